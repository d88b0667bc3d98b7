"""A query tower as an ONNX graph from token ids and mask to embeddings, with the projection.

    model.onnx        float32
    model_int8.onnx   8-bit weights with a scale per column; activations are quantized dynamically
    onnx.json         special tokens and lengths; with tokenizer.json, all settings that reading needs
    golden.json, golden.npy   real queries and the tower's embeddings of them

No torch is needed to read a graph. The embeddings of the golden queries are compared with the tower's when a
graph is written and whenever it is loaded: 8-bit products differ between CPUs, and a wrong graph raises no
error.
"""

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.models.prompt import QueryPrompt, SpecialTokens, TokenRow, without_limits

OnnxForm = Literal["onnx", "onnx_int8"]
ONNX_FILES: dict[OnnxForm, str] = {"onnx": "model.onnx", "onnx_int8": "model_int8.onnx"}
MAX_GRAPH_BYTES = 1 << 31  # the limit of a protobuf message
MIN_COSINE = 0.999  # between a graph's embedding and the tower's, for every golden query
_GOLDEN_SINGLE = 16  # golden queries that are encoded one by one
_GOLDEN_AT_LOAD = 64  # golden queries that are encoded when a graph is loaded
_MAX_BATCH_TOKENS = 1024
_HUGE_PAGE = 1 << 21  # bytes
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; the second since 6.1


class OnnxTower:
    """A query tower's graph in an onnxruntime session."""

    def __init__(self, folder: Path, form: OnnxForm, *, threads: int | None = None) -> None:
        """Read a folder written by :func:`export_graph` without a check of its graph.

        Raise ArtifactError if the folder has no such graph.
        """
        try:
            facts = json.loads((folder / "onnx.json").read_text())
            tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
            self._queries: list[str] = json.loads((folder / "golden.json").read_text())
            self._expected = np.load(folder / "golden.npy", allow_pickle=False)
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} holds no {form} tower: {error.filename} is missing") from None
        self.dim, self._pad = int(facts["dim"]), int(facts["pad"])
        self._prompt = QueryPrompt(
            without_limits(tokenizer),
            SpecialTokens(pad=self._pad, end=facts["end"], first=facts["first"]),
            max_length=facts["max_length"],
            causal=facts["causal"],
        )
        self.max_tokens = self._prompt.max_tokens
        self._session = _session(folder / ONNX_FILES[form], threads)

    @classmethod
    def load(cls, folder: Path, form: OnnxForm, *, threads: int | None = None) -> "OnnxTower":
        """Read a folder written by :func:`export_graph` and check the graph.

        A query runs on `threads` threads; without them on OMP_NUM_THREADS, else on one per core. Raise
        ArtifactError if the folder has no such graph, or if a golden query gets another embedding.
        """
        tower = cls(folder, form, threads=threads)
        least = tower.agreement(limit=_GOLDEN_AT_LOAD)
        if least < MIN_COSINE:
            raise ArtifactError(
                f"{folder / ONNX_FILES[form]} gives a golden query another embedding than its tower, cosine "
                f"{least:.4f}, less than {MIN_COSINE}: its 8-bit products differ on this CPU from those "
                "where it was exported, or a file is of another tower; export it here, or use another form"
            )
        return tower

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Return embeddings of queries, not normalised."""
        return self._encode(self._prompt.rows(queries))

    def encode_token_ids(self, queries: Sequence[Sequence[int]]) -> Float32[ndarray, "queries dim"]:
        """Return embeddings of queries as token ids; the first `max_tokens` of a query are read."""
        return self._encode([self._prompt.row(self._prompt.cut(ids)) for ids in queries])

    def _encode(self, rows: Sequence[TokenRow]) -> Float32[ndarray, "queries dim"]:
        if len(rows) == 1:
            return self.run(*_pad(rows, self._pad))
        out = np.empty((len(rows), self.dim), np.float32)
        # Large batches gain nothing on a CPU, and pads cost time: batches are small and of similar lengths.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        for batch_rows in _batches(order, [len(row.ids) for row in rows]):
            out[batch_rows] = self.run(*_pad([rows[i] for i in batch_rows], self._pad))
        return out

    def run(
        self, ids: Int[ndarray, "rows tokens"], mask: Int[ndarray, "rows tokens"]
    ) -> Float32[ndarray, "rows dim"]:
        """Return the graph's output. Rows must be padded on the right: positions count from the left."""
        if not (mask[:, :1].all() and (mask[:, 1:] <= mask[:, :-1]).all()):
            raise ValueError("rows must start with a token and have their pads on the right")
        embeddings: ndarray = self._session.run(None, {"ids": ids, "mask": mask})[0]
        return embeddings

    def agreement(self, *, limit: int | None = None) -> float:
        """Return the least cosine to the tower's embeddings over the first `limit` golden queries.

        Queries are encoded one by one and in batches: an error may depend on padding.
        """
        queries, tower_embeddings = self._queries[:limit], self._expected[:limit]
        single = np.concatenate([self.encode([query]) for query in queries[:_GOLDEN_SINGLE]])
        batched = self.encode(queries)
        return min(
            _least_cosine(single, tower_embeddings[: len(single)]), _least_cosine(batched, tower_embeddings)
        )


