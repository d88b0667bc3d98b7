"""Train stage I at several sizes and fit the scaling laws: `python jobs/ladder.py --config FILE`."""

import sys

from entrypoint import ladder

sys.exit(ladder())
