"""Comparison of the arms of an experiment: `python jobs/experiment.py CONFIG...`."""

from job import job

raise SystemExit(job("experiment"))
