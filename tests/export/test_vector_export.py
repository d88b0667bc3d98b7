"""Export of vectors to real databases, killed and resumed: Qdrant (local), Milvus Lite, LanceDB, Parquet."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.export import databases, vectors
from scalingnote.export.vectors import ExportSource
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft

ROWS, DIM, PARTS, TERMS = 1200, 16, 3, 40
FILES = {"qdrant": "folder", "milvus": "milvus.db", "lancedb": "folder", "parquet": "folder"}
KILLED_AT = 600
# The batch at KILLED_AT is in the database, but not yet in the checkpoint.
EXPORT = """
import sys, time
from scalingnote.export import databases, vectors
to, url, embeddings, checkpoint, last = sys.argv[1:]
source = vectors.of_embeddings(embeddings, columns=["title", "price"])
database = databases.connect(to, url, "docs")
write = database.write
def write_and_wait(rows, *, known):
    write(rows, known=known)
    if rows.first == int(last):
        print("written", flush=True)
        time.sleep(600)
database.write = write_and_wait
vectors.export(source, database, checkpoint=checkpoint, batch_rows=100)
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact]:
    """Build embeddings with terms, and their dataset."""
    root, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    draft = Draft(str(root / "dataset"), kind="dataset", config=Config(), parents={})
    for part, ids in enumerate(np.array_split(np.arange(ROWS + 6), PARTS)):  # two per part have no vector
        names = [f"d{i}" for i in ids]
        columns = [names, [f"title {i}" for i in ids], ["t"] * len(ids), [f"text {i}" for i in ids], names]
        table = pa.table(dict(zip(schema.DOCUMENTS.names, columns, strict=True)), schema=schema.DOCUMENTS)
        price = pa.array([None if i % 10 == 0 else int(i) for i in ids], pa.int64())
        draft.write_table(f"documents/part-{part:05d}.parquet", table.append_column("price", price))
    dataset = draft.commit(counts={"documents": ROWS + 6})
    draft = Draft(str(root / "embeddings"), kind="embeddings", config=Config(), parents={"dataset": dataset})
    for part, ids in enumerate(np.array_split(np.arange(ROWS + 6), PARTS)):
        with_vector = ids[1:-1]
        matrix = arrow.l2_normalize(rng.normal(size=(len(with_vector), DIM)).astype(np.float32))
        terms = [sorted(rng.choice(TERMS, rng.integers(0, 5), replace=False).tolist()) for _ in with_vector]
        weights = [(rng.integers(1, 9, len(row)) / 4).astype(np.float16) for row in terms]
        columns = [[f"d{i}" for i in with_vector], arrow.to_arrow(matrix), terms, weights]
        types = [pa.string(), columns[1].type, *schema.SPARSE.types]
        arrays = [pa.array(c, t) if isinstance(c, list) else c for c, t in zip(columns, types, strict=True)]
        table = pa.table(arrays, names=["doc_id", "summary", *schema.SPARSE.names])
        draft.write_table(f"embeddings/part-{part:05d}.parquet", table)
    return draft.commit(counts={"documents": ROWS}), dataset


def truth(embeddings: Artifact, query: np.ndarray) -> list[str]:
    table = embeddings.table("embeddings")
    best = np.argsort(-(arrow.to_numpy(table["summary"]) @ query), kind="stable")[:10]
    return table["doc_id"].take(pa.array(best)).to_pylist()


def nearest(to: str, database: Any, query: np.ndarray) -> list[str]:
    """Find the ten nearest documents through the client of the database."""
    if to == "qdrant":
        answer = database._client.query_points("docs", query=query.tolist(), using="dense", limit=10)
        return [point.payload["doc_id"] for point in answer.points]
    if to == "milvus":
        (hits,) = database._client.search("docs", data=[query.tolist()], anns_field="dense", limit=10)
        return [hit["doc_id"] for hit in hits]
    if to == "lancedb":
        search = database._table.search(query, vector_column_name="dense").distance_type("dot").limit(10)
        return [row["doc_id"] for row in search.to_list()]
    table = pq.read_table(database._folder)
    best = np.argsort(-(arrow.to_numpy(table["dense"]) @ query), kind="stable")[:10]
    return table["doc_id"].take(pa.array(best)).to_pylist()


def by_terms(to: str, database: Any, query: dict[int, float]) -> set[str] | None:
    """Find the best documents by terms; None if the database has no sparse search."""
    if to == "qdrant":
        sparse = database._models.SparseVector(indices=[*query], values=[*query.values()])
        return {
            p.payload["doc_id"] for p in database._client.query_points("docs", sparse, using="terms").points
        }
    if to == "milvus":
        (hits,) = database._client.search("docs", data=[query], anns_field="terms", limit=10)
        return {hit["doc_id"] for hit in hits}
    return None


