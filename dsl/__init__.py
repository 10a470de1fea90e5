"""The language: sources and spans, diagnostics, grammar, syntax tree, parsing, checking, element types, the prelude."""
