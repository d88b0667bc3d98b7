"""Simulated users: which results of a list they click, how long they stay, and which features they prefer.

Each click model has its own config class. In all of them a result is clicked if it is examined and
attractive, and a click satisfies with its own probability. The models differ in which places are examined.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets.config import (
    AnyClickModel,
    CascadeClicks,
    ClickModelConfig,
    DynamicBayesianClicks,
    PositionClicks,
    Taste,
)
from scalingnote.errors import ConfigError


@dataclass(frozen=True)
class UserResponse:
    """Clicks at each place of each list."""

    clicked: Bool[ndarray, "sessions k"]
    satisfied: Bool[ndarray, "sessions k"]  # only where clicked


def browse(
    attraction: Float[ndarray, "sessions k"],
    satisfaction: Float[ndarray, "sessions k"],
    *,
    config: AnyClickModel,
    rng: np.random.Generator,
    second: np.random.Generator,
) -> UserResponse:
    """Simulate the clicks of one user per list.

    Args:
        attraction: P(click | examined) of each place.
        satisfaction: P(satisfied | clicked) of each place.
        config: selects the click model by its class.
        rng: every model takes the same number of draws from it, so that later draws (lists, users) do not
            depend on the model.
        second: generator for the draws that only some models make.
    """
    uniform = rng.random(attraction.shape)
    satisfying = second.random(attraction.shape) < satisfaction
    match config:
        case PositionClicks():
            clicked = uniform < examination_probabilities(attraction.shape[1], eta=config.eta) * attraction
        case CascadeClicks():
            attractive = uniform < attraction
            clicked = attractive & _reached(~attractive)
        case DynamicBayesianClicks():
            attractive = uniform < attraction
            persevering = second.random(attraction.shape) < config.perseverance
            clicked = attractive & _reached(~(attractive & satisfying) & persevering)
    return UserResponse(clicked, clicked & satisfying)


def examination_probabilities(positions: int, *, eta: float) -> Float[ndarray, " positions"]:
    """P(examined) of positions 1, 2, ... in the position-based model: 1 / position ** eta."""
    return np.arange(1, positions + 1, dtype=np.float64) ** -eta


def probability_by_grade(
    grades: Float[ndarray, "*shape"], *, best: float, other: float
) -> Float[ndarray, "*shape"]:
    """A probability for each grade in [0, 1]: `best` for grade 1, proportional below, at least `other`."""
    return np.where(grades > 0, np.maximum(best * grades, other), other)


def draw_dwell_times(
    satisfied: Bool[ndarray, " clicks"], *, config: ClickModelConfig, rng: np.random.Generator
) -> Float[ndarray, " clicks"]:
    """Seconds spent on each clicked document: lognormal, with the median of its kind of click."""
    median = np.where(satisfied, config.satisfied_dwell_s, config.unsatisfied_dwell_s)
    return median * np.exp(config.dwell_sigma * rng.standard_normal(satisfied.shape))


def _reached(continues: Bool[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Whether a user who reads from the top reaches each place; `continues` says where they would read on."""
    reached = np.ones_like(continues)
    np.logical_and.accumulate(continues[:, :-1], axis=1, out=reached[:, 1:])
    return reached


BANDS = ("low", "middle", "high")


@dataclass(frozen=True)
class Tastes:
    """Preferences of all users for the documents whose features were given to :meth:`draw`.

    A user likes some values of a text column (brands, drawn by frequency) and a range of a number column
    (a price band). A document without a value is neither liked nor disliked.
    """

    config: Taste
    likes: tuple["_LikedValues | _LikedRange", ...]
    profile_columns: tuple[tuple[str, pa.Array], ...]

    @classmethod
    def draw(cls, config: Taste, documents: pa.Table, *, users: int, seed: int) -> "Tastes":
        """Draw the tastes of `users` users; equal inputs give equal tastes.

        Raises:
            ConfigError: a column of `config` has no value in any document.
        """
        likes: list[_LikedValues | _LikedRange] = []
        profiles: list[tuple[str, pa.Array]] = []
        rng = np.random.default_rng([seed, 0x7A57E])
        for name in config.columns:
            column = documents[name].combine_chunks()
            kind = _LikedValues if pa.types.is_string(column.type) else _LikedRange
            like = kind.draw(column, config, users, rng)
            if not like.has_value.any():
                raise ConfigError(f"click_model.taste names {name!r}, which has no value in any document")
            # As in real profiles, some users do not say what they like.
            undisclosed = rng.random(users) >= config.told
            likes.append(like)
            profiles.append((f"liked_{name}", pa.array(like.favorites(), pa.string(), mask=undisclosed)))
        return cls(config, tuple(likes), tuple(profiles))

    def factor(
        self, users: Int[ndarray, "*#rows"], documents: Int[ndarray, "*#rows"]
    ) -> Float[ndarray, "..."]:
        """Multiplier of a document's attraction to a user: 1 if nothing about it is disliked."""
        out = np.ones(np.broadcast_shapes(users.shape, documents.shape))
        for like in self.likes:
            out = np.where(like.disliked(users, documents), out * (1 - self.config.strength), out)
        return out

    def of_documents(self, rows: Sequence[int]) -> "Tastes":
        """The same tastes for a subset of the documents, which are renumbered."""
        chosen = np.asarray(rows, np.int64)
        return Tastes(
            self.config, tuple(like.of_documents(chosen) for like in self.likes), self.profile_columns
        )

    def profiles(self) -> pa.Table:
        """USERS with a column ``liked_{column}``: a value, or one of BANDS; null if the user does not say."""
        users = len(self.profile_columns[0][1])
        return pa.table({"user_id": user_ids(np.arange(users)), **dict(self.profile_columns)})


