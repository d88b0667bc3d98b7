"""Train a cross-encoder to teach a student: `python jobs/cross_encoder.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("cross_encoder"))
