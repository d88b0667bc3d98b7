"""Compare the arms of an experiment: `python jobs/experiment.py --config FILE`."""

import sys

from entrypoint import experiment

sys.exit(experiment())
