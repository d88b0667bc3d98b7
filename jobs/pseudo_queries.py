"""Draw pseudo-queries from the documents of a dataset: `python jobs/pseudo_queries.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("pseudo_queries"))
