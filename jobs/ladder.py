"""Train stage I at several sizes and fit the scaling laws: `python jobs/ladder.py --config FILE`."""

from entrypoint import ladder

raise SystemExit(ladder())
