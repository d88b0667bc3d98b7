"""Take a published embedding model as the dual encoder: `python jobs/adopt.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("adopt"))
