"""Take in new documents: `python jobs/ingest.py FILE --run DIR`, both where every node reaches them."""

import sys

from scalingnote.cli import main

sys.exit(main(["ingest", *sys.argv[1:]]))
