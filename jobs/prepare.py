"""Read a dataset into documents, queries and qrels: `python jobs/prepare.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("prepare"))
