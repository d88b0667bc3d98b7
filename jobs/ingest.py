"""Take in new documents: `python jobs/ingest.py FILE --run DIR`; every node must reach both."""

import sys

from entrypoint import ingest

sys.exit(ingest())
