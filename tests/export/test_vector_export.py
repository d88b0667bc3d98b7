"""Vectors in real databases, killed midway and resumed: Qdrant (local), Milvus Lite, LanceDB, Parquet."""

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
made = databases.connect(to, url, "docs")
write = made.write
def written(rows, *, known):
    write(rows, known=known)
    if rows.first == int(last):
        print("written", flush=True)
        time.sleep(600)
made.write = written
vectors.export(source, made, checkpoint=checkpoint, batch_rows=100)
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact]:
    """Embeddings with terms, and the dataset they were made of."""
    root, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    draft = Draft(str(root / "dataset"), kind="dataset", config=Config(), parents={})
    for part, ids in enumerate(np.array_split(np.arange(ROWS + 6), PARTS)):  # two of each part have no vector
        names = [f"d{i}" for i in ids]
        columns = [names, [f"title {i}" for i in ids], ["t"] * len(ids), [f"text {i}" for i in ids], names]
        table = pa.table(dict(zip(schema.DOCUMENTS.names, columns, strict=True)), schema=schema.DOCUMENTS)
        price = pa.array([None if i % 10 == 0 else int(i) for i in ids], pa.int64())
        draft.write_table(f"documents/part-{part:05d}.parquet", table.append_column("price", price))
    dataset = draft.commit(counts={"documents": ROWS + 6})
    draft = Draft(str(root / "embeddings"), kind="embeddings", config=Config(), parents={"dataset": dataset})
    for part, ids in enumerate(np.array_split(np.arange(ROWS + 6), PARTS)):
        kept = ids[1:-1]
        matrix = arrow.l2_normalize(rng.normal(size=(len(kept), DIM)).astype(np.float32))
        terms = [sorted(rng.choice(TERMS, rng.integers(0, 5), replace=False).tolist()) for _ in kept]
        weights = [(rng.integers(1, 9, len(row)) / 4).astype(np.float16) for row in terms]
        columns = [[f"d{i}" for i in kept], arrow.to_arrow(matrix), terms, weights]
        types = [pa.string(), columns[1].type, *schema.SPARSE.types]
        arrays = [pa.array(c, t) if isinstance(c, list) else c for c, t in zip(columns, types, strict=True)]
        table = pa.table(arrays, names=["doc_id", "summary", *schema.SPARSE.names])
        draft.write_table(f"embeddings/part-{part:05d}.parquet", table)
    return draft.commit(counts={"documents": ROWS}), dataset


def truth(embeddings: Artifact, query: np.ndarray) -> list[str]:
    table = embeddings.table("embeddings")
    best = np.argsort(-(arrow.to_numpy(table["summary"]) @ query), kind="stable")[:10]
    return table["doc_id"].take(pa.array(best)).to_pylist()


def nearest(to: str, made: Any, query: np.ndarray) -> list[str]:
    """The ten nearest documents, through the database's own client."""
    if to == "qdrant":
        found = made._client.query_points("docs", query=query.tolist(), using="dense", limit=10)
        return [point.payload["doc_id"] for point in found.points]
    if to == "milvus":
        (hits,) = made._client.search("docs", data=[query.tolist()], anns_field="dense", limit=10)
        return [hit["doc_id"] for hit in hits]
    if to == "lancedb":
        search = made._table.search(query, vector_column_name="dense").distance_type("dot").limit(10)
        return [row["doc_id"] for row in search.to_list()]
    table = pq.read_table(made._folder)
    best = np.argsort(-(arrow.to_numpy(table["dense"]) @ query), kind="stable")[:10]
    return table["doc_id"].take(pa.array(best)).to_pylist()


def by_terms(to: str, made: Any, query: dict[int, float]) -> set[str] | None:
    """The best documents by terms; None where the database has no sparse search."""
    if to == "qdrant":
        sparse = made._models.SparseVector(indices=[*query], values=[*query.values()])
        return {p.payload["doc_id"] for p in made._client.query_points("docs", sparse, using="terms").points}
    if to == "milvus":
        (hits,) = made._client.search("docs", data=[query], anns_field="terms", limit=10)
        return {hit["doc_id"] for hit in hits}
    return None


