# ruff: noqa: E402  # the path is set before packages are imported
"""The package's entrypoints, also for a checkout that is not installed: `python jobs/encode.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if sys.path[0] == str(HERE):
    # `python jobs/encode.py` puts jobs/ on the path; the packages lie beside it.
    sys.path[0] = str(HERE.parent)

from scalingnote.entrypoint import experiment, ingest, ladder, main, run

__all__ = ["experiment", "ingest", "ladder", "main", "run"]
