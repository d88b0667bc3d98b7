"""Assign semantic IDs: `python jobs/quantize.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("quantize"))
