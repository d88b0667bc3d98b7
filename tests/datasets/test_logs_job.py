"""A log in any number of files and parts equals a result of plain Python; killed runs are resumed."""

import hashlib
import random
import unicodedata
from collections import Counter, defaultdict
from datetime import UTC

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from in_process import killed_after
from row_files import build, write_lines
from scalingnote.core.errors import DataError
from scalingnote.datasets import job, supervision
from scalingnote.datasets.config import Logs
from scalingnote.datasets.job import run as prepare
from scalingnote.datasets.readers import read_logs
from scalingnote.storage import filesystem as fs

DAY = 86_400
WINDOWS = {"train": ["1970-01-02", "1970-01-11"], "test": ["1970-01-11", "1970-01-16"]}
TABLES = ("documents", "queries", "qrels", "impressions", "scores")


# --- a small log with faults ------------------------------------------------------------------------------


def random_log(seed, *, judged=False):
    """Return rows of every table; about one in eight has a fault."""
    rng = random.Random(seed)
    texts = [f"{word} {number}" for word in ("lamp", "Sofa", "ＤＥＳＫ") for number in range(24)]

    def called(text):
        """Return a form of the query that users may type."""
        return rng.choice([text, text, text.upper(), f"  {text} ", text.replace(" ", "\u3000")])

    documents = [{"doc_id": f"d{n}", "title": f"title {n}", "content": f"text {n}"} for n in range(40)]
    for row in documents:
        row |= {"topic": rng.choice(["home", None]), "group": rng.choice([None, "g"]), "price": rng.random()}
    documents += [{**documents[n], "title": "again"} for n in rng.sample(range(40), 4)]
    documents += [{"doc_id": None, "title": "t"}, {"doc_id": "bare", "title": " "}]
    rng.shuffle(documents)
    documents += [{"doc_id": f"u{n}", "content": f"more {n}"} for n in range(8)]
    impressions = []
    for number in range(400):
        when = rng.randrange(0, 17 * DAY)
        # Some queries occur late, so that the test window has unseen ones.
        late = when > 9.5 * DAY and rng.random() < 0.5
        row = {
            "session_id": f"s{number // 5}",
            "user_id": rng.choice([None, f"u{number % 7}"]),
            "query": called(texts[60 + rng.randrange(12) if late else min(int(rng.expovariate(0.06)), 59)]),
            "doc_id": f"d{rng.randrange(3) if late else min(int(rng.expovariate(0.08)), 39)}",
            "position": number % 5 + 1,
            "clicked": rng.random() < 0.4,
            "timestamp": when,
            "dwell_s": rng.choice([None, 5.0, 50.0]),
        }
        row |= rng.choice(IMPRESSION_FAULTS) if rng.random() < 0.12 else {}
        impressions.append(row)
    scores = [
        {"query": called(text), "doc_id": f"d{rng.randrange(45)}", "score": rng.random()}
        for text in [*texts, "never searched"]
        for _ in range(3)
    ] + [{"query": " ", "doc_id": "d1", "score": 1.0}, {"query": texts[0], "doc_id": "d1", "score": None}]
    qrels = [
        {"query": called(text), "doc_id": f"d{rng.randrange(45)}", "relevance": rng.choice([0, 1, 2])}
        for text in [*texts[::2], "judged only"]
        for _ in range(3)
    ]
    log = {"documents": documents, "impressions": impressions, "scores": scores}
    return log | ({"qrels": qrels} if judged else {})


IMPRESSION_FAULTS = [
    {"session_id": None},
    {"user_id": ""},
    {"query": " \t "},
    {"query": None},
    {"doc_id": "unknown"},
    {"doc_id": "x" * 300},
    {"position": 0},
    {"position": None},
    {"clicked": None},
    {"timestamp": None},
    {"dwell_s": float("inf")},
]
TYPES = {
    "position": pa.int64(),
    "clicked": pa.bool_(),
    "timestamp": pa.int64(),
    **dict.fromkeys(("dwell_s", "score", "price"), pa.float64()),
    "relevance": pa.int64(),
}


