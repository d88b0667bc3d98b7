"""What simulated users do, against one user at a time, place by place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError
from scalingnote.datasets.config import PositionClicks, SampledDataset
from scalingnote.datasets.simulate import (
    browse,
    draw_dwell_times,
    examination_probabilities,
    probability_by_grade,
)


def one_user(attraction, satisfaction, click_draws, satisfaction_draws, *, eta):
    """The clicks of one list, place by place: (clicked, satisfied)."""
    clicked, satisfied = [], []
    for i in range(len(attraction)):
        examination = (i + 1) ** -eta
        clicked.append(bool(click_draws[i] < examination * attraction[i]))
        satisfied.append(clicked[i] and bool(satisfaction_draws[i] < satisfaction[i]))
    return clicked, satisfied


@given(st.sampled_from([0.0, 1.0, 2.0]), st.integers(1, 7), st.integers(0, 10_000), st.booleans())
def test_browse_equals_one_user_at_a_time(eta, places, seed, eager):
    shape = (20, places)
    attraction, satisfaction = np.random.default_rng([seed, 2]).random((2, *shape))
    attraction = np.ones(shape) if eager else attraction
    found = browse(
        attraction,
        satisfaction,
        eta=eta,
        rng=np.random.default_rng(seed),
        satisfaction_rng=np.random.default_rng([seed, 1]),
    )
    click_draws = np.random.default_rng(seed).random(shape)
    satisfaction_draws = np.random.default_rng([seed, 1]).random(shape)
    for row in range(len(attraction)):
        rows = (each[row] for each in (attraction, satisfaction, click_draws, satisfaction_draws))
        clicked, satisfied = one_user(*rows, eta=eta)
        assert found.clicked[row].tolist() == clicked
        assert found.satisfied[row].tolist() == satisfied


def test_nobody_clicks_what_never_attracts():
    rng = np.random.default_rng(0)
    found = browse(np.zeros((9, 3)), np.ones((9, 3)), eta=0.0, rng=rng, satisfaction_rng=rng)
    assert not found.clicked.any()
    assert not found.satisfied.any()


def test_examination():
    np.testing.assert_allclose(examination_probabilities(4, eta=2.0), [1, 1 / 4, 1 / 9, 1 / 16])


def test_by_grade():
    np.testing.assert_allclose(
        probability_by_grade(np.array([0, 0.1, 0.5, 1]), best=0.8, other=0.2), [0.2, 0.2, 0.4, 0.8]
    )
    # A best below the rest's would be odd, and is what was asked for at grade 0 only.
    np.testing.assert_allclose(probability_by_grade(np.array([0, 1.0]), best=0.1, other=0.2), [0.2, 0.2])


def test_dwell():
    rng = np.random.default_rng(0)
    seconds = draw_dwell_times(np.repeat([True, False], 4000), rng=rng).reshape(2, -1)
    np.testing.assert_allclose(np.median(seconds, axis=1), [60, 10], rtol=0.05)


def read(**click_model):
    return validate(SampledDataset, {"click_model": click_model}, source="test").click_model


def test_a_config_may_set_one_field_of_the_default_model():
    assert SampledDataset().click_model == PositionClicks() == read()
    assert read(eta=0.5) == PositionClicks(eta=0.5)
    assert validate(SampledDataset, {"click_model": None}, source="test").click_model is None


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"etta": 0.5}, "did you mean 'eta'"),
        ({"eta": -1.0}, "greater than or equal to 0"),
    ],
)
def test_a_wrong_knob_is_named(knobs, message):
    with pytest.raises(ConfigError, match=message):
        read(**knobs)
