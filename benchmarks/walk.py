"""Files and types that a query, and a few documents, pass in this process, traced for benchmarks/house.py.

The helpers of tests/ build the inputs: for the query a small index and a lookup table, like in
docs/architecture.md; for the documents a dataset and a document tower for the jobs `encode` and `index`.
"""

import dataclasses
import importlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
QUERY = "ko ba"
PACKAGE = str(ROOT / "scalingnote") + "/"


@dataclasses.dataclass(frozen=True)
class Walk:
    """Files with functions that ran, and data types of objects that were made."""

    files: list[str]
    types: list[str]


def trace_query() -> Walk:
    """Trace one query over HTTP: gateway, query tower and searcher in this process, a small index."""
    gateway_here, pair = _helpers("serve", "gateway_here", "pair")
    from scalingnote.run.service_config import ServeConfig
    from scalingnote.serve import api

    with tempfile.TemporaryDirectory() as folder:
        index, tower = pair.built(Path(folder) / "index"), pair.table(f"{folder}/table")
        tracer = _Tracer(counts=False)
        with tracer.on():
            config = ServeConfig(allow_unauthenticated=True)
            client = gateway_here.Client(api.build(gateway_here.service(index, tower, config), config))
            client.search(query=QUERY, k=5)  # objects that a first call opens and compiles are not counted
            tracer.counts = True
            answer = client.search(query=QUERY, k=5)
        client.close()
    if answer.status_code != HTTPStatus.OK:
        raise RuntimeError(f"the gateway answered {answer.status_code}: {answer.text}")
    return tracer.walk()


def trace_documents() -> Walk:
    """Trace the jobs `encode` and `index` over a few documents, with Ray's part done in this process."""
    in_process, tiny = _helpers("", "in_process", "tiny")
    from benchmarks.encode import make_towers
    from scalingnote.encode import job as encode
    from scalingnote.encode.config import EncodeConfig
    from scalingnote.index import job as index
    from scalingnote.index.config import FastScan, IndexConfig
    from scalingnote.quantize import job as quantize
    from scalingnote.quantize.config import QuantizeConfig

    config = IndexConfig(shards=1, family=FastScan(refine="flat"), nlist=2, nprobe=2, refine_factor=10)
    tracer = _Tracer()

    def build(folder: str) -> None:
        dataset = tiny.dataset(f"{folder}/dataset")
        towers = make_towers(f"{folder}/towers", dataset, layers=1, hidden=32)
        read = {"dataset": dataset.uri, "dual_encoder": towers.uri}
        with tracer.on():
            embeddings = encode.run(EncodeConfig(), **read, output=f"{folder}/embeddings").uri
        ids = quantize.run(QuantizeConfig(codes=4), embeddings=embeddings, output=f"{folder}/ids").uri
        read = {"dataset": dataset.uri, "embeddings": embeddings, "semantic_ids": ids}
        with tracer.on():
            index.run(config, **read, output=f"{folder}/index")

    with tempfile.TemporaryDirectory() as folder:
        in_process.run_without_ray(build, folder)
    return tracer.walk()


class _Tracer:
    """Recorder of calls and data types of scalingnote, in this thread and in threads that it starts."""

    def __init__(self, *, counts: bool = True) -> None:
        self.counts = counts  # False: objects made now are not counted later
        self._files: set[str] = set()
        self._types: set[str] = set()
        self._earlier: dict[int, Any] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Trace during a block."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def walk(self) -> Walk:
        """Return the recorded files and types."""
        return Walk(sorted(self._files), sorted(self._types))

    def _note(self, frame: FrameType, event: str, returned: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(PACKAGE):
            return
        if self.counts:
            self._files.add(name.removeprefix(PACKAGE))
        for value in (*frame.f_locals.values(), returned):
            kind = type(value)
            if not kind.__module__.startswith("scalingnote") or not _is_data(kind):
                continue
            if not self.counts:
                self._earlier[id(value)] = value
            elif id(value) not in self._earlier:
                self._types.add(f"{kind.__module__}.{kind.__qualname__}")


def _helpers(room: str, *names: str) -> list[Any]:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / room)]
    return [importlib.import_module(name) for name in names]


def _is_data(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, (BaseModel, tuple))
