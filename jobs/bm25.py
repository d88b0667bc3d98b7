"""Weight the words of a dataset's documents by BM25: `python jobs/bm25.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("bm25"))
