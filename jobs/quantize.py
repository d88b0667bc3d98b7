"""Assign semantic IDs: `python jobs/quantize.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("quantize"))
