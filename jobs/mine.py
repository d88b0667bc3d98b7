"""Find fresh hard negatives with the trained towers: `python jobs/mine.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("mine"))
