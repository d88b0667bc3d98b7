"""Find fresh hard negatives with the trained towers: `python jobs/mine.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("mine"))
