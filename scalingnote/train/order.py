"""The order of rows: which of them meet in a step, a function of the step and a seed, in constant memory.

    step ─► places in the epoch ─permuted─► slots ─► part and draw ─permuted─► rows ─► sorted within a window

Rows are numbered part after part; a part is one source and hop. An epoch has so many slots per part: as many
as it has rows, or as its ratio asks for. A part's draws go through a fresh permutation of it again and again,
across epochs, so a large part with a small ratio is seen whole before any of its rows comes back. Nothing is
remembered: a resumed run, a restarted worker or another number of ranks meets the same batches.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int64, UInt64
from numpy import ndarray

from scalingnote.errors import ConfigError, DataError
from scalingnote.train.config import Batching

_ROUNDS = 12
_SLOTS, _PART, _WINDOW = range(3)  # what a permutation is for: equal keys would tie them together
LengthOf = Callable[[Int64[ndarray, " rows"]], ndarray]


class Order:
    """The rows of every step. Raises DataError or ConfigError for what cannot be dealt out.

    `sizes` are the rows of each part (``click/one``), in the order in which rows are numbered.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, global_batch: int, seed: int, batching: Batching | None = None
    ) -> None:
        batching = batching or Batching()
        self._names, self._batch = list(sizes), global_batch
        self._seed, self._window = seed % 2**64, batching.length_window
        self._sizes = np.array(list(sizes.values()), dtype=np.int64)
        self._homogeneous = batching.sources == "homogeneous"
        rows = int(self._sizes.sum())
        if rows < global_batch:
            raise DataError(
                f"{rows} training rows do not fill one global batch of {global_batch}: "
                "lower global_batch or collect more"
            )
        weights = shares(batching.ratios, sizes) if batching.ratios else None
        self.steps_per_epoch, self._quota = self._plan(rows, weights)
        # A homogeneous batch never straddles two passes over its part: a row would meet itself.
        tail = self._sizes % global_batch if self._homogeneous else 0
        self._pass = np.where(self._sizes < global_batch, self._sizes, self._sizes - tail)
        self._last: tuple[tuple[int, int], Int64[ndarray, "steps batch"]] | None = None

    def steps(self, epochs: float) -> int:
        """Steps of a run."""
        return round(self.steps_per_epoch * epochs)

    def batch(self, step: int, *, length_of: LengthOf | None = None) -> Int64[ndarray, " batch"]:
        """Row numbers of a step's global batch; `length_of` rows is asked where batches are by length."""
        epoch, within = divmod(step, self.steps_per_epoch)
        window, place = divmod(within, self._window)
        if self._last is None or self._last[0] != (epoch, window):  # a cache, nothing more
            self._last = (epoch, window), self._rows_of_window(epoch, window, length_of)
        rows: Int64[ndarray, " batch"] = self._last[1][place]
        return rows

    def _plan(
        self, rows: int, weights: Float64[ndarray, " parts"] | None
    ) -> tuple[int, Int64[ndarray, " parts"]]:
        """Steps of an epoch, and its slots per part: rows, or batches where these are homogeneous."""
        steps = rows // self._batch
        if weights is None:
            quota = self._sizes // self._batch if self._homogeneous else self._sizes
            lost, remedy = quota == 0, "set batching.sources=mixed, or give every part a ratio"
            steps = int(quota.sum()) if self._homogeneous else steps
        else:
            quota = apportion(steps if self._homogeneous else rows, weights)
            lost, remedy = (quota == 0) & (weights > 0), "raise its ratio or lower global_batch"
        if lost.any():
            part = int(np.flatnonzero(lost)[0])
            raise ConfigError(
                f"{self._names[part]} ({self._sizes[part]:,} rows) would not fill one batch of "
                f"{self._batch} in an epoch: {remedy}"
            )
        return steps, quota

    def _rows_of_window(
        self, epoch: int, window: int, length_of: LengthOf | None
    ) -> Int64[ndarray, "steps batch"]:
        first = window * self._window
        steps = np.arange(first, min(first + self._window, self.steps_per_epoch))
        parts, draws = self._draws(epoch, steps)
        rows = self._rows(parts, draws)
        if self._window == 1 or length_of is None:
            return rows
        # Sort within the window, cut into batches again, and take these in any order but by length.
        kinds = parts[:, 0] if self._homogeneous else np.zeros(len(steps), np.int64)
        for kind in np.unique(kinds).tolist():
            at = np.flatnonzero(kinds == kind)
            flat = rows[at].reshape(-1)
            by_length = flat[np.argsort(length_of(flat), kind="stable")].reshape(len(at), -1)
            key = (self._seed, _WINDOW, epoch, window, kind)
            rows[at] = by_length[permuted(np.arange(len(at)), size=len(at), key=key)]
        return rows

    def _draws(
        self, epoch: int, steps: Int64[ndarray, " steps"]
    ) -> tuple[Int64[ndarray, "steps batch"], Int64[ndarray, "steps batch"]]:
        """The part of every row of a batch, and which draw of that part it is, counted over all epochs."""
        row = np.arange(self._batch)
        places = steps[:, None] if self._homogeneous else steps[:, None] * self._batch + row
        ends = np.cumsum(self._quota)
        slots = permuted(places.reshape(-1), size=int(ends[-1]), key=(self._seed, _SLOTS, epoch))
        parts = np.searchsorted(ends, slots, side="right")
        draws = epoch * self._quota[parts] + slots - (ends - self._quota)[parts]
        parts, draws = parts.reshape(places.shape), draws.reshape(places.shape)
        if self._homogeneous:
            return np.repeat(parts, self._batch, axis=1), draws * self._batch + row
        return parts, draws

    def _rows(
        self, parts: Int64[ndarray, "steps batch"], draws: Int64[ndarray, "steps batch"]
    ) -> Int64[ndarray, "steps batch"]:
        starts = np.cumsum(self._sizes) - self._sizes
        passes, within = np.divmod(draws, self._pass[parts])
        rows = np.empty_like(draws)
        for part, number in np.unique(np.stack([parts.ravel(), passes.ravel()]), axis=1).T.tolist():
            chosen = (parts == part) & (passes == number)
            key = (self._seed, _PART, part, number)
            rows[chosen] = starts[part] + permuted(within[chosen], size=int(self._sizes[part]), key=key)
        return rows


