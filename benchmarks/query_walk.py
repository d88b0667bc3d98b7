"""What a query passes on its way: files and types, traced in one process (benchmarks/house.py)."""

import dataclasses
import importlib
import sys
import tempfile
import threading
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
QUERY = "ko ba"
PACKAGE = str(ROOT / "scalingnote") + "/"


@dataclass(frozen=True)
class Walk:
    """Files whose functions were entered, and data types of objects that were made for the query."""

    files: list[str]
    types: list[str]


def trace() -> Walk:
    """The walk of one query over HTTP: gateway, query tower and searcher in this process, a small index."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "serve")]
    gateway_here, pair = (importlib.import_module(name) for name in ("gateway_here", "pair"))
    from scalingnote.serve import api
    from scalingnote.serve_config import ServeConfig

    files: set[str] = set()
    types: set[str] = set()
    walks = False
    before: dict[int, Any] = {}  # objects of the first search, not made for the second

    def note(frame: FrameType, event: str, returned: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(PACKAGE):
            return
        if walks:
            files.add(name.removeprefix(PACKAGE))
        for value in (*frame.f_locals.values(), returned):
            made = type(value)
            if not made.__module__.startswith("scalingnote") or not _is_data(made):
                continue
            if not walks:
                before[id(value)] = value
            elif id(value) not in before:
                types.add(f"{made.__module__}.{made.__qualname__}")

    with tempfile.TemporaryDirectory() as folder:
        index, tower = pair.built(Path(folder) / "index"), pair.student(f"{folder}/student")
        threading.setprofile(note)  # of the threads that the gateway starts
        sys.setprofile(note)
        config = ServeConfig(allow_unauthenticated=True)
        client = gateway_here.Client(api.build(gateway_here.service(index, tower, config), config))
        client.search(query=QUERY, k=5)  # what a first call opens and compiles is no part of the walk
        walks = True
        answer = client.search(query=QUERY, k=5)
        walks = False
        sys.setprofile(None)
        threading.setprofile(None)
        client.close()
    if answer.status_code != HTTPStatus.OK:
        raise RuntimeError(f"the gateway answered {answer.status_code}: {answer.text}")
    return Walk(sorted(files), sorted(types))


def _is_data(made: type) -> bool:
    return dataclasses.is_dataclass(made) or issubclass(made, (BaseModel, tuple))
