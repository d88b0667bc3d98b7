"""Compare the arms of an experiment: `python jobs/experiment.py --config FILE`."""

from entrypoint import experiment

raise SystemExit(experiment())