def stored(to: str, made: Any, doc_id: str) -> dict[str, Any]:
    """Vector, terms and columns of a document."""
    if to == "qdrant":
        (point,) = made._client.retrieve("docs", [databases.point_id(doc_id)], with_vectors=True)
        sparse = point.vector["terms"]
        terms = dict(zip(sparse.indices, sparse.values, strict=True))
        return {"dense": point.vector["dense"], "terms": terms, **point.payload}
    if to == "milvus":
        (row,) = made._client.get("docs", ids=[doc_id])
        row["terms"].pop(databases.NO_TERM, None)
        return row
    if to == "lancedb":
        (row,) = made._table.search().where(f"doc_id = '{doc_id}'").limit(2).to_list()
    else:
        (row,) = pq.read_table(made._folder, filters=[("doc_id", "==", doc_id)]).to_pylist()
    return {**row, "terms": dict(zip(row["terms"], row["impacts"], strict=True))}


@pytest.mark.parametrize("to", FILES)
def test_killed_midway_and_resumed_every_vector_is_there_once(artifacts, tmp_path, to):
    embeddings, _ = artifacts
    url, checkpoint = str(tmp_path / FILES[to]), tmp_path / "checkpoint.json"
    given = [to, url, embeddings.uri, str(checkpoint), str(KILLED_AT)]
    process = subprocess.Popen([sys.executable, "-c", EXPORT, *given], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    assert json.loads(checkpoint.read_bytes())["rows"] == KILLED_AT
    made = databases.connect(to, url, "docs")
    source = vectors.of_embeddings(embeddings.uri, columns=["title", "price"])
    summary = vectors.export(source, made, checkpoint=str(checkpoint))
    assert (summary.rows, summary.written, summary.held) == (ROWS, ROWS - KILLED_AT, ROWS)

    rows = embeddings.table("embeddings").to_pylist()
    for row in rows[::100] + rows[KILLED_AT - 1 : KILLED_AT + 2]:
        found, number = stored(to, made, row["doc_id"]), int(row["doc_id"][1:])
        np.testing.assert_allclose(found["dense"], row["summary"], rtol=1e-6)
        assert found["terms"] == dict(zip(row["terms"], row["impacts"], strict=True))
        assert found["title"] == f"title {number}"
        assert found.get("price") == (None if number % 10 == 0 else number)
    rng, overlaps = np.random.default_rng(1), []
    for _ in range(20):
        query = rng.normal(size=DIM).astype(np.float32)
        overlaps.append(len({*truth(embeddings, query)} & {*nearest(to, made, query)}) / 10)
    assert np.mean(overlaps) >= 0.95
    best = max(rows, key=lambda row: dict(zip(row["terms"], row["impacts"], strict=True)).get(7, 0))
    weight = dict(zip(best["terms"], best["impacts"], strict=True))[7]
    found = by_terms(to, made, {7: 1.0})
    weights = {row["doc_id"]: dict(zip(row["terms"], row["impacts"], strict=True)) for row in rows}
    assert found is None or {weights[doc_id][7] for doc_id in found} == {weight}

    # Once more changes nothing; without the checkpoint rows are written again, under the same ids.
    again = vectors.export(source, made, checkpoint=str(checkpoint))
    assert (again.written, again.held) == (0, ROWS)
    checkpoint.unlink()
    again = vectors.export(source, made, checkpoint=str(checkpoint), most=500)
    assert (again.written, again.held) == (500, 500 if to == "parquet" else ROWS)
    assert (f"{ROWS - 500:,} of them are not of" in "\n".join(again.lines())) == (to != "parquet")


GUIDE = Path(__file__).parents[2] / "docs/guides/vector_databases.md"
PLACES = {
    "qdrant": ('url="http://localhost:6333"', "path={!r}"),
    "milvus": ('"http://localhost:19530"', "{!r}"),
    "lancedb": ('"./lancedb"', "{!r}"),
}


@pytest.mark.parametrize("to", PLACES)
def test_the_hybrid_query_of_the_guide_runs(artifacts, tmp_path, to):
    url = str(tmp_path / FILES[to])
    made = databases.connect(to, url, "docs")
    vectors.export(
        ExportSource(*artifacts, columns=("title",)), made, checkpoint=str(tmp_path / "c.json"), most=500
    )
    if to != "lancedb":
        made._client.close()
    (code,) = re.findall(rf"```python\n(# {to}.*?)```", GUIDE.read_text(), re.DOTALL)
    before, after = PLACES[to]
    assert before in code
    row = artifacts[0].table("embeddings").slice(42, 1).to_pylist()[0]
    known = {"vector": row["summary"], "terms": {7: 1.0}, "text": f"title {row['doc_id'][1:]}"}
    exec(code.replace(before, after.format(url)), known)
    assert len(set(known["results"])) == 10
    assert row["doc_id"] in known["results"]


def test_rows_that_the_database_lost_are_written_again(artifacts, tmp_path):
    source, checkpoint = ExportSource(artifacts[0]), str(tmp_path / "checkpoint.json")
    for folder in ("one", "two"):
        made = databases.connect("parquet", str(tmp_path / folder), "docs")
        assert vectors.export(source, made, checkpoint=checkpoint).written == ROWS
    with pytest.raises(ConfigError, match="of an export of other rows"):
        vectors.export(ExportSource(*artifacts, columns=("title",)), made, checkpoint=checkpoint)


def test_a_collection_of_another_layout_is_refused(artifacts, tmp_path):
    made = databases.connect("lancedb", str(tmp_path / "lance"), "docs")
    made.open(vectors.ExportLayout(DIM // 2, False, pa.schema([])))
    with pytest.raises(
        ConfigError, match=r"with 8 dimensions of 'dense', no 'terms'; the vectors have 16 and"
    ):
        vectors.export(ExportSource(artifacts[0]), made, checkpoint=str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("prize",), "no column 'prize': they have doc_id, title"),
        (("terms",), "'terms' is one that every row"),
    ],
)
def test_a_column_that_is_not_there_is_refused(artifacts, columns, message):
    with pytest.raises(ConfigError, match=message):
        ExportSource(*artifacts, columns=columns).layout()


def test_a_repeated_id_is_found_by_counting(tmp_path):
    draft = Draft(str(tmp_path / "embeddings"), kind="embeddings", config=Config(), parents={})
    table = pa.table({"doc_id": ["a", "b", "a"], "summary": arrow.to_arrow(np.eye(3, dtype=np.float32))})
    draft.write_table("embeddings/part-00000.parquet", table)
    made = databases.connect("qdrant", str(tmp_path / "q"), "docs")
    with pytest.raises(DataError, match="holds 2 of 3 rows: ids repeat"):
        vectors.export(ExportSource(draft.commit(counts={})), made, checkpoint=str(tmp_path / "c.json"))


def test_a_client_that_is_not_installed_is_named(monkeypatch):
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


def test_the_command_says_what_it_wrote(artifacts, tmp_path, capsys, monkeypatch):
    from scalingnote.cli.main import main

    monkeypatch.chdir(tmp_path)
    given = ["export", "vectors", "--to", "parquet", "--embeddings", artifacts[0].uri, "--columns", "price"]
    assert main([*given, "--url", str(tmp_path / "out"), "--rows", "900"]) == 0
    assert "900 of 900 rows written" in capsys.readouterr().out
    table = pq.read_table(Path("out/scalingnote"))
    assert table.column_names == ["doc_id", "dense", "terms", "impacts", "price"]
    assert len(table) == 900
    assert len(list(Path("exports").iterdir())) == 1
