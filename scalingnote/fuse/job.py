"""The fuse stage on Ray: it trains both networks on clicks, and writes final embeddings of all documents.

    impressions, users, features ─prepare─► store ─Ray Train─► both networks ─parts─► final embeddings

The output is an artifact of the kind `embeddings` with the same parts as the input, so every reader of
embeddings can read it. It also has ``document_fusion/`` and ``query_fusion/``, which fuse new documents and
queries.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Int64
from numpy import ndarray
from safetensors import torch as safetensors

from scalingnote.core import cluster
from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.encode.parts import EncodedPart, Steps, encode_parts, read_nothing, write_parts
from scalingnote.fuse import prepare
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.feature_encoding import EncodedFeatures, Encoding, no_values
from scalingnote.fuse.fusion import (
    DocumentFusion,
    ImportantWords,
    QueryFusion,
    document_inputs,
    important_words,
    last_codes,
    query_inputs,
)
from scalingnote.fuse.networks import (
    Clicks,
    DocumentInputs,
    DocumentNetwork,
    FusionStage,
    QueryInputs,
    QueryNetwork,
    SemanticIdEmbedding,
)
from scalingnote.fuse.prepare import FusedCorpus, read_part
from scalingnote.quantize.semantic_id import require_origin
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.storage.shuffle import slices
from scalingnote.train.config import prefix_lengths
from scalingnote.train.data import Order, RowTable, Store, one_chunk
from scalingnote.train.job import Settings, launch, start_rank, train_rank
from scalingnote.train.prepare import read_array
from scalingnote.train.tokens import in_sorted

log = get_logger("fuse")
WRITERS = "fuse.writers"
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

    All arguments but `config` are URIs; the query tower is the student's, if there is one.

    Raises:
        DataError: no clicks to learn from.
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
            f"{embeddings} has documents of their own length, compared by dot, and fusion scales them to 1: "
            "leave fuse out, or set adopt.similarity to cosine"
        )
    prepare.require_columns(config, parents["dataset"])
    cluster.check_resources_early(config.writers, task_cpus=config.writers.readers, knob=WRITERS)
    cluster.check_resources_early(config.resources, knob="fuse.resources")
    corpus = FusedCorpus(*(parents[name] for name in ("dataset", "embeddings", "semantic_ids")))
    facts = _prepare(config, corpus, parents["planner"], tower, draft)
    steps = _order(config, facts).steps(config)
    clicks = facts["sizes"]["rows"]
    if not fs.exists(trained := draft.work("trained")):
        log.info("%s clicks, %d steps", f"{clicks:,}", steps)
        settings = {
            "output": output,
            "work": draft.work(),
            "store": draft.work("store"),
            "semantic_ids": semantic_ids,
            "steps": steps,
        }
        launch(_worker, settings, schedule=config, section="fuse")
        fs.write_bytes(trained, b"")
    counts = {"documents": _fuse(config, corpus, draft), "clicks": clicks, "steps": steps}
    return draft.commit(counts=counts | {"clicks_left_out": facts["left_out"]})


def _tower(dual_encoder: str | None, student: str | None) -> Artifact:
    if student:
        return open_artifact(student, kind="student")
    if dual_encoder:
        return open_artifact(dual_encoder, kind="dual_encoder")
    raise ConfigError("fusion needs the query tower that serves: give a student or a dual_encoder")


def _prepare(
    config: FuseConfig, corpus: FusedCorpus, planner: Artifact, tower: Artifact, draft: Draft
) -> dict[str, Any]:
    """Write the store, unless it is finished; its facts."""
    folder = draft.work("store")
    query_slices = slices(corpus.dataset, "queries")
    rows = {
        f"queries/{number:05d}.arrow": sum(corpus.dataset.rows_of(parts).values())
        for number, parts in enumerate(query_slices)
    }
    read = partial(read_queries, dataset=corpus.dataset, slices=query_slices, store=folder)
    steps = Steps(read, partial(QueryParts, tower=tower, planner=planner if config.query.planner else None))

    def encode_queries() -> list[Any]:
        records = encode_parts(
            steps,
            output=folder,
            work=draft.work("queries"),
            rows=rows,
            resources=config.writers,
            unit="queries",
            knob=WRITERS,
        )
        return [(record["name"], record["part"]) for record in records if record["part"]["rows"]]

    return prepare.write_store(
        config, corpus, folder=folder, each=cluster.map_tasks, encode_queries=encode_queries
    )


def _fuse(config: FuseConfig, corpus: FusedCorpus, draft: Draft) -> int:
    """Write the final embeddings, part by part; their number."""
    source = corpus.embeddings
    rows = source.rows_of(source.names("embeddings/", ".parquet"))
    steps = Steps(read_nothing, partial(FusedParts, corpus=corpus, output=draft.uri))
    records = write_parts(
        steps, draft, rows=rows, resources=config.writers, unit="documents fused", knob=WRITERS
    )
    return sum(record["part"]["rows"] for record in records)


def _order(config: FuseConfig, facts: dict[str, Any]) -> Order:
    return Order(facts["sizes"], global_batch=config.global_batch, seed=config.seed)


def read_queries(
    name: str, *, dataset: Artifact, slices: list[list[str]], store: str
) -> tuple[pa.Array, list[str]]:
    """Hashes and texts of the training queries of a slice that have clicks."""
    queries = pa.concat_tables(dataset.table(part) for part in slices[int(Path(name).stem)])
    queries = queries.filter(pc.equal(queries["split"], "train"))
    hashes = shuffle.hash_of(queries["query_id"])
    clicked = pa.array(in_sorted(hashes, read_array(fs.join(store, "asked.arrow"))))
    return pa.array(hashes).filter(clicked), queries["query"].filter(clicked).to_pylist()


class QueryParts:
    """Encodes queries by the query tower and the planner, in a worker; without one they have no words."""

    def __init__(self, *, tower: Artifact, planner: Artifact | None) -> None:
        from scalingnote.encode.query_encoder import QueryEncoder
        from scalingnote.triplets.planner.planner import load

        self._encoder = QueryEncoder(tower.directory("query"))
        self._planner = None if planner is None else load(planner)

    def __call__(self, _: str, hashes_and_queries: tuple[pa.Array, list[str]]) -> EncodedPart:
        """A part of the store."""
        hashes, queries = hashes_and_queries
        embeddings = arrow.l2_normalize(self._encoder.encode_queries(queries))
        columns = {"hash": hashes, "embedding": arrow.to_arrow(embeddings)}
        if self._planner is not None:
            words = important_words(self._planner.term_scores(queries), len(queries))
            columns["words"] = arrow.to_arrow(words.hashes)
            columns["importances"] = arrow.to_arrow(words.importances)
        return EncodedPart(one_chunk(columns))


class FusedParts:
    """Fuses documents by the trained network, in a worker."""

    def __init__(self, *, corpus: FusedCorpus, output: str) -> None:
        self._corpus = corpus
        files = [f"{DOCUMENT_SIDE}/{name}" for name in fs.list_files(fs.join(output, DOCUMENT_SIDE))]
        version = "".join(fs.checksum(fs.join(output, name)) for name in files)
        self._fusion = DocumentFusion.load(fs.download(output, files, version=version) / DOCUMENT_SIDE)

    def __call__(self, name: str, _: None) -> EncodedPart:
        """A part of the final embeddings."""
        documents = read_part(self._corpus, name, self._fusion.columns)
        fused = self._fusion.fuse(documents.table, documents.embeddings, documents.codes)
        # The other columns (term weights) stay as they are.
        plain = self._corpus.embeddings.table(name)
        place = plain.schema.get_field_index(INDEXED_VIEW)
        column = arrow.to_arrow(fused, dtype=arrow.dtype_of(plain.schema.field(INDEXED_VIEW)))
        return EncodedPart(plain.set_column(place, plain.schema.field(INDEXED_VIEW), column))


class ClickBatches:
    """Reads one rank's clicks of any step from a finished store; `order` decides which rows a step has.

    A step's rows follow from its number alone, as those of stage I do, so training resumes at any step.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        config: FuseConfig,
        encodings: dict[str, list[Encoding]],
        *,
        rank: int,
        world: int,
    ) -> None:
        self._rows, self._documents, self._queries = store["rows"], store["documents"], store["queries"]
        self._users = store.tables.get("users")
        self._order, self._config, self._rank, self._world = order, config, rank, world
        self._encodings = encodings

    def __call__(self, step: int) -> Clicks:
        """This rank's rows of a step."""
        rows = self._order.batch(step)[self._rank :: self._world]
        group = self._rows.values("group", rows)
        return Clicks(
            queries=self._query_rows(rows),
            documents=self._document_rows(np.maximum(group, 0).reshape(-1)),
            group=torch.from_numpy(group),
            log_q=torch.from_numpy(self._rows.values("log_q", rows)),
        )

    def _query_rows(self, rows: Int64[ndarray, " rows"]) -> QueryInputs:
        queries, users = self._rows.values("query", rows), self._rows.values("user", rows)
        side = self._config.query
        words = important_words(None, len(rows))
        if side.planner:
            hashes, importances = (self._queries.values(name, queries) for name in ("words", "importances"))
            words = ImportantWords(hashes, importances)
        return query_inputs(
            self._queries.values("embedding", queries),
            words,
            self._profiles(users),
            self._histories(rows),
            config=side,
            encodings=self._encodings["users"],
        )

    def _document_rows(self, documents: Int64[ndarray, " docs"]) -> DocumentInputs:
        return document_inputs(
            self._documents.values("embedding", documents),
            self._documents.values("codes", documents),
            self._documents.values("hash", documents),
            _read_features(self._documents, documents, self._encodings["documents"]),
            config=self._config.document,
        )

    def _profiles(self, users: Int64[ndarray, " rows"]) -> EncodedFeatures:
        profiles = no_values(self._encodings["users"], len(users))
        known = users >= 0
        if self._users is not None and known.any():
            read = _read_features(self._users, users[known], self._encodings["users"])
            profiles.indices[known], profiles.numbers[known] = read.indices, read.numbers
        return profiles

    def _histories(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, "rows last levels"]:
        last = self._config.query.history
        if not last:
            return np.zeros((len(rows), 0, 0), np.int64)
        histories = self._rows.lists("history", rows)
        documents = np.concatenate([np.empty(0, np.int64), *histories])
        levels = self._documents.values("codes", np.zeros(1, np.int64)).shape[1]
        codes = self._documents.values("codes", documents).reshape(-1, levels)
        ends = np.cumsum([len(each) for each in histories])
        return last_codes(np.split(codes, ends[:-1]), last=last, levels=levels)


