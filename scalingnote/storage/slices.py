"""Work in slices: some parts of an artifact are one task, which writes its files and leaves a record last.

A run that was killed takes the records it finds and does the other slices again, under the same names. Where
and in which order tasks run is the caller's affair.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table

ROWS_PER_SLICE = 1 << 18
Record = dict[str, Any]  # JSON values
Slice = tuple[int, list[str]]  # its number and its parts
# How tasks are run: a task for every slice, in any order, anywhere; the built-in map runs them here.
Each = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
T = TypeVar("T")
R = TypeVar("R")  # JSON values


def slices(artifact: Artifact, *tables: str, rows: int | None = None) -> list[list[str]]:
    """Parts of tables in order, gathered into slices of `rows` at most where parts allow.

    As many as ROWS_PER_SLICE, if nothing is said: tasks that keep narrow rows alone take more.
    """
    limit = ROWS_PER_SLICE if rows is None else rows
    names = [name for table in tables for name in artifact.table_parts(table)]
    known = [artifact.manifest.parts[name].rows for name in names]
    sizes = [limit if size is None else size for size in known]
    return [[names[place] for place in group] for group in grouped(sizes, limit=limit)]


def grouped(sizes: Sequence[int], *, limit: int) -> list[list[int]]:
    """Places in a list of sizes, in order, gathered into groups of `limit` in sum where sizes allow."""
    out: list[list[int]] = []
    room = -1
    for place, size in enumerate(sizes):
        if size > room:
            out.append([])
            room = limit
        out[-1].append(place)
        room -= size
    return out


def run_slices(
    name: str,
    task: Callable[[tuple[int, T]], R],
    slices: Sequence[T],
    *,
    folder: str,
    each: Each,
    room: str,
    unit: str = "slices",
) -> list[R]:
    """The records of a task over all slices, in order; those that an earlier run left stand as they are.

    A slice comes to the task with its number. Whatever else there is one task for may stand in its place.
    """
    where = fs.join(folder, "done", name)
    done = set(fs.list_files(where))
    todo = [(number, parts) for number, parts in enumerate(slices) if _file(number) not in done]
    if todo and done:
        get_logger(room).info("resuming: %d of %d %s of %r are done", len(done), len(slices), unit, name)
    with Progress(room, total=len(slices), done=len(slices) - len(todo), unit=f"{unit} ({name})") as progress:
        for _ in each(partial(_recorded, task=task, folder=where), todo) if todo else ():
            progress.advance(1)
    return [json.loads(fs.read_bytes(fs.join(where, _file(i)))) for i in range(len(slices))]


def write_tables(folder: str, tables: Mapping[str, pa.Table]) -> list[Any]:
    """Write those of the tables that have rows; their names and parts, as JSON values."""
    return [
        (name, asdict(write_table(fs.join(folder, name), table.combine_chunks())))
        for name, table in tables.items()
        if len(table)
    ]


def listed(files: Iterable[Any]) -> list[tuple[str, Part]]:
    """What :func:`write_tables` said, after it went through JSON."""
    return [(name, Part(**part)) for name, part in files]


def _recorded(item: tuple[int, T], *, task: Callable[[tuple[int, T]], R], folder: str) -> R:
    """Do a task, and only then say so."""
    record = task(item)
    fs.write_bytes(fs.join(folder, _file(item[0])), json.dumps(record).encode())
    return record


def _file(number: int) -> str:
    return f"{number:05d}.json"
