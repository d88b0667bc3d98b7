"""`scalingnote.Index`: searches of a run in this process, with the teacher for uncertain queries."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pair import student

import tiny
from scalingnote import Index
from scalingnote.core.errors import ConfigError
from scalingnote.encode.encoder import Encoder
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact

QUERIES = [row["title"] for row in tiny.document_rows(12)]


@pytest.fixture
def teacher(tmp_path: Path) -> Artifact:
    return student(f"{tmp_path}/teacher", seed=1)


@pytest.fixture
def run(
    index: Artifact, query_tower: Artifact, teacher: Artifact, monkeypatch: pytest.MonkeyPatch
) -> RunConfig:
    splits = ["test", *["train"] * (len(QUERIES) - 1)]
    dataset = SimpleNamespace(table=lambda *_: pa.table({"query": QUERIES, "split": splits}))
    built = {"index": index, "student": query_tower, "dual_encoder": teacher, "dataset": dataset}
    config = RunConfig.model_validate({"dataset": {"name": "python_docs"}})
    monkeypatch.setattr(pipeline, "load_run", lambda _: config)
    monkeypatch.setattr(pipeline, "locate", lambda _, kind: built[kind])
    return config


def ranked(index: Artifact, tower: Artifact, query: str) -> list[str]:
    embedding = Encoder.load(tower.directory("query")).encode_queries([query])
    return [hit.doc_id for hit in Searcher.open(index.uri).search(embedding, k=5)[0]]


def found(searcher: Index, query: str) -> list[str]:
    return [result.doc_id for result in searcher.search(query, k=5)]


def test_the_student_or_its_teacher_answers(
    run: RunConfig, index: Artifact, query_tower: Artifact, teacher: Artifact
):
    query = QUERIES[3]
    student_ids, teacher_ids = ranked(index, query_tower, query), ranked(index, teacher, query)
    assert student_ids != teacher_ids
    assert found(Index("a run"), query) == student_ids
    assert found(Index("a run", escalate=1.0), query) == teacher_ids


def test_a_share_of_the_queries_is_encoded_by_the_teacher(
    run: RunConfig, index: Artifact, query_tower: Artifact, teacher: Artifact
):
    half = Index("a run", escalate=0.5)
    plain = Index("a run")
    changed = [query for query in QUERIES[1:] if found(half, query) != found(plain, query)]
    assert 1 <= len(changed) <= 5  # at most half of the queries that the threshold was tuned on
    for query in changed:
        assert found(half, query) == ranked(index, teacher, query)


def test_invalid_arguments_are_refused(run: RunConfig, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Index("a run", escalate=1.5)
    with pytest.raises(ConfigError, match="nothing to search"):
        Index("a run").search("  ")
    monkeypatch.setattr(pipeline, "load_run", lambda _: run.model_copy(update={"distill": None}))
    with pytest.raises(ConfigError, match="no student"):
        Index("a run", escalate=0.3)
