"""Read a dataset into documents, queries and qrels: `python jobs/prepare.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("prepare"))
