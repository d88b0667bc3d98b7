"""The databases of an export, each through its own client: Qdrant, Milvus, LanceDB, OpenSearch, Parquet.

Each has the dense vectors in ``dense``, compared by inner product, and the terms in ``terms`` if it has
sparse vectors. The id of a row depends only on its doc_id, so that a row replaces its earlier version.
Clients are imported when a database is opened; `pip install 'scalingnote[vectors]'` installs them.
"""

import importlib
import os
import uuid
from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.export.vectors import Database, ExportLayout, ExportRows
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.manifest import write_table

DENSE, TERMS = "dense", "terms"
MAX_ID_BYTES = 512  # of a doc_id in Milvus
NO_TERM = (1 << 32) - 2  # Milvus refuses an empty sparse vector; no vocabulary has a term of this number
NO_TERM_WEIGHT = 1e-6
C = TypeVar("C")


class Qdrant(Database):
    """A Qdrant server (http://...), or a local folder of the client."""

    batch_rows = 1_000

    def __init__(self, url: str, collection: str, timeout_s: float | None = None) -> None:
        client = _client("qdrant", "qdrant_client")
        self._models, self._collection, self._on_server = client.models, collection, "://" in url
        server = {"url": url, "api_key": os.environ.get("QDRANT_API_KEY")}
        place = server if self._on_server else {"path": url}
        # The client takes only integers of seconds.
        self._client = client.QdrantClient(**place, timeout=None if timeout_s is None else ceil(timeout_s))

    def layout(self) -> tuple[int | None, bool] | None:
        """Read the dimension of the dense vectors, and whether there are terms; None without a collection."""
        if not self._client.collection_exists(self._collection):
            return None
        params = self._client.get_collection(self._collection).config.params
        size = (
            params.vectors[DENSE].size
            if isinstance(params.vectors, dict) and DENSE in params.vectors
            else None
        )
        return size, TERMS in (params.sparse_vectors or {})

    def open(self, layout: ExportLayout) -> None:
        """Create the collection if it does not exist."""
        models = self._models
        if (current := self.layout()) is not None:
            _require(self._collection, layout, dim=current[0], sparse=current[1])
            return
        self._client.create_collection(
            self._collection,
            vectors_config={DENSE: models.VectorParams(size=layout.dim, distance=models.Distance.DOT)},
            sparse_vectors_config={TERMS: models.SparseVectorParams()} if layout.sparse else None,
        )
        # Without payload indexes, a server's filters read all points, or are refused (strict mode). The local
        # client has none.
        for field in layout.payload if self._on_server else ():
            if (kind := _payload_kind(field)) is not None:
                self._client.create_payload_index(self._collection, field.name, kind, wait=True)

    def count(self) -> int:
        """Count the points of the collection."""
        return int(self._client.count(self._collection, exact=True).count)

    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Upsert points, and wait until Qdrant has written them."""
        models, vectors = self._models, dict[str, Any]()
        vectors[DENSE] = rows.dense.tolist()
        if rows.sparse is not None:
            vectors[TERMS] = [
                models.SparseVector(indices=[*row], values=[*row.values()]) for row in rows.sparse_rows()
            ]
        payloads = [{"doc_id": doc, **row} for doc, row in zip(rows.ids, rows.payload_rows(), strict=True)]
        ids = [point_id(doc_id) for doc_id in rows.ids]
        batch = models.Batch(ids=ids, vectors=vectors, payloads=payloads)
        self._client.upsert(self._collection, points=batch, wait=True)


def _payload_kind(field: pa.Field) -> str | None:
    """Return the type of Qdrant's index for a column of documents; None for texts without filters."""
    if field.name in ("title", "content"):
        return None
    if pa.types.is_string(field.type):
        return "keyword"
    if pa.types.is_boolean(field.type):
        return "bool"
    if pa.types.is_integer(field.type):
        return "integer"
    return "float" if pa.types.is_floating(field.type) else None


