from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import tiny
from scalingnote.distillation.config import DistillLosses
from scalingnote.distillation.objective import LessonBatches, StageTwo
from scalingnote.distillation.prepare import prepare
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.tower import Tower
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.data import Order, Store

QUERIES = [row["content"] for row in tiny.document_rows(48)]
LEARNT = backbone.train_tokenizer(QUERIES, vocabulary=400)
STUDENT = tiny.query_tower(tiny.BIDIRECTIONAL)


def student() -> Tower:
    return dual_encoder.build_tower(STUDENT, role="query", dim=8, tokenizer_json=LEARNT, seed=0)


def embedded(uri: str, teacher: np.ndarray) -> Artifact:
    """A teacher's embeddings in parts, every seventh of a validation query."""
    draft = Draft(uri, kind="query_embeddings", config=tiny.Nothing(), parents={})
    for start in range(0, 48, 10):
        texts = QUERIES[start : start + 10]
        split = ["validation" if (start + i) % 7 == 6 else "train" for i in range(len(texts))]
        table = pa.table({"query_id": texts, "query": texts, "split": split})
        table = table.append_column("embedding", arrow.to_arrow(teacher[start : start + 10]))
        draft.write_table(f"embeddings/part-{start // 10:05d}.parquet", table)
    return draft.commit(counts={})


def lessons(folder: Path, teacher: np.ndarray, *, rank: int = 0, world: int = 1, batch: int = 8, **kwargs):
    found = embedded(str(folder / "embeddings"), teacher)
    sizes = prepare(found, prompt=student().prompt, folder=str(folder / "store"))
    store = Store.open(str(folder / "store"))
    order = Order(sizes, global_batch=batch, seed=0)
    return LessonBatches(
        store, order, pad=student().pad, rank=rank, world=world, **{"packed": False} | kwargs
    )


@pytest.fixture
def numbered() -> np.ndarray:
    """The teacher's first value tells which query it belongs to."""
    return np.tile(np.arange(48, dtype=np.float32)[:, None], (1, 8))


def test_a_lesson_pairs_each_training_query_with_its_own_teacher_embedding(tmp_path: Path, numbered):
    rows = student().prompt.rows(QUERIES)
    source, seen = lessons(tmp_path, numbered), []
    for step in range(5):
        lesson = source(step)
        for ids, mask, embedding in zip(lesson.queries.ids, lesson.queries.mask, lesson.teacher, strict=True):
            number = int(embedding[0])
            assert ids[mask.bool()].tolist() == rows[number].ids
            seen.append(number)
    assert len(set(seen)) == 40
    assert not [number for number in seen if number % 7 == 6]  # validation queries are not learnt


def test_ranks_share_a_global_batch_and_packing_keeps_the_tokens(tmp_path: Path, numbered):
    whole = lessons(tmp_path / "one", numbered)(3)
    shares = [lessons(tmp_path / f"{r}", numbered, rank=r, world=2)(3) for r in range(2)]
    drawn = torch.cat([share.teacher for share in shares])[:, 0]
    assert sorted(drawn.tolist()) == sorted(whole.teacher[:, 0].tolist())
    packed = lessons(tmp_path / "packed", numbered, packed=True)(3)
    flat = [ids[mask.bool()] for ids, mask in zip(whole.queries.ids, whole.queries.mask, strict=True)]
    assert packed.queries.ids[0].tolist() == torch.cat(flat).tolist()


def test_what_was_prepared_is_not_prepared_again(tmp_path: Path, numbered):
    lessons(tmp_path, numbered)

    def refuse(task, items):
        raise AssertionError(items)

    found = embedded(str(tmp_path / "again"), numbered)
    folder = str(tmp_path / "store")
    sizes = prepare(found, prompt=student().prompt, folder=folder, each=refuse)
    assert sizes == {"lessons": 42}


def test_the_student_comes_close_to_a_teacher_it_never_loads(tmp_path: Path):
    made = student()
    teacher = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
    source, stage = lessons(tmp_path, teacher, batch=14), StageTwo(made, DistillLosses())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2, weight_decay=0.0)
    distances = []
    for step in range(150):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 150)
        loss, parts = stage(source(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        distances.append(float(parts["squared_distance"]))
    assert distances[-1] < 0.05 * distances[0]
    train = [i for i in range(48) if i % 7 != 6]
    found = Encoder(made).encode_queries([QUERIES[i] for i in train])
    cosine = (found * teacher[train]).sum(1)
    cosine /= np.linalg.norm(found, axis=1) * np.linalg.norm(teacher[train], axis=1)
    assert cosine.mean() > 0.95
