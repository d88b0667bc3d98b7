"""Train both towers (stage I): `python jobs/train.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("train"))
