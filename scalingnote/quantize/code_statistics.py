"""Statistics of the codes of a corpus: use of codes, residual energy, shared prefixes, and drift.

Counts add up: a :class:`CodeTally` over any pieces of the corpus, :class:`PrefixCounts` over ranges of codes,
where only a prefix that continues in the next range is counted twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Integer
from numpy import ndarray
from safetensors import numpy as safetensors

MIN_DRIFT_DOCUMENTS = 100  # the error of their mean residual energy is about 3 %


@dataclass(frozen=True)
class CodeTally:
    """Number of documents, sum of their residual energies after each level, and uses of each code."""

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
    ) -> "CodeTally":
        """Count documents; `size` is the number of codes of a level."""
        usage = [np.bincount(column, minlength=size) for column in codes.T]
        return cls(len(codes), energy.sum(axis=0, dtype=np.float64), np.array(usage, np.int64))

    def __add__(self, other: "CodeTally") -> "CodeTally":
        return CodeTally(
            self.documents + other.documents, self.energy + other.energy, self.usage + other.usage
        )

    @property
    def mean_energy(self) -> Float[ndarray, " levels"]:
        """Mean squared norm of the residual after each level."""
        return self.energy / max(self.documents, 1)


@dataclass(frozen=True)
class PrefixCounts:
    """How the documents in a range of codes share prefixes, as plain values for a JSON record."""

    distinct: list[int]  # prefixes of 1, 2, ... codes
    alone: int  # documents with unique codes
    largest: int  # largest number of documents with equal codes
    first: list[int]  # the lowest codes
    last: list[int]  # the highest
    with_first: int  # documents with the lowest codes
    with_last: int

    @classmethod
    def of(cls, codes: Integer[ndarray, "docs levels"]) -> "PrefixCounts":
        """Count the prefixes of at least one document; `codes` ascend."""
        fresh = np.ones(codes.shape, bool)  # where a prefix of each length begins
        fresh[1:] = np.logical_or.accumulate(codes[1:] != codes[:-1], axis=1)
        sizes = np.diff(np.flatnonzero(fresh[:, -1]), append=len(codes))
        return cls(
            distinct=fresh.sum(axis=0).tolist(),
            alone=int((sizes == 1).sum()),
            largest=int(sizes.max()),
            first=codes[0].tolist(),
            last=codes[-1].tolist(),
            with_first=int(sizes[0]),
            with_last=int(sizes[-1]),
        )

    @classmethod
    def merge(cls, ranges: Iterable["PrefixCounts"]) -> "PrefixCounts":
        """Merge disjoint ranges in ascending order."""
        ranges = list(ranges)
        distinct = np.sum([each.distinct for each in ranges], axis=0)
        alone, largest = (sum(each.alone for each in ranges), max(each.largest for each in ranges))
        tail = ranges[0].with_last  # documents so far with the codes of the last one
        for before, after in pairwise(ranges):
            same = np.equal(before.last, after.first)
            distinct -= np.logical_and.accumulate(same)  # prefixes counted in both ranges
            if same.all():
                alone -= (tail == 1) + (after.with_first == 1)
                tail += after.with_first
                largest = max(largest, tail)
            if not same.all() or after.first != after.last:
                tail = after.with_last
        head = list(takewhile(lambda each: each.first == ranges[0].first, ranges))
        return cls(
            distinct=distinct.tolist(),
            alone=alone,
            largest=largest,
            first=ranges[0].first,
            last=ranges[-1].last,
            with_first=sum(each.with_first for each in head),
            with_last=tail,
        )


def report(tally: CodeTally, spread: PrefixCounts) -> dict[str, Any]:
    """Statistics of the codes of a corpus.

    Per level: `usage`, the share of codes that occur; `entropy_bits`, at most log2(K) when all are equally
    frequent; `residual_energy`, mean squared norm of the residual (1 for unit vectors: nothing explained);
    `distinct_prefixes`, number of distinct tuples of the levels up to this one. Overall: `distinct_codes`;
    `uniqueness`, share of documents with unique codes; `collisions`, documents beyond the first with
    their codes;
    `largest_collision`, largest number of documents with equal codes.
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
        "collisions": documents - spread.distinct[-1],
        "largest_collision": spread.largest,
        "levels": levels,
    }


def drift(new: CodeTally, fitted: CodeTally, *, refit_above: float) -> dict[str, Any]:
    """How documents coded with existing codebooks differ from the corpus that the codebooks were fitted for.

    Args:
        new: tally of the documents coded with existing codebooks.
        fitted: tally of documents of the fitted corpus outside the sample. Documents of the sample would not
            do: after 6 levels their residual energy is lower by an eighth with 120 of them per code, by a
            third with 30, and all new documents would look different.
        refit_above: ratio of residual energies above which new codebooks are proposed.

    Returns:
        Per level: `residual_energy_ratio`, mean of the new documents over that of the fitted;
        `usage_divergence_bits`, the Jensen-Shannon divergence of code frequencies (0: equal, 1: disjoint).
        `refit`: whether the ratio after the last level exceeds `refit_above`, with enough documents of both.
    """
    if not new.documents:
        return {"documents": 0, "levels": [], "refit": False}
    ratio = new.mean_energy / np.maximum(fitted.mean_energy, np.finfo(float).tiny)
    enough = min(new.documents, fitted.documents) >= MIN_DRIFT_DOCUMENTS
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
        "refit": bool(enough and ratio[-1] > refit_above),
    }


def dump_tally(tally: CodeTally) -> bytes:
    """A tally as safetensors."""
    arrays = {"documents": np.array([tally.documents]), "energy": tally.energy, "usage": tally.usage}
    data: bytes = safetensors.save(arrays)
    return data


def load_tally(data: bytes) -> CodeTally:
    """What :func:`dump_tally` wrote."""
    held = safetensors.load(data)
    return CodeTally(int(held["documents"][0]), held["energy"], held["usage"])


def _divergence(one: Int[ndarray, " codes"], other: Int[ndarray, " codes"]) -> float:
    one, other = one / max(one.sum(), 1), other / max(other.sum(), 1)
    return max(0.0, _entropy((one + other) / 2) - (_entropy(one) + _entropy(other)) / 2)


def _entropy(counts: ndarray) -> float:
    share = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(share * np.log2(share)).sum())