def _read_features(
    table: RowTable, rows: Int64[ndarray, " rows"], encodings: Sequence[Encoding]
) -> EncodedFeatures:
    """The encoded features of some rows; a table lacks a column of width 0."""
    empty = no_values(encodings, len(rows))
    return EncodedFeatures(
        table.values("indices", rows) if empty.indices.shape[1] else empty.indices,
        table.values("numbers", rows) if empty.numbers.shape[1] else empty.numbers,
    )


def _worker(settings: Settings) -> dict[str, str] | None:
    """One rank."""
    config, rank, world = start_rank(FuseConfig, settings)
    store, encodings = Store.open(settings["store"]), prepare.encodings(settings["store"])
    build_stage = partial(_stage, config, settings, encodings)
    order = _order(config, dict(store.facts))
    return train_rank(
        build_stage(),
        ClickBatches(store, order, config, encodings, rank=rank, world=world),
        build_stage=build_stage,
        schedule=config,
        settings=settings,
        save=partial(_save, config=config, encodings=encodings),
    )


def _stage(config: FuseConfig, settings: Settings, encodings: dict[str, list[Encoding]]) -> FusionStage:
    """Both networks with their initial weights."""
    ids = open_artifact(settings["semantic_ids"], kind="semantic_ids")
    codebooks = safetensors.load(ids.read_bytes("codebooks.safetensors"))["codebooks"].float()
    seen = torch.from_numpy(read_array(fs.join(settings["store"], prepare.SEEN)).copy())
    return build(config, codebooks, encodings, seen=seen)