def user_ids(numbers: Int[ndarray, " rows"]) -> pa.Array:
    """Ids of simulated users."""
    return numbered_ids("u-", numbers)


def numbered_ids(prefix: str, numbers: Int[ndarray, " rows"]) -> pa.Array:
    """Zero-padded ids, which sort in the order of their numbers."""
    text = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise(prefix, text, "")


@dataclass(frozen=True)
class _LikedValues:
    names: list[str]
    liked: Int[ndarray, "users liked"]  # indices into `names`, favorite first
    value: Int[ndarray, " docs"]  # index into `names`; -1 for a document without a value

    @classmethod
    def draw(cls, column: pa.Array, config: Taste, users: int, rng: np.random.Generator) -> "_LikedValues":
        coded = pc.dictionary_encode(pc.if_else(pc.equal(column, ""), None, column))
        value = pc.fill_null(coded.indices, -1).to_numpy().astype(np.int64)
        share = np.bincount(value[value >= 0], minlength=len(coded.dictionary)).astype(np.float64)
        # The largest of log share + Gumbel noise are a draw without replacement, proportional to share.
        keys = np.log(share) + rng.gumbel(size=(users, len(share)))
        liked = np.argsort(-keys, axis=1, kind="stable")[:, : config.values]
        return cls(coded.dictionary.to_pylist(), liked, value)

    @property
    def has_value(self) -> Bool[ndarray, " docs"]:
        return np.asarray(self.value >= 0)

    def favorites(self) -> list[str]:
        return [self.names[row[0]] for row in self.liked]

    def disliked(self, users: ndarray, documents: ndarray) -> ndarray:
        liked = np.zeros((len(self.liked), len(self.names)), bool)
        np.put_along_axis(liked, self.liked, True, axis=1)
        value = self.value[documents]
        return np.asarray((value >= 0) & ~liked[users, value])

    def of_documents(self, rows: Int[ndarray, " rows"]) -> "_LikedValues":
        return replace(self, value=self.value[rows])


@dataclass(frozen=True)
class _LikedRange:
    low: Float[ndarray, " users"]  # ranks in [0, 1]
    high: Float[ndarray, " users"]
    rank: Float[ndarray, " docs"]  # NaN for a document without a number

    @classmethod
    def draw(cls, column: pa.Array, config: Taste, users: int, rng: np.random.Generator) -> "_LikedRange":
        numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
        finite = np.isfinite(numbers)
        rank = np.full(len(numbers), np.nan)
        order = np.sort(numbers[finite])
        rank[finite] = np.searchsorted(order, numbers[finite], side="right") / max(len(order), 1)
        low = rng.random(users) * (1 - config.band)
        return cls(low, low + config.band, rank)

    @property
    def has_value(self) -> Bool[ndarray, " docs"]:
        return np.asarray(np.isfinite(self.rank))

    def favorites(self) -> list[str]:
        span = np.maximum(1 - (self.high - self.low), 1e-9)
        return [BANDS[min(int(3 * place), 2)] for place in (self.low / span).tolist()]

    def disliked(self, users: ndarray, documents: ndarray) -> ndarray:
        rank = self.rank[documents]
        return np.asarray((rank < self.low[users]) | (rank > self.high[users]))

    def of_documents(self, rows: Int[ndarray, " rows"]) -> "_LikedRange":
        return replace(self, rank=self.rank[rows])
