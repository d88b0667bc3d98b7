"""Train both towers (stage I): `python jobs/train.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("train"))
