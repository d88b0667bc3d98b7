# ruff: noqa: E402  # the path is set before packages are imported
"""A command of `scalingnote`, also from a checkout without installation; its last output is a JSON line."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if sys.path[0] == str(HERE):
    # `python jobs/encode.py` puts jobs/ on the path; the packages are in its parent folder.
    sys.path[0] = str(HERE.parent)

from scalingnote.cli.main import main


def job(*command: str) -> int:
    """Run a command with the arguments of this script; return the exit code."""
    return main([*command, *sys.argv[1:], "--json"])
