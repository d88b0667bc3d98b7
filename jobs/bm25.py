"""Weight the words of a dataset's documents by BM25: `python jobs/bm25.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("bm25"))
