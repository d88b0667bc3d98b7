"""What simulated users do, against one user at a time, place by place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.config import validate
from scalingnote.datasets.config import (
    CascadeClicks,
    DatasetConfig,
    DynamicBayesianClicks,
    PositionClicks,
)
from scalingnote.datasets.simulate import (
    browse,
    draw_dwell_times,
    examination_probabilities,
    probability_by_grade,
)
from scalingnote.errors import ConfigError

probability = st.sampled_from([0.0, 0.3, 0.8, 1.0])
configs = st.one_of(
    st.builds(PositionClicks, eta=st.sampled_from([0.0, 1.0, 2.0])),
    st.just(CascadeClicks()),
    st.builds(DynamicBayesianClicks, perseverance=probability),
)


def one_user(kind, attraction, satisfaction, luck, satisfying, persevering, *, eta, gamma):
    """The papers' stories, told place by place: (clicked, satisfied) of one list."""
    clicked, satisfied = [False] * len(attraction), [False] * len(attraction)
    for i in range(len(attraction)):
        examined = (i + 1) ** -eta if kind == "position" else 1.0
        clicked[i] = bool(luck[i] < examined * attraction[i])
        satisfied[i] = clicked[i] and bool(satisfying[i] < satisfaction[i])
        if kind == "cascade" and clicked[i]:
            break
        if kind == "dbn" and (satisfied[i] or not persevering[i] < gamma):
            break
    return clicked, satisfied


@given(configs, st.integers(1, 7), st.integers(0, 10_000), st.booleans())
def test_browse_equals_one_user_at_a_time(config, places, seed, eager):
    shape = (20, places)
    attraction, satisfaction = np.random.default_rng([seed, 2]).random((2, *shape))
    attraction = np.ones(shape) if eager else attraction
    found = browse(
        attraction,
        satisfaction,
        config=config,
        rng=np.random.default_rng(seed),
        second=np.random.default_rng([seed, 1]),
    )
    second = np.random.default_rng([seed, 1])
    luck, satisfying, persevering = (
        np.random.default_rng(seed).random(shape),
        second.random(shape),
        second.random(shape),
    )
    for row in range(len(attraction)):
        clicked, satisfied = one_user(
            config.kind,
            attraction[row],
            satisfaction[row],
            luck[row],
            satisfying[row],
            persevering[row],
            eta=getattr(config, "eta", 0.0),
            gamma=getattr(config, "perseverance", 1.0),
        )
        assert found.clicked[row].tolist() == clicked
        assert found.satisfied[row].tolist() == satisfied


def test_cascade_is_the_dynamic_bayesian_user_whom_every_click_satisfies():
    attraction, all_satisfy = np.random.default_rng(0).random((500, 8)), np.ones((500, 8))
    cascade, dbn = (
        browse(
            attraction,
            all_satisfy,
            config=config,
            rng=np.random.default_rng(1),
            second=np.random.default_rng(2),
        )
        for config in (CascadeClicks(), DynamicBayesianClicks(perseverance=1.0))
    )
    np.testing.assert_array_equal(cascade.clicked, dbn.clicked)


def test_nobody_clicks_what_never_attracts():
    for config in (PositionClicks(eta=0.0), CascadeClicks(), DynamicBayesianClicks()):
        found = browse(
            np.zeros((9, 3)),
            np.ones((9, 3)),
            config=config,
            rng=np.random.default_rng(0),
            second=np.random.default_rng(0),
        )
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
    config = PositionClicks(satisfied_dwell_s=50, unsatisfied_dwell_s=5, dwell_sigma=0)
    seconds = draw_dwell_times(np.array([True, False]), config=config, rng=np.random.default_rng(0))
    np.testing.assert_allclose(seconds, [50, 5])


def read(**click_model):
    return validate(DatasetConfig, {"click_model": click_model}, source="test").click_model


def test_the_kind_tells_the_models_apart():
    assert DatasetConfig().click_model == PositionClicks() == read() == read(kind="position")
    assert read(eta=0.5) == PositionClicks(eta=0.5)
    assert read(kind="cascade", noise=0.1) == CascadeClicks(noise=0.1)
    assert read(kind="dbn", perseverance=0.5) == DynamicBayesianClicks(perseverance=0.5)
    assert DatasetConfig(click_model=CascadeClicks()).click_model == CascadeClicks()
    assert validate(DatasetConfig, {"click_model": None}, source="test").click_model is None


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kind": "cascades"}, "'position', 'cascade', 'dbn'"),
        ({"kind": "cascade", "eta": 1.0}, "unknown key 'click_model.cascade.eta'"),
        ({"perseverence": 0.5}, "did you mean 'perseverance'"),
        ({"satisfied_dwell_s": 5.0}, "satisfied_dwell_s=5 is below unsatisfied_dwell_s=10"),
    ],
)
def test_a_wrong_knob_is_named(knobs, message):
    with pytest.raises(ConfigError, match=message):
        read(**knobs)
