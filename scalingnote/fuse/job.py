"""The fuse stage on Ray: it trains both networks on clicks, and writes final embeddings of all documents.

    impressions, users, features ─prepare─► store ─Ray Train─► both networks ─Ray Data─► final embeddings

The output is an artifact of the kind `embeddings` with the same parts as the input, so every reader of
embeddings can read it. It also has ``document_fusion/`` and ``query_fusion/``, which fuse new documents and
queries.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import torch as safetensors

from scalingnote import cluster
from scalingnote.encode.parts import EncodedPart, Steps, encode_parts, read_nothing, reader_cpus, write_parts
from scalingnote.errors import ConfigError
from scalingnote.fuse import prepare
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.fusion import DocumentFusion, QueryFusion, important_words
from scalingnote.fuse.impressions import read_clicks
from scalingnote.fuse.networks import DocumentNetwork, FusionStage, QueryNetwork, SemanticIds
from scalingnote.fuse.prepare import VIEW, ClickBatches, FusedCorpus, read_part
from scalingnote.log import get_logger
from scalingnote.quantize.semantic_id import require_origin
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.shuffle import slices
from scalingnote.train.config import prefix_lengths
from scalingnote.train.data import Order, Store, one_chunk
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
    cluster.check_resources_early(config.writers, task_cpus=reader_cpus(config.writers), knob=WRITERS)
    cluster.check_resources_early(config.resources, knob="fuse.resources")
    corpus = FusedCorpus(*(parents[name] for name in ("dataset", "embeddings", "semantic_ids")))
    facts = _prepare(config, corpus, parents["planner"], tower, draft)
    steps = _order(config, facts).steps(config)
    clicks = facts["sizes"][prepare.ROWS]
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
    if Store.finished(folder):
        return Store.facts_of(folder)
    left_out = read_clicks(config, corpus.dataset, folder=folder, each=cluster.map_tasks)
    prepare.fit_features(config, corpus.dataset, folder=folder, each=cluster.map_tasks)
    query_slices = slices(corpus.dataset, "queries")
    rows = {
        f"{prepare.QUERIES}/{number:05d}.arrow": sum(corpus.dataset.rows_of(parts).values())
        for number, parts in enumerate(query_slices)
    }
    read = partial(read_queries, dataset=corpus.dataset, slices=query_slices, store=folder)
    words = config.query.planner.words if config.query.planner else 0
    steps = Steps(read, partial(QueryParts, tower=tower, planner=planner, words=words))
    where = {"output": folder, "work": draft.work("queries")}
    records = encode_parts(steps, **where, rows=rows, resources=config.writers, unit="queries", knob=WRITERS)
    files = [(record["name"], record["part"]) for record in records if record["part"]["rows"]]
    return prepare.finish(
        config, corpus, queries=files, folder=folder, each=cluster.map_tasks, left_out=left_out
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
    kept = pa.array(in_sorted(hashes, read_array(fs.join(store, "asked.arrow"))))
    return pa.array(hashes).filter(kept), queries["query"].filter(kept).to_pylist()


class QueryParts:
    """Encodes queries by the query tower and the planner, in a worker."""

    def __init__(self, *, tower: Artifact, planner: Artifact, words: int) -> None:
        from scalingnote.encode.query_encoder import QueryEncoder
        from scalingnote.planner.planner import load

        self._encoder = QueryEncoder.load(tower.directory("query"))
        self._planner, self._words = load(planner), words

    def __call__(self, _: str, hashes_and_queries: tuple[pa.Array, list[str]]) -> EncodedPart:
        """A part of the store."""
        hashes, queries = hashes_and_queries
        embeddings = arrow.l2_normalize(self._encoder.encode_queries(queries))
        columns = {"hash": hashes, "embedding": arrow.to_arrow(embeddings)}
        if self._words:
            terms = self._planner.term_scores(queries)
            words = important_words(terms, len(queries), most=self._words)
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
        place = plain.schema.get_field_index(VIEW)
        column = arrow.to_arrow(fused, dtype=arrow.dtype_of(plain.schema.field(VIEW)))
        return EncodedPart(plain.set_column(place, plain.schema.field(VIEW), column))


def _worker(settings: Settings) -> dict[str, str] | None:
    """One rank."""
    config, rank, world = start_rank(FuseConfig, settings)
    store = Store.open(settings["store"])
    encodings = prepare.encodings(settings["store"])
    build_stage = partial(_stage, config, settings)
    batches = ClickBatches(
        store, _order(config, dict(store.facts)), config, **encodings, rank=rank, world=world
    )
    return train_rank(
        build_stage(),
        batches,
        build_stage=build_stage,
        schedule=config,
        settings=settings,
        save=partial(_save, config=config, encodings=encodings),
    )


def _stage(config: FuseConfig, settings: Settings) -> FusionStage:
    """Both networks with their initial weights."""
    ids = open_artifact(settings["semantic_ids"], kind="semantic_ids")
    codebooks = safetensors.load(ids.read_bytes("codebooks.safetensors"))["codebooks"].float()
    encodings = prepare.encodings(settings["store"])
    seen = torch.from_numpy(read_array(fs.join(settings["store"], prepare.SEEN)).copy())
    return build(config, codebooks, **encodings, seen=seen)


def build(
    config: FuseConfig,
    codebooks: torch.Tensor,
    *,
    documents: list[Any],
    users: list[Any],
    seen: torch.Tensor | None = None,
) -> FusionStage:
    """Both networks and their losses, with initial weights that follow from ``config.seed``.

    Args:
        config: of the stage.
        codebooks: [levels, codes, dim], the initial tables of semantic IDs.
        documents, users: encodings of their features.
        seen: buckets of the document ids in training; None: all.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        used = config.document.semantic_ids or config.query.history
        # Both sides share the tables, so that histories and documents are in the same space.
        ids = SemanticIds(codebooks) if used else None
        dim = codebooks.shape[2]
        knobs: dict[str, Any] = {"dim": dim, "semantic_ids": ids, "dropout": config.hide}
        prefixes = prefix_lengths(config.losses.matryoshka, dim=dim)
        return FusionStage(
            DocumentNetwork(config.document, documents, seen=seen, **knobs),
            QueryNetwork(config.query, users, **knobs),
            config.losses.model_copy(update={"matryoshka": prefixes}),
        )


def _save(stage: FusionStage, folder: Path, *, config: FuseConfig, encodings: dict[str, Any]) -> None:
    DocumentFusion(stage.documents, config.document, encodings["documents"]).save(folder / DOCUMENT_SIDE)
    QueryFusion(stage.queries, config.query, encodings["users"]).save(folder / QUERY_SIDE)