def point_id(doc_id: str) -> str:
    """Compute the id of a document's point, because Qdrant takes UUIDs and not text."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, doc_id))


class Milvus(Database):
    """A Milvus server (http://...), or a file of Milvus Lite (``NAME.db``)."""

    batch_rows = 1_000

    def __init__(self, url: str, collection: str, timeout_s: float | None = None) -> None:
        client = _client("milvus", "pymilvus")
        self._types, self._collection, self._timeout_s = client.DataType, collection, timeout_s
        token = os.environ.get("MILVUS_TOKEN", "")
        self._client = client.MilvusClient(uri=url, token=token, timeout=timeout_s)

    def layout(self) -> tuple[int | None, bool] | None:
        """Read the dimension of the dense vectors, and whether there are terms; None without a collection."""
        if not self._client.has_collection(self._collection, timeout=self._timeout_s):
            return None
        description = self._client.describe_collection(self._collection, timeout=self._timeout_s)
        fields = {field["name"]: field for field in description["fields"]}
        return int(fields[DENSE]["params"]["dim"]) if DENSE in fields else None, TERMS in fields

    def open(self, layout: ExportLayout) -> None:
        """Create the collection if it does not exist, and load it."""
        client, types = self._client, self._types
        if (current := self.layout()) is not None:
            _require(self._collection, layout, dim=current[0], sparse=current[1])
            client.load_collection(self._collection)
            return
        schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
        schema.add_field("doc_id", types.VARCHAR, is_primary=True, max_length=MAX_ID_BYTES)
        schema.add_field(DENSE, types.FLOAT_VECTOR, dim=layout.dim)
        indices = client.prepare_index_params()
        indices.add_index(DENSE, index_type="AUTOINDEX", metric_type="IP")
        if layout.sparse:
            schema.add_field(TERMS, types.SPARSE_FLOAT_VECTOR)
            indices.add_index(TERMS, index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
        client.create_collection(self._collection, schema=schema, index_params=indices)

    def count(self) -> int:
        """Count the rows of the collection."""
        rows = self._client.query(
            self._collection, filter="", output_fields=["count(*)"], timeout=self._timeout_s
        )
        return int(rows[0]["count(*)"])

    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Upsert rows, with the columns of documents as dynamic fields."""
        if long := [doc_id for doc_id in rows.ids if len(doc_id.encode()) > MAX_ID_BYTES]:
            raise DataError(f"doc_id {long[0]!r} has over {MAX_ID_BYTES} bytes, the limit of Milvus")
        entities = [
            {"doc_id": doc_id, DENSE: vector, **payload}
            for doc_id, vector, payload in zip(rows.ids, rows.dense, rows.payload_rows(), strict=True)
        ]
        if rows.sparse is not None:
            for entity, terms in zip(entities, rows.sparse_rows(), strict=True):
                entity[TERMS] = terms or {NO_TERM: NO_TERM_WEIGHT}
        self._client.upsert(self._collection, entities)

    def finish(self) -> None:
        """Seal the segments in memory."""
        self._client.flush(self._collection)


class LanceDB(Database):
    """A table of LanceDB, in a folder or at a URI of an object store. Terms are columns, not an index."""

    batch_rows = 10_000  # each batch is a version and a fragment of the table

    def __init__(self, url: str, collection: str) -> None:
        self._database, self._collection = _client("lancedb", "lancedb").connect(url), collection
        self._table: Any = None

    def open(self, layout: ExportLayout) -> None:
        """Create the table if it does not exist."""
        fields = [pa.field("doc_id", pa.string()), pa.field(DENSE, pa.list_(pa.float32(), layout.dim))]
        if layout.sparse:
            fields += [pa.field(TERMS, pa.list_(pa.int32())), pa.field("impacts", pa.list_(pa.float32()))]
        self._schema = pa.schema([*fields, *layout.payload])
        if self._collection not in self._database.list_tables().tables:
            self._table = self._database.create_table(self._collection, schema=self._schema)
            return
        self._table = self._database.open_table(self._collection)
        current = self._table.schema
        dim = current.field(DENSE).type.list_size if DENSE in current.names else None
        _require(self._collection, layout, dim=dim, sparse=TERMS in current.names)

    def count(self) -> int:
        """Count the rows of the table."""
        return int(self._table.count_rows())

    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Append rows, or if some may exist, merge them by doc_id, which reads the table."""
        table = to_table(rows).cast(self._schema)
        if known:
            self._table.merge_insert(
                "doc_id"
            ).when_matched_update_all().when_not_matched_insert_all().execute(table)
        else:
            self._table.add(table)

    def finish(self) -> None:
        """Compact the fragments of the table."""
        self._table.optimize()


class OpenSearch(Database):
    """An index of OpenSearch with the k-NN plugin: HNSW over the vectors, rank features of the terms."""

    batch_rows = 500

    def __init__(self, url: str, collection: str) -> None:
        client = _client("opensearch", "opensearchpy")
        user, password = (os.environ.get(f"OPENSEARCH_{name}") for name in ("USER", "PASSWORD"))
        login = (user, password) if user else None
        self._client, self._collection = client.OpenSearch(url, http_auth=login, timeout=60), collection

    def open(self, layout: ExportLayout) -> None:
        """Create the index if it does not exist."""
        if self._client.indices.exists(index=self._collection):
            mappings = self._client.indices.get_mapping(index=self._collection)
            current = next(iter(mappings.values()))["mappings"].get("properties", {})
            _require(
                self._collection, layout, dim=current.get(DENSE, {}).get("dimension"), sparse=TERMS in current
            )
            return
        method = {"name": "hnsw", "space_type": "innerproduct", "engine": "faiss"}
        properties: dict[str, Any] = {
            "doc_id": {"type": "keyword"},
            DENSE: {"type": "knn_vector", "dimension": layout.dim, "method": method},
        }
        if layout.sparse:
            properties[TERMS] = {"type": "rank_features"}
        body = {"settings": {"index": {"knn": True}}, "mappings": {"properties": properties}}
        self._client.indices.create(index=self._collection, body=body)

    def count(self) -> int:
        """Count the documents of the index."""
        self._client.indices.refresh(index=self._collection)
        return int(self._client.count(index=self._collection)["count"])

    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Index documents by their ids in one request.

        Raises:
            DataError: a document was refused.
        """
        lines: list[dict[str, Any]] = []
        for doc_id, vector, terms, payload in zip(
            rows.ids, rows.dense.tolist(), rows.sparse_rows(), rows.payload_rows(), strict=True
        ):
            body = {"doc_id": doc_id, DENSE: vector, **payload}
            if terms:
                body[TERMS] = {str(term): weight for term, weight in terms.items()}
            lines += [{"index": {"_index": self._collection, "_id": doc_id}}, body]
        answer = self._client.bulk(body=lines)
        if answer["errors"]:
            refused = next(item["index"] for item in answer["items"] if "error" in item["index"])
            raise DataError(f"OpenSearch refused document {refused['_id']!r}: {refused['error']}")

    def finish(self) -> None:
        """Make the documents searchable."""
        self._client.indices.refresh(index=self._collection)


class Parquet(Database):
    """A folder of Parquet files, one per batch, for other programs."""

    batch_rows = 50_000

    def __init__(self, url: str, collection: str) -> None:
        self._folder = fs.join(url, collection)

    def open(self, layout: ExportLayout) -> None:
        """Do nothing: the first file creates the folder."""

    def count(self) -> int:
        """Count the rows of all files."""
        return sum(map(self._rows, fs.list_files(self._folder)))

    def _rows(self, name: str) -> int:
        with fs.open_input(fs.join(self._folder, name)) as file:
            return int(pq.ParquetFile(file).metadata.num_rows)

    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Write a file named by its first row; an export from the first row replaces an earlier one."""
        if known and rows.first == 0:
            for name in fs.list_files(self._folder):
                if name.startswith("part-"):
                    fs.delete(fs.join(self._folder, name))
        write_table(fs.join(self._folder, f"part-{rows.first:012d}.parquet"), to_table(rows))


DATABASES: dict[str, Callable[[str, str], Database]] = {
    "qdrant": Qdrant,
    "milvus": Milvus,
    "opensearch": OpenSearch,
    "lancedb": LanceDB,
    "parquet": Parquet,
}


def connect(to: str, url: str, collection: str) -> Database:
    """Connect to a collection of a database.

    Raises:
        ConfigError: the client is not installed, or the database does not answer.
    """
    return call_client(to, url, lambda: DATABASES[to](url, collection))


def call_client(to: str, url: str | None, make: Callable[[], C]) -> C:
    """Call `make`, which connects to a database, and convert its errors.

    Raises:
        ConfigError: the client is not installed, or the database does not answer.
    """
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # each client has its own errors
        raise ConfigError(f"no {to} at {url}: {error}") from error


def to_table(rows: ExportRows) -> pa.Table:
    """Convert rows to a table."""
    columns = {"doc_id": pa.array(rows.ids, pa.string()), DENSE: arrow.to_arrow(rows.dense)}
    if rows.sparse is not None:
        terms_of_rows = rows.sparse_rows()
        columns[TERMS] = pa.array([[*row] for row in terms_of_rows], pa.list_(pa.int32()))
        columns["impacts"] = pa.array(
            [np.fromiter(row.values(), np.float32) for row in terms_of_rows], pa.list_(pa.float32())
        )
    table = pa.table(columns)
    for name in rows.payload.column_names:
        table = table.append_column(rows.payload.schema.field(name), rows.payload[name])
    return table


def _require(collection: str, layout: ExportLayout, *, dim: int | None, sparse: bool) -> None:
    """Raise ConfigError if a collection cannot take the rows of a layout."""
    if dim != layout.dim or sparse < layout.sparse:
        actual = f"{dim or 'no'} dimensions of {DENSE!r}{'' if sparse else f', no {TERMS!r}'}"
        raise ConfigError(
            f"collection {collection!r} exists with {actual}; the vectors have {layout.dim}"
            f"{' and terms' if layout.sparse else ''}: give another collection or delete it"
        )


def _client(to: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{to} needs {module} ({error}): pip install 'scalingnote[vectors]'") from None
