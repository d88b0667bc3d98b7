"""Build the sharded index: `python jobs/index.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("index"))