def write(log, folder, *, files, form):
    """Write every table as `files` files of a form; return the paths as fields of a config."""
    paths = {}
    for table, rows in log.items():
        names = sorted({name for row in rows for name in row})
        schema = pa.schema([(name, TYPES.get(name, pa.string())) for name in names])
        (folder / table).mkdir(parents=True, exist_ok=True)
        each = -(-len(rows) // files)
        for number in range(files):
            piece, path = rows[number * each : (number + 1) * each], folder / table / f"{number:03d}.{form}"
            if form == "parquet":
                pq.write_table(pa.Table.from_pylist(piece, schema=schema), path, row_group_size=17)
            else:
                write_lines(path, *piece)
        paths[table] = {"path": str(folder / table)}
    return paths


# --- the same in plain Python -----------------------------------------------------------------------------


def twin(log, config):
    """Compute the expected content of the artifact, one row at a time."""
    rejected, left_out = Counter(), Counter()
    documents = {}
    for row in log["documents"]:
        if not row["doc_id"]:
            rejected["documents: no doc_id"] += 1
        elif not (row.get("title") or "").strip() and not row.get("content"):
            rejected["documents: no text"] += 1
        elif row["doc_id"] in documents:
            rejected["documents: duplicate doc_id"] += 1
        else:
            texts = {name: (row.get(name) or "") for name in ("title", "topic", "content")}
            group = row.get("group") or row["doc_id"]
            documents[row["doc_id"]] = texts | {
                "doc_id": row["doc_id"],
                "group": group,
                "price": row.get("price"),
            }

    def sound(table):
        rows = []
        for row in log.get(table, ()):
            text = " ".join((row["query"] or "").split())
            fault = "empty query" if not text else _fault(table, row)
            if fault:
                rejected[f"{table}: {fault}"] += 1
            else:
                rows.append({**row, "query_id": query_id(text), "shown": text})
        return rows

    rows = {table: sound(table) for table in ("impressions", "scores", "qrels")}

    def pairs(table, known=None):
        """Check documents before queries: if both are unknown, the reason is the document."""
        seen_pairs, valid_rows = set(), []
        for row in rows[table]:
            pair = row["query_id"], row["doc_id"]
            if row["doc_id"] not in documents:
                rejected[f"{table}: unknown doc_id"] += 1
            elif known is not None and row["query_id"] not in known:
                rejected[f"{table}: unknown query_id"] += 1
            elif table != "impressions" and pair in seen_pairs:
                rejected[f"{table}: duplicate query and document"] += 1
            else:
                valid_rows.append(
                    {name: value for name, value in row.items() if name not in ("query", "shown")}
                )
            seen_pairs.add(pair)
        return valid_rows

    impressions = rows["impressions"]
    # The text of a query: of all rows without a fault, also those with an unknown document.
    calls = defaultdict(Counter)
    for row in impressions:
        calls[row["query_id"]][row["shown"]] += 1
    for row in rows["qrels"]:
        calls[row["query_id"]][row["shown"]] += 0
    text = {key: min(found, key=lambda t: (-found[t], t)) for key, found in calls.items()}

    train_window, test_window = (
        (start.timestamp(), end.timestamp()) for start, end in (config.train, config.test)
    )
    train, clicks, in_test = [], Counter(), set()
    for row in pairs("impressions"):
        if train_window[0] <= row["timestamp"] < train_window[1]:
            train.append(row)
        elif test_window[0] <= row["timestamp"] < test_window[1]:
            in_test.add(row["query_id"])
            enough = row["dwell_s"] is None or row["dwell_s"] >= config.min_dwell_s
            clicks[row["query_id"], row["doc_id"]] += row["clicked"] and enough
        else:
            left_out["impressions outside both windows"] += 1
    trained = {row["query_id"] for row in train}
    if config.qrels:
        judged = pairs("qrels", set(text))
    else:
        judged = [
            {"query_id": q, "doc_id": d, "relevance": 1}
            for (q, d), count in clicks.items()
            if count >= config.min_clicks
        ]
    test = {row["query_id"] for row in judged if row["relevance"] > 0} - trained
    qrels = [row for row in judged if row["query_id"] in test]
    scores = pairs("scores", set(text))
    useful = [row for row in scores if row["query_id"] in trained]
    logged = {row["query_id"] for row in impressions}
    left_out += Counter(
        {
            "queries of the test window that training has seen": len(in_test & trained),
            "queries of the test window without a relevant document": len(in_test - trained - test),
            "queries without an impression in either window": len(logged - trained - in_test),
            "scores of queries that are not for training": len(scores) - len(useful),
            "judgements of queries that are not for test": len(judged) - len(qrels) if config.qrels else 0,
        }
    )
    queries = [{"query_id": q, "query": text[q], "split": "train"} for q in trained]
    queries += [{"query_id": q, "query": text[q], "split": "test"} for q in test]
    tables = {
        "documents": list(documents.values()),
        "queries": queries,
        "qrels": qrels,
        "impressions": train,
        "scores": useful,
    }
    return tables, dict(rejected), dict(left_out)


def _fault(table, row):
    """Return the fault of a row itself, or an empty string."""
    if table != "impressions":
        return "score is not a number" if row.get("score", 0) is None else ""
    faults = {
        "doc_id longer than 256 characters": len(row["doc_id"]) > 256,
        "position is not a number": row["position"] is None,
        "position is not 1 or above": row["position"] == 0,
        "clicked is neither true nor false": row["clicked"] is None,
        "no session_id": not row["session_id"],
        "no user_id": row["user_id"] == "",
        "timestamp is not a number": row["timestamp"] is None,
        "dwell_s is not finite": row["dwell_s"] == float("inf"),
    }
    return next((reason for reason, holds in faults.items() if holds), "")


def query_id(text):
    plain = " ".join(unicodedata.normalize("NFKC", text).split()).lower()
    return hashlib.blake2b(plain.encode(), digest_size=8).hexdigest()


# --- runs -------------------------------------------------------------------------------------------------


def contents(artifact):
    """Return all rows of all tables, sorted."""
    tables = {name: artifact.table(name).to_pylist() for name in TABLES if artifact.names(f"{name}/")}
    for row in tables.get("impressions", ()):
        row["timestamp"] = round(row["timestamp"].replace(tzinfo=UTC).timestamp())
    return {name: in_order(rows) for name, rows in tables.items()}


def in_order(rows):
    def plain(value):
        return f"{value:.5g}" if isinstance(value, float) else value

    return sorted(
        ({name: plain(value) for name, value in sorted(row.items())} for row in rows),
        key=lambda row: str(row),
    )


@pytest.mark.parametrize(
    ("seed", "files", "parts", "form", "settings"),
    [
        (0, 1, 1, "jsonl", {}),
        (0, 3, 3, "parquet", {"min_clicks": 2}),
        (1, 2, 2, "jsonl", {"min_dwell_s": 10.0}),
    ],
)
def test_the_artifact_equals_the_result_of_plain_python(tmp_path, seed, files, parts, form, settings):
    log = random_log(seed, judged=seed == 1)
    paths = write(log, tmp_path / "in", files=files, form=form)
    config = Logs(
        **paths, **WINDOWS, **settings, features={"price": "float64"}, parts=parts, documents_per_part=7
    )
    artifact = build(config, tmp_path / "out")
    tables, rejected, left_out = twin(log, config)
    assert contents(artifact) == {name: in_order(rows) for name, rows in tables.items()}
    info = artifact.manifest.info
    assert info["rejected_by_reason"] == rejected
    assert info["left_out"] == {name: count for name, count in left_out.items() if count}
    assert artifact.counts["rejected"] == sum(rejected.values()) == len(artifact.table("rejected"))
    assert artifact.counts["train_queries"] > 10
    assert artifact.counts["test_queries"] >= 1
    assert not any(name.endswith(".pending") for name in fs.list_files(artifact.uri))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a config of a log with two files a table, and the digest of its artifact."""
    folder = tmp_path_factory.mktemp("small")
    log = {table: rows[:60] for table, rows in random_log(3).items()}
    config = Logs(**write(log, folder / "in", files=2, form="jsonl"), **WINDOWS, parts=2)
    return config, build(config, folder / "out").digest


def test_the_order_of_tasks_does_not_change_the_artifact(small, tmp_path):
    config, digest = small

    def backwards(task, items):
        return map(task, reversed(items))

    artifact = build(config, tmp_path / "out", each=backwards)
    assert artifact.digest == digest
    assert artifact.table("rejected").num_rows > 3


@pytest.mark.parametrize("tasks", [3, 8, 12])
def test_a_killed_log_run_is_resumed(small, tmp_path, tasks):
    config, digest = small
    with pytest.raises(KeyboardInterrupt):
        build(config, tmp_path / "out", each=killed_after(tasks))
    items_run = []

    def counted(task, items):
        items_run.extend(items)
        return map(task, items)

    assert build(config, tmp_path / "out", each=counted).digest == digest
    slices = {table: len(rows) for table, rows in read_logs(config).tables.items()}
    total = 2 * sum(slices.values()) - slices["documents"] + 2 * config.parts
    assert len(items_run) == total - tasks


def test_a_frequent_query_is_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr("scalingnote.storage.shuffle.ROWS_PER_BATCH", 50)
    monkeypatch.setattr(supervision, "ROWS_PER_PART", 64)
    log = random_log(6)
    log["impressions"] = [
        {**row, "query": "head"} if number % 10 == 0 else row
        for number, row in enumerate(log["impressions"] * 5)
    ]
    config = Logs(**write(log, tmp_path / "in", files=2, form="parquet"), **WINDOWS, parts=8)
    sizes = []
    stream = supervision.stream

    def watched(*arguments):
        for rows in stream(*arguments):
            sizes.append(len(rows))
            yield rows

    monkeypatch.setattr(supervision, "stream", watched)
    artifact = build(config, tmp_path / "out")
    (head,) = (row["query_id"] for row in artifact.table("queries").to_pylist() if row["query"] == "head")
    parts = [artifact.table(name) for name in artifact.names("impressions/")]
    rows = [part for part in parts if head in part["query_id"].to_pylist()]
    assert sum(map(len, rows)) > 90
    assert max(map(len, parts)) == 64
    assert max(sizes) == 50


def test_a_log_without_usable_impressions_is_an_error(small, tmp_path):
    documents = {"documents": small[0].documents.model_dump()}
    paths = documents | write({"impressions": []}, tmp_path / "in", files=1, form="jsonl")
    with pytest.raises(DataError, match="no usable row of impressions"):
        build(Logs(**paths, **WINDOWS), tmp_path / "out")


def test_a_run_on_ray_gives_the_same_artifact(cluster, small, tmp_path, monkeypatch):
    config, digest = small
    monkeypatch.setattr(job, "SLICE_BYTES", 1)
    artifact = prepare(config, output=str(tmp_path / "out"))
    assert artifact.digest == digest
    assert prepare(config, output=str(tmp_path / "out")).manifest == artifact.manifest
    assert artifact.manifest.info["simulated_clicks"] is False
    assert artifact.manifest.info["hold_out_documents"] is False
