"""The benchmark's measure of inherited documents: the order of a cross-encoder's scores, or another."""

from pathlib import Path

import numpy as np
import pytest

import tiny
from benchmarks import cross_teacher
from in_process import without_ray
from scalingnote.cross_encoder import job
from scalingnote.encode.config import EncodeConfig, TeacherConfig


def test_agreement_counts_pairs_that_search_tells_apart():
    searched = np.array([[0.9, 0.8, 0.7999]])  # the last two are one to float16
    assert cross_teacher.agreement(searched, np.array([[3.0, 2.0, 1.0]])) == 1
    assert cross_teacher.agreement(searched, np.array([[3.0, 4.0, 1.0]])) == 0.5
    assert cross_teacher.agreement(searched[:, :1], searched[:, :1]) == 1


@pytest.mark.parametrize("score", ["cosine", "product"])
def test_documents_keep_the_order_of_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: str
):
    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    teacher = tiny.cross_encoder(str(tmp_path / "teacher"), pooling="segments", score=score)
    given = {"dataset": dataset.uri, "cross_encoder": teacher.uri}
    queries = job.run_queries(
        TeacherConfig(), **given, triplets=triplets.uri, output=str(tmp_path / "queries")
    )
    documents = job.run_documents(EncodeConfig(), **given, output=str(tmp_path / "documents"))
    built = {"dataset": dataset, "cross_encoder": teacher}
    built |= {"query_embeddings": queries, "embeddings": documents}
    found = cross_teacher.agreements(built)
    assert found["ce_rank_agreement"] >= 0.99
    assert 0 <= found["ce_joint_agreement"] < 1  # read together, proxies are others
