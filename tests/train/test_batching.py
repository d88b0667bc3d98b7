import numpy as np
import pytest

from scalingnote.errors import DataError
from scalingnote.train.batching import hash_ids, rows_of_step, total_steps


def test_an_epoch_visits_every_row_once_over_all_ranks():
    shares = [
        rows_of_step(step, rows=48, global_batch=12, rank=rank, world=3, seed=5)
        for step in range(4)
        for rank in range(3)
    ]
    assert all(len(share) == 4 for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(48))


def test_epochs_differ_and_the_uneven_tail_is_left_out():
    first, second = (
        np.concatenate(
            [rows_of_step(s, rows=50, global_batch=12, rank=0, world=1, seed=5) for s in range(e, e + 4)]
        )
        for e in (0, 4)
    )
    assert len(set(first.tolist())) == 48
    assert first.tolist() != second.tolist()


def test_the_global_batch_does_not_depend_on_how_many_ranks_share_it():
    one = rows_of_step(3, rows=40, global_batch=8, rank=0, world=1, seed=1)
    two = [rows_of_step(3, rows=40, global_batch=8, rank=r, world=2, seed=1) for r in range(2)]
    assert sorted(np.concatenate(two).tolist()) == sorted(one.tolist())


def test_too_few_rows_for_one_batch_is_said_before_training():
    assert total_steps(rows=100, global_batch=10, epochs=2.5) == 25
    with pytest.raises(DataError, match="do not fill one global batch"):
        total_steps(rows=9, global_batch=10, epochs=1.0)


def test_hashes_are_stable_and_positive():
    hashes = hash_ids(["a", "b", "a"])
    assert hashes[0] == hashes[2] != hashes[1]
    assert (hashes >= 0).all()
    assert hash_ids(["doc-1"]).tolist() == [2376381282532555307]
