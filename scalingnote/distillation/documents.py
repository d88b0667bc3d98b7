"""What the losses over documents read: each query's positive and hard negatives, as the teacher embeds them.

    triplets    ─► names      hashes of the documents that training rows name, and of their queries
    embeddings  ─► documents  the teacher's embeddings of those, and tokens for a student that reads them
    triplets    ─► rows       a query's number, row numbers of its documents, what is known, its scores
    lessons     ─► rows       queries that stand in no triplet (generated ones): they have no documents

A document lies in the store once; rows name it by number. Work is done in slices, as in stage I's preparing:
a killed run does again what has no record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from numpy import ndarray
from torch import Tensor

from scalingnote.errors import ConfigError, DataError, TrainingError
from scalingnote.models.batch import Batch, collate
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.token_rows import list_column
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table
from scalingnote.storage.exchange import hash_of
from scalingnote.storage.slices import Each, Record, Slice, listed, run_slices, slices, write_tables
from scalingnote.train import corpus, tokens
from scalingnote.train.batching import padded
from scalingnote.train.prepare import array, merged, place_of
from scalingnote.train.stream import Store, one_chunk

VIEW = "summary"  # the embedding that is searched
ROWS, DOCUMENTS = "rows", "documents"
_COLUMNS = ["query_id", "positive", "negatives", "source", "hop", "weight", "split"]


@dataclass(frozen=True)
class Sources:
    """The artifacts that candidates come from. With a `prompt`, a student reads documents: their text too."""

    triplets: Artifact
    embeddings: Artifact
    dataset: Artifact | None = None
    prompt: DocumentPrompt | None = None


@dataclass(frozen=True)
class Candidates:
    """What one rank's queries are scored against. A row of `index` is a query's positive, then its negatives.

    A query without documents has `weights` 0, and is not `present`; its row of `index` means nothing.
    """

    embeddings: Float[Tensor, "docs dim"]  # the teacher's, each document once
    index: Int[Tensor, "queries group"]  # rows of `embeddings`
    present: Bool[Tensor, " queries"]
    weights: Float[Tensor, " queries"]  # of each row in the losses over candidates
    query_ids: Int[Tensor, " queries"]
    document_ids: Int[Tensor, "queries group"]
    known: Int[Tensor, "queries known"]  # documents known to answer the query; padded with -1
    scores: Float[Tensor, "queries group"] | None = None  # a cross-encoder's; NaN where it gave none
    texts: Batch | None = None  # of the documents, in the order of `embeddings`

    def to(self, device: torch.device) -> "Candidates":
        """The same candidates on a device."""
        parts = vars(self).items()
        moved: dict[str, Any] = {name: None if part is None else part.to(device) for name, part in parts}
        return Candidates(**moved)


class CandidateRows:
    """Candidates of any rows of a store. `pad` is the pad token of the student that reads documents."""

    def __init__(self, store: Store, *, pad: int | None, packed: bool) -> None:
        self._rows, self._documents = store[ROWS], store[DOCUMENTS]
        self._known, self._scored = max(store.facts["known"], 1), store.facts["scored"]
        sizes = store.facts["sizes"]
        # Generated queries have no documents. However many there are, the losses over candidates are means
        # over the triplets: of all rows in expectation, with no exchange between ranks.
        self._share = sum(sizes.values()) / sizes["triplets"]
        self._pad, self._packed = pad, packed

    def lessons(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
        """The query of each row, by its number among the lessons."""
        return self._rows.values("lesson", rows)

    def weights(self, rows: Int64[ndarray, " rows"]) -> Float[Tensor, " rows"]:
        """Of each row in the losses over queries."""
        return torch.from_numpy(self._rows.values("weight", rows))

    def __call__(self, rows: Int64[ndarray, " rows"]) -> Candidates:
        """Candidates of these rows' queries."""
        documents = self._rows.values("documents", rows)
        present = torch.from_numpy((documents >= 0).all(axis=1))
        # One document stands in for all that are missing; it is masked, and encoded once at most.
        distinct, index = np.unique(np.maximum(documents, 0), return_inverse=True)
        embeddings = self._documents.values("teacher", distinct)
        texts = None
        if self._pad is not None:
            texts = collate(self._documents.tokens(distinct), pad=self._pad, packed=self._packed)
        return Candidates(
            embeddings=torch.from_numpy(embeddings.astype(np.float32)),
            index=torch.from_numpy(index.reshape(documents.shape)),
            present=present,
            weights=self.weights(rows) * present * self._share,
            query_ids=torch.from_numpy(self._rows.values("query", rows)),
            document_ids=torch.from_numpy(documents),
            known=torch.from_numpy(padded(self._rows.lists("known", rows), width=self._known)),
            scores=torch.from_numpy(self._rows.values("scores", rows)) if self._scored else None,
            texts=texts,
        )


