"""Prepare stage II: write queries, the teacher's embeddings of them, and their candidates to a store.

    query embeddings  ─► lessons    token rows of queries with the teacher's embeddings, a file per slice
    triplets          ─► names      hashes of the documents that training rows name, and of their queries
    embeddings        ─► documents  the teacher's embeddings of those, and tokens if a student reads them
    triplets          ─► rows       a query's number, row numbers of its documents, known answers, scores
    lessons           ─► rows       queries that occur in no triplet (generated ones): they have no documents

Only losses over documents need the tables after the first. A document is stored once; rows name it by number.
Work is done in slices, the same as in stage I: a killed run repeats the slices without a record.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalingnote.core.errors import ConfigError, DataError, TrainingError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, list_column, token_columns
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table
from scalingnote.storage.schema import DOCUMENT_COLUMNS, INDEXED_VIEW
from scalingnote.storage.shuffle import (
    JsonRecord,
    NumberedSlice,
    hash_of,
    run_slices,
    slices,
    write_tables,
)
from scalingnote.train import tokens
from scalingnote.train.data import ABSENT, Store, one_chunk
from scalingnote.train.prepare import (
    file_name,
    files_of,
    merge_hashes,
    number_documents,
    read_array,
    total_rows,
)
from scalingnote.train.tokens import query_number

log = get_logger("distill")
LESSONS = "lessons"  # table of the store: rows of training
VALIDATION = "validation"  # table of the store: rows like those of training, which no step draws
_TRIPLET_COLUMNS = ["query_id", "positive", "negatives", "source", "hop", "weight", "split"]
_QUERY_COLUMNS = ["query_id", "query", "embedding", "split"]


@dataclass(frozen=True)
class CandidateSources:
    """The artifacts that candidates come from; the last two are set if a student reads documents."""

    triplets: Artifact
    embeddings: Artifact
    dataset: Artifact | None = None
    prompt: DocumentPrompt | None = None


def prepare(
    teacher: Artifact,
    *,
    prompt: QueryPrompt | LookupPrompt,
    folder: str,
    candidates: CandidateSources | None = None,
    each: Executor = map,
) -> dict[str, int]:
    """Write the store of a run into `folder`, or find it there. Must be called once, before any rank starts.

    The folder must belong to this `teacher`, with embeddings of queries, to the student with this `prompt`,
    and to these `candidates`, for losses over documents.

    Returns:
        Training rows by part, the input of :class:`Order`.

    Raises:
        TrainingError: triplets name documents or queries without an embedding.
        DataError: a query or document occurs twice, or no triplet for training has a positive with an
            embedding.
        ConfigError: the document embeddings do not have the view that is searched.
    """
    if not Store.is_complete(folder):
        run = partial(run_slices, folder=folder, each=each, section="distill")
        task = partial(_lessons_of_slice, teacher=teacher, prompt=prompt, folder=folder)
        records = run(LESSONS, task, slices(teacher, "embeddings"))
        tables = {name: files_of(records, name) for name in (LESSONS, VALIDATION)}
        facts = {"sizes": {LESSONS: total_rows(tables[LESSONS])}, "dim": records[0]["dim"]}
        if candidates is not None:
            candidate_tables, candidate_facts = _write_candidates(
                candidates, teacher, tables[LESSONS], run, folder
            )
            tables, facts = tables | candidate_tables, facts | candidate_facts
        Store.finish(folder, tables, facts)
    facts = Store.facts_of(folder)
    if facts.get("left_out"):
        log.warning("%s triplets left out: their positive has no embedding", f"{facts['left_out']:,}")
    sizes: dict[str, int] = facts["sizes"]
    return sizes


def _lessons_of_slice(
    item: NumberedSlice, *, teacher: Artifact, prompt: QueryPrompt | LookupPrompt, folder: str
) -> JsonRecord:
    table = pa.concat_tables(teacher.table(part, _QUERY_COLUMNS) for part in item[1])
    record: JsonRecord = {"dim": table.schema.field("embedding").type.list_size}
    for name, split in ((LESSONS, "train"), (VALIDATION, "validation")):
        rows = lesson_rows(table.filter(pc.equal(table["split"], split)), prompt=prompt)
        record[name] = write_tables(folder, {file_name(name, item[0]): rows})
    return record


def lesson_rows(queries: pa.Table, *, prompt: QueryPrompt | LookupPrompt) -> pa.Table:
    """Build rows of queries: numbers (``query``), token rows and ``teacher`` embeddings."""
    columns = token_columns(tokens.prompt_blocks(prompt, queries["query"].to_pylist()), views=1)
    number = pa.array(query_number(queries["query_id"]))
    return one_chunk(
        {"query": number, **columns, "teacher": arrow.to_arrow(arrow.to_numpy(queries["embedding"]))}
    )


def _write_candidates(
    sources: CandidateSources,
    teacher: Artifact,
    lessons: Sequence[tuple[str, Part]],
    run: Callable[[str, Callable[[Any], JsonRecord], Sequence[Any]], list[JsonRecord]],
    folder: str,
) -> tuple[dict[str, list[tuple[str, Part]]], dict[str, Any]]:
    """Write tables and facts in addition to the lessons; `run` runs a named task over slices."""
    with sources.embeddings.open(sources.embeddings.table_parts("embeddings")[0]) as stream:
        if INDEXED_VIEW not in pq.read_schema(stream).names:
            raise ConfigError(
                f"{sources.embeddings.uri} has no view {INDEXED_VIEW!r}, which is searched: add it to "
                "encode.views"
            )
    of_triplets = slices(sources.triplets, "triplets")
    # Documents and queries that the training rows name: sorted hashes, 8 bytes each.
    name_records = run("names", partial(_hashes_of_slice, sources=sources, folder=folder), of_triplets)
    wanted = merge_hashes(folder, "document_hashes", files=len(of_triplets))
    merge_hashes(folder, "query_hashes", files=len(of_triplets))
    group = max(int(record["group"]) for record in name_records)
    document_records = run(
        "documents",
        partial(_documents_of_slice, sources=sources, folder=folder),
        slices(sources.embeddings, "embeddings"),
    )
    place = number_documents(wanted, document_records, folder)
    rejected = sources.embeddings.table("rejected.parquet", ["row"])["row"]
    unread = np.flatnonzero(np.isin(wanted, hash_of(rejected))) if len(rejected) else np.empty(0, np.int64)
    place[unread[place[unread] < 0]] = tokens.UNREADABLE_ROW
    write_table(fs.join(folder, "place.arrow"), pa.table({"row": place}))
    _number_lessons(lessons, folder)
    row_records = run(
        "rows",
        partial(_rows_of_slice, sources=sources, teacher=teacher, group=group, folder=folder),
        of_triplets,
    )
    starts = accumulate((part.rows or 0 for _, part in lessons), initial=0)
    free_records = run(
        "free",
        partial(_rows_without_documents, group=group, folder=folder),
        [(name, start) for (name, _), start in zip(lessons, starts, strict=False)],
    )
    with_documents, without = files_of(row_records), files_of(free_records)
    sizes = {"triplets": total_rows(with_documents), "generated": total_rows(without)}
    if not sizes["triplets"]:
        raise DataError("no triplet for training has a positive with an embedding: re-run collect or encode")
    facts = {
        "sizes": {part: count for part, count in sizes.items() if count},
        "known": max(record["known"] for record in row_records),
        "scored": any(record["scored"] for record in row_records),
        "left_out": sum(record["left_out"] for record in row_records),
    }
    return {"documents": files_of(document_records), "rows": [*with_documents, *without]}, facts


def _hashes_of_slice(item: NumberedSlice, *, sources: CandidateSources, folder: str) -> JsonRecord:
    table = _training_rows(sources.triplets, item[1], ["query_id", "positive", "negatives", "split"])
    documents, group = tokens.document_hashes(table.to_batches())
    queries = np.unique(tokens.query_number(table["query_id"]))
    for name, hashes in (("document_hashes", documents), ("query_hashes", queries.astype(np.uint64))):
        write_table(fs.join(folder, file_name(name, item[0])), pa.table({"hash": hashes}))
    return {"group": group}


def _documents_of_slice(item: NumberedSlice, *, sources: CandidateSources, folder: str) -> JsonRecord:
    wanted = read_array(fs.join(folder, "document_hashes.arrow"))
    tables: list[pa.Table] = []
    problems: dict[str, str] = {}
    for part in item[1]:
        table = sources.embeddings.table(part, ["doc_id", INDEXED_VIEW])
        hashes = hash_of(table["doc_id"])
        is_wanted = tokens.in_sorted(hashes, wanted)
        columns = {
            "hash": pa.array(hashes[is_wanted]),
            "teacher": table.filter(pa.array(is_wanted))[INDEXED_VIEW],
        }
        if sources.prompt is not None:
            assert sources.dataset is not None
            texts = tokens.read_columns(
                sources.dataset, [part.replace("embeddings/", "documents/", 1)], DOCUMENT_COLUMNS
            )
            token_rows, unreadable = tokens.document_rows(
                texts, prompt=sources.prompt, wanted=np.sort(hashes[is_wanted])
            )
            problems |= unreadable
            # Both are in the dataset's order; embeddings have no documents that the teacher could not read.
            both = pa.array(np.isin(hashes[is_wanted], np.asarray(token_rows["hash"])))
            columns = {name: column.filter(both) for name, column in columns.items()}
            columns |= {name: token_rows[name] for name in ("ids", "positions")}
        tables.append(pa.table(columns))
    files = write_tables(folder, {file_name("documents", item[0]): pa.concat_tables(tables)})
    return {"files": files, "problems": problems}


def _number_lessons(lessons: Sequence[tuple[str, Part]], folder: str) -> None:
    """Write sorted numbers of all queries and the row of each among the lessons: 16 bytes a query."""
    files = [read_array(fs.join(folder, name)) for name, _ in lessons]
    numbers = np.concatenate([np.empty(0, np.int64), *files])
    order = np.argsort(numbers, kind="stable")
    if (np.diff(numbers[order]) == 0).any():
        raise DataError(
            "a query occurs twice in the teacher's embeddings, or two ids share a hash: re-run teacher"
        )
    write_table(fs.join(folder, "queries.arrow"), pa.table({"query": numbers[order]}))
    write_table(fs.join(folder, "lessons.arrow"), pa.table({"row": order.astype(np.int64)}))


def _rows_of_slice(
    item: NumberedSlice, *, sources: CandidateSources, teacher: Artifact, group: int, folder: str
) -> JsonRecord:
    number, parts = item
    table = _training_rows(sources.triplets, parts, _TRIPLET_COLUMNS, scores=teacher)
    columns, readable = tokens.triplet_columns(
        table,
        tokens.read_answers(sources.triplets, parts),
        group=group,
        wanted=read_array(fs.join(folder, "document_hashes.arrow")),
        place=read_array(fs.join(folder, "place.arrow")),
    )
    lesson_queries, queries = read_array(fs.join(folder, "queries.arrow")), np.asarray(columns["query"])
    at = np.searchsorted(lesson_queries, queries)
    if (at == len(lesson_queries)).any() or (lesson_queries[at] != queries).any():
        raise TrainingError("triplets contain queries that the teacher has not embedded: re-run teacher")
    lesson = read_array(fs.join(folder, "lessons.arrow"))[at]
    names = ("query", "documents", "known", "weight", "scores")
    rows = one_chunk({"lesson": pa.array(lesson), **{name: columns[name] for name in names}})
    rows = rows.filter(pa.array(readable)).combine_chunks()
    return {
        "files": write_tables(folder, {file_name("rows", number): rows}),
        "left_out": int((~readable).sum()),
        **tokens.row_facts(rows),
    }


def _rows_without_documents(item: tuple[int, tuple[str, int]], *, group: int, folder: str) -> JsonRecord:
    """Write rows of queries without a triplet, for a file of lessons that starts at row `start`."""
    file, (name, start) = item
    numbers = read_array(fs.join(folder, name))
    in_triplets = read_array(fs.join(folder, "query_hashes.arrow"))
    free_rows = np.flatnonzero(~tokens.in_sorted(numbers.astype(np.uint64), in_triplets))
    size = len(free_rows)
    rows = one_chunk(
        {
            "lesson": pa.array(free_rows + start),
            "query": pa.array(numbers[free_rows]),
            "documents": arrow.to_arrow(np.full((size, group), ABSENT, np.int64)),
            "known": list_column(np.empty(0, np.int64), [0] * (size + 1)),
            "weight": pa.array(np.ones(size, np.float32)),
            "scores": arrow.to_arrow(np.full((size, group), np.nan, np.float32)),
        }
    )
    return {"files": write_tables(folder, {file_name("free", file): rows})}


def _training_rows(
    triplets: Artifact, parts: Sequence[str], columns: list[str], *, scores: Artifact | None = None
) -> pa.Table:
    """Read training rows of parts, with the `scores` of a teacher if it scored them row by row."""
    tables = []
    for part in parts:
        table = triplets.table(part, columns)
        score_part = part.replace("triplets/", "scores/", 1)
        if scores is not None and score_part in scores.manifest.parts:
            table = table.append_column("scores", scores.table(score_part, ["scores"])["scores"])
        tables.append(table.filter(pc.equal(table["split"], "train")))
    return pa.concat_tables(tables)
