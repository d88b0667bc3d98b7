"""The index shard replica: a unit embedding goes in, the shard's candidates come out; documents by row."""

import asyncio
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from ray import serve

from scalingnote.search.searcher import Candidates, Searcher


@serve.deployment(max_ongoing_requests=256)
class IndexShard:
    """Holds one shard of an index. Each shard is a deployment of its own: own replicas, own health."""

    def __init__(self, index: str, shard: int, nprobe: int | None) -> None:
        self._searcher = Searcher.open(index, shards=[shard], nprobe=nprobe)

    async def candidates(self, query: Float[ndarray, " dim"], k: int) -> Candidates:
        """The shard's best k, for the gateway to merge."""
        return await asyncio.to_thread(self._searcher.candidates, query[np.newaxis], k=k)

    async def documents(self, rows: Sequence[int]) -> list[dict[str, str]]:
        """doc_id, title, topic, snippet and semantic_id of each row."""
        return await asyncio.to_thread(self._searcher.documents, rows)

    async def ping(self) -> bool:
        """Answers as long as the replica's event loop turns."""
        return True
