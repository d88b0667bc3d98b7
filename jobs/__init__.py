"""One entrypoint per stage, for `ray job submit`."""
