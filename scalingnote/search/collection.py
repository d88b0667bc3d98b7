"""Searches of a collection that `scalingnote export vectors` filled, through the database's own client.

    vectors ──► dense  ┐
                       ├─► (ids, scores) of each query, best first
    terms ────► sparse ┘

    ids ──────► read ───► vectors, terms or columns by id

Milvus takes its filters as text, Qdrant as objects. In its local mode the client of Qdrant compares a query
with every vector; Milvus Lite builds a graph (HNSW) of what is sealed, as a server does. Methods raise what
the clients raise.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from jaxtyping import Float
from numpy import ndarray

from scalingnote.export import databases
from scalingnote.export.databases import DENSE, NO_TERM, TERMS
from scalingnote.index.config import SearchConfig
from scalingnote.index.filters import Condition

MOST_EF = 32_768  # that Milvus takes
Conditions = Mapping[str, Condition]  # of scalingnote.index.filters.conditions
Hits = tuple[list[str], list[float]]  # ids of documents and scores, best first
Terms = Mapping[int, float]  # term -> weight
PointPart = Literal["dense", "terms", "columns"]
_OPEN_FILES: Counter[str] = Counter()  # of Milvus Lite: collections that this process has open in each


class QdrantCollection(databases.Qdrant):
    """A collection of Qdrant, to be searched."""

    def __init__(self, search: SearchConfig, collection: str, timeout_s: float) -> None:
        super().__init__(search.url or "", collection, timeout_s)
        self._ef, self._is_local = search.ef, search.is_local

    def dense(
        self, queries: Float[ndarray, "queries dim"], *, k: int, where: Conditions, thorough: bool = False
    ) -> list[Hits]:
        """The k documents with the largest inner products; `thorough` compares with every vector."""
        params = None
        if not self._is_local:  # which compares with every vector, and warns of settings
            params = self._models.SearchParams(exact=thorough, hnsw_ef=self._ef)
        return self._query([row.tolist() for row in queries], DENSE, k=k, where=where, params=params)

    def sparse(self, queries: Sequence[Terms], *, k: int, where: Conditions) -> list[Hits]:
        """The k documents with the largest inner products of terms above 0; no query is without terms."""
        vectors = [self._models.SparseVector(indices=[*row], values=[*row.values()]) for row in queries]
        return self._query(vectors, TERMS, k=k, where=where)

    def read(self, doc_ids: Sequence[str], part: PointPart) -> dict[str, Any]:
        """Vectors, terms or columns of the documents that are there."""
        points = self._client.retrieve(
            self._collection,
            ids=[databases.point_id(doc_id) for doc_id in doc_ids],
            with_payload=True if part == "columns" else ["doc_id"],
            with_vectors=False if part == "columns" else [part],
        )
        if part == "terms":
            found = {point.payload["doc_id"]: (point.vector or {}).get(TERMS) for point in points}
            return {
                doc_id: dict(zip(row.indices, row.values, strict=True)) if row else {}
                for doc_id, row in found.items()
            }
        return {p.payload["doc_id"]: p.payload if part == "columns" else p.vector[DENSE] for p in points}

    def close(self) -> None:
        """Release the folder of the local mode, or the connections."""
        self._client.close()

    def _query(
        self, queries: Sequence[Any], using: str, *, k: int, where: Conditions, params: Any = None
    ) -> list[Hits]:
        kept = self._filter(where) if where else None
        requests = [
            self._models.QueryRequest(
                query=query, using=using, filter=kept, params=params, limit=k, with_payload=["doc_id"]
            )
            for query in queries
        ]
        answers = self._client.query_batch_points(self._collection, requests=requests)
        return [
            ([point.payload["doc_id"] for point in answer.points], [point.score for point in answer.points])
            for answer in answers
        ]

    def _filter(self, where: Conditions) -> Any:
        """Conditions in Qdrant's form: numbers with a fraction and truth values have no list of their own."""
        models, must = self._models, []
        for name, condition in where.items():
            field = partial(models.FieldCondition, key=_key(name))
            if isinstance(condition, tuple):
                must.append(field(range=models.Range(gte=condition[0], lte=condition[1])))
            elif isinstance(condition[0], bool):
                must.append(
                    models.Filter(should=[field(match=models.MatchValue(value=v)) for v in condition])
                )
            elif isinstance(condition[0], float):
                must.append(
                    models.Filter(should=[field(range=models.Range(gte=v, lte=v)) for v in condition])
                )
            else:
                must.append(field(match=models.MatchAny(any=condition)))
        return models.Filter(must=must)


