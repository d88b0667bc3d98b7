"""Embed the documents: `python jobs/encode.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("encode"))
