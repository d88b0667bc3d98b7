"""Deployments that run models on queries: the query encoder, and the cross-encoder that re-ranks results.

A lookup tower takes microseconds and runs in the event loop. A transformer runs in a thread of its own, on
all queries that arrived during its last batch.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scalingnote.encode import query_encoder
from scalingnote.encode.config import Form
from scalingnote.errors import ConfigError
from scalingnote.fuse.feature_store import StoreConfig, open_store
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.planner import planner
from scalingnote.search.query_path import EncodedQueries, Personal, QueryPath
from scalingnote.serve.concurrency import ThreadBatcher
from scalingnote.serve.telemetry import get_logger
from scalingnote.storage.artifact import Artifact, open_artifact

MAX_BATCH = 8  # queries: in larger batches the first ones wait longer than the batch saves
Location = tuple[str, str]  # URI and kind of an artifact
log = get_logger()


@dataclass(frozen=True)
class QueryPathParts:
    """The artifacts and settings of a query path, for replicas to load."""

    tower: Location
    form: Form = "auto"
    cache: int = 0
    sparse: Location | None = None  # the artifact with ``sparse_query/``
    fusion: Location | None = None  # the artifact with ``query_fusion/``
    planner: Location | None = None
    features: str = ""  # URL of the store of users' features

    def load(self) -> QueryPath:
        """Load all parts."""
        tower = _open(self.tower).directory("query")
        encoder = query_encoder.QueryEncoder.load(tower, self.form, cache=self.cache)
        terms, personal = None, None
        if self.sparse is not None:
            terms = SparseQuery.load(_open(self.sparse).directory("sparse_query"))
        if self.fusion is not None:
            from scalingnote.fuse.fusion import QueryFusion  # imports torch, which lookup towers save

            personal = Personal(
                QueryFusion.load(_open(self.fusion).directory("query_fusion")),
                open_store(StoreConfig(url=self.features)),
                None if self.planner is None else planner.load(_open(self.planner)),
            )
        return QueryPath(encoder, terms, personal)


class ArmEncoder:
    """Encodes queries by one query path.

    Ray sets OMP_NUM_THREADS to the CPUs that a replica reserves (at least 1), and every form of tower obeys
    it: replicas on one machine do not compete for its cores.
    """

    def __init__(self, parts: QueryPathParts) -> None:
        self._path = parts.load()
        self._path(["warm up"])  # the first pass is the slowest
        in_loop = self._path.encoder.form == "lookup" and self._path.personal is None
        self._batcher = None if in_loop else ThreadBatcher(self._encode_batch, max_batch=MAX_BATCH)

    async def encode(self, query: str, user_id: str | None = None) -> EncodedQueries:
        """Embedding and terms of a query; one row."""
        if self._batcher is None:
            return self._path([query])
        return await self._batcher((query, user_id))

    async def encode_many(self, queries: Sequence[str], user_id: str | None = None) -> EncodedQueries:
        """Embeddings and terms of queries of one user; a row each."""
        if self._batcher is None:
            return self._path(queries)
        return await self._batcher.run_between_batches(
            lambda: self._encode_together(queries, [user_id] * len(queries))
        )

    async def ping(self) -> bool:
        """Answers while the event loop runs."""
        return True

    def _encode_batch(self, batch: Sequence[tuple[str, str | None]]) -> list[EncodedQueries | Exception]:
        encoded = self._encode_together([query for query, _ in batch], [user for _, user in batch])
        return [encoded[row] for row in range(len(batch))]

    def _encode_together(self, queries: Sequence[str], users: Sequence[str | None]) -> EncodedQueries:
        try:
            return self._path(queries, users)
        except Exception:
            if not any(users):
                raise
            # The feature store may be down: results that are not personal are better than none.
            log.exception("personalising failed; these queries are answered as those of unknown users")
            return self._path(queries)


class Reranker:
    """Scores documents for a query by a cross-encoder of sentence-transformers."""

    def __init__(self, model: str) -> None:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError:
            raise ConfigError("serve.rerank needs a package: pip install 'scalingnote[rerank]'") from None
        self._model: Any = CrossEncoder(model)
        self._model.predict([("warm", "up")], show_progress_bar=False)

    async def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """A score of each text, higher is better."""
        pairs = [(query, text) for text in texts]
        scores = await asyncio.to_thread(self._model.predict, pairs, show_progress_bar=False)
        return [float(score) for score in scores]


def _open(location: Location) -> Artifact:
    uri, kind = location
    return open_artifact(uri, kind=kind)
