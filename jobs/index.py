"""The sharded index: `python jobs/index.py CONFIG...`."""

from job import job

raise SystemExit(job("run", "--only", "index"))
