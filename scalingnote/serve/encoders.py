"""The deployments that encode queries, and the cross-encoder that re-ranks results.

A lookup tower takes microseconds and runs in the event loop. A transformer runs in a separate thread, on all
queries that arrived during its last batch.
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

MAX_ENCODED = 8  # queries encoded together: a larger batch delays its first queries by more than it saves
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
    features: str = ""  # URL of the store with the features of users

    def load(self) -> QueryPath:
        """Load all parts."""
        tower = folder_of(self.tower, "query")
        encoder = query_encoder.QueryEncoder(tower, self.form, cache=self.cache)
        terms, personal = None, None
        if self.sparse is not None:
            terms = SparseQuery.load(folder_of(self.sparse, "sparse_query"))
        if self.fusion is not None:
            from scalingnote.fuse.fusion import QueryFusion  # imports torch, which lookup towers do not need

            plan = self.planner and planner.load(open_artifact(self.planner[0], kind=self.planner[1]))
            fusion = QueryFusion.load(folder_of(self.fusion, "query_fusion"))
            personal = Personal(fusion, open_store(StoreConfig(url=self.features)), plan)
        return QueryPath(encoder, terms, personal)


class ArmEncoder(TextTower):
    """An encoder of queries by one query path, and of texts for clients of embeddings by only its tower.

    Ray sets OMP_NUM_THREADS to the CPUs that a replica reserves (at least 1), and every form of tower
    respects it, so replicas on one machine do not compete for its cores.
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
        """Apply the settings that may change while this replica runs. Ray Serve calls this."""
        self.resize_cache(self._settings.take(user_config).query_cache)

    def resize_cache(self, queries: int) -> None:
        """Set the number of queries with embeddings in the cache."""
        self._path.encoder.resize_cache(queries)

    async def encode(self, query: str, user_id: str | None = None) -> Query:
        """Encode a query to its embedding and terms."""
        if self._batcher is None:
            return self._path([query])[0]
        return await self._batcher((query, user_id))

    async def encode_many(self, queries: Sequence[str], user_id: str | None = None) -> list[Query]:
        """Encode queries of one user to their embeddings and terms."""
        if self._batcher is None:
            return self._path(queries)
        pairs = [(query, user_id) for query in queries]
        return await self._thread.run(lambda: self._encode_batch(pairs))

    async def terms(
        self, queries: Sequence[str], *, truncate: bool = True, keeps: Side | None = None
    ) -> list[tuple[list[int], list[float]]] | Refused:
        """Compute terms and weights of each query; refused if the documents have no terms.

        Only the first terms of a long query are read. It is refused if it may not be cut (`truncate` is
        False), or if its end is to be read (`keeps` is "right").
        """
        sparse = self._path.sparse
        if sparse is not None and (not truncate or keeps == "right"):
            lengths = [sparse.length(query) for query in queries]
            if refused := too_long(lengths, sparse.max_length):
                return refused
        encoded_queries = await self.encode_many(queries)
        rows = [query.terms for query in encoded_queries if query.terms is not None]
        if len(rows) < len(encoded_queries):
            return Refused("the documents of this index have no terms: terms of a query have no weights")
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
            # The feature store may be down. Results that are not personal are better than none.
            log.exception("personalising failed; these queries are answered like those of unknown users")
            return self._path(queries)


class Reranker:
    """A cross-encoder of sentence-transformers, which scores documents for a query."""

    def __init__(self, model: str) -> None:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError:
            raise ConfigError("serve.rerank needs a package: pip install 'scalingnote[rerank]'") from None
        self._model: Any = CrossEncoder(model)
        self._thread = WorkerThread("pairs")
        self._scores([("warm", "up")])

    async def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """Compute a score of each text; higher is better."""
        return await self._predict(query, texts)

    async def logits(
        self, query: str, texts: Sequence[str], *, truncate: bool = True, keeps: Side | None = None
    ) -> list[float] | Refused:
        """Compute the output of the model for each text, before any activation.

        A long pair is cut at the side where the tokenizer of the model cuts. It is refused if it may not be
        cut (`truncate` is False), or if the other side is to be cut.
        """
        from torch.nn import Identity

        if not truncate or keeps == self._model.tokenizer.truncation_side:
            lengths = await asyncio.to_thread(self._lengths, query, texts)
            if refused := too_long(lengths, self._model.max_seq_length or max(lengths)):
                return refused
        return await self._predict(query, texts, activation_fn=Identity())

    def _lengths(self, query: str, texts: Sequence[str]) -> list[int]:
        """Count the tokens of the query and each text, as the model reads them together."""
        uncut = {"text": {"truncation": False}}
        # One pair at a time: rows of several pairs are padded or joined, depending on the hardware.
        pairs = [self._model.preprocess([(query, text)], processing_kwargs=uncut) for text in texts]
        return [pair["input_ids"].numel() for pair in pairs]

    async def check_health(self) -> None:
        """Raise an error if a pair cannot be scored or the thread hangs. Ray Serve calls this."""
        await self._thread.check(lambda: require_finite(self._scores([(HEALTH_TEXT, HEALTH_TEXT)])))

    async def _predict(self, query: str, texts: Sequence[str], **options: Any) -> list[float]:
        pairs = [(query, text) for text in texts]
        scores = await self._thread.run(lambda: self._scores(pairs, **options))
        return [float(score) for score in scores]

    def _scores(self, pairs: Sequence[tuple[str, str]], **options: Any) -> ndarray:
        return np.asarray(self._model.predict(pairs, show_progress_bar=False, **options))
