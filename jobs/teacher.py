"""Embed the training queries with stage I's query tower: `python jobs/teacher.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("teacher"))
