"""Contrastive entropy of towers against a softmax in loops over the documents that were drawn."""

import math

import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.evaluate import test_set
from scalingnote.evaluate.test_set import QueryEmbeddings
from scalingnote.evaluate.tower_measures import entropies, temperature_of
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Draft
from scalingnote.train.config import TrainConfig

IDS = [f"d{number}" for number in range(40)]
TEST = test_set.TestSet(
    ["q0", "q1", "q2"], ["a", "b", "c"], {"q0": {"d3": 1}, "q1": {"gone": 1}, "q2": {"d5": 1, "d6": 2}}, 0
)
KNOBS = {"temperature": 0.1, "seed": 4}


def pool(uri: str, ids: list[str], documents: np.ndarray):
    draft = Draft(uri, kind="embeddings", config=tiny.Nothing(), parents={})
    for number, start in enumerate(range(0, len(ids), 7)):
        mine = slice(start, start + 7)
        part = {"doc_id": ids[mine], "summary": arrow.to_arrow(documents[mine])}
        draft.write_table(f"embeddings/part-{number:05d}.parquet", pa.table(part))
    return draft.commit(counts={"documents": len(ids)})


@pytest.fixture
def world(tmp_path):
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(40, 8)).astype(np.float32), rng.normal(size=(40, 5)).astype(np.float32)
    order = rng.permutation(39)  # another order, and the last document is missing
    pools = {
        "dual": pool(f"{tmp_path}/a", IDS, first),
        "student": pool(f"{tmp_path}/b", [IDS[i] for i in order], second[order]),
    }
    encoded = {
        name: QueryEmbeddings(TEST.queries, rng.normal(size=(3, dim)).astype(np.float32))
        for name, dim in (("dual", 8), ("student", 5))
    }
    return pools, encoded, {"dual": first, "student": second}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_against_all_documents_it_is_the_whole_softmax(world):
    pools, encoded, documents = world
    found = entropies(pools, encoded, test=TEST, negatives=256, **KNOBS)
    assert found.negatives == 37  # 39 that both pools have, less the two that answer q2
    own = [i for i in range(39) if i not in (5, 6)]
    for name, matrix in documents.items():
        exact = [math.exp(cosine(encoded[name].embeddings[2], matrix[i]) / 0.1) for i in (6, *own)]
        assert found.values[name][2] == pytest.approx(-math.log(exact[0] / sum(exact)), rel=1e-5)
        assert np.isnan(found.values[name]).tolist() == [False, True, False]
    section = found.section()
    assert (section["queries"], section["negatives"], section["temperature"]) == (2, 37, 0.1)
    assert section["methods"]["dual"] == pytest.approx(np.nanmean(found.values["dual"]))


def test_few_negatives_are_the_same_for_all_and_answer_no_query(world, monkeypatch):
    pools, encoded, documents = world
    found = entropies(pools, encoded, test=TEST, negatives=3, **KNOBS)
    again = entropies(pools, encoded, test=TEST, negatives=3, **KNOBS)
    other = entropies(pools, encoded, test=TEST, negatives=3, temperature=0.1, seed=5)
    assert found.negatives == 3
    np.testing.assert_array_equal(found.values["dual"], again.values["dual"])
    assert (found.values["dual"][[0, 2]] != other.values["dual"][[0, 2]]).all()
    # What answers q2 beside its positive is as near as can be, and yet no negative of it.
    documents["dual"][5] = encoded["dual"].embeddings[2]
    near = pool(f"{pools['dual'].uri}-near", IDS, documents["dual"])
    for seed in range(8):
        found = entropies({"dual": near}, encoded, test=TEST, negatives=38, temperature=0.001, seed=seed)
        without = [i for i in range(40) if i not in (5, 6)]
        best = max(cosine(encoded["dual"].embeddings[2], documents["dual"][i]) for i in without)
        right = cosine(encoded["dual"].embeddings[2], documents["dual"][6])
        assert found.values["dual"][2] <= max(0.0, best - right) / 0.001 + math.log(39)


def test_nothing_is_measured_if_no_positive_is_in_the_pool(world):
    pools, encoded, _ = world
    test = test_set.TestSet(["q1"], ["b"], {"q1": {"gone": 1}}, 0)
    assert entropies(pools, encoded, test=test, negatives=3, **KNOBS) is None


def test_the_temperature_is_the_towers(tmp_path):
    config = TrainConfig.model_validate({"losses": {"temperature": 0.02}})
    made = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=config, parents={}).commit(counts={})
    assert temperature_of(made) == 0.02
    assert temperature_of(None) == 0.05
