"""Take a published embedding model as the dual encoder: `python jobs/adopt.py --config FILE`."""

from entrypoint import main

raise SystemExit(main("adopt"))
