"""Train the small query tower (stage II): `python jobs/distill.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("distill"))
