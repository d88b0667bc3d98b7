"""Public sets in our columns: numbers of rows of the real files, splits without a common group, downloads."""

import hashlib
import os
import re
from typing import Any

import pytest

from benchmarks import public_sets
from benchmarks.public_sets import ARCHIVE, SETS, distinct, download, prepare, prepare_for, strip_html
from scalingnote.core.config import load
from scalingnote.core.errors import DataError
from scalingnote.datasets.config import Columns
from scalingnote.datasets.job import run
from scalingnote.run.config import RunConfig

REAL = {
    "medquad": (16_407, 14_345, "What is (are) Adult Acute Lymphoblastic Leukemia ?"),
    "stackexchange_devops": (4_968, 3_221, "How to order physical backup of S3 data?"),
    "chorus_icecat": (19_406, 116, "laptop"),
    "zh_reading_titles": (3_344, 12_415, "陸特和漢斯雷頓開創了哪一地區對梵語的學術研究？"),
    "zh_medical_qa": (7_244, 7_266, "高血压患者能吃党参吗？"),
    "dureader_demo_zh": (1_393, 200, "微信分享链接打开app"),
}


@pytest.fixture
def real(tmp_path, monkeypatch):
    if not os.environ.get("SCALINGNOTE_DATA"):
        pytest.skip("SCALINGNOTE_DATA is unset: the source files are not on this machine")
    monkeypatch.setattr(public_sets, "DATA", tmp_path / "data")


@pytest.mark.parametrize("name", REAL)
def test_rows_of_the_real_files(name, real, tmp_path):
    documents, queries, sample = REAL[name]
    artifact = run(columns_config(name, click_model=None), output=str(tmp_path / "out"))
    assert (artifact.counts["documents"], artifact.counts["queries"]) == (documents, queries)
    table, query_rows = artifact.table("documents"), artifact.table("queries").to_pylist()
    assert sample in {row["query"] for row in query_rows}
    split = {row["query_id"]: row for row in query_rows}
    group, title = (
        dict(zip(table["doc_id"].to_pylist(), table[column].to_pylist(), strict=True))
        for column in ("group", "title")
    )
    groups_of_split, equal_titles = {"train": set(), "test": set()}, 0
    for row in artifact.table("qrels").to_pylist():
        if row["relevance"] > 0:
            groups_of_split[split[row["query_id"]]["split"]].add(group[row["doc_id"]])
            equal_titles += split[row["query_id"]]["query"] == title[row["doc_id"]]
    assert groups_of_split["train"]
    assert not groups_of_split["train"] & groups_of_split["test"]
    assert equal_titles <= 0.02 * queries  # with the query as title the task would be trivial


def test_every_set_has_a_quickstart_that_reads_it(tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr(public_sets, "prepare", prepared.append)
    for name in SETS:
        prepare_for(load(RunConfig, [f"configs/quickstart/{name}.yaml"]).dataset)
    assert prepared == list(SETS)


def test_downloads_name_a_commit_and_are_checked(tmp_path):
    for each in SETS.values():
        for folder, files in each.downloads.items():
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}(/[\w.-]+)*", folder)
            # GitHub builds the archive of a commit for each request.
            assert all(re.fullmatch("[0-9a-f]{64}", sha or "") or f == ARCHIVE for f, sha in files.items())
    (tmp_path / "source").write_bytes(b"hello")
    url, good = (tmp_path / "source").as_uri(), hashlib.sha256(b"hello").hexdigest()
    download(url, tmp_path / "target", good)
    assert (tmp_path / "target").read_bytes() == b"hello"
    with pytest.raises(DataError, match="expected 0000"):
        download(url, tmp_path / "target", "0000")


def test_rows_are_distinct_in_the_order_of_the_first():
    rows = [{"a": value, "n": n} for n, value in enumerate("xyxz")]
    assert [row["n"] for row in distinct(rows, "a")] == [0, 1, 3]


def test_html():
    assert strip_html("<p>a <code>if x &lt; 3</code></p>\n<p>&amp;b</p>") == "a if x < 3 &b"


def columns_config(name: str, **settings: Any) -> Columns:
    """Return the config of a set as a source of tables."""
    files = {path.stem: {"path": str(path)} for path in sorted(prepare(name).glob("*.jsonl"))}
    return Columns.model_validate({"name": "columns", **files, **settings})
