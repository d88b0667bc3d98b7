"""Assign semantic IDs to a coded corpus, range by range: no process ever holds the codes of all documents.

Documents are partitioned by ranges of codes, whose bounds come from a sample. A bound is the codes of a
document and a part of the corpus: of the documents with these codes, those of earlier parts are below it. So
documents with equal codes that fill many ranges are divided in corpus order, and all others stay together. A
range numbers its documents with equal codes, after those that were counted below it, counts prefixes, and
writes its documents sorted by code. Suffixes then return to the parts that the documents came from. Every
step is a recorded task over files (storage/shuffle.py): after a kill, only the tasks under way are repeated.

Counts of a range add up: a :class:`CodeTally` over any pieces of the corpus, :class:`PrefixCounts` over
ranges, where only a prefix that continues in the next range is counted twice.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int, Integer, Shaped
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.quantize import semantic_id
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.arrow import to_arrow, to_matrix
from scalingnote.storage.artifact import Artifact, Part, read_table, write_table
from scalingnote.storage.shuffle import TaskRunner, group_by_size, run_slices

ROWS = 1 << 22  # documents of a task, which takes some 270 bytes of memory for each: 1.1 GB
KEYS_PER_RANGE = 1024  # sampled to determine the bounds of ranges
_SUFFIXES = pa.schema({"part": pa.int32(), "row": pa.int32(), "suffix": pa.int32()})
CorpusSlice = list[tuple[int, str]]  # parts, each with its place in the corpus
Bound = list[int]  # codes, and the first part of the corpus whose documents with these codes are behind it
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
        """Count the prefixes of at least one document."""
        order, fresh = semantic_id.runs(codes)
        sizes = np.diff(np.flatnonzero(fresh[:, -1]), append=len(codes))
        return cls(
            distinct=fresh.sum(axis=0).tolist(),
            alone=int((sizes == 1).sum()),
            largest=int(sizes.max()),
            first=codes[order[0]].tolist(),
            last=codes[order[-1]].tolist(),
            with_first=int(sizes[0]),
            with_last=int(sizes[-1]),
        )

    @classmethod
    def merged(cls, ranges: Iterable["PrefixCounts"]) -> "PrefixCounts":
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


def report(tally: CodeTally, spread: PrefixCounts, *, collisions: int) -> dict[str, Any]:
    """Statistics of the codes of a corpus.

    Per level: `usage`, the share of codes that occur; `entropy_bits`, at most log2(K) when all are equally
    frequent; `residual_energy`, mean squared norm of the residual (1 for unit vectors: nothing explained);
    `distinct_prefixes`, number of distinct tuples of the levels up to this one. Overall: `distinct_codes`;
    `uniqueness`, share of documents with unique codes; `collisions`, documents with a suffix above 0;
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
        "collisions": collisions,
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


@dataclass(frozen=True)
class CodedCorpus:
    """A corpus with codes, whose documents are to be named."""

    output: str  # folder of the parts with IDs
    work: str  # folder of the coded parts and of intermediate files
    levels: int
    size: int  # codes per level
    given: Artifact | None = None  # IDs that stay


@dataclass(frozen=True)
class NamedCorpus:
    """Files written, and statistics of all documents.

    `unseen` counts the documents that the codebooks were not fitted on or, where earlier IDs stay, those
    without one.
    """

    parts: dict[str, Part]
    tally: CodeTally
    unseen: CodeTally
    spread: PrefixCounts
    collisions: int
    ranges: list[dict[str, Any]]


def coded_table(
    doc_ids: pa.ChunkedArray,
    codes: Shaped[ndarray, "docs levels"],
    energy: Shaped[ndarray, "docs levels"],
    sampled: Bool[ndarray, " docs"],
) -> pa.Table:
    """Table of a coded part, for :func:`name`.

    `energy` is the squared norm of the residual after each level, `sampled` marks the documents that the
    codebooks were fitted on.
    """
    columns = {
        "codes": to_arrow(codes.astype(np.uint16)),
        "energy": to_arrow(energy),
        "sampled": pa.array(sampled),
    }
    return pa.table({"doc_id": doc_ids.cast(pa.string()), **columns})


