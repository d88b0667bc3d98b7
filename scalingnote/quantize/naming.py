"""Codes of a corpus become semantic IDs range by range: no process ever holds the codes of all documents.

Documents are dealt to ranges of codes (a sort in pieces: bounds are read off a sample of the codes). A range
holds all documents with equal codes, so it gives them suffixes, counts prefixes, and leaves its documents
sorted by code. Suffixes then go back to the parts that the documents came from. Everything is a recorded task
over files (storage/slices.py): a killed run repeats the tasks under way.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Shaped
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.quantize import by_code, semantic_id
from scalingnote.quantize.statistics import Spread, Tally
from scalingnote.storage import exchange
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table
from scalingnote.storage.slices import Each, grouped, run_slices
from scalingnote.storage.vectors import matrix_of, to_arrow

ROWS = 1 << 22  # documents of a task, which takes some 270 bytes of memory for each: 1.1 GB
_MARKS = 1024  # documents shown for each range, to read its bounds off
_SUFFIXES = pa.schema({"part": pa.int32(), "row": pa.int32(), "suffix": pa.int32()})
Slice = list[tuple[int, str]]  # parts, each with its place in the corpus


@dataclass(frozen=True)
class Corpus:
    """Where the coded parts lie, and where named ones go. Levels, and codes per level."""

    coded: str
    output: str
    work: str
    levels: int
    size: int
    given: Artifact | None = None  # IDs that stay


@dataclass(frozen=True)
class Named:
    """Files written, and what they say together.

    `unseen` counts the documents that the codebooks do not know: those outside the sample that they were
    fitted on or, where IDs were given before, those that had none.
    """

    parts: dict[str, Part]
    tally: Tally
    unseen: Tally
    spread: Spread
    collisions: int
    ranges: list[dict[str, Any]]


def coded_table(
    doc_ids: pa.ChunkedArray,
    codes: Shaped[ndarray, "docs levels"],
    energy: Shaped[ndarray, "docs levels"],
    sampled: Bool[ndarray, " docs"],
) -> pa.Table:
    """A coded part, as :func:`name` reads it.

    `energy` is left over of each document after each level; `sampled` documents were fitted on.
    """
    columns = {
        "codes": to_arrow(codes.astype(np.uint16)),
        "energy": to_arrow(energy),
        "sampled": pa.array(sampled),
    }
    return pa.table({"doc_id": doc_ids.cast(pa.string()), **columns})


def name(corpus: Corpus, parts: Sequence[str], rows: Sequence[int], *, each: Each) -> Named:
    """Give every document of the coded parts its ID, and write the parts and the files by code."""
    pieces = [[(place, parts[place]) for place in group] for group in grouped(rows, limit=ROWS)]
    run = partial(run_slices, folder=fs.join(corpus.work, "naming"), each=each, room="quantize")
    ranges = -(-sum(rows) // ROWS)
    show = partial(_show, corpus=corpus, every=max(1, ROWS // _MARKS))
    shown = run("show", show, pieces) if ranges > 1 else []
    marks = np.sort(np.array([key for keys in shown for key in keys], np.uint64))
    ends = [int(marks[len(marks) * number // ranges]) for number in range(1, ranges)]
    run("deal", partial(_deal, corpus=corpus, ends=ends), pieces)
    settle = partial(_settle, corpus=corpus, ends=ends, firsts=[piece[0][0] for piece in pieces])
    settled = [found for found in run("settle", settle, range(ranges), unit="ranges") if found["documents"]]
    written = [listed for files in run("name", partial(_name, corpus=corpus), pieces) for listed in files]
    by_range = [(found["name"], found["part"]) for found in settled]
    spreads = [Spread(**found["spread"]) for found in settled]
    return Named(
        parts={name: Part(**part) for name, part in (*written, *by_range)},
        tally=_sum(corpus, settled, "all"),
        unseen=_sum(corpus, settled, "unseen"),
        spread=Spread.merged(spreads),
        collisions=sum(found["collisions"] for found in settled),
        ranges=[
            {"name": found["name"], "rows": found["documents"], "first": spread.first, "last": spread.last}
            for found, spread in zip(settled, spreads, strict=True)
        ],
    )


def _show(item: tuple[int, Slice], *, corpus: Corpus, every: int) -> list[int]:
    """The key of one document in so many of a slice."""
    codes = np.concatenate([matrix_of(_read(corpus, part, ["codes"])["codes"]) for _, part in item[1]])
    found: list[int] = by_code.keys(codes[::every], size=corpus.size).tolist()
    return found


def _deal(item: tuple[int, Slice], *, corpus: Corpus, ends: list[int]) -> int:
    """The documents of a slice to the ranges of their codes."""
    tables = []
    for number, part in item[1]:
        table = _read(corpus, part)
        place = {"part": np.full(len(table), number, np.int32), "row": np.arange(len(table), dtype=np.int32)}
        for column, values in place.items():
            table = table.append_column(column, pa.array(values))
        tables.append(table)
    whole = pa.concat_tables(tables)
    keys = by_code.keys(matrix_of(whole["codes"]), size=corpus.size)
    bucket = np.searchsorted(np.array(ends, np.uint64), keys, "right").astype(np.int64)
    exchange.scatter(whole, bucket, target=fs.join(corpus.work, "dealt"), name=f"{item[0]:05d}")
    return len(whole)


def _settle(item: tuple[int, int], *, corpus: Corpus, ends: list[int], firsts: list[int]) -> dict[str, Any]:
    """Suffixes and statistics of a range, its documents sorted by code, and suffixes sent back."""
    number = item[1]
    wide = {"codes": pa.list_(pa.uint16(), corpus.levels), "energy": pa.list_(pa.float32(), corpus.levels)}
    origin = {"sampled": pa.bool_(), "part": pa.int32(), "row": pa.int32()}
    layout = pa.schema({"doc_id": pa.string(), **wide, **origin})
    table = exchange.gather(fs.join(corpus.work, "dealt"), number, schema=layout).combine_chunks()
    if not len(table):
        return {"documents": 0}
    doc_ids, codes = table["doc_id"].combine_chunks(), matrix_of(table["codes"])
    suffix, new = _suffixes(corpus, number, ends, doc_ids, codes)
    unseen = new & ~table["sampled"].to_numpy()
    energy = matrix_of(table["energy"])
    tallies = {
        "all": Tally.of(codes, energy, size=corpus.size),
        "unseen": Tally.of(codes[unseen], energy[unseen], size=corpus.size),
    }
    usage = {which: tally.usage for which, tally in tallies.items()}
    fs.write_bytes(_usage(corpus, number), safetensors.save(usage))

    sent = np.flatnonzero(suffix)
    back = table.select(["part", "row"]).take(sent).append_column("suffix", pa.array(suffix[sent]))
    slices = np.searchsorted(firsts, back["part"].to_numpy(), "right") - 1
    exchange.scatter(
        back, slices.astype(np.int64), target=fs.join(corpus.work, "suffixes"), name=f"{number:05d}"
    )
    file = f"by_code/part-{number:05d}.arrow"
    part = write_table(fs.join(corpus.output, file), by_code.to_table(doc_ids, codes, suffix))
    return {
        "number": number,
        "name": file,
        "part": asdict(part),
        "documents": len(table),
        "collisions": len(sent),
        "spread": asdict(Spread.of(codes)),
        "energy": {which: tally.energy.tolist() for which, tally in tallies.items()},
        "counts": {which: tally.documents for which, tally in tallies.items()},
    }


def _suffixes(
    corpus: Corpus, number: int, ends: list[int], doc_ids: pa.Array, codes: Shaped[ndarray, "docs levels"]
) -> tuple[ndarray, ndarray]:
    """Suffixes of a range, and which of its documents have no ID yet."""
    if corpus.given is None:
        return semantic_id.suffixes(codes), np.ones(len(codes), bool)
    bounds = [by_code.prefix_of(end, size=corpus.size, levels=corpus.levels) for end in ends]
    low, high = [[], *bounds][number], [*bounds, None][number]
    given = by_code.open_by_code(corpus.given).between(low, high)
    return semantic_id.suffixes_after(given, doc_ids, codes)


def _name(item: tuple[int, Slice], *, corpus: Corpus) -> list[Any]:
    """The parts of a slice, with their suffixes."""
    back = exchange.gather(fs.join(corpus.work, "suffixes"), item[0], schema=_SUFFIXES)
    origin, row, value = (back[column].to_numpy() for column in _SUFFIXES.names)
    written = []
    for number, part in item[1]:
        table = _read(corpus, part, ["doc_id", "codes"])
        suffix = np.zeros(len(table), np.int32)
        ours = origin == number
        suffix[row[ours]] = value[ours]
        named = semantic_id.to_table(table["doc_id"], matrix_of(table["codes"]), suffix)
        written.append((part, asdict(write_table(fs.join(corpus.output, part), named))))
    return written


def _sum(corpus: Corpus, settled: Sequence[dict[str, Any]], which: str) -> Tally:
    """One range after the other: what a range counts is as large as the codebooks are long."""
    total = Tally(0, np.zeros(corpus.levels), np.zeros((corpus.levels, corpus.size), np.int64))
    for found in settled:
        usage = safetensors.load(fs.read_bytes(_usage(corpus, found["number"])))[which]
        total += Tally(found["counts"][which], np.array(found["energy"][which]), usage)
    return total


def _usage(corpus: Corpus, number: int) -> str:
    return fs.join(corpus.work, "naming", "usage", f"{number:05d}.safetensors")


def _read(corpus: Corpus, part: str, columns: list[str] | None = None) -> pa.Table:
    return pq.read_table(fs.open_input(fs.join(corpus.coded, part)), columns=columns)
