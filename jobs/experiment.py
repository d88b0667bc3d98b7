"""The arms of an experiment compared: `python jobs/experiment.py CONFIG...`."""

from job import job

raise SystemExit(job("experiment"))
