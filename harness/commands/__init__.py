"""One file per command of `meshscope`; each has `add_arguments(parser)` and `run(args) -> exit code`."""
