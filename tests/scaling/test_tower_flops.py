from dataclasses import replace

import pytest

from scalingnote.models import flops as tower_flops
from scalingnote.models.flops import PUBLISHED
from scalingnote.scaling import training_cost
from scalingnote.scaling.training_cost import TowerInput

SHAPE = PUBLISHED["Qwen/Qwen2.5-7B"]
QUERY, DOCUMENT = TowerInput(SHAPE, 16.0), TowerInput(SHAPE, 250.0, rows=2, pooled=3)


def test_a_pair_is_a_query_and_all_its_documents():
    query = tower_flops.row(SHAPE, tokens=16.0, pooled=1, dim=128)
    document = tower_flops.row(SHAPE, tokens=250.0, pooled=3, dim=128)
    assert training_cost.pair_work(QUERY, DOCUMENT, dim=128) == query + document.times(2)


def test_operations_for_each_parameter_are_six_a_token_and_some_for_attention():
    tokens = 16 + 2 * 250
    assert 6 * tokens < training_cost.operations_per_parameter(QUERY, DOCUMENT, dim=128) < 6.1 * tokens
    # Nearly another forward pass where activations are computed anew; longer rows attend to more.
    assert (
        7.4 * tokens
        < training_cost.operations_per_parameter(QUERY, DOCUMENT, dim=128, checkpointing=True)
        < 8 * tokens
    )
    twice = training_cost.operations_per_parameter(QUERY, replace(DOCUMENT, tokens=500.0), dim=128)
    once = training_cost.operations_per_parameter(QUERY, DOCUMENT, dim=128)
    assert twice - once > 6 * 500
    assert twice == pytest.approx(once + 6 * 500, rel=0.02)
