"""Take in new documents: `python jobs/ingest.py FILE --run DIR`; every node must reach both."""

import argparse
import json
import sys

from entrypoint import HERE as HERE  # puts the packages on the path

from scalingnote import pipeline
from scalingnote.config import load
from scalingnote.errors import ScalingNoteError
from scalingnote.ingest.config import IngestConfig
from scalingnote.log import configure

parser = argparse.ArgumentParser(prog="jobs/ingest.py", description="Take in new documents.")
parser.add_argument("file", help="JSON lines or Parquet: doc_id, title, topic, content, features")
parser.add_argument("--run", required=True, metavar="DIR", help="a finished run")
parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")
options = parser.parse_args()
configure()
try:
    made = pipeline.ingest(load(IngestConfig, [], options.overrides), options.file, run_dir=options.run)
except ScalingNoteError as error:
    print(f"ingest: {getattr(error, 'cause', error)}", file=sys.stderr)
    sys.exit(2)
print(json.dumps({"kind": "ready", "uri": made.uri, "digest": made.digest, "counts": made.counts}))
