"""Embed the training queries with stage I's query tower: `python jobs/teacher.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("teacher"))