def permuted(
    numbers: Int64[ndarray, " numbers"], *, size: int, key: Sequence[int]
) -> Int64[ndarray, " numbers"]:
    """Where the permutation of ``range(size)`` that `key` names sends `numbers`, each on its own.

    A Feistel network permutes the next power of two without a table; what falls outside the range is sent
    on until it falls inside (Black and Rogaway, 2002), twice on average at most.
    """
    keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
    bits = max((size - 1).bit_length(), 2)
    out = numbers.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        out[outside] = _feistel(out[outside], bits=bits, keys=keys)
        outside = outside[out[outside] >= size]
    return np.asarray(out, dtype=np.int64)


def shares(ratios: Mapping[str, float], sizes: Mapping[str, int]) -> Float64[ndarray, " parts"]:
    """The share of each part, summing to 1, from ratios by part (``click/multi``) or source (``click``).

    A source's ratio is dealt out to those of its parts that have none of their own, by their sizes.
    ConfigError for a negative ratio, one of no rows, and for rows that no ratio speaks of.
    """
    owner = {part: part if part in ratios else part.partition("/")[0] for part in sizes}
    for name in sorted(set(ratios) - set(owner.values())):
        raise ConfigError(f"batching.ratios: no rows of {name!r} here; there are {', '.join(sizes)}")
    for part in [part for part, name in owner.items() if name not in ratios]:
        raise ConfigError(f"batching.ratios says nothing of {part} ({sizes[part]:,} rows): 0 leaves it out")
    if min(ratios.values()) < 0 or not sum(ratios.values()) > 0:
        raise ConfigError(f"batching.ratios must be 0 or more, and not all 0; found {dict(ratios)}")
    rows = dict.fromkeys(ratios, 0)
    for part, name in owner.items():
        rows[name] += sizes[part]
    found = np.array([ratios[name] * sizes[part] / rows[name] for part, name in owner.items()])
    return np.asarray(found / found.sum(), dtype=np.float64)


def apportion(total: int, weights: Float64[ndarray, " parts"]) -> Int64[ndarray, " parts"]:
    """`total` dealt out by `weights` (summing to 1) in whole numbers, largest remainders first."""
    exact = total * weights
    out: ndarray = np.floor(exact).astype(np.int64)
    largest = np.argsort(out - exact, kind="stable")
    out[largest[: total - int(out.sum())]] += 1
    return out


def _feistel(
    numbers: UInt64[ndarray, " numbers"], *, bits: int, keys: UInt64[ndarray, " rounds"]
) -> UInt64[ndarray, " numbers"]:
    """A permutation of ``range(2**bits)``: each half in turn is shifted by a hash of the other."""
    width = np.uint64(bits // 2)
    low, high = numbers & _ones(bits // 2), numbers >> width
    for number, key in enumerate(keys):
        if number % 2:
            high ^= _hash(low ^ key) & _ones(bits - bits // 2)
        else:
            low ^= _hash(high ^ key) & _ones(bits // 2)
    return (high << width) | low


def _ones(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _hash(values: UInt64[ndarray, " values"]) -> UInt64[ndarray, " values"]:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