def _session(path: Path, threads: int | None) -> Any:
    (runtime,) = require("onnxruntime")
    if not path.exists():
        raise ArtifactError(f"no graph at {path}: export it with `scalingnote export`")
    options = runtime.SessionOptions()
    # 0: one per core. Ray sets OMP_NUM_THREADS to the CPUs that a replica reserves.
    options.intra_op_num_threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0))
    options.inter_op_num_threads = 1
    # Threads that spin while they wait for the next operator take the cores from other replicas.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    before = _memory_ranges()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    _use_huge_pages(before)
    return session


def _memory_ranges() -> dict[int, int]:
    """Return the ranges, start -> end, of the process's private writable memory; none without /proc."""
    ranges = {}
    with suppress(OSError), open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for place, access, _, _, _, *name in map(str.split, lines):
            if access == "rw-p" and name in ([], ["[heap]"]):
                start, end = place.split("-")
                ranges[int(start, 16)] = int(end, 16)
    return ranges


def _use_huge_pages(before: dict[int, int]) -> None:
    """Make Linux back the memory that was added since `before` with huge pages; do nothing on other systems.

    A query reads all weights once. 28 MB of weights in pages of 4 KB cause 7,000 misses of the address cache:
    a query of 13 tokens took 5.0 ms of a core, and 4.4 ms with pages of 2 MB (4 layers of 768, AVX-512 VNNI).
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    for start, end in _memory_ranges().items():
        # The new part of a range, or a new range, rounded to huge pages.
        first = -(-before.get(start, start) // _HUGE_PAGE) * _HUGE_PAGE
        size = end // _HUGE_PAGE * _HUGE_PAGE - first
        if size > 0:
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):  # an error leaves the pages as they are
                advise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def _pad(
    rows: Sequence[TokenRow], pad: int
) -> tuple[Int[ndarray, "rows tokens"], Int[ndarray, "rows tokens"]]:
    longest = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), longest), pad, np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        mask[i, : len(row.ids)] = 1
    return ids, mask


def _batches(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split `order`, sorted by length, into batches of at most _MAX_BATCH_TOKENS tokens with pads."""
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > _MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _least_cosine(actual: Float[ndarray, "rows dim"], expected: Float[ndarray, "rows dim"]) -> float:
    lengths = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (actual * expected).sum(axis=1) / np.maximum(lengths, 1e-12)
    return float(np.nan_to_num(cosines, nan=-1.0).min())


def require(*names: str) -> list[Any]:
    """Import packages of the extra `onnx`; raise ConfigError if one is missing."""
    import importlib

    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ConfigError(f"ONNX graphs need {error.name}: install scalingnote[onnx]") from None
