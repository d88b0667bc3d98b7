"""Embed the documents: `python jobs/encode.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("encode"))