def name(sources: Sources, *, folder: str, each: Each) -> None:
    """Note which documents and queries the training rows name: sorted hashes, 8 bytes each."""
    parts = slices(sources.triplets, "triplets")
    run_slices(
        "names",
        partial(_names, sources=sources, folder=folder),
        parts,
        folder=folder,
        each=each,
        room="distill",
    )
    for table in ("named", "asked"):
        found = merged([array(fs.join(folder, _name(table, i))) for i in range(len(parts))])
        write_table(fs.join(folder, f"{table}.arrow"), pa.table({"hash": found}))


def prepare(
    sources: Sources, teacher: Artifact, lessons: Sequence[Record], *, folder: str, each: Each
) -> tuple[dict[str, list[tuple[str, Part]]], dict[str, Any]]:
    """Tables and facts that a store needs beside its lessons, whose records are given; after :func:`name`.

    TrainingError when triplets name what was never embedded; ConfigError when the wrong view was.
    """
    run = partial(run_slices, folder=folder, each=each, room="distill")
    _require_view(sources.embeddings)
    written = run(
        "documents",
        partial(_documents, sources=sources, folder=folder),
        slices(sources.embeddings, "embeddings"),
    )
    wanted = array(fs.join(folder, "named.arrow"))
    place = place_of(wanted, written, folder)
    rejected = sources.embeddings.table("rejected.parquet", ["row"])["row"]
    lost = np.flatnonzero(np.isin(wanted, hash_of(rejected))) if len(rejected) else np.empty(0, np.int64)
    place[lost[place[lost] < 0]] = tokens.UNREADABLE
    write_table(fs.join(folder, "place.arrow"), pa.table({"row": place}))
    _number_lessons(lessons, folder)
    rows = run(
        "rows",
        partial(_rows, sources=sources, teacher=teacher, folder=folder),
        slices(sources.triplets, "triplets"),
    )
    groups = {record["group"] for record in rows if record["group"]}
    if len(groups) != 1:
        raise DataError(f"triplets carry unequal numbers of documents ({sorted(groups)}): re-run collect")
    (group,) = groups
    starts = np.cumsum([0, *(_total(listed(record["files"])) for record in lessons)])
    free = run(
        "free",
        partial(_free, lessons=list(lessons), starts=starts.tolist(), group=group, folder=folder),
        [[str(number)] for number in range(len(lessons))],
    )
    with_documents = [file for record in rows for file in listed(record["files"])]
    without = [file for record in free for file in listed(record["files"])]
    sizes = {"triplets": _total(with_documents), "generated": _total(without)}
    tables = {
        DOCUMENTS: [file for record in written for file in listed(record["files"])],
        ROWS: [*with_documents, *without],
    }
    facts = {
        "sizes": {part: count for part, count in sizes.items() if count},
        "known": max(record["known"] for record in rows),
        "scored": any(record["scored"] for record in rows),
        "left_out": sum(record["left_out"] for record in rows),
    }
    return tables, facts


def _require_view(embeddings: Artifact) -> None:
    with fs.open_input(embeddings.file(embeddings.table_parts("embeddings")[0])) as stream:
        views = pq.read_schema(stream).names
    if VIEW not in views:
        raise ConfigError(
            f"{embeddings.uri} holds no view {VIEW!r}, which is what is searched: add it to encode.views"
        )


def _names(item: Slice, *, sources: Sources, folder: str) -> Record:
    table = _training(sources.triplets, item[1], ["query_id", "positive", "negatives", "split"])
    named = tokens.named(table.to_batches())
    asked = np.unique(tokens.query_number(table["query_id"]))
    for name, found in (("named", named), ("asked", asked.astype(np.uint64))):
        write_table(fs.join(folder, _name(name, item[0])), pa.table({"hash": found}))
    return {}


def _documents(item: Slice, *, sources: Sources, folder: str) -> Record:
    wanted = array(fs.join(folder, "named.arrow"))
    found: list[pa.Table] = []
    problems: dict[str, str] = {}
    for part in item[1]:
        table = sources.embeddings.table(part, ["doc_id", VIEW])
        hashes = hash_of(table["doc_id"])
        kept = corpus.among(hashes, wanted)
        columns = {"hash": pa.array(hashes[kept]), "teacher": table.filter(pa.array(kept))[VIEW]}
        if sources.prompt is not None:
            assert sources.dataset is not None
            texts = corpus.read(
                sources.dataset, [part.replace("embeddings/", "documents/", 1)], corpus.COLUMNS
            )
            read, unread = tokens.tokenise_slice(texts, prompt=sources.prompt, wanted=np.sort(hashes[kept]))
            problems |= unread
            # Both are in the dataset's order, and embeddings may lack what the teacher could not read.
            both = pa.array(np.isin(hashes[kept], np.asarray(read["hash"])))
            columns = {name: column.filter(both) for name, column in columns.items()}
            columns |= {name: read[name] for name in ("ids", "positions")}
        found.append(pa.table(columns))
    files = write_tables(folder, {_name(DOCUMENTS, item[0]): pa.concat_tables(found)})
    return {"files": files, "problems": problems}


