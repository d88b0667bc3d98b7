import pytest
from pydantic import ValidationError

from scalingnote.triplets.collect.config import CollectConfig


def test_ranks_must_leave_room_for_the_negatives():
    assert CollectConfig(top_k=5, top_t=8, num_negatives=3).top_t == 8
    with pytest.raises(ValidationError, match="raise top_t"):
        CollectConfig(top_k=5, top_t=7, num_negatives=3)


def test_a_source_is_needed():
    with pytest.raises(ValidationError):
        CollectConfig(sources=())
