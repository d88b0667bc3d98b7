"""Document embeddings: `python jobs/encode.py CONFIG...`."""

from job import job

raise SystemExit(job("run", "--only", "encode"))
