"""Semantic IDs of a coded corpus sorted by code, in ranges: no process holds the codes of all documents.

    coded parts ─scatter by range─► ranges ─sort─► files by code · statistics

A suffix depends on the document alone (:func:`scalingnote.quantize.semantic_id.suffixes`), so the parts have
their IDs as soon as they are coded. Documents are then partitioned by ranges of (codes, suffix), whose bounds
come from a sample; a range sorts its documents, checks that no two have one ID, and counts prefixes. Every
step is a recorded task over files (storage/shuffle.py): after a kill, only the tasks under way are repeated.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Shaped
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.quantize import semantic_id
from scalingnote.quantize.code_statistics import CodeTally, PrefixCounts, dump_tally, load_tally
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.arrow import to_arrow, to_matrix
from scalingnote.storage.artifact import Artifact, Part, read_table, write_table
from scalingnote.storage.shuffle import TaskRunner, group_by_size, run_slices

ROWS = 1 << 22  # documents of a task, which takes some 270 bytes of memory for each: 1.1 GB
KEYS_PER_RANGE = 1024  # sampled to determine the bounds of ranges
Bound = list[int]  # the codes and the suffix of the first document of a range


@dataclass(frozen=True)
class CodedCorpus:
    """A corpus with codes."""

    output: str  # folder of the files by code
    work: str  # folder of the coded parts and of intermediate files
    levels: int
    size: int  # codes per level
    earlier: Artifact | None = None  # IDs made before with the same codebooks


@dataclass(frozen=True)
class SortedCorpus:
    """Files by code, and statistics of all documents.

    `unseen` counts the documents that the codebooks were not fitted on or, where there are earlier IDs, those
    whose ID is not among them.
    """

    parts: dict[str, Part]
    tally: CodeTally
    unseen: CodeTally
    spread: PrefixCounts
    ranges: list[dict[str, Any]]


def coded_table(
    doc_ids: pa.ChunkedArray,
    codes: Shaped[ndarray, "docs levels"],
    energy: Shaped[ndarray, "docs levels"],
    sampled: Bool[ndarray, " docs"],
) -> pa.Table:
    """Table of a coded part, for :func:`sort`.

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


def sort(corpus: CodedCorpus, parts: Sequence[str], rows: Sequence[int], *, each: TaskRunner) -> SortedCorpus:
    """Write the files by code, and count.

    Args:
        corpus: its folders and codebooks.
        parts: names of the coded parts.
        rows: of each of them.
        each: runs the tasks.

    Raises:
        DataError: two documents have the same ID.
    """
    slices = [[parts[place] for place in group] for group in group_by_size(rows, limit=ROWS)]
    run = partial(run_slices, folder=fs.join(corpus.work, "naming"), each=each, section="quantize")
    ranges = -(-sum(rows) // ROWS)
    # The names of the steps also name their records: others would not find those of a killed run.
    sample = partial(_sample_keys, corpus=corpus, every=max(1, ROWS // KEYS_PER_RANGE))
    keys = sorted(key for found in run("sample", sample, slices) for key in found) if ranges > 1 else []
    bounds = [keys[len(keys) * number // ranges] for number in range(1, ranges)]
    run("scatter", partial(_scatter, corpus=corpus, bounds=bounds), slices)
    found = run("sort", partial(_sort_range, corpus=corpus), range(ranges), unit="ranges")
    found = [each_range for each_range in found if each_range["documents"]]
    spreads = [PrefixCounts(**each_range["spread"]) for each_range in found]
    return SortedCorpus(
        parts={each_range["name"]: Part(**each_range["part"]) for each_range in found},
        tally=_sum(corpus, found, "all"),
        unseen=_sum(corpus, found, "unseen"),
        spread=PrefixCounts.merge(spreads),
        ranges=[
            {"name": one["name"], "rows": one["documents"], "first": spread.first, "last": spread.last}
            for one, spread in zip(found, spreads, strict=True)
        ],
    )


def _sample_keys(item: tuple[int, list[str]], *, corpus: CodedCorpus, every: int) -> list[Bound]:
    """Task: the codes and the suffix of every `every`-th document of a slice."""
    table = pa.concat_tables([_read(corpus, part, ["codes", "suffix"]) for part in item[1]])
    chosen = table.take(np.arange(0, len(table), every))
    codes = to_matrix(chosen["codes"]).tolist()
    return [[*row, suffix] for row, suffix in zip(codes, chosen["suffix"].to_pylist(), strict=True)]


def _scatter(item: tuple[int, list[str]], *, corpus: CodedCorpus, bounds: list[Bound]) -> int:
    """Task: send the documents of a slice to their ranges."""
    table = pa.concat_tables([_read(corpus, part) for part in item[1]])
    ends = np.array(bounds, np.int64).reshape(-1, corpus.levels + 1)
    bucket = np.searchsorted(semantic_id.sortable(ends[:, :-1], ends[:, -1]), _keys(table), "right")
    target = fs.join(corpus.work, "scattered")
    shuffle.scatter(table, bucket.astype(np.int64), target=target, name=f"{item[0]:05d}")
    return len(table)


def _sort_range(item: tuple[int, int], *, corpus: CodedCorpus) -> dict[str, Any]:
    """Task: sort the documents of a range, write them by code, and count."""
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
    tallies = {
        "all": CodeTally.of(codes, energy, size=corpus.size),
        "unseen": CodeTally.of(codes[unseen], energy[unseen], size=corpus.size),
    }
    for which, tally in tallies.items():
        fs.write_bytes(_tally(corpus, number, which), dump_tally(tally))
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
    """Which documents of a sorted range have an ID that is among the earlier ones."""
    known = np.zeros(len(keys), bool)
    if corpus.earlier is not None:
        by_code = semantic_id.ByCode(corpus.earlier)
        for piece in by_code.between(codes[0].tolist(), codes[-1].tolist()):
            known |= np.isin(keys, semantic_id.sortable(piece.matrix(), piece.suffix))
    return known


def _keys(table: pa.Table) -> Shaped[ndarray, " docs"]:
    return semantic_id.sortable(to_matrix(table["codes"]), table["suffix"].to_numpy())


def _sum(corpus: CodedCorpus, ranges: Sequence[dict[str, Any]], which: str) -> CodeTally:
    """Sum of the tallies of all ranges, loaded one at a time because each has a count per code."""
    total = CodeTally(0, np.zeros(corpus.levels), np.zeros((corpus.levels, corpus.size), np.int64))
    for found in ranges:
        total += load_tally(fs.read_bytes(_tally(corpus, found["number"], which)))
    return total


def _tally(corpus: CodedCorpus, number: int, which: str) -> str:
    return fs.join(corpus.work, "naming", which, f"{number:05d}.safetensors")


def _read(corpus: CodedCorpus, part: str, columns: list[str] | None = None) -> pa.Table:
    return read_table(fs.join(corpus.work, part), columns)