def document_of(to: str, database: Any, doc_id: str) -> dict[str, Any]:
    """Read vector, terms and columns of a document."""
    if to == "qdrant":
        (point,) = database._client.retrieve("docs", [databases.point_id(doc_id)], with_vectors=True)
        sparse = point.vector["terms"]
        terms = dict(zip(sparse.indices, sparse.values, strict=True))
        return {"dense": point.vector["dense"], "terms": terms, **point.payload}
    if to == "milvus":
        (row,) = database._client.get("docs", ids=[doc_id])
        row["terms"].pop(databases.NO_TERM, None)
        return row
    if to == "lancedb":
        (row,) = database._table.search().where(f"doc_id = '{doc_id}'").limit(2).to_list()
    else:
        (row,) = pq.read_table(database._folder, filters=[("doc_id", "==", doc_id)]).to_pylist()
    return {**row, "terms": dict(zip(row["terms"], row["impacts"], strict=True))}


@pytest.mark.parametrize("to", FILES)
def test_a_killed_and_resumed_export_writes_each_vector_once(artifacts, tmp_path, to):
    embeddings, _ = artifacts
    url, checkpoint = str(tmp_path / FILES[to]), tmp_path / "checkpoint.json"
    arguments = [to, url, embeddings.uri, str(checkpoint), str(KILLED_AT)]
    process = subprocess.Popen([sys.executable, "-c", EXPORT, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    assert json.loads(checkpoint.read_bytes())["rows"] == KILLED_AT
    database = databases.connect(to, url, "docs")
    source = vectors.of_embeddings(embeddings.uri, columns=["title", "price"])
    summary = vectors.export(source, database, checkpoint=str(checkpoint))
    assert (summary.rows, summary.written, summary.held) == (ROWS, ROWS - KILLED_AT, ROWS)

    rows = embeddings.table("embeddings").to_pylist()
    for row in rows[::100] + rows[KILLED_AT - 1 : KILLED_AT + 2]:
        document, number = document_of(to, database, row["doc_id"]), int(row["doc_id"][1:])
        np.testing.assert_allclose(document["dense"], row["summary"], rtol=1e-6)
        assert document["terms"] == dict(zip(row["terms"], row["impacts"], strict=True))
        assert document["title"] == f"title {number}"
        assert document.get("price") == (None if number % 10 == 0 else number)
    rng, overlaps = np.random.default_rng(1), []
    for _ in range(20):
        query = rng.normal(size=DIM).astype(np.float32)
        overlaps.append(len({*truth(embeddings, query)} & {*nearest(to, database, query)}) / 10)
    assert np.mean(overlaps) >= 0.95
    best = max(rows, key=lambda row: dict(zip(row["terms"], row["impacts"], strict=True)).get(7, 0))
    weight = dict(zip(best["terms"], best["impacts"], strict=True))[7]
    names = by_terms(to, database, {7: 1.0})
    weights = {row["doc_id"]: dict(zip(row["terms"], row["impacts"], strict=True)) for row in rows}
    assert names is None or {weights[doc_id][7] for doc_id in names} == {weight}

    # A second export changes nothing; without the checkpoint, it writes rows again under the same ids.
    again = vectors.export(source, database, checkpoint=str(checkpoint))
    assert (again.written, again.held) == (0, ROWS)
    checkpoint.unlink()
    again = vectors.export(source, database, checkpoint=str(checkpoint), most=500)
    assert (again.written, again.held) == (500, 500 if to == "parquet" else ROWS)
    assert (f"{ROWS - 500:,} of them are from another export" in "\n".join(again.lines())) == (
        to != "parquet"
    )


GUIDE = Path(__file__).parents[2] / "docs/guides/vector_databases.md"
PLACES = {
    "qdrant": ('url="http://localhost:6333"', "path={!r}"),
    "milvus": ('"http://localhost:19530"', "{!r}"),
    "lancedb": ('"./lancedb"', "{!r}"),
}


@pytest.mark.parametrize("to", PLACES)
def test_the_hybrid_query_of_the_guide_runs(artifacts, tmp_path, to):
    url = str(tmp_path / FILES[to])
    database = databases.connect(to, url, "docs")
    vectors.export(
        ExportSource(*artifacts, columns=("title",)), database, checkpoint=str(tmp_path / "c.json"), most=500
    )
    if to != "lancedb":
        database._client.close()
    (code,) = re.findall(rf"```python\n(# {to}.*?)```", GUIDE.read_text(), re.DOTALL)
    before, after = PLACES[to]
    assert before in code
    row = artifacts[0].table("embeddings").slice(42, 1).to_pylist()[0]
    variables = {"vector": row["summary"], "terms": {7: 1.0}, "text": f"title {row['doc_id'][1:]}"}
    exec(code.replace(before, after.format(url)), variables)
    assert len(set(variables["results"])) == 10
    assert row["doc_id"] in variables["results"]


def test_rows_that_a_database_has_lost_are_written_again(artifacts, tmp_path):
    source, checkpoint = ExportSource(artifacts[0]), str(tmp_path / "checkpoint.json")
    for folder in ("one", "two"):
        database = databases.connect("parquet", str(tmp_path / folder), "docs")
        assert vectors.export(source, database, checkpoint=checkpoint).written == ROWS
    with pytest.raises(ConfigError, match="of an export of other rows"):
        vectors.export(ExportSource(*artifacts, columns=("title",)), database, checkpoint=checkpoint)


def test_a_collection_of_another_layout_is_refused(artifacts, tmp_path):
    database = databases.connect("lancedb", str(tmp_path / "lance"), "docs")
    database.open(vectors.ExportLayout(DIM // 2, False, pa.schema([])))
    with pytest.raises(
        ConfigError, match=r"with 8 dimensions of 'dense', no 'terms'; the vectors have 16 and"
    ):
        vectors.export(ExportSource(artifacts[0]), database, checkpoint=str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("prize",), "no column 'prize': they have doc_id, title"),
        (("terms",), "'terms' is part of every row"),
    ],
)
def test_unknown_and_reserved_columns_are_refused(artifacts, columns, message):
    with pytest.raises(ConfigError, match=message):
        ExportSource(*artifacts, columns=columns).layout()


def test_a_repeated_id_is_detected_by_the_count(tmp_path):
    draft = Draft(str(tmp_path / "embeddings"), kind="embeddings", config=Config(), parents={})
    table = pa.table({"doc_id": ["a", "b", "a"], "summary": arrow.to_arrow(np.eye(3, dtype=np.float32))})
    draft.write_table("embeddings/part-00000.parquet", table)
    database = databases.connect("qdrant", str(tmp_path / "q"), "docs")
    with pytest.raises(DataError, match="holds 2 of 3 rows: ids repeat"):
        vectors.export(ExportSource(draft.commit(counts={})), database, checkpoint=str(tmp_path / "c.json"))


def test_a_missing_client_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(ConfigError, match=r"milvus needs pymilvus .*pip install 'scalingnote\[vectors\]'"):
        databases.connect("milvus", "milvus.db", "docs")


def test_columns_that_a_server_filters_by_are_indexed(monkeypatch):
    indexes = {}

    class Server:
        def __init__(self, **place: Any) -> None:
            assert place["url"] == "http://qdrant:6333"

        def collection_exists(self, _: str) -> bool:
            return False

        def create_collection(self, *_: Any, **__: Any) -> None:
            pass

        def create_payload_index(self, _: str, name: str, kind: str, *, wait: bool) -> None:
            indexes[name] = kind

    import qdrant_client

    monkeypatch.setattr(qdrant_client, "QdrantClient", Server)
    columns = {
        "title": pa.string(),
        "topic": pa.string(),
        "price": pa.float64(),
        "year": pa.int64(),
        "new": pa.bool_(),
        "tags": pa.list_(pa.string()),
    }
    databases.connect("qdrant", "http://qdrant:6333", "docs").open(
        vectors.ExportLayout(DIM, False, pa.schema(columns.items()))
    )
    assert indexes == {"topic": "keyword", "price": "float", "year": "integer", "new": "bool"}
    assert {*indexes.values()} <= {kind.value for kind in qdrant_client.models.PayloadSchemaType}


def test_the_command_prints_the_number_of_rows(artifacts, tmp_path, capsys, monkeypatch):
    from scalingnote.cli.main import main

    monkeypatch.chdir(tmp_path)
    arguments = [
        "export",
        "vectors",
        "--to",
        "parquet",
        "--embeddings",
        artifacts[0].uri,
        "--columns",
        "price",
    ]
    assert main([*arguments, "--url", str(tmp_path / "out"), "--rows", "900"]) == 0
    assert "900 of 900 rows written" in capsys.readouterr().out
    table = pq.read_table(Path("out/scalingnote"))
    assert table.column_names == ["doc_id", "dense", "terms", "impacts", "price"]
    assert len(table) == 900
    assert len(list(Path("exports").iterdir())) == 1
