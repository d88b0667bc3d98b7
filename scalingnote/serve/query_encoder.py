"""The query encoder: a query and who asks it go in, what the index is searched with comes out.

A lookup tower takes microseconds and works where it is asked. A transformer works in a thread of its own, on
all queries that arrived while it was at the last ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scalingnote.encode import query_encoder
from scalingnote.encode.config import Form
from scalingnote.fuse.feature_store import open_store
from scalingnote.fuse.features import StoreConfig
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.planner import planner
from scalingnote.search.query_path import Asked, Personal, QueryPath
from scalingnote.serve.batcher import Batcher
from scalingnote.serve.log import get_logger
from scalingnote.storage.artifact import Artifact, open_artifact

MOST = 8  # queries in a pass: more make those in front wait longer than they save
Query: TypeAlias = tuple[str, str | None]
log = get_logger()


@dataclass(frozen=True)
class Parts:
    """Where the parts of a query path lie: URIs of artifacts, and their kinds."""

    tower: tuple[str, str]
    form: Form = "auto"
    cache: int = 0
    sparse: tuple[str, str] | None = None  # the artifact that holds ``sparse_query/``
    fusion: tuple[str, str] | None = None  # that which holds ``query_fusion/``
    planner: tuple[str, str] | None = None
    features: str = ""

    def load(self) -> QueryPath:
        """Everything, ready to be asked."""
        tower = _open(self.tower).directory("query")
        path = QueryPath(query_encoder.QueryEncoder.load(tower, self.form, cache=self.cache))
        if self.sparse is not None:
            path = QueryPath(path.encoder, SparseQuery.load(_open(self.sparse).directory("sparse_query")))
        if self.fusion is None:
            return path
        from scalingnote.fuse.query_fusion import QueryFusion  # needs torch, a lookup tower does not

        personal = Personal(
            QueryFusion.load(_open(self.fusion).directory("query_fusion")),
            open_store(StoreConfig(url=self.features)),
            None if self.planner is None else planner.load(_open(self.planner)),
        )
        return QueryPath(path.encoder, path.sparse, personal)


class QueryEncoder:
    """Holds one query path.

    Ray sets OMP_NUM_THREADS to the CPUs a replica reserves (at least 1), and every form obeys it: replicas
    on one machine do not fight over its cores.
    """

    def __init__(self, parts: Parts) -> None:
        self._path = parts.load()
        self._path(["warm up"])  # the first pass is the slowest: not at a user's cost
        at_once = self._path.encoder.form == "lookup" and self._path.personal is None
        self._batcher = None if at_once else Batcher(self._encode, most=MOST)

    async def encode(self, query: str, user_id: str | None = None) -> Asked:
        """What to search with; one row."""
        if self._batcher is None:
            return self._path([query])
        return await self._batcher((query, user_id))

    async def encode_many(self, queries: Sequence[str], user_id: str | None = None) -> Asked:
        """The same for queries of one user; a row each."""
        if self._batcher is None:
            return self._path(queries)
        return await self._batcher.in_turn(lambda: self._together(queries, [user_id] * len(queries)))

    async def ping(self) -> bool:
        """Answers as long as the event loop turns."""
        return True

    def _encode(self, batch: Sequence[Query]) -> list[Asked | Exception]:
        found = self._together([query for query, _ in batch], [user for _, user in batch])
        return [found[row] for row in range(len(batch))]

    def _together(self, queries: Sequence[str], users: Sequence[str | None]) -> Asked:
        try:
            return self._path(queries, users)
        except Exception:
            if not any(users):
                raise
            # The store of features may be gone: a plain answer is better than none.
            log.exception("personalising failed; these queries are answered as anyone's")
            return self._path(queries)


def _open(place: tuple[str, str]) -> Artifact:
    uri, kind = place
    return open_artifact(uri, kind=kind)
