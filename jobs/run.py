"""All stages of a config, or some: `python jobs/run.py CONFIG... [--only STAGE] [--until STAGE]`."""

from job import job

raise SystemExit(job("run"))
