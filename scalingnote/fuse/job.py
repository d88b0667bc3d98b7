"""The fuse stage on Ray, which trains both networks on clicks and writes final embeddings of all documents.

    impressions, users, features ─prepare─► store ─Ray Train─► both networks ─parts─► final embeddings

The output is an artifact of the kind `embeddings` with the same parts as the input, so every reader of
embeddings can read it. It also has ``document_fusion/`` and ``query_fusion/``, which fuse new documents and
queries.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32, Int64
from numpy import ndarray
from safetensors import torch as safetensors

from scalingnote.core import cluster
from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.encode.parts import EncodedPart, write_parts
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.feature_encoding import Encoding
from scalingnote.fuse.fusion import DocumentFusion, QueryFusion
from scalingnote.fuse.networks import (
    Clicks,
    DocumentInputs,
    DocumentNetwork,
    FusionStage,
    QueryInputs,
    QueryNetwork,
    SemanticIdEmbedding,
)
from scalingnote.fuse.prepare import WRITERS, Encodings, FusedCorpus, prepare, read_part
from scalingnote.quantize.semantic_id import require_origin
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.train.config import prefix_lengths
from scalingnote.train.data import Order, Store
from scalingnote.train.job import RankTraining, TrainingRun, launch

log = get_logger("fuse")
DOCUMENT_SIDE, QUERY_SIDE = "document_fusion", "query_fusion"


def run(
    config: FuseConfig,
    *,
    dataset: str,
    planner: str,
    embeddings: str,
    semantic_ids: str,
    dual_encoder: str | None = None,
    student: str | None = None,
    output: str,
) -> Artifact:
    """Train fusion and write the final embeddings; a call after a killed one resumes it.

    All arguments except `config` are URIs. The query tower is the student's, if there is a student.

    Raises:
        DataError: there are no clicks to train on.
        ConfigError: the dataset lacks a declared feature, there is no query tower, or embeddings are not
            compared by cosine.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "planner": open_artifact(planner, kind="planner"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
        "semantic_ids": open_artifact(semantic_ids, kind="semantic_ids"),
    }
    tower = _tower(dual_encoder, student)
    draft = Draft(output, kind="embeddings", config=config, parents={**parents, tower.manifest.kind: tower})
    if draft.finished:
        return draft.existing()
    require_origin(parents["semantic_ids"], parents["embeddings"])
    if parents["embeddings"].manifest.info.get("similarity", "cosine") != "cosine":
        raise ConfigError(
            f"{embeddings} has embeddings of any length, compared by dot, and fusion scales them to 1: "
            "leave fuse out, or set adopt.similarity to cosine"
        )
    cluster.check_resources_early(config.writers, task_cpus=config.writers.readers, knob=WRITERS)
    cluster.check_resources_early(config.resources, knob="fuse.resources")
    corpus = FusedCorpus(*(parents[name] for name in FusedCorpus._fields))
    store = draft.work("store")
    facts = prepare(config, corpus, planner=parents["planner"], tower=tower, folder=store)
    clicks, steps = facts["sizes"]["rows"], Order(config, facts["sizes"]).steps
    if not fs.exists(trained := draft.work("trained")):
        log.info("%s clicks, %d steps", f"{clicks:,}", steps)
        rank = partial(_prepare_rank, config=config, store=store, semantic_ids=semantic_ids)
        launch(rank, TrainingRun(config, "fuse", output, steps))
        fs.write_bytes(trained, b"")
    counts = {"documents": _fuse(config, corpus, draft), "clicks": clicks, "steps": steps}
    return draft.commit(counts=counts | {"clicks_left_out": facts["left_out"]})


def _tower(dual_encoder: str | None, student: str | None) -> Artifact:
    if student:
        return open_artifact(student, kind="student")
    if dual_encoder:
        return open_artifact(dual_encoder, kind="dual_encoder")
    raise ConfigError("fusion needs the query tower that serves: pass a student or a dual_encoder")


# --- the final embeddings ---------------------------------------------------------------------------------


def _fuse(config: FuseConfig, corpus: FusedCorpus, draft: Draft) -> int:
    """Write the final embeddings, part by part; return their number."""
    source = corpus.embeddings
    rows = source.rows_of(source.names("embeddings/", ".parquet"))
    encoder = partial(FusedParts, corpus=corpus, output=draft.uri)
    records = write_parts(
        encoder, draft, rows=rows, resources=config.writers, unit="documents fused", knob=WRITERS
    )
    return sum(record["part"]["rows"] for record in records)


