"""Learn which words of a query matter: `python jobs/planner.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("planner"))
