"""Measure and write the report: `python jobs/evaluate.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("evaluate"))
