"""A data set does not depend on slices; killed runs are resumed; too large inputs fail early."""

import json
import random
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from row_files import build, write_lines, write_tables
from scalingnote.core.errors import DataError
from scalingnote.datasets import documents, input_files, job, readers
from scalingnote.datasets.config import Columns, NewDocuments, Texts
from scalingnote.datasets.sources import read_texts
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Draft

COUNT = 300


def rows_with_faults():
    rng = random.Random(5)
    rows = []
    for number in range(COUNT):
        row = {"doc_id": f"d{number}", "title": f"title {number}", "content": f"text {number} " * 3}
        row |= {"topic": f"t{number % 5}", "group": f"g{number // 3}", "price": number / 2}
        faults = [
            {"doc_id": f"d{rng.randrange(number + 1)}"},
            {"doc_id": "d7"},
            {"doc_id": None},
            {"title": 3},
            {"title": "", "content": ""},
            {"price": "dear"},
            {"content": "a\x00b" + "y" * 30_000},
        ]
        rows.append(row | (rng.choice(faults) if rng.random() < 0.3 else {}))
    return rows


def write_inputs(folder, *, form="jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_with_faults()
    if form == "parquet":
        rows = [row for row in rows if isinstance(row["title"], str) and not isinstance(row["price"], str)]
        table = pa.Table.from_pylist(rows)
        for number in range(2):
            half = table.slice(number * len(rows) // 2, len(rows) // 2)
            pq.write_table(half, folder / f"d{number}.parquet", row_group_size=20)
    else:
        rows[40:40] = [b'{"doc_id": broken\n', b"\n", b'{"doc_id": "\xff"}\n', b"[1]\n"]
        write_lines(folder / "d0.jsonl", *rows[:200])
        write_lines(folder / "d1.jsonl", *rows[200:-1], json.dumps(rows[-1]).encode())
    pairs = [(f"q{n}", f"d{(7 * n) % (COUNT + 9)}") for n in range(80)]
    files = write_tables(
        folder,
        queries=[{"query_id": q, "query": f"query {q}"} for q, _ in pairs],
        qrels=[{"query_id": q, "doc_id": d, "relevance": 1} for q, d in pairs],
    )
    documents = {"path": str(folder / f"d?.{form}")}
    return files | {"documents": documents, "features": {"price": "float64"}, "documents_per_part": 17}


def facts(artifact):
    info = artifact.manifest.info
    return artifact.digest, artifact.counts, info["rejected_by_reason"], info["repaired"], info["left_out"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_slices_of_any_size_give_the_same_data_set(tmp_path, monkeypatch, form):
    config = Columns(**write_inputs(tmp_path / "in", form=form))
    unsliced = build(config, tmp_path / "whole")
    assert len(readers.read_columns(config).tables["documents"]) == 2
    assert unsliced.table("documents")["doc_id"].to_pylist() == _twin(form)
    assert unsliced.manifest.info["rejected_by_reason"]["documents: duplicate doc_id"] > 10
    for size in (6_000, 20_000):
        monkeypatch.setattr(input_files, "SLICE_BYTES", size)
        assert len(readers.read_columns(config).tables["documents"]) > 4
        for name, each in (("ahead", map), ("back", lambda task, items: map(task, reversed(items)))):
            assert facts(build(config, tmp_path / f"{name}-{size}", each=each)) == facts(unsliced)


def _twin(form):
    """Return the ids of the valid documents, in the order of the input."""
    rows = [row for row in rows_with_faults() if isinstance(row["title"], str)]
    if form == "parquet":
        rows = [row for row in rows if not isinstance(row["price"], str)]
        rows = rows[: len(rows) // 2 * 2]  # two files of equal length
    return list(Counter(row["doc_id"] for row in rows if row["doc_id"] and (row["title"] or row["content"])))


def test_work_on_other_slices_is_deleted_except_the_lease(tmp_path):
    config = Columns(**write_inputs(tmp_path / "in"))
    draft = Draft(str(tmp_path / "out"), kind="dataset", config=config, parents={})
    kept_files = {"fingerprint", "lease", "lease.pending"}
    for name in ("lease.pending", "part-0", "tasks/1.json"):
        fs.write_bytes(draft.work(name), b"data")
    documents.resume_or_clear(draft, [{"slice": 0}])
    assert set(fs.list_files(draft.work())) == {*kept_files, "plan.json"}


def test_a_changed_input_is_prepared_again(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "SLICE_BYTES", 40_000)
    inputs = write_inputs(tmp_path / "in")
    config = Columns(**inputs)

    def killed(task, items):
        yield task(items[0])
        yield task(items[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(config, tmp_path / "out", each=killed)
    fs.write_bytes(str(tmp_path / "out" / "documents" / "part-00099.parquet"), b"stale")
    with (tmp_path / "in" / "d1.jsonl").open("a") as file:
        file.write('\n{"doc_id": "late", "title": "one more"}\n')
    late = build(config, tmp_path / "out")
    assert late.table("documents")["doc_id"].to_pylist()[-1] == "late"
    assert facts(late) == facts(build(config, tmp_path / "whole"))


def test_new_documents_and_texts_are_read_in_slices(tmp_path, monkeypatch):
    inputs = write_inputs(tmp_path / "in")
    monkeypatch.setattr(job, "_runner", lambda config, source: map)
    new = NewDocuments(documents=inputs["documents"], features=inputs["features"])
    (tmp_path / "t.txt").write_text("".join(f"text {n}\n" + "\n" * (n % 3) for n in range(90)))
    texts = Texts(path=str(tmp_path / "t.txt"))
    digests = []
    for size in (1 << 20, 40_000):
        monkeypatch.setattr(input_files, "SLICE_BYTES", size)
        ready = job.prepare_documents(new, output=str(tmp_path / f"new-{size}"))
        monkeypatch.setattr(input_files, "SLICE_BYTES", size // 200)
        rows = job.run(texts, output=str(tmp_path / f"texts-{size}"))
        assert rows.table("documents")["doc_id"].to_pylist() == [str(n) for n in range(1, 91)]
        assert [row["content"] for row in read_texts(texts.path)] == rows.table("documents")[
            "content"
        ].to_pylist()
        digests.append((ready.digest, ready.manifest.info["rejected_by_reason"], rows.digest))
    assert digests[0] == digests[1]


def test_too_many_documents_for_simulated_clicks_are_an_error(tmp_path, monkeypatch):
    config = Columns(**write_inputs(tmp_path / "in"))
    monkeypatch.setattr(job, "MAX_SIMULATED_DOCUMENTS", 100)
    with pytest.raises(
        DataError, match=r"documents, but clicks are simulated for 100 at most: .*click_model"
    ):
        build(config, tmp_path / "other")
    plain = config.model_copy(update={"click_model": None})
    assert build(plain, tmp_path / "plain").counts["documents"] > 100


@pytest.mark.parametrize(
    ("rows", "bytes_each", "per_part"),
    [
        (1, 0, 4096),
        (10_000_000, 1_000, 4096),
        (100_000_000, 1_000, 8192),
        (2_000_000_000, 1_000, 65_536),
        (5_000_000_000, 1_000, 65_536),
        (5_000_000_000, 8_000, 16_384),
        (100, 1_000_000, 128),
        (100, 1 << 30, 1),
    ],
)
def test_the_size_of_parts_depends_on_rows_and_bytes(rows, bytes_each, per_part):
    config = NewDocuments(documents={"path": "d"})
    rows_per_part = documents.rows_per_part(config, rows=rows, text_bytes=rows * bytes_each)
    assert rows_per_part == per_part
    assert rows_per_part == 1 or rows_per_part * bytes_each <= documents.MAX_PART_BYTES
    assert rows / rows_per_part < 80_000 or bytes_each > 2_000
    fixed_size = config.model_copy(update={"documents_per_part": 3})
    assert documents.rows_per_part(fixed_size, rows=rows, text_bytes=rows * bytes_each) == 3


def test_parts_of_long_texts_are_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_PART_BYTES", 4_000)
    inputs = {key: value for key, value in write_inputs(tmp_path / "in").items() if "per_part" not in key}
    config = Columns(**inputs)
    unsliced = build(config, tmp_path / "whole")
    rows = [unsliced.manifest.parts[name].rows for name in unsliced.names("documents/", ".parquet")]
    per_part = unsliced.manifest.info["documents_per_part"]
    assert 1 < per_part < 64
    assert set(rows[:-1]) == {per_part}
    monkeypatch.setattr(input_files, "SLICE_BYTES", 6_000)
    assert facts(build(config, tmp_path / "cut")) == facts(unsliced)


def test_the_number_of_slices_is_limited(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_bytes(b'{"doc_id": "d"}\n' * 1000)
    files = input_files.find_files(str(tmp_path / "d.jsonl"))
    monkeypatch.setattr(input_files, "SLICE_BYTES", 16)
    assert len(input_files.cut(files)) == 1000
    monkeypatch.setattr(input_files, "MAX_SLICES", 10)
    assert len(input_files.cut(files)) == 10
