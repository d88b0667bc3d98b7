"""Draw pseudo-queries from the documents of a dataset: `python jobs/pseudo_queries.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("pseudo_queries"))
