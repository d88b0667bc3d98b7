"""New documents: `python jobs/ingest.py FILE --run DIR`; every node must have access to both."""

from job import job

raise SystemExit(job("ingest"))
