"""Build the sharded index: `python jobs/index.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("index"))
