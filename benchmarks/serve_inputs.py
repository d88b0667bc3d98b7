"""Inputs for benchmarks of serving: an index of real passages, and two query towers of its dimension.

lookup     the table of token embeddings that are summed in the passages' vectors: queries are near passages
student    MiniLM's first two layers and a random projection, exported with 8-bit products, for the cost of a
           transformer; its results have no meaning
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray
from tokenizers import Tokenizer

from benchmarks import live_kill, minilm, passages
from scalingnote.core.config import Config
from scalingnote.index import shard
from scalingnote.index.config import FastScan
from scalingnote.models import dual_encoder, onnx_export
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.lookup_table import Table
from scalingnote.storage.artifact import Artifact, Draft

DIM, NPROBE, LENGTH = 128, 16, 32


class Settings(Config):
    """Config in place of those of the stages that usually build these artifacts."""

    documents: int


@dataclass(frozen=True)
class Inputs:
    """Artifacts, and queries for them."""

    indexes: dict[int, Artifact]  # by number of shards
    lookup: Artifact
    student: Artifact
    int8: Artifact
    queries: list[str]
    vectors: Float[ndarray, "documents dim"]
    texts: list[str]


def build(folder: Path, *, documents: int, queries: int = 2000) -> Inputs:
    """Build the inputs below `folder`; reuse finished ones."""
    texts = passages.texts(documents + queries)
    matrix, table = passages.embedded(texts, dim=DIM)
    # A query is the beginning of a passage that is not indexed.
    queries_of = [" ".join(text.split()[:6]) for text in texts[documents:]]
    texts, matrix = texts[:documents], matrix[:documents]
    student = _student(f"{folder}/student", documents)
    return Inputs(
        {shards: _index(f"{folder}/index-{shards}", texts, matrix, shards=shards) for shards in (1, 4)},
        _lookup(f"{folder}/lookup", table, documents),
        student,
        _exported(f"{folder}/int8", student, queries_of[:64]),
        queries_of,
        matrix,
        texts,
    )


def _index(uri: str, texts: list[str], matrix: ndarray, *, shards: int) -> Artifact:
    names = [f"p{number}" for number in range(len(texts))]
    columns = {
        "doc_id": names,
        "title": [" ".join(text.split()[:6]) for text in texts],
        "topic": [f"topic {number % 20}" for number in range(len(texts))],
        "snippet": texts,
        "semantic_id": [f"{number % 64}-{number}" for number in range(len(texts))],
    }
    return live_kill.build(
        uri,
        names,
        matrix,
        family=FastScan(),
        nlist=4 * int(len(texts) ** 0.5),
        shards=shards,
        nprobe=NPROBE,
        refine_factor=4,
        documents=pa.table(columns, schema=shard.SHARD_DOCUMENTS),
    )


def _lookup(uri: str, table: ndarray, documents: int) -> Artifact:
    draft = Draft(uri, kind="student", config=Settings(documents=documents), parents={})
    if draft.finished:
        return draft.existing()
    tokenizer = Tokenizer.from_file(str(minilm.path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = np.zeros((tokenizer.get_vocab_size(), DIM), np.float32)
    rows[: len(table)] = table
    Table(rows, tokenizer.to_str(), LENGTH).write(Path(draft.path("query")))
    return draft.commit(counts={})


def _student(uri: str, documents: int) -> Artifact:
    draft = Draft(uri, kind="student", config=Settings(documents=documents), parents={})
    if draft.finished:
        return draft.existing()
    config = TowerConfig(
        backbone=Pretrained(path=str(minilm.path()), layers=minilm.SMALL_LAYERS), max_length=LENGTH
    )
    dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=None, seed=0).save(
        Path(draft.path("query"))
    )
    return draft.commit(counts={})


def _exported(uri: str, student: Artifact, queries: list[str]) -> Artifact:
    draft = Draft(uri, kind="query_encoder", config=Settings(documents=0), parents={"student": student})
    if draft.finished:
        return draft.existing()
    onnx_export.export_graph(student.directory("query"), Path(draft.path("query")), queries=queries)
    return draft.commit(counts={})
