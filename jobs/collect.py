"""Mine training triplets from clicks and relevance: `python jobs/collect.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("collect"))
