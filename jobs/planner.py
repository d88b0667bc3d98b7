"""Learn which words of a query matter: `python jobs/planner.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("planner"))
