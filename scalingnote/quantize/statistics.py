"""How codes are used: counts that add up over disjoint pieces of a corpus, and what is read off them.

A piece here is a range of codes: all documents whose codes lie between two bounds. A :class:`Tally` adds up
whatever the pieces are; prefixes (:class:`Spread`) are counted where they lie, and only one that reaches from
a range into the next is seen twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Integer
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.quantize.semantic_id import runs

ENOUGH = 100  # documents before their mean residual energy is trusted: its error is then some 3 %


@dataclass(frozen=True)
class Tally:
    """Of some documents: their number, their summed residual energy after each level, uses of each code."""

    documents: int
    energy: Float[ndarray, " levels"]
    usage: Int[ndarray, "levels codes"]

    @classmethod
    def of(
        cls,
        codes: Integer[ndarray, "docs levels"],
        energy: Float[ndarray, "docs levels"],
        *,
        size: int,
    ) -> "Tally":
        """Counted; `size` is the number of codes of a level."""
        usage = [np.bincount(column, minlength=size) for column in codes.T]
        return cls(len(codes), energy.sum(axis=0, dtype=np.float64), np.array(usage, np.int64))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.documents + other.documents, self.energy + other.energy, self.usage + other.usage)

    @property
    def mean_energy(self) -> Float[ndarray, " levels"]:
        """Mean squared norm of what each level leaves over."""
        return self.energy / max(self.documents, 1)


@dataclass(frozen=True)
class Spread:
    """Of all documents in a range of codes: how they share prefixes. Plain values, for a record."""

    distinct: list[int]  # prefixes of 1, 2, ... codes
    alone: int  # documents whose codes no other document has
    largest: int  # documents with the same codes, at most
    first: list[int]  # the lowest codes
    last: list[int]  # the highest

    @classmethod
    def of(cls, codes: Integer[ndarray, "docs levels"]) -> "Spread":
        """Counted; there must be documents."""
        order, fresh = runs(codes)
        sizes = np.diff(np.flatnonzero(fresh[:, -1]), append=len(codes))
        return cls(
            distinct=fresh.sum(axis=0).tolist(),
            alone=int((sizes == 1).sum()),
            largest=int(sizes.max()),
            first=codes[order[0]].tolist(),
            last=codes[order[-1]].tolist(),
        )

    @classmethod
    def merged(cls, ranges: Iterable["Spread"]) -> "Spread":
        """Of ranges in ascending order, none of whose codes lie in two."""
        ranges = list(ranges)
        distinct = np.sum([each.distinct for each in ranges], axis=0)
        for before, after in pairwise(ranges):
            same = np.equal(before.last, after.first)
            distinct -= np.logical_and.accumulate(same)  # the prefixes that reach across
        return cls(
            distinct=distinct.tolist(),
            alone=sum(each.alone for each in ranges),
            largest=max(each.largest for each in ranges),
            first=ranges[0].first,
            last=ranges[-1].last,
        )


def report(tally: Tally, spread: Spread, *, collisions: int) -> dict[str, Any]:
    """How the codes of a corpus are used.

    Per level: `usage`, the share of codes that occur; `entropy_bits`, at most log2(K) when all are equally
    frequent; `residual_energy`, mean squared norm left over (1 is nothing explained, for unit vectors);
    `distinct_prefixes`, how many different tuples the levels up to this one form. Overall: `distinct_codes`;
    `uniqueness`, the share of documents whose codes no other has; `collisions`, documents that needed a
    suffix above 0; `largest_collision`, how many documents share one tuple of codes at most.
    """
    documents = tally.documents
    levels = [
        {
            "level": level,
            "usage": float((counts > 0).mean()),
            "entropy_bits": _entropy(counts),
            "residual_energy": float(energy),
            "distinct_prefixes": distinct,
        }
        for level, (counts, energy, distinct) in enumerate(
            zip(tally.usage, tally.mean_energy, spread.distinct, strict=True)
        )
    ]
    return {
        "documents": documents,
        "distinct_codes": spread.distinct[-1],
        "uniqueness": spread.alone / documents,
        "collisions": collisions,
        "largest_collision": spread.largest,
        "levels": levels,
    }


def drift(new: Tally, fitted: Tally, *, refit_above: float) -> dict[str, Any]:
    """How documents coded with existing codebooks differ from those that the codebooks were made for.

    `fitted` counts documents of that corpus which the codebooks were not fitted on: what those of the sample
    leave over after 6 levels is less by an eighth with 120 of them per code, by a third with 30, and beside
    them everything new would look strange.

    Per level: `residual_energy_ratio`, mean of the new over that of the fitted; `usage_divergence_bits`, the
    Jensen-Shannon divergence of how often codes are used (0: alike, 1: nothing in common). `refit` proposes
    new codebooks: after the last level the new documents leave over more than `refit_above` times as much,
    and both are enough to tell.
    """
    if not new.documents:
        return {"documents": 0, "levels": [], "refit": False}
    ratio = new.mean_energy / np.maximum(fitted.mean_energy, np.finfo(float).tiny)
    return {
        "documents": new.documents,
        "levels": [
            {
                "level": level,
                "residual_energy_ratio": float(ratio[level]),
                "usage_divergence_bits": _divergence(new.usage[level], fitted.usage[level]),
            }
            for level in range(len(ratio))
        ],
        "refit": bool(min(new.documents, fitted.documents) >= ENOUGH and ratio[-1] > refit_above),
    }


def dump(tally: Tally) -> bytes:
    """A tally as safetensors."""
    arrays = {"documents": np.array([tally.documents]), "energy": tally.energy, "usage": tally.usage}
    data: bytes = safetensors.save(arrays)
    return data


def load(data: bytes) -> Tally:
    """What :func:`dump` wrote."""
    held = safetensors.load(data)
    return Tally(int(held["documents"][0]), held["energy"], held["usage"])


def _divergence(one: Int[ndarray, " codes"], other: Int[ndarray, " codes"]) -> float:
    one, other = one / max(one.sum(), 1), other / max(other.sum(), 1)
    return max(0.0, _entropy((one + other) / 2) - (_entropy(one) + _entropy(other)) / 2)


def _entropy(counts: ndarray) -> float:
    share = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(share * np.log2(share)).sum())
