"""Train the small query tower (stage II): `python jobs/distill.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("distill"))
