from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import tiny
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.tower import Tower
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.data import Order, Store
from scalingnote.train.distillation.objective import LessonBatches
from scalingnote.train.distillation.prepare import prepare

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


def lessons(folder: Path, teacher: np.ndarray, *, rank: int = 0, world: int = 1, batch: int = 8):
    found = embedded(str(folder / "embeddings"), teacher)
    sizes = prepare(found, prompt=student().prompt, folder=str(folder / "store"))
    store = Store.open(str(folder / "store"))
    order = Order(sizes, global_batch=batch, seed=0)
    return LessonBatches(store, order, pad=student().pad, rank=rank, world=world)


@pytest.fixture
def numbered() -> np.ndarray:
    """The teacher's first value tells which query it belongs to."""
    return np.tile(np.arange(48, dtype=np.float32)[:, None], (1, 8))


def test_a_lesson_pairs_queries_with_their_teacher_embeddings(tmp_path: Path, numbered):
    rows = student().prompt.rows(QUERIES)
    source, seen = lessons(tmp_path, numbered), []
    for step in range(5):
        lesson = source(step)
        ids, lengths = lesson.queries.flat()
        for line, embedding in zip(ids.split(lengths.tolist()), lesson.teacher, strict=True):
            number = int(embedding[0])
            assert line.tolist() == rows[number].ids
            seen.append(number)
    assert len(set(seen)) == 40
    assert not [number for number in seen if number % 7 == 6]  # validation queries are not learnt


def test_ranks_share_a_global_batch(tmp_path: Path, numbered):
    whole = lessons(tmp_path / "one", numbered)(3)
    shares = [lessons(tmp_path / f"{r}", numbered, rank=r, world=2)(3) for r in range(2)]
    drawn = torch.cat([share.teacher for share in shares])[:, 0]
    assert sorted(drawn.tolist()) == sorted(whole.teacher[:, 0].tolist())


def test_what_was_prepared_is_not_prepared_again(tmp_path: Path, numbered):
    lessons(tmp_path, numbered)

    def refuse(task, items):
        raise AssertionError(items)

    found = embedded(str(tmp_path / "again"), numbered)
    folder = str(tmp_path / "store")
    sizes = prepare(found, prompt=student().prompt, folder=folder, each=refuse)
    assert sizes == {"lessons": 42}
