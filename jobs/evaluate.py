"""Measure and write the report: `python jobs/evaluate.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("evaluate"))
