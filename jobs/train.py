"""Stage I, both towers: `python jobs/train.py CONFIG...`."""

from job import job

raise SystemExit(job("run", "--only", "train"))
