"""Stage I at several sizes, and the scaling laws: `python jobs/ladder.py CONFIG...`."""

from job import job

raise SystemExit(job("ladder"))
