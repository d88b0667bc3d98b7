"""A finished run, opened in this process: search of its index, and the quality of its query tower."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

from scalingnote.core.array_types import Float64
from scalingnote.core.errors import ArtifactError, ConfigError, explained_imports
from scalingnote.core.words import checked_text
from scalingnote.encode.query_encoder import QueryEncoder

if TYPE_CHECKING:
    from scalingnote.encode.config import Form
    from scalingnote.evaluate.mteb_model import MtebSearch
    from scalingnote.run.config import RunConfig
    from scalingnote.search.query_path import Query
    from scalingnote.search.searcher import SearchHit
    from scalingnote.train.distillation.agreement import Agreement

MAX_TUNING_QUERIES = 2_000  # to tune a threshold


@dataclass(frozen=True)
class Result:
    """A document in the answer of a search."""

    doc_id: str
    score: float
    title: str
    snippet: str
    passage: Mapping[str, int] | None = None
    """In an index of passages, the `number` of the document's best passage, from 1, and its `start` and `end`
    in characters of the document's content. The snippet is the beginning of this passage."""


class Index:
    """The index of a finished run, open for searches in this process.

    Args:
        run_dir: folder of a run that `scalingnote run CONFIG` finished.
        form: form of the query tower: "auto" (the fastest), "lookup", "torch", "onnx", "onnx_int8".
        escalate: share of the queries, from 0 to 1, that the teacher encodes instead of the student: those
            with the student's five best scores closest together. The threshold is tuned on the queries of the
            run without test queries, or on its pseudo-queries.

    Raises:
        ConfigError: there is no run, or `escalate` is not 0 and the run has no student of its document tower.
        ArtifactError: the run has no index.
    """

    @explained_imports()
    def __init__(self, run_dir: str | Path, *, form: "Form" = "auto", escalate: float = 0.0) -> None:
        from scalingnote.encode import exports
        from scalingnote.models.sparse_query import SparseQuery
        from scalingnote.run import pipeline
        from scalingnote.search.query_path import QueryPath, escalation_threshold
        from scalingnote.search.searcher import Searcher

        config = pipeline.load_run(str(run_dir))
        self.searcher = Searcher.open(pipeline.locate(config, "index").uri)
        tower = pipeline.locate(config, config.query_tower_kind)
        encoder = QueryEncoder(exports.find(tower, form, str(run_dir)).directory("query"), form)
        # Stored vectors score the candidates by terms; an index with only codes has none.
        source = pipeline.query_terms(config) if self.searcher.layout.refine != "none" else None
        terms = None if source is None else SparseQuery.load(source.directory("sparse_query"))
        self.query_path = QueryPath(encoder, terms)
        self._teacher: QueryPath | None = None
        self._threshold = float("inf")
        if escalate:
            teacher = QueryEncoder(pipeline.teacher(config).directory("query"), "torch")
            self._teacher = QueryPath(teacher, terms)
            queries = _held_out_queries(config)
            doubts = self._doubts(self.query_path(queries)) if queries else np.empty(0)
            self._threshold = escalation_threshold(doubts, escalate)

    def encode(self, query: str) -> "Query":
        """Encode a query to embedding and terms, with the teacher's embedding if the student is uncertain."""
        encoded = self.query_path([query])
        # The decision searches five results: under 0.1 ms, while the teacher takes 10 ms to encode.
        if self._teacher is not None and self._doubts(encoded)[0] > self._threshold:
            encoded = self._teacher([query])
        return encoded[0]

    def search_encoded(
        self, encoded: "Query", *, k: int, dense_weight: float | None = None
    ) -> "list[SearchHit]":
        """Find the `k` best documents of an encoded query, by embeddings, and terms if the index has some."""
        return self.searcher.search(encoded.embedding, encoded.terms, k=k, dense_weight=dense_weight)[0]

    def search(self, query: str, *, k: int = 10, dense_weight: float | None = None) -> list[Result]:
        """Find the `k` best documents, best first.

        Args:
            query: a text. Half of a surrogate pair in it is read as U+FFFD.
            k: number of documents, 1 to 1000.
            dense_weight: weight of embeddings in hybrid search; terms have the rest. 1: only embeddings, 0:
                only terms, which find only documents with a term of the query. None: the tuned weight of the
                index, else 0.5.

        Raises:
            ConfigError: the query is empty, `k` is below 1, or the weight is not between 0 and 1, or is given
                for documents without terms.
            DataError: the query is not a text.
        """
        query = checked_text(query, name="the query")
        if not query.strip() or k < 1:
            raise ConfigError("nothing to search: give some text and k of at least 1")
        if dense_weight is not None and not 0 <= dense_weight <= 1:
            raise ConfigError(f"dense_weight is {dense_weight}: give one from 0 to 1")
        if dense_weight is not None and self.query_path.sparse is None:
            raise ConfigError(
                "dense_weight is given, but the documents of this index have no terms: leave it out"
            )
        hits = self.search_encoded(self.encode(query), k=k, dense_weight=dense_weight)
        pairs = [(hit, hit.document) for hit in hits]
        return [
            Result(hit.doc_id, float(hit.score), row["title"], row["snippet"], row.get("passage"))
            for hit, row in pairs
        ]

    def _doubts(self, encoded: "Sequence[Query]") -> Float64[ndarray, " queries"]:
        from scalingnote.search.query_path import COMPARED, doubt

        embeddings = np.concatenate([query.embedding for query in encoded])
        hits = self.searcher.search(embeddings, k=COMPARED)
        scores = np.full((len(hits), COMPARED), -np.inf)
        for row, best in enumerate(hits):
            scores[row, : len(best)] = [hit.score for hit in best]
        return doubt(scores)


