"""Merge features into the final embeddings: `python jobs/fuse.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("fuse"))
