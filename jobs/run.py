"""Run all stages of a config: `python jobs/run.py --config FILE`."""

import sys

from entrypoint import run

sys.exit(run())
