"""Held-out queries measure a student in training, and the best weights are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tiny
from in_process import without_ray
from scalingnote.encode import job as encode
from scalingnote.encode.config import Fleet, TeacherConfig
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup import LookupTower
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.config import Optimizer, Ranks
from scalingnote.train.distillation import agreement, job
from scalingnote.train.distillation.config import DistillConfig, StudentValidation


@pytest.fixture
def query_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """Write a teacher's embeddings of pseudo-queries, every fifth one for validation."""
    without_ray(monkeypatch)
    texts = [row["content"] for row in tiny.document_rows()]
    draft = Draft(str(tmp_path / "pseudo"), kind="pseudo_queries", config=tiny.Nothing(), parents={})
    rows = [
        {"query_id": f"t{n}", "query": text, "split": "train" if n % 5 else "validation"}
        for n, text in enumerate(texts)
    ]
    draft.write_table(
        "queries/part-00000-00000.parquet", pa.Table.from_pylist(rows, schema=schema.PSEUDO_QUERIES)
    )
    pseudo = draft.commit(counts={"queries": len(rows)})
    tokenizer_json = backbone.train_tokenizer(texts, vocabulary=400)
    draft = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    tower = dual_encoder.build_tower(
        tiny.query_tower(), role="query", dim=16, tokenizer_json=tokenizer_json, seed=0
    )
    tower.save(Path(draft.path("query")))
    towers = draft.commit(counts={})
    return encode.run_queries(
        TeacherConfig(resources=Fleet(workers=1)),
        dual_encoder=towers.uri,
        pseudo_queries=pseudo.uri,
        output=str(tmp_path / "teacher"),
    )


def train_student(query_embeddings: Artifact, **knobs: Any) -> Artifact:
    student, one_process = LookupConfig(storage="float32"), Ranks(workers=0)
    config = DistillConfig(student=student, global_batch=16, resources=one_process, **knobs)
    output = str(Path(query_embeddings.uri).with_name("student"))
    return job.run(config, query_embeddings=query_embeddings.uri, output=output)


def test_a_student_is_measured_on_held_out_pseudo_queries(query_embeddings: Artifact):
    student = train_student(
        query_embeddings,
        optimizer=Optimizer(peak_lr=0.05),
        epochs=6,
        validation=StudentValidation(every=5),
    )
    measurements = student.read_json("validation.json")
    assert [row["step"] for row in measurements] == [5, 10, 15, 20, student.counts["steps"]]
    assert measurements[-1]["cosine"] > measurements[0]["cosine"]
    assert measurements[-1]["squared_distance"] < measurements[0]["squared_distance"]
    assert student.counts["queries"] == sum(n % 5 > 0 for n in range(tiny.DOCUMENTS))


def test_cosine_and_distance_are_means_over_the_queries():
    student, teacher = (
        np.array([[2.0, 0.0], [0.0, 1.0]], np.float32),
        np.array([[1.0, 0.0], [1.0, 0.0]], np.float32),
    )
    expected = {"cosine": 0.5, "squared_distance": 1.5, "qkd": 1.5 - 0.5}
    assert agreement.measure_embeddings(student, teacher) == pytest.approx(expected)


def test_a_student_stops_early_and_keeps_the_best(query_embeddings: Artifact):
    """At this rate it diverges: two measurements worse than the best end the run."""
    artifact = train_student(
        query_embeddings,
        optimizer=Optimizer(peak_lr=3.0, warmup=0.5),
        epochs=30,
        validation=StudentValidation(every=2, patience=2),
    )
    cosines = [row["cosine"] for row in artifact.read_json("validation.json")]
    assert artifact.counts["steps"] < 30 * 4
    best = int(np.argmax(cosines))
    assert len(cosines) == best + 3
    kept_table = LookupTower.load(artifact.directory("query"))
    table = query_embeddings.table("embeddings")
    table = table.filter(pc.equal(table["split"], "validation"))
    rows = collate(kept_table.prompt.rows(table["query"].to_pylist()), pad=kept_table.pad)
    embeddings, teacher = kept_table(rows)[:, 0].detach().numpy(), arrow.to_numpy(table["embedding"])
    metrics = agreement.measure_embeddings(embeddings, teacher)
    assert metrics["cosine"] == pytest.approx(cosines[best], rel=1e-3)