class FusedParts:
    """Worker that fuses the documents of parts by the trained network."""

    def __init__(self, *, corpus: FusedCorpus, output: str) -> None:
        self._corpus = corpus
        files = [f"{DOCUMENT_SIDE}/{name}" for name in fs.list_files(fs.join(output, DOCUMENT_SIDE))]
        version = "".join(fs.checksum(fs.join(output, name)) for name in files)
        self._fusion = DocumentFusion.load(fs.download(output, files, version=version) / DOCUMENT_SIDE)

    def __call__(self, name: str, _: None) -> EncodedPart:
        """Compute a part of the final embeddings."""
        fused = self._fusion.fuse(*read_part(self._corpus, name, self._fusion.columns))
        # The other columns (term weights) do not change.
        plain = self._corpus.embeddings.table(name)
        place = plain.schema.get_field_index(INDEXED_VIEW)
        column = arrow.to_arrow(fused, dtype=arrow.dtype_of(plain.schema.field(INDEXED_VIEW)))
        return EncodedPart(plain.set_column(place, plain.schema.field(INDEXED_VIEW), column))


# --- training ---------------------------------------------------------------------------------------------


class ClickBatches:
    """Clicks of any step, for one rank, from a store of :mod:`scalingnote.fuse.prepare`."""

    def __init__(self, store: Store, order: Order, *, rank: int, world: int) -> None:
        self._store, self._order, self._rank, self._world = store, order, rank, world

    def __call__(self, step: int) -> Clicks:
        """Read this rank's share of a step."""
        rows = self._order.batch(step)[self._rank :: self._world]
        clicks = self._read("rows", rows, "query", "group", "history", "log_q", "features")
        # Document 0 is in the place of all absent ones, which are masked.
        documents = np.maximum(clicks["group"], 0).ravel()
        return Clicks(
            QueryInputs.of(
                **self._read("queries", clicks["query"], "embeddings", "words", "importances"),
                features=clicks["features"],
                history=self._codes(clicks["history"]),
            ),
            DocumentInputs.of(
                **self._read("documents", documents, "embeddings", "codes", "buckets", "features")
            ),
            torch.from_numpy(clicks["group"]),
            torch.from_numpy(clicks["log_q"]),
        )

    def _read(self, table: str, rows: Int64[ndarray, " rows"], *names: str) -> dict[str, ndarray]:
        return {name: self._store[table].values(name, rows) for name in names}

    def _codes(self, history: Int64[ndarray, "rows last"]) -> Int32[ndarray, "rows last levels"]:
        codes = self._store["documents"].values("codes", np.maximum(history, 0).ravel())
        return np.where(history[:, :, None] < 0, np.int32(-1), codes.reshape(*history.shape, -1))


def _prepare_rank(
    rank: int, world: int, *, config: FuseConfig, store: str, semantic_ids: str
) -> RankTraining:
    tables = Store.open(store)
    encodings = {
        table: [Encoding.model_validate(each) for each in values]
        for table, values in tables.facts["encodings"].items()
    }
    ids = open_artifact(semantic_ids, kind="semantic_ids")
    codebooks = safetensors.load(ids.read_bytes("codebooks.safetensors"))["codebooks"].float()
    documents = tables["documents"]
    seen = torch.zeros(config.document.id_buckets or 1, dtype=torch.bool)
    seen[torch.from_numpy(documents.values("buckets", np.arange(len(documents))))] = True
    build_stage = partial(build, config, codebooks, encodings, seen=seen)
    order = Order(config, tables.facts["sizes"])
    batches = ClickBatches(tables, order, rank=rank, world=world)
    return RankTraining(build_stage(), build_stage, batches, _save)


def build(
    config: FuseConfig, codebooks: torch.Tensor, encodings: Encodings, *, seen: torch.Tensor | None = None
) -> FusionStage:
    """Build both networks and their losses, with initial weights that depend on ``config.seed``.

    Args:
        config: of the stage.
        codebooks: [levels, codes, dim], the initial tables of semantic IDs.
        encodings: of the features of ``documents`` and ``users``.
        seen: buckets of the document ids in training; None: all.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # Both sides share the tables, so that histories and documents are in one space.
        shared: dict[str, Any] = {"semantic_ids": SemanticIdEmbedding(codebooks), "dropout": config.hide}
        prefixes = prefix_lengths(config.losses.matryoshka, dim=codebooks.shape[2])
        return FusionStage(
            DocumentNetwork(config.document, encodings["documents"], seen=seen, **shared),
            QueryNetwork(config.query, encodings["users"], **shared),
            config.losses.model_copy(update={"matryoshka": prefixes}),
        )


def _save(stage: FusionStage, folder: Path) -> None:
    DocumentFusion(stage.documents).save(folder / DOCUMENT_SIDE)
    QueryFusion(stage.queries).save(folder / QUERY_SIDE)
