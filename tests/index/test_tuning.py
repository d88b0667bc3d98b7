import logging
from functools import partial, reduce

import numpy as np
import pytest

from scalingnote.core import topk
from scalingnote.index import families, ivf, tuning
from scalingnote.index.config import IVFPQ, FastScan
from scalingnote.index.tuning import OperatingPoint
from scalingnote.search import scan
from synthetic_corpus import queries, vectors

DIM, LISTS = 24, 12


def test_measured_recall_is_that_of_a_searcher_of_all_shards() -> None:
    documents = vectors(1500, DIM)
    query_vectors = queries(documents, 30)
    exact = topk.search(query_vectors, documents, k=10)[1]
    # Scores of FastScan's 4-bit codes tie at the last candidate, and shards resolve ties in another order.
    quantizer = families.train(documents, IVFPQ(), nlist=LISTS, seed=0)
    bounds = [0, 400, 1500]
    shards = [ivf.empty(quantizer) for _ in bounds[1:]]
    for lists, start, stop in zip(shards, bounds, bounds[1:], strict=False):
        ivf.add(lists, documents[start:stop])
    shares = {}
    for nprobe in (1, 3, LISTS):
        answers = [tuning.candidates(lists, query_vectors, nprobe=nprobe, k=10 * 4) for lists in shards]
        shares[nprobe] = [
            share._replace(rows=np.where(share.rows < 0, -1, share.rows + first))
            for share, first in zip(answers, bounds, strict=False)
        ]
    merged_lists = ivf.merge(shards)
    for nprobe, answers in shares.items():
        joined_answers = reduce(partial(tuning.join, depth=10 * 4), answers)
        for point in tuning.measure(joined_answers, exact, nprobe=nprobe, factors=[1, 4]):
            factor = point.refine_factor
            _, rows = scan.search([merged_lists], query_vectors, k=10, nprobe=nprobe, refine_factor=factor)
            assert point.recall == pytest.approx(tuning.recall(rows, exact), abs=1e-4)


def test_scanned_codes_are_counted() -> None:
    documents = vectors(300, DIM)
    quantizer = families.train(documents, FastScan(), nlist=4, seed=0)
    lists = ivf.empty(quantizer)
    ivf.add(lists, documents)
    sizes = np.bincount(topk.search(documents, quantizer.centroids, k=1)[1][:, 0], minlength=4)
    query_vectors = queries(documents, 5)
    nearest = topk.search(query_vectors, quantizer.centroids, k=1)[1][:, 0]
    one, all_lists = (tuning.candidates(lists, query_vectors, nprobe=n, k=10).scanned for n in (1, 4))
    assert one == pytest.approx(sizes[nearest].mean())
    assert all_lists == 300


def test_probes_double_up_to_all_lists() -> None:
    assert tuning.probes(1) == [1]
    assert tuning.probes(8) == [1, 2, 4, 8]
    assert tuning.probes(11) == [1, 2, 4, 8, 11]


def test_the_cheapest_point_that_reaches_the_target_is_chosen() -> None:
    points = [
        OperatingPoint(1, 8, 0.96, 90.0),
        OperatingPoint(2, 1, 0.95, 40.0),
        OperatingPoint(2, 2, 0.97, 60.0),
        OperatingPoint(4, 1, 0.94, 30.0),
    ]
    assert tuning.choose(points, target=0.95) == points[1]


def test_codes_that_limit_recall_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    points = [
        OperatingPoint(1, 1, 0.70, 10.0),
        OperatingPoint(2, 1, 0.799, 20.0),
        OperatingPoint(4, 1, 0.80, 40.0),
        OperatingPoint(8, 1, 0.80, 80.0),
    ]
    with caplog.at_level(logging.WARNING):
        assert tuning.choose(points, target=0.95) == points[1]
    assert "the highest recall of this index is 0.800, below the target of 0.950" in caplog.text
    assert "more than nprobe=2 does not raise it" in caplog.text


def test_recall_ignores_padding_of_exact_answers() -> None:
    exact = np.array([[3, 1, -1], [-1, -1, -1]])
    assert tuning.recall(np.array([[1, 9, 8], [0, 1, 2]]), exact) == 0.5
