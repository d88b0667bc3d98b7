"""Settings that the configs of planner, pseudo_queries, collect and mine refuse, with a remedy."""

import pytest

from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError
from scalingnote.triplets.config import CollectConfig, Learned, MineConfig, PseudoQueriesConfig, Statistics

CROSS = {"kind": "cross_encoder", "path": "x"}


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (Statistics, {"corpus": "logs"}, "corpus"),
        (Statistics, {"fields": []}, "fields"),
        (Learned, {"backbone": {"kind": "scratch", "architecture": "qwen2"}}, "set bert"),
        (PseudoQueriesConfig, {"mix": {"window": 0}}, "shares must be above 0: remove window"),
        (PseudoQueriesConfig, {"mix": {"windows": 1}}, "window"),
        (CollectConfig, {"top_k": 5, "top_t": 7, "num_negatives": 3}, "increase top_t"),
        (CollectConfig, {"top_t": 10_001}, "documents that are read for a query: lower it"),
        (CollectConfig, {"ranker": {**CROSS, "candidates": 49}}, "is below top_t=50: increase it"),
        (CollectConfig, {"sources": ()}, "sources"),
        (CollectConfig, {"query_generation": {"sigmas": (0.1, 0.1)}}, "has a duplicate"),
        (MineConfig, {"first_rank": 5, "last_rank": 6, "num_negatives": 3}, "increase last_rank"),
    ],
)
def test_impossible_settings_are_refused(config, values, message):
    with pytest.raises(ConfigError, match=message):
        validate(config, values, source="test")


def test_ranks_may_have_exactly_room_for_the_negatives():
    assert CollectConfig(top_k=5, top_t=8, num_negatives=3).top_t == 8
