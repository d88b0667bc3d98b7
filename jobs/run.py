"""Run all stages of a config: `python jobs/run.py --config FILE`."""

from entrypoint import run

raise SystemExit(run())