def build(
    config: FuseConfig,
    codebooks: torch.Tensor,
    encodings: dict[str, list[Encoding]],
    *,
    seen: torch.Tensor | None = None,
) -> FusionStage:
    """Both networks and their losses, with initial weights that follow from ``config.seed``.

    Args:
        config: of the stage.
        codebooks: [levels, codes, dim], the initial tables of semantic IDs.
        encodings: of the features of ``documents`` and ``users``.
        seen: buckets of the document ids in training; None: all.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # Both sides share the tables, so that histories and documents are in the same space.
        shared = config.document.semantic_ids or config.query.history
        ids, dim = SemanticIdEmbedding(codebooks) if shared else None, codebooks.shape[2]
        knobs: dict[str, Any] = {"dim": dim, "semantic_ids": ids, "dropout": config.hide}
        prefixes = prefix_lengths(config.losses.matryoshka, dim=dim)
        return FusionStage(
            DocumentNetwork(config.document, encodings["documents"], seen=seen, **knobs),
            QueryNetwork(config.query, encodings["users"], **knobs),
            config.losses.model_copy(update={"matryoshka": prefixes}),
        )


def _save(
    stage: FusionStage, folder: Path, *, config: FuseConfig, encodings: dict[str, list[Encoding]]
) -> None:
    DocumentFusion(stage.documents, config.document, encodings["documents"]).save(folder / DOCUMENT_SIDE)
    QueryFusion(stage.queries, config.query, encodings["users"]).save(folder / QUERY_SIDE)
