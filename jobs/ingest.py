"""Take in new documents: `python jobs/ingest.py FILE --run DIR`; every node must reach both."""

from entrypoint import ingest

raise SystemExit(ingest())
