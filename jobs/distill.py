"""Stage II, the small query tower: `python jobs/distill.py CONFIG...`."""

from job import job

raise SystemExit(job("run", "--only", "distill"))
