"""Many tasks write the queries and rows of one task; killed runs are resumed."""

import random
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from in_process import killed_after
from row_files import build, write_tables
from scalingnote.core.errors import DataError
from scalingnote.datasets import input_files, job, supervision
from scalingnote.datasets.config import Columns

QUERIES, DOCUMENTS = 60, 50
TABLES = ("queries", *supervision.PAIR_SCHEMAS, "users")


def write_inputs(folder, *, impressions=False, split=False, users=False):
    """Write a small source with rows of every kind of fault; return the fields of its config."""
    rng = random.Random(3)

    def pairs(**more):
        for number in range(4 * QUERIES):
            row = {"query_id": f"q{min(int(rng.expovariate(0.1)), QUERIES - 1)}"}
            row |= {"doc_id": rng.choice([f"d{rng.randrange(DOCUMENTS)}", rng.randrange(DOCUMENTS)])}
            row |= {name: values(number) for name, values in more.items()}
            faults = [{"doc_id": "gone"}, {"query_id": "gone"}, {"doc_id": None}, {"query_id": "half \ud800"}]
            yield row | (rng.choice(faults) if rng.random() < 0.15 else {})

    documents = [
        {"doc_id": f"d{n}", "title": f"t{n}", "topic": f"t{n % 3}", "price": n} for n in range(DOCUMENTS)
    ]
    documents += [{"doc_id": str(n), "title": f"n{n}", "group": f"g{n // 9}"} for n in range(DOCUMENTS)]
    queries = [{"query_id": f"q{n}", "query": f"query {n}"} for n in range(QUERIES)]
    if split:
        queries = [row | {"split": "test" if n % 3 == 0 else "train"} for n, row in enumerate(queries)]
    queries += [{"query_id": "q3", "query": "again"}, {"query_id": "lonely", "query": "x"}, {"query": "y"}]
    queries += [b'{"query_id": broken\n', b"[1]\n"]
    judged = pairs(relevance=lambda _: rng.choice([0, 1, 2, "many"]))
    fields = write_tables(folder, documents=documents, queries=queries, qrels=judged)
    fields["features"] = {"price": "float64"}
    if impressions:
        rows = list(pairs(position=lambda n: n % 5, clicked=lambda _: rng.random() < 0.3))
        table = pa.Table.from_pylist(
            [
                row
                | {"session_id": f"s{n // 5}", "query_id": row["query_id"].replace("\ud800", "?")}
                | {
                    "doc_id": str(row["doc_id"] or ""),
                    "timestamp": datetime(2024, 1, 1, 0, 0, n % 60, tzinfo=UTC),
                }
                for n, row in enumerate(rows)
            ]
        )
        pq.write_table(table, folder / "log.parquet", row_group_size=40)
        fields["impressions"] = {"path": str(folder / "log.parquet")}
        fields |= write_tables(folder, scores=pairs(score=lambda _: rng.random()))
    if users:
        user_rows = [{"user_id": f"u{n % 25}", "age": n} for n in range(30)] + [{"age": 1}]
        fields |= write_tables(folder, users=user_rows) | {"profile": {"age": "int64"}}
    return fields


@pytest.fixture
def many(monkeypatch):
    """Return a function that lowers the limits, so that these rows are too many for one task."""

    def limit():
        monkeypatch.setattr(supervision, "MAX_TASK_ROWS", 100)
        monkeypatch.setattr(job, "BUCKET_BYTES", 6_000)
        monkeypatch.setattr("scalingnote.storage.shuffle.ROWS_PER_BATCH", 16)
        monkeypatch.setattr(input_files, "SLICE_BYTES", 3_000)

    return limit


def rows_of(artifact):
    tables = {name: artifact.table(name) for name in TABLES if artifact.table_parts(name)}
    return {name: sorted(table.to_pylist(), key=str) for name, table in tables.items()}


def info_of(artifact):
    names = ("rejected_by_reason", "repaired", "left_out", "simulated_clicks", "click_model")
    return artifact.counts, {name: artifact.manifest.info[name] for name in names}


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        ({}, {}),
        ({"split": True, "users": True}, {}),
        ({"users": True}, {"max_documents": 60}),
        ({"impressions": True, "users": True}, {"test_fraction": 0.4}),
        ({"impressions": True}, {"max_documents": 70, "click_model": None}),
    ],
)
def test_many_tasks_write_the_rows_of_one_task(tmp_path, many, inputs, settings):
    config = Columns(**write_inputs(tmp_path / "in", **inputs), **settings)
    one = build(config, tmp_path / "one")
    assert one.table_parts("queries") == ["queries.parquet"]
    many()
    wide = build(config, tmp_path / "many")
    assert len(wide.table_parts("queries")) > 2
    actual, expected = rows_of(wide), rows_of(one)
    if one.manifest.info["simulated_clicks"]:  # drawn from judgements in another order
        assert len(actual.pop("impressions")) > 0.8 * len(expected.pop("impressions"))
    assert actual == expected
    assert info_of(wide)[1] == info_of(one)[1]
    backwards = build(config, tmp_path / "back", each=lambda task, items: map(task, reversed(items)))
    assert backwards.digest == wide.digest


@pytest.mark.parametrize("tasks", [3, 9, 15, 21])
def test_a_killed_run_repeats_only_the_running_task(tmp_path, many, tasks):
    many()
    config = Columns(**write_inputs(tmp_path / "in", users=True))
    items_run = []

    def counted(task, items):
        items_run.extend(items)
        return map(task, items)

    complete = build(config, tmp_path / "whole", each=counted)
    total = len(items_run)
    with pytest.raises(KeyboardInterrupt):
        build(config, tmp_path / "out", each=killed_after(tasks))
    items_run.clear()
    assert build(config, tmp_path / "out", each=counted).digest == complete.digest
    assert len(items_run) == total - tasks
    assert total > 21


def test_too_many_positives_for_a_split_are_an_error(tmp_path, many, monkeypatch):
    many()
    config = Columns(**write_inputs(tmp_path / "in"))
    monkeypatch.setattr(supervision, "MAX_SPLIT_POSITIVES", 10)
    with pytest.raises(DataError, match=r"answers, but a split by groups is drawn from 10 at most"):
        build(config, tmp_path / "out")
    (tmp_path / "in" / "qrels.jsonl").write_text('{"query_id": "q1", "doc_id": "gone"}\n')
    with pytest.raises(DataError, match=r"no query with a relevant document remains; set aside: .*"):
        build(config, tmp_path / "none")
