import numpy as np
import pyarrow as pa
import torch

import tiny
from scalingnote.distill.batching import LessonBatches
from scalingnote.distill.objective import StageTwo
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, tower
from scalingnote.models.tower import Tower
from scalingnote.storage import vectors
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Optimizer
from scalingnote.train.loop import fit


def lessons(student: Tower, teacher: np.ndarray) -> LessonBatches:
    queries = pa.table({"query": [row["content"] for row in tiny.document_rows(48)]})
    queries = queries.append_column("embedding", vectors.to_arrow(teacher))
    return LessonBatches(queries, student=student, global_batch=16, rank=0, world=1, seed=0)


def student() -> Tower:
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    return tower.build(
        tiny.query_tower(tiny.BIDIRECTIONAL), role="query", dim=8, tokenizer_json=learnt, seed=0
    )


def test_a_lesson_pairs_each_query_with_its_own_teacher_embedding():
    made = student()
    # The teacher's first value tells which query it belongs to.
    teacher = np.tile(np.arange(48, dtype=np.float32)[:, None], (1, 8))
    lesson = lessons(made, teacher)(2)
    rows = made.prompt.rows([row["content"] for row in tiny.document_rows(48)])
    for ids, mask, embedding in zip(lesson.queries.ids, lesson.queries.mask, lesson.teacher, strict=True):
        assert ids[mask.bool()].tolist() == rows[int(embedding[0])].ids


def test_the_student_comes_close_to_a_teacher_it_never_loads(tmp_path):
    made = student()
    teacher = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
    curve = fit(
        StageTwo(made, cosine_weight=1.0),
        lessons(made, teacher),
        steps=150,
        rows_per_step=16,
        settings=Optimizer(peak_lr=1e-2),
        checkpoints=Checkpoints(str(tmp_path), keep=1),
        checkpoint_every=1000,
        dtype=torch.float32,
        seed=0,
        room="distill",
    )
    assert curve[-1]["squared_distance"] < 0.05 * curve[0]["squared_distance"]
    found = Encoder(made).encode_queries([row["content"] for row in tiny.document_rows(48)])
    cosine = (found * teacher).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(teacher, axis=1)
    assert cosine.mean() > 0.95
