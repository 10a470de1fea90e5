"""The commands, one module each: `configure(parser)` states the arguments, `run(arguments)` answers the exit code."""
