"""What simulated users like: features of documents in, a factor on the attraction of each for each user out.

A user likes some values of a text (brands, drawn by how frequent they are) and a range of a number (a price
band). A document that has no value is neither liked nor disliked. Profiles tell a part of it, as people do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets.config import Taste
from scalingnote.errors import ConfigError

BANDS = ("low", "middle", "high")


@dataclass(frozen=True)
class Tastes:
    """The likes of all users, for the documents whose features were given."""

    config: Taste
    likes: tuple["_Values | _Range", ...]
    told: tuple[tuple[str, pa.Array], ...]  # columns of the profiles

    @classmethod
    def draw(cls, config: Taste, documents: pa.Table, *, users: int, seed: int) -> "Tastes":
        """Tastes of so many users; equal inputs give equal ones.

        ConfigError where no document has a value.
        """
        likes: list[_Values | _Range] = []
        told: list[tuple[str, pa.Array]] = []
        rng = np.random.default_rng([seed, 0x7A57E])
        for name in config.columns:
            column = documents[name].combine_chunks()
            text = pa.types.is_string(column.type)
            like = _values(column, config, users, rng) if text else _range(column, config, users, rng)
            if not like.known.any():
                raise ConfigError(f"click_model.taste names {name!r}, which has no value in any document")
            silent = rng.random(users) >= config.told
            likes.append(like)
            told.append((f"liked_{name}", pa.array(like.told(), pa.string(), mask=silent)))
        return cls(config, tuple(likes), tuple(told))

    def factor(
        self, users: Int[ndarray, "*#rows"], documents: Int[ndarray, "*#rows"]
    ) -> Float[ndarray, "..."]:
        """What is left of a document's attraction to a user: 1 where all is liked."""
        out = np.ones(np.broadcast_shapes(users.shape, documents.shape))
        for like in self.likes:
            out = np.where(like.disliked(users, documents), out * (1 - self.config.strength), out)
        return out

    def of_documents(self, rows: Sequence[int]) -> "Tastes":
        """The same tastes for some of the documents, renumbered."""
        chosen = np.asarray(rows, np.int64)
        return Tastes(self.config, tuple(like.of_documents(chosen) for like in self.likes), self.told)

    def profiles(self) -> pa.Table:
        """USERS: what each user tells, ``liked_{column}``: a value, or one of BANDS; null where nothing."""
        users = len(self.told[0][1])
        return pa.table({"user_id": user_ids(np.arange(users)), **dict(self.told)})


def user_ids(numbers: Int[ndarray, " rows"]) -> pa.Array:
    """Ids of simulated users."""
    return numbered("u-", numbers)


def numbered(prefix: str, numbers: Int[ndarray, " rows"]) -> pa.Array:
    """Ids that sort as their numbers do."""
    text = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise(prefix, text, "")


@dataclass(frozen=True)
class _Values:
    names: list[str]
    liked: Int[ndarray, "users liked"]  # numbers of names, that liked most first
    value: Int[ndarray, " docs"]  # number of the document's name; -1 where it has none

    @property
    def known(self) -> Bool[ndarray, " docs"]:
        return np.asarray(self.value >= 0)

    def told(self) -> list[str]:
        return [self.names[row[0]] for row in self.liked]

    def disliked(self, users: ndarray, documents: ndarray) -> ndarray:
        liked = np.zeros((len(self.liked), len(self.names)), bool)
        np.put_along_axis(liked, self.liked, True, axis=1)
        value = self.value[documents]
        return np.asarray((value >= 0) & ~liked[users, value])

    def of_documents(self, rows: Int[ndarray, " rows"]) -> "_Values":
        return _Values(self.names, self.liked, self.value[rows])


@dataclass(frozen=True)
class _Range:
    low: Float[ndarray, " users"]  # ranks in [0, 1]
    high: Float[ndarray, " users"]
    rank: Float[ndarray, " docs"]  # NaN where it has no number

    @property
    def known(self) -> Bool[ndarray, " docs"]:
        return np.asarray(np.isfinite(self.rank))

    def told(self) -> list[str]:
        span = np.maximum(1 - (self.high - self.low), 1e-9)
        return [BANDS[min(int(3 * place), 2)] for place in (self.low / span).tolist()]

    def disliked(self, users: ndarray, documents: ndarray) -> ndarray:
        rank = self.rank[documents]
        return np.asarray((rank < self.low[users]) | (rank > self.high[users]))

    def of_documents(self, rows: Int[ndarray, " rows"]) -> "_Range":
        return _Range(self.low, self.high, self.rank[rows])


def _values(column: pa.Array, config: Taste, users: int, rng: np.random.Generator) -> _Values:
    coded = pc.dictionary_encode(pc.if_else(pc.equal(column, ""), None, column))
    value = pc.fill_null(coded.indices, -1).to_numpy().astype(np.int64)
    share = np.bincount(value[value >= 0], minlength=len(coded.dictionary)).astype(np.float64)
    # The largest of log share + Gumbel noise: draws without replacement, by share.
    keys = np.log(share) + rng.gumbel(size=(users, len(share)))
    liked = np.argsort(-keys, axis=1, kind="stable")[:, : config.values]
    return _Values(coded.dictionary.to_pylist(), liked, value)


def _range(column: pa.Array, config: Taste, users: int, rng: np.random.Generator) -> _Range:
    numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
    there = np.isfinite(numbers)
    rank = np.full(len(numbers), np.nan)
    order = np.sort(numbers[there])
    rank[there] = np.searchsorted(order, numbers[there], side="right") / max(len(order), 1)
    low = rng.random(users) * (1 - config.band)
    return _Range(low, low + config.band, rank)
