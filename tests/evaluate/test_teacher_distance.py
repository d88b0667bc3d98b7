"""Distances between student and teacher against loops over the papers' terms."""

import math

import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.evaluate import tower_measures
from scalingnote.evaluate.test_set import QueryEmbeddings
from scalingnote.evaluate.tower_measures import distances
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft


def drawn(queries: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(queries, dim)).astype(np.float32)


def test_terms_are_those_of_the_equation():
    student, teacher = drawn(9, 4, 0), drawn(9, 4, 1)
    total = apart = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        ls, lt = math.hypot(*s), math.hypot(*t)
        total += math.sqrt(sum((a / ls - b / lt) ** 2 for a, b in zip(s, t, strict=True)))
        apart += math.dist(s, t)
    found = distances(student, teacher)
    assert found["bound"] == pytest.approx(2 / 9 * total)
    assert found["mean_as_given"] == pytest.approx(apart / 9)
    same = distances(teacher * 3, teacher)
    assert (same["bound"], same["cosine"]) == (pytest.approx(0, abs=1e-6), pytest.approx(1))


def test_the_teachers_queries_are_sampled_by_split_over_parts(tmp_path):
    draft = Draft(str(tmp_path / "teacher"), kind="query_embeddings", config=tiny.Nothing(), parents={})
    every = drawn(60, 4, 0)
    for part in range(3):
        rows = range(part * 20, part * 20 + 20)
        table = {
            "query": [f"query {i}" for i in rows],
            "split": ["validation" if i % 10 == 0 else "train" for i in rows],
            "embedding": arrow.to_arrow(every[list(rows)]),
        }
        draft.write_table(f"embeddings/part-{part:05d}.parquet", pa.table(table))
    made: Artifact = draft.commit(counts={})
    found = tower_measures.sample_teacher_queries(made, queries=8)
    assert {split: len(one.queries) for split, one in found.items()} == {"train": 8, "validation": 6}
    for one in found.values():
        assert len(set(one.queries)) == len(one.queries)
        np.testing.assert_array_equal(one.embeddings, every[[int(q.split()[1]) for q in one.queries]])
    assert tower_measures.sample_teacher_queries(None) == {}

    student = QueryEmbeddings([f"query {i}" for i in range(60)], every + 0.1)
    section = tower_measures.distance_section(found, student)
    assert set(section["splits"]) == {"train", "validation"}
    assert section["splits"]["train"]["mean_as_given"] == pytest.approx(0.2, abs=1e-5)
    narrow = QueryEmbeddings(student.queries, student.embeddings[:, :2])
    assert tower_measures.distance_section(found, narrow)["splits"] == {}