def _key(name: str) -> str:
    """A column's name as a key of a payload, in which a point leads into an object."""
    return name if name.replace("_", "a").isalnum() else json.dumps(name, ensure_ascii=False)


class MilvusCollection(databases.Milvus):
    """A collection of Milvus, as :class:`QdrantCollection`."""

    def __init__(self, search: SearchConfig, collection: str, timeout_s: float) -> None:
        super().__init__(search.url or "", collection, timeout_s)
        self._ef, self._file = search.ef, search.url if search.is_local else None
        if self._file is not None:
            _OPEN_FILES[self._file] += 1

    def layout(self) -> tuple[int | None, bool] | None:
        """As of :class:`databases.Milvus`; a collection that is there is loaded."""
        found = super().layout()
        if found is not None:
            self._client.load_collection(self._collection, timeout=self._timeout_s)
        return found

    def dense(
        self, queries: Float[ndarray, "queries dim"], *, k: int, where: Conditions, thorough: bool = False
    ) -> list[Hits]:
        """The nearest by vectors; `thorough` walks as much of the graph as Milvus allows."""
        ef = MOST_EF if thorough else self._ef
        params = {} if ef is None else {"ef": max(ef, k)}
        return self._search([*queries], DENSE, k=k, where=where, params=params)

    def sparse(self, queries: Sequence[Terms], *, k: int, where: Conditions) -> list[Hits]:
        """The nearest by terms."""
        return self._search([{**row} for row in queries], TERMS, k=k, where=where, params={})

    def read(self, doc_ids: Sequence[str], part: PointPart) -> dict[str, Any]:
        """Vectors, terms or columns of documents."""
        # The client's own search by ids does not escape them.
        rows = self._client.query(
            self._collection,
            filter=_expression("doc_id", [*doc_ids]),
            output_fields=["*" if part == "columns" else part],
            timeout=self._timeout_s,
        )
        if part == "terms":
            return {
                row["doc_id"]: {term: weight for term, weight in row[TERMS].items() if term != NO_TERM}
                for row in rows
            }
        return {row["doc_id"]: row if part == "columns" else row[DENSE] for row in rows}

    def close(self) -> None:
        """Close the connection; the server of a file stops with its last collection."""
        self._client.close()
        if self._file is not None:
            _OPEN_FILES[self._file] -= 1
            if _OPEN_FILES[self._file]:
                return
            from milvus_lite.server_manager import server_manager_instance  # type: ignore[import-untyped]

            server_manager_instance.release_server(self._file)

    def _search(
        self, queries: list[Any], field: str, *, k: int, where: Conditions, params: dict[str, Any]
    ) -> list[Hits]:
        answers = self._client.search(
            self._collection,
            data=queries,
            anns_field=field,
            limit=k,
            filter=" and ".join(_expression(name, condition) for name, condition in where.items()),
            search_params={"metric_type": "IP", "params": params},
            timeout=self._timeout_s,
        )
        return [
            ([hit["doc_id"] for hit in hits], [float(hit["distance"]) for hit in hits]) for hits in answers
        ]


def _expression(name: str, condition: Condition) -> str:
    """A condition in Milvus' language: columns of documents are dynamic fields."""
    field = name if name == "doc_id" else f"$meta[{_literal(name)}]"
    if isinstance(condition, tuple):
        return f"({field} >= {condition[0]!r} and {field} <= {condition[1]!r})"
    values = [_literal(value) if isinstance(value, str) else str(value).lower() for value in condition]
    if name == "doc_id":
        return f"{field} in [{', '.join(values)}]"
    # Milvus Lite knows no `in` for dynamic fields.
    return f"({' or '.join(f'{field} == {value}' for value in values)})"


def _literal(text: str) -> str:
    """A text as a literal of Milvus' language, which has fewer escapes than JSON."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(character, escape)
    return f'"{text}"'


Collection: TypeAlias = QdrantCollection | MilvusCollection


def connect(search: SearchConfig, collection: str, *, timeout_s: float) -> Collection:
    """Open a collection to search it; ConfigError where the client is missing or nothing answers."""
    kind: type[Collection] = QdrantCollection if search.backend == "qdrant" else MilvusCollection
    return databases.call_client(search.backend, search.url, lambda: kind(search, collection, timeout_s))
