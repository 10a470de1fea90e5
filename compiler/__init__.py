"""From definitions to generated source: the two IRs, their passes, schedules and code generation."""
