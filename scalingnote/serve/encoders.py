"""The deployments that encode queries, and the cross-encoder that ranks results again.

A lookup tower takes microseconds and runs in the event loop. A transformer runs in a thread of its own, on
all queries that arrived during its last batch.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from scalingnote.core.errors import ConfigError
from scalingnote.encode import query_encoder
from scalingnote.encode.config import Form
from scalingnote.fuse.feature_store import StoreConfig, open_store
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.query_path import Personal, Query, QueryPath
from scalingnote.serve.concurrency import Batcher, WorkerThread
from scalingnote.serve.running_settings import RunningSettings
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import (
    HEALTH_TEXT,
    Location,
    Refused,
    Side,
    TextEncoder,
    TextTower,
    folder_of,
    require_finite,
    too_long,
)
from scalingnote.storage.artifact import open_artifact
from scalingnote.triplets.planner import planner

MAX_ENCODED = 8  # queries encoded together: in larger batches the first ones wait longer than the batch saves
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
        tower = folder_of(self.tower, "query")
        encoder = query_encoder.QueryEncoder(tower, self.form, cache=self.cache)
        terms, personal = None, None
        if self.sparse is not None:
            terms = SparseQuery.load(folder_of(self.sparse, "sparse_query"))
        if self.fusion is not None:
            from scalingnote.fuse.fusion import QueryFusion  # imports torch, which lookup towers save

            plan = self.planner and planner.load(open_artifact(self.planner[0], kind=self.planner[1]))
            fusion = QueryFusion.load(folder_of(self.fusion, "query_fusion"))
            personal = Personal(fusion, open_store(StoreConfig(url=self.features)), plan)
        return QueryPath(encoder, terms, personal)


class ArmEncoder(TextTower):
    """Encodes queries by one query path, and texts for clients of embeddings by its tower alone.

    Ray sets OMP_NUM_THREADS to the CPUs that a replica reserves (at least 1), and every form of tower obeys
    it: replicas on one machine do not compete for its cores.
    """

    def __init__(self, parts: QueryPathParts) -> None:
        self._settings = RunningSettings(ServeConfig(query_cache=parts.cache), "encoder")
        self._path = parts.load()
        self.form = self._path.encoder.form
        self._path(["warm up"])  # the first pass is the slowest
        in_loop = self._path.encoder.form == "lookup" and self._path.personal is None
        tower = self._path.encoder
        encoder = TextEncoder(tower.encode_queries, tower.encode_ids, tower.max_tokens)
        super().__init__(folder_of(parts.tower, "query"), "query", encoder, inline=in_loop)
        self._batcher: Batcher[tuple[str, str | None], Query] | None = None
        if not in_loop:
            self._batcher = Batcher(self._encode_batch, max_batch=MAX_ENCODED, thread=self._thread)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: take the settings that may change while this runs."""
        self.resize_cache(self._settings.take(user_config).query_cache)

    def resize_cache(self, queries: int) -> None:
        """Keep the embeddings of so many queries."""
        self._path.encoder.resize_cache(queries)

    async def encode(self, query: str, user_id: str | None = None) -> Query:
        """A query with its embedding and terms."""
        if self._batcher is None:
            return self._path([query])[0]
        return await self._batcher((query, user_id))

    async def encode_many(self, queries: Sequence[str], user_id: str | None = None) -> list[Query]:
        """Queries of one user with their embeddings and terms."""
        if self._batcher is None:
            return self._path(queries)
        pairs = [(query, user_id) for query in queries]
        return await self._thread.run(lambda: self._encode_batch(pairs))

    async def terms(
        self, queries: Sequence[str], *, truncate: bool = True, keeps: Side | None = None
    ) -> list[tuple[list[int], list[float]]] | Refused:
        """Terms and weights of each query; refused where the documents have no terms.

        The first terms of a long query are read. It is refused where it may not be cut (`truncate` is False),
        or where its end is asked for.
        """
        sparse = self._path.sparse
        if sparse is not None and (not truncate or keeps == "right"):
            lengths = [sparse.length(query) for query in queries]
            if refused := too_long(lengths, sparse.max_length):
                return refused
        encoded = await self.encode_many(queries)
        rows = [query.terms for query in encoded if query.terms is not None]
        if len(rows) < len(encoded):
            return Refused("the documents of this index have no terms: nothing weighs those of a query")
        return [(row.terms.tolist(), row.values.tolist()) for row in rows]

    def _encode_anew(self, texts: Sequence[str]) -> ndarray:
        return self._path.encoder.encode_anew(texts)

    def _encode_batch(self, batch: Sequence[tuple[str, str | None]]) -> list[Query]:
        queries, users = [query for query, _ in batch], [user for _, user in batch]
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
        self._thread = WorkerThread("pairs")
        self._scores([("warm", "up")])

    async def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """A score of each text, higher is better."""
        return await self._predict(query, texts)

    async def logits(
        self, query: str, texts: Sequence[str], *, truncate: bool = True, keeps: Side | None = None
    ) -> list[float] | Refused:
        """The model's output for each text, before any activation.

        Long pairs are cut at the side where the model's tokenizer cuts. They are refused where they may not
        be cut (`truncate` is False), or where the other side is to be cut.
        """
        from torch.nn import Identity

        if not truncate or keeps == self._model.tokenizer.truncation_side:
            lengths = await asyncio.to_thread(self._lengths, query, texts)
            if refused := too_long(lengths, self._model.max_seq_length or max(lengths)):
                return refused
        return await self._predict(query, texts, activation_fn=Identity())

    def _lengths(self, query: str, texts: Sequence[str]) -> list[int]:
        """Tokens of the query with each text, as the model reads them together."""
        whole = {"text": {"truncation": False}}
        # Pair by pair: the rows of several are padded, or joined, as the hardware needs.
        pairs = [self._model.preprocess([(query, text)], processing_kwargs=whole) for text in texts]
        return [pair["input_ids"].numel() for pair in pairs]

    async def check_health(self) -> None:
        """Ray Serve's question: an error where a pair cannot be scored, or where the thread hangs."""
        await self._thread.check(lambda: require_finite(self._scores([(HEALTH_TEXT, HEALTH_TEXT)])))

    async def _predict(self, query: str, texts: Sequence[str], **options: Any) -> list[float]:
        pairs = [(query, text) for text in texts]
        scores = await self._thread.run(lambda: self._scores(pairs, **options))
        return [float(score) for score in scores]

    def _scores(self, pairs: Sequence[tuple[str, str]], **options: Any) -> ndarray:
        return np.asarray(self._model.predict(pairs, show_progress_bar=False, **options))