def agreement(run_dir: str | Path) -> "Agreement":
    """Measure how far a run's query tower agrees with its teacher on held-out texts, and the costs of both.

    Args:
        run_dir: folder of a run that :func:`build_index` or `scalingnote run CONFIG` finished.

    Raises:
        ConfigError: there is no run.
        ArtifactError: the run has no distilled query tower.
    """
    with explained_imports():
        from scalingnote.run import pipeline
        from scalingnote.train.distillation.agreement import compare

        config = pipeline.load_run(str(run_dir))
        artifacts = {kind: pipeline.locate(config, kind) for kind in ("query_embeddings", "student")}
        for kind in ("dataset", "dual_encoder", "embeddings"):
            with contextlib.suppress(ArtifactError):  # a run up to `distill`, or with an external teacher
                artifacts[kind] = pipeline.locate(config, kind)
        return compare(**artifacts)


def mteb_search(run_dir: str | Path, *, name: str = "") -> "MtebSearch":
    """Build a model for mteb from the search of the last finished run in a folder.

    Args:
        run_dir: folder of a run that `scalingnote run CONFIG` finished.
        name: name of the model in the results; by default ``scalingnote/`` and the name of the folder.

    Raises:
        ConfigError: there is no run.
    """
    from scalingnote.evaluate.mteb_model import MtebSearch
    from scalingnote.run import pipeline
    from scalingnote.storage.schema import document_of

    config, index = pipeline.load_run(str(run_dir)), Index(run_dir)
    parts = {kind: pipeline.locate(config, kind) for kind in ("embeddings", "index")}
    doc_ids = parts["embeddings"].table("embeddings", ["doc_id"])["doc_id"].to_pylist()
    if index.searcher.layout.passages:
        doc_ids = [document_of(doc_id) for doc_id in doc_ids]
    about = {
        "name": name or f"scalingnote/{Path(run_dir).resolve().name}",
        "revision": parts["index"].digest[:12],
        "embed_dim": index.query_path.encoder.dim,
    }
    return MtebSearch(index.searcher, index.query_path, doc_ids, about=about)


def _held_out_queries(config: "RunConfig") -> list[str]:
    """Return queries to tune a threshold on, never test queries."""
    from scalingnote.run import pipeline

    rows = pipeline.locate(config, "dataset").table("queries", ["query", "split"]).to_pylist()
    queries = [row["query"] for row in rows if row["split"] != "test"]
    if not queries and config.pseudo_queries is not None:
        table = pipeline.locate(config, "pseudo_queries").table("queries", ["query", "split"])
        queries = [row["query"] for row in table.to_pylist() if row["split"] != "train"]
    return queries[:MAX_TUNING_QUERIES]
