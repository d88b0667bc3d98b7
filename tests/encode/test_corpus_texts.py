"""Texts of documents as lessons: those of a slow twin, however slices and buckets cut them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from in_process import without_ray
from scalingnote.config import validate
from scalingnote.encode import corpus_texts, job, queries
from scalingnote.encode.config import TeacherConfig
from scalingnote.errors import ConfigError
from scalingnote.run_config import RunConfig
from scalingnote.storage.artifact import Artifact, Draft

DOCUMENTS = [
    {"title": "Joining tensors", "content": "Joins tensors along a dimension. They need one shape."},
    {"title": "joining  TENSORS.", "content": "如何连接张量？它们需要相同的形状。"},
    {"title": "How do I split?", "content": "Asked by a test query above.\nMore."},
    {"title": "What is a stride?", "content": ""},
    {"title": "", "content": "One without an end" + 400 * " and on"},
]
QUERIES = [
    ("t", "how do i  split", "test"),
    ("v", "What is a stride", "train"),
    ("q", "Concatenate", "train"),
]


@pytest.fixture
def dataset(tmp_path: Path) -> Artifact:
    draft = Draft(str(tmp_path / "dataset"), kind="dataset", config=tiny.Nothing(), parents={})
    for number, row in enumerate(DOCUMENTS):
        draft.write_table(f"documents/part-{number:05d}.parquet", pa.Table.from_pylist([row]))
    columns = zip(*QUERIES, strict=True)
    draft.write_table(
        "queries.parquet", pa.table([*map(list, columns)], names=["query_id", "query", "split"])
    )
    return draft.commit(counts={"documents": len(DOCUMENTS)})


@pytest.fixture
def triplets(tmp_path: Path) -> Artifact:
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    rows = [{"query_id": "q", "query": "Concatenate", "split": "train"}]
    rows += [{"query_id": "v", "query": "What is a stride", "split": "validation"}]
    draft.write_table("triplets/part-00000.parquet", pa.Table.from_pylist(rows))
    return draft.commit(counts={"triplets": 2})


@pytest.mark.parametrize(("rows_per_slice", "buckets"), [(100, 1), (1, 4)])
def test_each_text_is_asked_once_and_none_that_is_held_out(
    rows_per_slice: int, buckets: int, dataset: Artifact, triplets: Artifact, tmp_path: Path, monkeypatch
):
    without_ray(monkeypatch)
    monkeypatch.setattr("scalingnote.storage.slices.ROWS_PER_SLICE", rows_per_slice)
    monkeypatch.setattr("scalingnote.encode.queries.buckets", lambda *_: buckets)
    config = TeacherConfig(texts=("title", "sentence"))
    draft = Draft(str(tmp_path / "out"), kind="query_embeddings", config=config, parents={})
    pieces = job.distinct_queries(config, triplets, dataset, draft)
    found = [
        row
        for piece in pieces
        for row in pq.read_table(queries.piece_uri(draft.work(), piece["name"])).to_pylist()
    ]
    assert {row["query"]: row["split"] for row in found} == {
        "Concatenate": "train",
        "What is a stride": "validation",
        "Joining tensors": "train",
        "Joins tensors along a dimension.": "train",
        "如何连接张量？": "train",
        "Asked by a test query above.": "train",
        ("One without an end" + 400 * " and on")[: corpus_texts.LONGEST]: "train",
    }
    assert len({row["query_id"] for row in found}) == len(found)


def test_a_share_of_the_texts_is_drawn_alike_everywhere(
    dataset: Artifact, triplets: Artifact, tmp_path: Path
):
    where = {"dataset": dataset, "texts": ("title", "sentence"), "buckets": 1}
    parts = dataset.table_parts("documents")
    few, again, whole = (
        corpus_texts.deal((0, parts), share=share, folder=str(tmp_path / str(number)), **where)
        for number, share in enumerate((0.5, 0.5, 1.0))
    )
    assert 0 < few == again < whole == 7


def test_texts_need_documents_and_a_teacher_that_reads_queries_alone(triplets: Artifact, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"teacher\.texts reads documents"):
        job.run_queries(
            TeacherConfig(texts=("title",)),
            triplets=triplets.uri,
            dual_encoder=triplets.uri,
            output=str(tmp_path),
        )
    run = {"dataset": {"name": "medquad"}, "cross_encoder": {}, "teacher": {"texts": ["title"]}}
    with pytest.raises(ConfigError, match="reads a query beside a document"):
        validate(RunConfig, run, source="test")
