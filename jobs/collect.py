"""Turn clicks and rankings into training triplets: `python jobs/collect.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("collect"))
