"""Train a cross-encoder to teach a student: `python jobs/cross_encoder.py --config FILE`."""

import sys

from entrypoint import main

sys.exit(main("cross_encoder"))
