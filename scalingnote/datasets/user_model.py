"""What a simulated user does with a list of results: which are clicked, which clicks satisfy, for how long.

Three click models, told apart by their config. In all of them a result is clicked when it is examined and
found attractive, and a click satisfies with a probability of its own; they differ in what is examined.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from scalingnote.datasets.config import (
    AnyClickModel,
    CascadeClicks,
    ClickModelConfig,
    DynamicBayesianClicks,
    PositionClicks,
)


@dataclass(frozen=True)
class Response:
    """What came of each place of each list."""

    clicked: Bool[ndarray, "sessions k"]
    satisfied: Bool[ndarray, "sessions k"]  # only where clicked


def browse(
    attraction: Float[ndarray, "sessions k"],
    satisfaction: Float[ndarray, "sessions k"],
    *,
    config: AnyClickModel,
    rng: np.random.Generator,
    second: np.random.Generator,
) -> Response:
    """Clicks of one user per list, given P(attractive) and P(satisfied | clicked) of each place.

    Every model takes the same number of draws from `rng`, so that whatever else is drawn from it (lists,
    users) does not depend on the model; what one model draws and another does not comes from `second`.
    """
    luck = rng.random(attraction.shape)
    satisfying = second.random(attraction.shape) < satisfaction
    match config:
        case PositionClicks():
            clicked = luck < examination(attraction.shape[1], eta=config.eta) * attraction
        case CascadeClicks():
            attractive = luck < attraction
            clicked = attractive & _reached(~attractive)
        case DynamicBayesianClicks():
            attractive = luck < attraction
            persevering = second.random(attraction.shape) < config.perseverance
            clicked = attractive & _reached(~(attractive & satisfying) & persevering)
    return Response(clicked, clicked & satisfying)


def examination(positions: int, *, eta: float) -> Float[ndarray, " positions"]:
    """P(examined) of positions 1, 2, ... in the position-based model: 1 / position ** eta."""
    return np.arange(1, positions + 1, dtype=np.float64) ** -eta


def by_grade(grades: Float[ndarray, "*shape"], *, best: float, other: float) -> Float[ndarray, "*shape"]:
    """A probability for each grade in [0, 1]: `best` at 1, others in proportion, but never below `other`."""
    return np.where(grades > 0, np.maximum(best * grades, other), other)


def dwell(
    satisfied: Bool[ndarray, " clicks"], *, config: ClickModelConfig, rng: np.random.Generator
) -> Float[ndarray, " clicks"]:
    """Seconds spent on each clicked document: lognormal, with the median of its kind of click."""
    median = np.where(satisfied, config.satisfied_dwell_s, config.unsatisfied_dwell_s)
    return median * np.exp(config.dwell_sigma * rng.standard_normal(satisfied.shape))


def _reached(goes_on: Bool[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Whether a reader from the top gets to each place, if `goes_on` says where they would read on."""
    reached = np.ones_like(goes_on)
    np.logical_and.accumulate(goes_on[:, :-1], axis=1, out=reached[:, 1:])
    return reached
