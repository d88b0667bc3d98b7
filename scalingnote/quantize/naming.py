"""Semantic IDs of a coded corpus sorted by code, in ranges, and the statistics of their codes.

    coded parts ─scatter by range─► ranges ─sort─► files by code · statistics

No process holds the codes of all documents. A suffix depends only on the document
(:func:`scalingnote.quantize.semantic_id.suffixes`), so the parts have their IDs as soon as they are coded.
Documents are then partitioned by ranges of (codes, suffix); the bounds of the ranges come from a sample. A
task per range sorts the documents, checks that no two have the same ID, and counts. Counts are added: a
:data:`Tally` over any pieces of the corpus, :class:`PrefixCounts` over ranges, with a correction for prefixes
that continue in the next range. Every step is a recorded task over files (storage/shuffle.py): after a kill,
only unfinished tasks are repeated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int, Integer, Shaped
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.core.errors import DataError
from scalingnote.core.parts import Executor
from scalingnote.quantize import semantic_id
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.arrow import to_arrow, to_matrix
from scalingnote.storage.artifact import Artifact, Draft, Part, read_table, write_table
from scalingnote.storage.shuffle import group_by_size, run_slices

ROWS = 1 << 22  # documents of a task, which needs about 270 bytes of memory for each: 1.1 GB
KEYS_PER_RANGE = 1024  # sampled to determine the bounds of ranges
MIN_DRIFT_DOCUMENTS = 100  # the error of their mean residual energy is about 3 %
# Counts of some documents: `documents` [1], their number; `energy` [levels], the sums of their residual
# energies after each level; `usage` [levels, codes], the uses of each code.
Tally = dict[str, ndarray]


@dataclass(frozen=True)
class CodedCorpus:
    """A corpus with codes."""

    output: str  # folder of the files by code
    work: str  # folder of the coded parts and of intermediate files
    levels: int
    size: int  # codes per level
    earlier: Artifact | None = None  # earlier IDs from the same codebooks


class Counted(NamedTuple):
    """Statistics of all documents of a corpus.

    `unseen` counts the documents that the codebooks were not fitted on. If there are earlier IDs, it counts
    only those documents of them with an ID that is not an earlier one.
    """

    all: Tally
    unseen: Tally
    spread: "PrefixCounts"


def coded_table(
    doc_ids: pa.ChunkedArray,
    codes: Shaped[ndarray, "docs levels"],
    energy: Shaped[ndarray, "docs levels"],
    sampled: Bool[ndarray, " docs"],
) -> pa.Table:
    """Build the table of a coded part, for :func:`sort`.

    `energy` is the squared norm of the residual after each level, `sampled` marks the documents that the
    codebooks were fitted on.
    """
    columns = {
        "codes": to_arrow(codes.astype(np.uint16)),
        "suffix": pa.array(semantic_id.suffixes(doc_ids)),
        "energy": to_arrow(energy),
        "sampled": pa.array(sampled),
    }
    return pa.table({"doc_id": doc_ids.cast(pa.string()), **columns})


def sort(
    draft: Draft,
    parts: Sequence[str],
    rows: Sequence[int],
    *,
    levels: int,
    size: int,
    earlier: Artifact | None,
    each: Executor,
) -> Counted:
    """Write the files by code and their summary, and count.

    Args:
        draft: of the semantic IDs; its work folder holds the coded parts.
        parts: names of the coded parts.
        rows: number of documents of each of them.
        levels: codes of a document.
        size: codes of a level.
        earlier: earlier IDs from the same codebooks.
        each: runs the tasks.

    Raises:
        DataError: two documents have the same ID.
    """
    corpus = CodedCorpus(draft.uri, draft.work(), levels, size, earlier)
    slices = [[parts[place] for place in group] for group in group_by_size(rows, limit=ROWS)]
    run = partial(run_slices, folder=fs.join(corpus.work, "naming"), each=each, section="quantize")
    range_count = -(-sum(rows) // ROWS)
    # The names of the steps also name their records: under other names, those of a killed run are not found.
    sample = partial(_sample_keys, corpus=corpus, every=max(1, ROWS // KEYS_PER_RANGE))
    keys = sorted(key for some in run("sample", sample, slices) for key in some) if range_count > 1 else []
    # Codes and suffix of the first document of each range but the first one.
    bounds = [keys[len(keys) * number // range_count] for number in range(1, range_count)]
    run("scatter", partial(_scatter, corpus=corpus, bounds=bounds), slices)
    ranges = run("sort", partial(_sort_range, corpus=corpus), range(range_count), unit="ranges")
    ranges = [each_range for each_range in ranges if each_range["documents"]]
    spreads = [PrefixCounts(**each_range["spread"]) for each_range in ranges]
    summary = []
    for each_range, spread in zip(ranges, spreads, strict=True):
        draft.register(each_range["name"], Part(**each_range["part"]))
        ends = {"first": spread.first, "last": spread.last}
        summary.append({"name": each_range["name"], "rows": each_range["documents"], **ends})
    draft.write_json(semantic_id.BY_CODE_SUMMARY, summary)
    everything, unseen = (_sum(corpus, ranges, which) for which in ("all", "unseen"))
    return Counted(everything, unseen, PrefixCounts.merge(spreads))


def _sample_keys(item: tuple[int, list[str]], *, corpus: CodedCorpus, every: int) -> list[list[int]]:
    """Read the codes and the suffix of every `every`-th document of a slice."""
    table = pa.concat_tables([_read(corpus, part, ["codes", "suffix"]) for part in item[1]])
    chosen = table.take(np.arange(0, len(table), every))
    codes = to_matrix(chosen["codes"]).tolist()
    return [[*row, suffix] for row, suffix in zip(codes, chosen["suffix"].to_pylist(), strict=True)]


def _scatter(item: tuple[int, list[str]], *, corpus: CodedCorpus, bounds: list[list[int]]) -> int:
    """Write the documents of a slice to the files of their ranges."""
    table = pa.concat_tables([_read(corpus, part) for part in item[1]])
    ends = np.array(bounds, np.int64).reshape(-1, corpus.levels + 1)
    bucket = np.searchsorted(semantic_id.sortable(ends[:, :-1], ends[:, -1]), _keys(table), "right")
    target = fs.join(corpus.work, "scattered")
    shuffle.scatter(table, bucket.astype(np.int64), target=target, name=f"{item[0]:05d}")
    return len(table)


def _sort_range(item: tuple[int, int], *, corpus: CodedCorpus) -> dict[str, Any]:
    """Sort the documents of a range, write them by code, and count."""
    number = item[1]
    wide = {"codes": pa.list_(pa.uint16(), corpus.levels), "suffix": pa.int64()}
    rest = {"energy": pa.list_(pa.float32(), corpus.levels), "sampled": pa.bool_()}
    layout = pa.schema({"doc_id": pa.string(), **wide, **rest})
    table = shuffle.gather(fs.join(corpus.work, "scattered"), number, schema=layout)
    if not len(table):
        return {"documents": 0}
    keys = _keys(table)
    order = np.argsort(keys, kind="stable")
    table, keys = table.take(order).combine_chunks(), keys[order]
    if len(same := np.flatnonzero(keys[1:] == keys[:-1])):
        first, second = table["doc_id"].slice(int(same[0]), 2).to_pylist()
        raise DataError(f"documents {first!r} and {second!r} have one semantic ID: rename one of them")
    codes, energy = to_matrix(table["codes"]), to_matrix(table["energy"])
    unseen = ~table["sampled"].to_numpy() & ~_has_earlier_id(corpus, codes, keys)
    for which, chosen in (("all", slice(None)), ("unseen", unseen)):
        counts = tally(codes[chosen], energy[chosen], size=corpus.size)
        fs.write_bytes(_tally_file(corpus, number, which), safetensors.save(counts))
    file = f"by_code/part-{number:05d}.arrow"
    columns = {f"code_{level}": pa.array(column) for level, column in enumerate(codes.T)}
    by_code = pa.table({"doc_id": table["doc_id"], "suffix": table["suffix"], **columns})
    return {
        "number": number,
        "name": file,
        "part": asdict(write_table(fs.join(corpus.output, file), by_code)),
        "documents": len(table),
        "spread": asdict(PrefixCounts.of(codes)),
    }


def _has_earlier_id(
    corpus: CodedCorpus, codes: Shaped[ndarray, "docs levels"], keys: Shaped[ndarray, " docs"]
) -> Bool[ndarray, " docs"]:
    """Return which documents of a sorted range have an ID that is among the earlier ones."""
    known = np.zeros(len(keys), bool)
    if corpus.earlier is not None:
        by_code = semantic_id.ByCode(corpus.earlier)
        for piece in by_code.between(codes[0].tolist(), codes[-1].tolist()):
            known |= np.isin(keys, semantic_id.sortable(piece.matrix(), piece.suffix))
    return known


def _keys(table: pa.Table) -> Shaped[ndarray, " docs"]:
    return semantic_id.sortable(to_matrix(table["codes"]), table["suffix"].to_numpy())


def _sum(corpus: CodedCorpus, ranges: Sequence[dict[str, Any]], which: str) -> Tally:
    """Add the counts of all ranges, loaded one at a time because each range has a count per code."""
    total = tally(np.empty((0, corpus.levels), int), np.empty((0, corpus.levels)), size=corpus.size)
    for each_range in ranges:
        more = safetensors.load(fs.read_bytes(_tally_file(corpus, each_range["number"], which)))
        total = {name: total[name] + more[name] for name in total}
    return total


def _tally_file(corpus: CodedCorpus, number: int, which: str) -> str:
    return fs.join(corpus.work, "naming", which, f"{number:05d}.safetensors")


def _read(corpus: CodedCorpus, part: str, columns: list[str] | None = None) -> pa.Table:
    return read_table(fs.join(corpus.work, part), columns)


# --- statistics --------------------------------------------------------------------------------------------


def tally(
    codes: Integer[ndarray, "docs levels"], energy: Shaped[ndarray, "docs levels"], *, size: int
) -> Tally:
    """Count documents, uses of codes and residual energy; `size` is the number of codes of a level."""
    usage = [np.bincount(column, minlength=size) for column in codes.T]
    return {
        "documents": np.array([len(codes)]),
        "energy": energy.sum(axis=0, dtype=np.float64),
        "usage": np.array(usage, np.int64),
    }


def _mean_energy(counted: Tally) -> ndarray:
    """Compute the mean squared norm of the residual after each level."""
    mean: ndarray = counted["energy"] / max(int(counted["documents"][0]), 1)
    return mean


@dataclass(frozen=True)
class PrefixCounts:
    """Counts of the prefixes that documents in a range of codes share, as plain values for a JSON record."""

    distinct: list[int]  # number of prefixes of 1, 2, ... codes
    alone: int  # documents with unique codes
    largest: int  # largest number of documents with equal codes
    first: list[int]  # the lowest codes
    last: list[int]  # the highest codes
    with_first: int  # documents with the lowest codes
    with_last: int  # documents with the highest codes

    @classmethod
    def of(cls, codes: Integer[ndarray, "docs levels"]) -> "PrefixCounts":
        """Count the prefixes of one or more documents; `codes` ascend."""
        fresh = np.ones(codes.shape, bool)  # True where a prefix of each length begins
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
        tail = ranges[0].with_last  # documents so far with the same codes as the last one
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


def report(counted: Tally, spread: PrefixCounts) -> dict[str, Any]:
    """Compute statistics of the codes of a corpus.

    Per level: `usage`, the share of codes that occur; `entropy_bits`, at most log2(K), if all are equally
    frequent; `residual_energy`, mean squared norm of the residual (1 for unit vectors: nothing explained);
    `distinct_prefixes`, number of distinct tuples of the levels up to this one. Overall: `distinct_codes`;
    `uniqueness`, share of documents with unique codes; `collisions`, documents that share all codes with an
    earlier one; `largest_collision`, largest number of documents with equal codes.
    """
    documents = int(counted["documents"][0])
    levels = [
        {
            "level": level,
            "usage": float((uses > 0).mean()),
            "entropy_bits": _entropy(uses),
            "residual_energy": float(energy),
            "distinct_prefixes": distinct,
        }
        for level, (uses, energy, distinct) in enumerate(
            zip(counted["usage"], _mean_energy(counted), spread.distinct, strict=True)
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


def drift(new: Tally, fitted: Tally, *, refit_above: float) -> dict[str, Any]:
    """Compare documents coded with existing codebooks with the corpus that the codebooks were fitted for.

    Args:
        new: counts of the documents coded with existing codebooks.
        fitted: counts of documents of the fitted corpus outside the sample. Documents of the sample are not
            suitable: after 6 levels their residual energy is lower by an eighth with 120 of them per code, by
            a third with 30, and all new documents would look different.
        refit_above: ratio of residual energies above which new codebooks are proposed.

    Returns:
        Per level: `residual_energy_ratio`, mean of the new documents divided by that of the fitted ones;
        `usage_divergence_bits`, the Jensen-Shannon divergence of code frequencies (0: equal, 1: disjoint).
        `refit`: whether the ratio after the last level exceeds `refit_above`, with enough documents of both.
    """
    documents, others = (int(counted["documents"][0]) for counted in (new, fitted))
    if not documents:
        return {"documents": 0, "levels": [], "refit": False}
    ratio = _mean_energy(new) / np.maximum(_mean_energy(fitted), np.finfo(float).tiny)
    enough = min(documents, others) >= MIN_DRIFT_DOCUMENTS
    return {
        "documents": documents,
        "levels": [
            {
                "level": level,
                "residual_energy_ratio": float(ratio[level]),
                "usage_divergence_bits": _divergence(new["usage"][level], fitted["usage"][level]),
            }
            for level in range(len(ratio))
        ],
        "refit": bool(enough and ratio[-1] > refit_above),
    }


def _divergence(one: Int[ndarray, " codes"], other: Int[ndarray, " codes"]) -> float:
    one, other = one / max(one.sum(), 1), other / max(other.sum(), 1)
    return max(0.0, _entropy((one + other) / 2) - (_entropy(one) + _entropy(other)) / 2)


def _entropy(counts: ndarray) -> float:
    share = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(share * np.log2(share)).sum())
