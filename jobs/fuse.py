"""Merge features into the final embeddings: `python jobs/fuse.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("fuse"))
