from dataclasses import replace

import pytest

from scalingnote.models import flops as tower_flops
from scalingnote.models.flops import PUBLISHED_SHAPES
from scalingnote.plan import training_cost
from scalingnote.plan.training_cost import TowerInput

SHAPE = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
QUERY, DOCUMENT = TowerInput(SHAPE, 16.0), TowerInput(SHAPE, 250.0, rows=2, pooled=3)


def test_a_pair_is_a_query_and_all_its_documents():
    query = tower_flops.row(SHAPE, tokens=16.0, pooled=1, dim=128)
    document = tower_flops.row(SHAPE, tokens=250.0, pooled=3, dim=128)
    assert training_cost.pair_work(QUERY, DOCUMENT, dim=128) == query + document.times(2)


def operations_per_parameter(document: TowerInput, **knobs: bool) -> float:
    work = training_cost.pair_work(QUERY, document, dim=128, **knobs)
    return work.total / SHAPE.non_embedding_parameters


def test_a_parameter_takes_six_operations_a_token_and_some_more():
    tokens = 16 + 2 * 250
    once = operations_per_parameter(DOCUMENT)
    assert 6 * tokens < once < 6.1 * tokens
    # Nearly another forward pass where activations are computed anew; longer rows attend to more.
    assert 7.4 * tokens < operations_per_parameter(DOCUMENT, checkpointing=True) < 8 * tokens
    twice = operations_per_parameter(replace(DOCUMENT, tokens=500.0))
    assert twice - once > 6 * 500
    assert twice == pytest.approx(once + 6 * 500, rel=0.02)