def _number_lessons(lessons: Sequence[Record], folder: str) -> None:
    """Sorted numbers of all queries and the row of each among the lessons: 16 bytes a query."""
    files = [name for record in lessons for name, _ in listed(record["files"])]
    numbers = np.concatenate([np.empty(0, np.int64), *(array(fs.join(folder, name)) for name in files)])
    order = np.argsort(numbers, kind="stable")
    if (np.diff(numbers[order]) == 0).any():
        raise DataError(
            "a query comes twice in the teacher's embeddings, or two ids share a hash: re-run teacher"
        )
    write_table(fs.join(folder, "queries.arrow"), pa.table({"query": numbers[order]}))
    write_table(fs.join(folder, "lessons.arrow"), pa.table({"row": order.astype(np.int64)}))


def _rows(item: Slice, *, sources: Sources, teacher: Artifact, folder: str) -> Record:
    number, parts = item
    table = _training(sources.triplets, parts, _COLUMNS, scores=teacher)
    found = [name.replace("triplets/", "answers/", 1) for name in parts]
    answers = [sources.triplets.table(name) for name in found if name in sources.triplets.names("answers/")]
    columns, readable = tokens.triplet_columns(
        table,
        pa.concat_tables(answers) if answers else None,
        wanted=array(fs.join(folder, "named.arrow")),
        place=array(fs.join(folder, "place.arrow")),
    )
    known, queries = array(fs.join(folder, "queries.arrow")), np.asarray(columns["query"])
    at = np.minimum(np.searchsorted(known, queries), max(len(known) - 1, 0))
    if len(queries) and not (len(known) and (known[at] == queries).all()):
        raise TrainingError("triplets ask queries that the teacher has not embedded: re-run teacher")
    lesson = array(fs.join(folder, "lessons.arrow"))[at] if len(queries) else queries
    kept = ("query", "documents", "known", "weight", "scores")
    rows = one_chunk({"lesson": pa.array(lesson), **{name: columns[name] for name in kept}})
    rows = rows.filter(pa.array(readable)).combine_chunks()
    return {
        "files": write_tables(folder, {_name(ROWS, number): rows}),
        "left_out": int((~readable).sum()),
        "group": rows.schema.field("documents").type.list_size if len(rows) else None,
        "known": pc.max(pc.list_value_length(rows["known"])).as_py() or 0,
        "scored": not bool(pc.all(pc.is_nan(pc.list_flatten(rows["scores"]))).as_py()),
    }


def _free(item: Slice, *, lessons: list[Record], starts: list[int], group: int, folder: str) -> Record:
    """Rows of queries that no triplet asks."""
    asked = array(fs.join(folder, "asked.arrow"))
    files = listed(lessons[item[0]]["files"])
    numbers = np.concatenate([np.empty(0, np.int64), *(array(fs.join(folder, name)) for name, _ in files)])
    alone = np.flatnonzero(~corpus.among(numbers.astype(np.uint64), asked))
    size = len(alone)
    rows = one_chunk(
        {
            "lesson": pa.array(alone + starts[item[0]]),
            "query": pa.array(numbers[alone]),
            "documents": _table(np.full((size, group), -1, np.int64)),
            "known": list_column(np.empty(0, np.int64), [0] * (size + 1), pa.large_list(pa.int64())),
            "weight": pa.array(np.ones(size, np.float32)),
            "scores": _table(np.full((size, group), np.nan, np.float32)),
        }
    )
    return {"files": write_tables(folder, {_name("free", item[0]): rows})}


def _training(
    triplets: Artifact, parts: Sequence[str], columns: list[str], *, scores: Artifact | None = None
) -> pa.Table:
    """Training rows of some parts; `scores`, those of a teacher that scored them part by part, row by row."""
    tables = []
    for part in parts:
        table = triplets.table(part, columns)
        beside = part.replace("triplets/", "scores/", 1)
        if scores is not None and beside in scores.manifest.parts:
            table = table.append_column("scores", scores.table(beside, ["scores"])["scores"])
        tables.append(table.filter(pc.equal(table["split"], "train")))
    return pa.concat_tables(tables)


def _table(values: Shaped[ndarray, "rows group"]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _total(files: Sequence[tuple[str, Part]]) -> int:
    return sum(part.rows or 0 for _, part in files)


def _name(table: str, number: int) -> str:
    return f"{table}/{number:05d}.arrow"