def name(corpus: CodedCorpus, parts: Sequence[str], rows: Sequence[int], *, each: TaskRunner) -> NamedCorpus:
    """Assign an ID to every document, and write the parts and the files by code.

    `parts` names the coded parts in corpus order, with their numbers of `rows`.
    """
    pieces = [[(place, parts[place]) for place in group] for group in group_by_size(rows, limit=ROWS)]
    run = partial(run_slices, folder=fs.join(corpus.work, "naming"), each=each, section="quantize")
    ranges = -(-sum(rows) // ROWS)
    # The names of the steps also name their records: others would not find those of a killed run.
    sample = partial(_sample_keys, corpus=corpus, every=max(1, ROWS // KEYS_PER_RANGE))
    sampled = run("show", sample, pieces) if ranges > 1 else []
    bounds = _choose_bounds([key for keys in sampled for key in keys], ranges)
    run("deal", partial(_partition, corpus=corpus, bounds=bounds), pieces)
    count = partial(_count_at_bound, corpus=corpus, bounds=bounds)
    counted = run("count", count, range(ranges - 1), unit="ranges")
    assign = partial(
        _assign_suffixes,
        corpus=corpus,
        bounds=bounds,
        below=_numbered_below(bounds, counted),
        firsts=[piece[0][0] for piece in pieces],
    )
    assigned = [found for found in run("settle", assign, range(ranges), unit="ranges") if found["documents"]]
    written = [
        listed for files in run("name", partial(_write_ids, corpus=corpus), pieces) for listed in files
    ]
    by_range = [(found["name"], found["part"]) for found in assigned]
    spreads = [PrefixCounts(**found["spread"]) for found in assigned]
    return NamedCorpus(
        parts={name: Part(**part) for name, part in (*written, *by_range)},
        tally=_sum(corpus, assigned, "all"),
        unseen=_sum(corpus, assigned, "unseen"),
        spread=PrefixCounts.merged(spreads),
        collisions=sum(found["collisions"] for found in assigned),
        ranges=[
            {"name": found["name"], "rows": found["documents"], "first": spread.first, "last": spread.last}
            for found, spread in zip(assigned, spreads, strict=True)
        ],
    )


def _choose_bounds(sampled: Iterable[Bound], ranges: int) -> list[Bound]:
    """Bounds of ranges of about equal size.

    Documents with equal codes are divided only where they fill a range, so that two bounds have their codes.
    """
    ordered = sorted(sampled)
    places = [ordered[len(ordered) * number // ranges] for number in range(1, ranges)]
    uses = Counter(tuple(codes) for *codes, _ in places)
    return [[*codes, part if uses[tuple(codes)] > 1 else 0] for *codes, part in places]


def _numbered_below(bounds: Sequence[Bound], counted: Sequence[int]) -> list[int]:
    """For every range, the new documents below it with the codes of its lower bound."""
    below = [0]
    for number, found in enumerate(counted):
        same = number > 0 and bounds[number - 1][:-1] == bounds[number][:-1]
        below.append(found + (below[number] if same else 0))
    return below


def _sample_keys(item: tuple[int, CorpusSlice], *, corpus: CodedCorpus, every: int) -> list[Bound]:
    """Task: the codes and the part of every `every`-th document of a slice."""
    keys: list[Bound] = []
    place = 0
    for number, part in item[1]:
        codes = to_matrix(_read(corpus, part, ["codes"])["codes"])
        keys += [[*found, number] for found in codes[-place % every :: every].tolist()]
        place += len(codes)
    return keys


def _partition(item: tuple[int, CorpusSlice], *, corpus: CodedCorpus, bounds: list[Bound]) -> int:
    """Task: send the documents of a slice to their ranges."""
    tables = []
    for number, part in item[1]:
        table = _read(corpus, part)
        table = table.append_column("part", pa.array(np.full(len(table), number, np.int32)))
        tables.append(table.append_column("row", pa.array(np.arange(len(table), dtype=np.int32))))
    whole = pa.concat_tables(tables)
    ends = np.array(bounds, np.int64).reshape(-1, corpus.levels + 1)
    keys = semantic_id.sortable(to_matrix(whole["codes"]), whole["part"].to_numpy())
    bucket = np.searchsorted(semantic_id.sortable(ends[:, :-1], ends[:, -1]), keys, "right").astype(np.int64)
    shuffle.scatter(whole, bucket, target=fs.join(corpus.work, "scattered"), name=f"{item[0]:05d}")
    return len(whole)


def _count_at_bound(item: tuple[int, int], *, corpus: CodedCorpus, bounds: list[Bound]) -> int:
    """Task: the number of new documents of a range with the codes of its upper bound."""
    *bound, part = bounds[item[1]]
    if not part:
        return 0
    layout = pa.schema({"doc_id": pa.string(), "codes": pa.list_(pa.uint16(), corpus.levels)})
    table = shuffle.gather(fs.join(corpus.work, "scattered"), item[1], schema=layout)
    codes = to_matrix(table["codes"])
    equal = (codes == np.array(bound)).all(axis=1)
    doc_ids = table["doc_id"].combine_chunks().filter(pa.array(equal))
    _, new = semantic_id.assign_suffixes(_given(corpus, bound, bound), doc_ids, codes[equal])
    return int(new.sum())


def _assign_suffixes(
    item: tuple[int, int],
    *,
    corpus: CodedCorpus,
    bounds: list[Bound],
    below: list[int],
    firsts: list[int],
) -> dict[str, Any]:
    """Task: assign the suffixes of a range, write its documents by code, and return suffixes to parts."""
    number = item[1]
    wide = {"codes": pa.list_(pa.uint16(), corpus.levels), "energy": pa.list_(pa.float32(), corpus.levels)}
    origin = {"sampled": pa.bool_(), "part": pa.int32(), "row": pa.int32()}
    layout = pa.schema({"doc_id": pa.string(), **wide, **origin})
    table = shuffle.gather(fs.join(corpus.work, "scattered"), number, schema=layout).combine_chunks()
    if not len(table):
        return {"documents": 0}
    doc_ids, codes = table["doc_id"].combine_chunks(), to_matrix(table["codes"])
    *low, _ = bounds[number - 1] if number else [0]
    *high, _ = bounds[number] if number < len(bounds) else [0]
    suffix, new = semantic_id.assign_suffixes(_given(corpus, low, high), doc_ids, codes)
    if below[number]:
        suffix[new & (codes == np.array(low)).all(axis=1)] += below[number]
    unseen = new & ~table["sampled"].to_numpy()
    energy = to_matrix(table["energy"])
    tallies = {
        "all": CodeTally.of(codes, energy, size=corpus.size),
        "unseen": CodeTally.of(codes[unseen], energy[unseen], size=corpus.size),
    }
    for which, tally in tallies.items():
        fs.write_bytes(_tally(corpus, number, which), dump_tally(tally))

    sent = np.flatnonzero(suffix)
    back = table.select(["part", "row"]).take(sent).append_column("suffix", pa.array(suffix[sent]))
    slices = np.searchsorted(firsts, back["part"].to_numpy(), "right") - 1
    shuffle.scatter(
        back, slices.astype(np.int64), target=fs.join(corpus.work, "suffixes"), name=f"{number:05d}"
    )
    file = f"by_code/part-{number:05d}.arrow"
    part = write_table(fs.join(corpus.output, file), semantic_id.sorted_table(doc_ids, codes, suffix))
    return {
        "number": number,
        "name": file,
        "part": asdict(part),
        "documents": len(table),
        "collisions": len(sent),
        "spread": asdict(PrefixCounts.of(codes)),
    }


def _given(corpus: CodedCorpus, low: Sequence[int], high: Sequence[int]) -> Iterable[semantic_id.CodeRange]:
    """IDs that stay, of codes from `low` to `high`."""
    return semantic_id.ByCode(corpus.given).between(low, high) if corpus.given else ()


def _write_ids(item: tuple[int, CorpusSlice], *, corpus: CodedCorpus) -> list[Any]:
    """Task: write the parts of a slice with their suffixes."""
    back = shuffle.gather(fs.join(corpus.work, "suffixes"), item[0], schema=_SUFFIXES)
    origin, row, value = (back[column].to_numpy() for column in _SUFFIXES.names)
    written = []
    for number, part in item[1]:
        table = _read(corpus, part, ["doc_id", "codes"])
        suffix = np.zeros(len(table), np.int32)
        ours = origin == number
        suffix[row[ours]] = value[ours]
        named = semantic_id.to_table(table["doc_id"], to_matrix(table["codes"]), suffix)
        written.append((part, asdict(write_table(fs.join(corpus.output, part), named))))
    return written


def _sum(corpus: CodedCorpus, assigned: Sequence[dict[str, Any]], which: str) -> CodeTally:
    """Sum of the tallies of all ranges, loaded one at a time because each has a count per code."""
    total = CodeTally(0, np.zeros(corpus.levels), np.zeros((corpus.levels, corpus.size), np.int64))
    for found in assigned:
        total += load_tally(fs.read_bytes(_tally(corpus, found["number"], which)))
    return total


def _tally(corpus: CodedCorpus, number: int, which: str) -> str:
    return fs.join(corpus.work, "naming", which, f"{number:05d}.safetensors")


def _read(corpus: CodedCorpus, part: str, columns: list[str] | None = None) -> pa.Table:
    return read_table(fs.join(corpus.work, part), columns)
