"""Contrastive entropy and distances from the teacher, compared with loops over the papers' terms."""

import math

import numpy as np
import pytest

import tiny
from scalingnote.evaluate import test_set, tower_measures
from scalingnote.evaluate.test_set import QueryEmbeddings
from scalingnote.evaluate.tower_measures import distances, entropies, temperature_of
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Draft
from scalingnote.train.config import TrainConfig

IDS = [f"d{number}" for number in range(40)]
TEST = test_set.TestSet(
    ["q0", "q1", "q2"], ["a", "b", "c"], {"q0": {"d3": 1}, "q1": {"gone": 1}, "q2": {"d5": 1, "d6": 2}}, 0
)
KNOBS = {"temperature": 0.1, "seed": 4}


def random_vectors(rows: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


def pool(uri: str, ids: list[str], documents: np.ndarray):
    parts = [slice(start, start + 7) for start in range(0, len(ids), 7)]
    tables = {
        f"embeddings/part-{number:05d}.parquet": {
            "doc_id": ids[rows],
            "summary": arrow.to_arrow(documents[rows]),
        }
        for number, rows in enumerate(parts)
    }
    return tiny.artifact(uri, "embeddings", tables, documents=len(ids))


@pytest.fixture
def world(tmp_path):
    first, second = random_vectors(40, 8, 1), random_vectors(40, 5, 2)
    order = np.random.default_rng(1).permutation(39)  # another order, and the last document is missing
    pools = {
        "dual": pool(f"{tmp_path}/a", IDS, first),
        "student": pool(f"{tmp_path}/b", [IDS[i] for i in order], second[order]),
    }
    encoded = {
        name: QueryEmbeddings(TEST.queries, random_vectors(3, d, 3))
        for name, d in (("dual", 8), ("student", 5))
    }
    return pools, encoded, {"dual": first, "student": second}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_entropy_over_all_documents_is_the_full_softmax(world):
    pools, encoded, documents = world
    section, values = entropies(pools, encoded, test=TEST, negatives=256, **KNOBS)
    # 39 documents are in both pools, without the two that are relevant to q2; no pool has the positive of q1.
    assert (section["queries"], section["negatives"], section["temperature"]) == (2, 37, 0.1)
    negatives = [i for i in range(39) if i not in (5, 6)]
    for name, matrix in documents.items():
        exact = [math.exp(cosine(encoded[name].embeddings[2], matrix[i]) / 0.1) for i in (6, *negatives)]
        assert values[name][2] == pytest.approx(-math.log(exact[0] / sum(exact)), rel=1e-5)
        assert np.isnan(values[name]).tolist() == [False, True, False]
        assert section["methods"][name] == pytest.approx(np.nanmean(values[name]))
    without_positives = test_set.TestSet(["q1"], ["b"], {"q1": {"gone": 1}}, 0)
    assert entropies(pools, encoded, test=without_positives, negatives=3, **KNOBS) == ({}, {})


def test_negatives_are_equal_for_all_towers_and_not_relevant(world):
    pools, encoded, documents = world
    (section, values), (_, repeated), (_, other) = (
        entropies(pools, encoded, test=TEST, negatives=3, temperature=0.1, seed=seed) for seed in (4, 4, 5)
    )
    assert section["negatives"] == 3
    np.testing.assert_array_equal(values["dual"], repeated["dual"])
    assert (values["dual"][[0, 2]] != other["dual"][[0, 2]]).all()
    # The second relevant document of q2 is nearest to it, but is not used as a negative.
    documents["dual"][5] = encoded["dual"].embeddings[2]
    near = pool(f"{pools['dual'].uri}-near", IDS, documents["dual"])
    best, positive = (
        max(cosine(encoded["dual"].embeddings[2], documents["dual"][i]) for i in rows)
        for rows in ([i for i in range(40) if i not in (5, 6)], [6])
    )
    for seed in range(8):
        _, values = entropies({"dual": near}, encoded, test=TEST, negatives=38, temperature=0.001, seed=seed)
        assert values["dual"][2] <= max(0.0, best - positive) / 0.001 + math.log(39)


def test_the_temperature_is_that_of_the_towers(tmp_path):
    config = TrainConfig.model_validate({"losses": {"temperature": 0.02}})
    towers = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=config, parents={}).commit(counts={})
    assert (temperature_of(towers), temperature_of(None)) == (0.02, 0.05)


def test_distances_equal_the_equation():
    student, teacher = random_vectors(9, 4, 0), random_vectors(9, 4, 1)
    total = total_unscaled = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        ls, lt = math.hypot(*s), math.hypot(*t)
        total += math.sqrt(sum((a / ls - b / lt) ** 2 for a, b in zip(s, t, strict=True)))
        total_unscaled += math.dist(s, t)
    result = distances(student, teacher)
    assert result["bound"] == pytest.approx(2 / 9 * total)
    assert result["mean_as_given"] == pytest.approx(total_unscaled / 9)
    scaled_teacher = distances(teacher * 3, teacher)
    assert (scaled_teacher["bound"], scaled_teacher["cosine"]) == (
        pytest.approx(0, abs=1e-6),
        pytest.approx(1),
    )


def test_queries_of_the_teacher_are_sampled_by_split(tmp_path):
    all_embeddings, tables = random_vectors(60, 4, 0), {}
    for part in range(3):
        rows = range(part * 20, part * 20 + 20)
        tables[f"embeddings/part-{part:05d}.parquet"] = {
            "query": [f"query {i}" for i in rows],
            "split": ["validation" if i % 10 == 0 else "train" for i in rows],
            "embedding": arrow.to_arrow(all_embeddings[list(rows)]),
        }
    teacher_queries = tiny.artifact(tmp_path / "teacher", "query_embeddings", tables)
    samples = tower_measures.sample_teacher_queries(teacher_queries, queries=8)
    assert {split: len(one.queries) for split, one in samples.items()} == {"train": 8, "validation": 6}
    for one in samples.values():
        assert len(set(one.queries)) == len(one.queries)
        np.testing.assert_array_equal(
            one.embeddings, all_embeddings[[int(q.split()[1]) for q in one.queries]]
        )
    assert tower_measures.sample_teacher_queries(None) == {}

    student = QueryEmbeddings([f"query {i}" for i in range(60)], all_embeddings + 0.1)
    section = tower_measures.distance_section(samples, student)
    assert set(section["splits"]) == {"train", "validation"}
    assert section["splits"]["train"]["mean_as_given"] == pytest.approx(0.2, abs=1e-5)
    narrow = QueryEmbeddings(student.queries, student.embeddings[:, :2])
    assert tower_measures.distance_section(samples, narrow)["splits"] == {}
