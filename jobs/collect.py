"""Turn clicks and rankings into training triplets: `python jobs/collect.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("collect"))
