"""The query encoder replica: a query goes in, its unit embedding comes out.

Queries that arrive while others are being encoded form the next batch, so a lone query never waits and
a crowd shares forward passes.
"""

import asyncio
from collections.abc import Sequence

from jaxtyping import Float
from numpy import ndarray
from ray import serve

from scalingnote.encode import query_encoder
from scalingnote.encode.config import Form
from scalingnote.storage import vectors
from scalingnote.storage.artifact import open_artifact

BATCH = 32


@serve.deployment(max_ongoing_requests=256)
class QueryEncoder:
    """Holds the query tower of a `student`, `dual_encoder` or `query_encoder` artifact, in one of its forms.

    Ray sets OMP_NUM_THREADS to the CPUs a replica reserves (at least 1), and every form obeys it: replicas
    on one machine do not fight over its cores.
    """

    def __init__(self, uri: str, kind: str, form: Form, cache: int) -> None:
        folder = open_artifact(uri, kind=kind).directory("query")
        self._encoder = query_encoder.QueryEncoder.load(folder, form, cache=cache)
        self._encoder.encode_queries(["warm up"])  # the first pass is the slowest: not at a user's cost

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0)
    async def encode(self, queries: list[str]) -> Sequence[Float[ndarray, " dim"]]:
        """The unit embedding of each query, float32. Callers pass one query; Serve makes the list."""
        embeddings = await asyncio.to_thread(self._encoder.encode_queries, queries)
        return list(vectors.unit(embeddings))

    async def ping(self) -> bool:
        """Answers as long as the replica's event loop turns."""
        return True
