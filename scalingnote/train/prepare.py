"""Prepare stage I: write triplets and the documents they name to a store that ranks read by row number.

    triplets   ─► names       hashes of the documents they name
    documents  ─► documents   tokens of those, a file per slice
    triplets   ─► rows        query tokens, row numbers of documents, known answers; a file per slice and part

Each text is tokenised once. A slice is a task: it reads some parts, writes its files, and then a record. A
killed run repeats the slices without a record. Only the hashes are held in memory entirely, 8 bytes a
document.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from jaxtyping import Int64, Shaped, UInt64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt
from scalingnote.models.sparse_query import SparseQuery, needs_leading_space
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, read_table, write_table
from scalingnote.storage.schema import DOCUMENT_COLUMNS
from scalingnote.storage.shuffle import (
    JsonRecord,
    hash_of,
    named_parts,
    run_slices,
    slices,
    write_tables,
)
from scalingnote.train import tokens
from scalingnote.train.config import TrainConfig
from scalingnote.train.data import Store, stand_ins

log = get_logger("train")
_MERGE_ELEMENTS = 1 << 24  # number of hashes that are merged together
_SAMPLE_ROWS = 4096


@dataclass(frozen=True)
class PreparedStore:
    """Facts of a finished store that the driver needs."""

    store: str  # URI, for Store.open
    tokenizers: dict[str, str]  # JSON, for towers that start from scratch
    sizes: dict[str, int]  # training rows by source and hop, the input of Order
    documents: int
    group: int  # documents of a row: the positive and the hard negatives, some of them possibly absent


class TrainingSet(NamedTuple):
    """Triplets, and the documents they name."""

    dataset: Artifact
    triplets: Artifact


SetSlice = tuple[int, tuple[str, list[str]]]  # the number of a slice, the name of its set, its parts
ONLY = ""  # name of the set of a run without a mixture: its ids stay unchanged


def prepare(
    config: TrainConfig,
    *,
    dataset: Artifact,
    triplets: Artifact,
    folder: str,
    mixture: Mapping[str, TrainingSet] | None = None,
    each: Executor = map,
) -> PreparedStore:
    """Write the store of a run into `folder`, or find it there. Must be called once, before any rank starts.

    Args:
        config: towers, and whether there is a sparse head.
        dataset: its documents are written.
        triplets: their rows are written.
        mixture: sets by their names, in place of these two.
        folder: must belong to this config and these artifacts, like the work directory of a Draft.
        each: runs the tasks; on Ray, `cluster.map_tasks`.

    Raises:
        TrainingError: triplets name a document that is not in the dataset.
        DataError: a doc_id occurs twice, or two have the same hash.
    """
    if not Store.is_complete(folder):
        _write_store(config, mixture or {ONLY: TrainingSet(dataset, triplets)}, folder, each)
    facts = Store.facts_of(folder)
    tokenizers = json.loads(fs.read_bytes(fs.join(folder, "tokenizers.json")))
    return PreparedStore(folder, tokenizers, facts["sizes"], facts["documents"], facts["group"])


def _write_store(config: TrainConfig, sets: Mapping[str, TrainingSet], folder: str, each: Executor) -> None:
    triplet_slices = [
        (name, parts) for name, entry in sets.items() for parts in slices(entry.triplets, "triplets")
    ]
    document_slices = [
        (name, parts) for name, entry in sets.items() for parts in slices(entry.dataset, "documents")
    ]
    run = partial(run_slices, folder=folder, each=each, section="train")

    wanted_records = run("wanted", partial(_hashes_of_slice, sets=sets, folder=folder), triplet_slices)
    group = max(record["group"] for record in wanted_records)
    wanted = merge_hashes(folder, "wanted", files=len(triplet_slices))

    uri = fs.join(folder, "tokenizers.json")
    if not fs.exists(uri):
        tokenizers = tokens.train_tokenizers(
            {"query": config.query_tower, "document": config.document},
            texts=lambda: (
                text
                for name, entry in sets.items()
                for text in tokens.tokenizer_texts(entry.triplets, entry.dataset, wanted, prefix=name)
            ),
        )
        fs.write_bytes(uri, json.dumps(tokenizers).encode())
    tokenizers = json.loads(fs.read_bytes(uri))
    query = tokens.build_prompt(config.query_tower, role="query", tokenizer_json=tokenizers.get("query"))
    document = tokens.build_prompt(
        config.document,
        role="document",
        tokenizer_json=tokenizers.get("document"),
        sparse=config.sparse is not None,
    )
    assert isinstance(document, DocumentPrompt)
    assert not isinstance(query, DocumentPrompt)
    terms = sparse_query(config, document.tokenizer)
    document_records = run(
        "documents",
        partial(_documents_of_slice, sets=sets, prompt=document, folder=folder),
        document_slices,
    )
    place = number_documents(wanted, document_records, folder)
    write_table(fs.join(folder, "place.arrow"), pa.table({"row": place}))

    rows = run(
        "rows",
        partial(_rows_of_slice, sets=sets, prompt=query, sparse=terms, group=group, folder=folder),
        triplet_slices,
    )
    _finish_store(document_records, rows, group, folder)


def _hashes_of_slice(item: SetSlice, *, sets: Mapping[str, TrainingSet], folder: str) -> JsonRecord:
    number, (name, parts) = item
    batches = tokens.read_columns(sets[name].triplets, parts, ["positive", "negatives"], prefix=name)
    hashes, group = tokens.document_hashes(batches)
    write_table(fs.join(folder, file_name("wanted", number)), pa.table({"hash": hashes}))
    return {"group": group}


def _documents_of_slice(
    item: SetSlice, *, sets: Mapping[str, TrainingSet], prompt: DocumentPrompt, folder: str
) -> JsonRecord:
    number, (name, parts) = item
    batches = tokens.read_columns(sets[name].dataset, parts, DOCUMENT_COLUMNS, prefix=name)
    wanted = read_array(fs.join(folder, "wanted.arrow"))
    table, problems = tokens.document_rows(batches, prompt=prompt, wanted=wanted)
    return {"files": write_tables(folder, {file_name("documents", number): table}), "problems": problems}


def sparse_query(config: TrainConfig, tokenizer: Tokenizer) -> SparseQuery | None:
    """Build the reader of queries as terms, with the document tower's tokenizer.

    None without a sparse head.
    """
    sparse = config.sparse
    if sparse is None:
        return None
    return SparseQuery(
        Tokenizer.from_str(tokenizer.to_str()),
        max_length=config.query.max_length,
        weighting=sparse.query,
        leading_space=needs_leading_space(tokenizer),
    )


def _rows_of_slice(
    item: SetSlice,
    *,
    sets: Mapping[str, TrainingSet],
    prompt: QueryPrompt | LookupPrompt,
    sparse: SparseQuery | None,
    group: int,
    folder: str,
) -> JsonRecord:
    number, (name, parts) = item
    triplets = sets[name].triplets
    answers = tokens.read_answers(triplets, parts)
    rows, left_out = tokens.triplet_rows(
        tokens.of_set(pa.concat_tables(triplets.table(part) for part in parts), name),
        None if answers is None else tokens.of_set(answers, name),
        prompt=prompt,
        group=group,
        wanted=read_array(fs.join(folder, "wanted.arrow")),
        place=read_array(fs.join(folder, "place.arrow")),
        sparse=sparse,
    )
    if name != ONLY:  # the set is the part, and rows store its number among all sets
        rows = rows.set_column(
            rows.schema.get_field_index("part"), "part", pa.array([name] * len(rows), pa.string())
        )
        rows = rows.append_column("set", pa.array([list(sets).index(name)] * len(rows), pa.int32()))
    columns = rows.drop_columns(["split", "part"])
    training = pc.equal(rows["split"], "train")
    files = {}
    for part in sorted(pc.unique(rows["part"]).to_pylist()):
        of_part = columns.filter(pc.and_(training, pc.equal(rows["part"], part)))
        files[part] = write_tables(folder, {f"rows/{number:05d}-{part.replace('/', '-')}.arrow": of_part})
    validation = columns.filter(pc.invert(training))
    return {
        "parts": files,
        "validation": write_tables(folder, {f"rows/{number:05d}-validation.arrow": validation}),
        "left_out": left_out,
        **tokens.row_facts(rows),
        "terms": (pc.max(pc.list_value_length(rows["terms"])).as_py() or 0) if sparse else None,
    }


def mean_tokens(store: Store) -> tuple[float, float]:
    """Compute mean tokens of a training row's query, and of all its documents, on 4,096 sampled rows."""
    rows = store["train"]
    sample = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLE_ROWS)).astype(np.int64))
    documents = stand_ins(rows.values("documents", sample))
    query_tokens = [len(ids) for ids in rows.lists("ids", sample)]
    document_tokens = [len(ids) for ids in store["documents"].lists("ids", documents.ravel())]
    return float(np.mean(query_tokens)), sum(document_tokens) / len(documents)


def merge_hashes(folder: str, name: str, *, files: int) -> UInt64[ndarray, " all"]:
    """Write the sorted union of the sorted hashes in files of `name` to ``{name}.arrow``, and return it."""
    arrays = [read_array(fs.join(folder, file_name(name, number))) for number in range(files)]
    # Ranges of values are merged one after the other.
    ranges = max(sum(map(len, arrays)) // _MERGE_ELEMENTS, 1)
    bounds = np.array([(i << 64) // ranges for i in range(1, ranges)], dtype=np.uint64)
    pieces = zip(*(np.split(values, np.searchsorted(values, bounds)) for values in arrays), strict=True)
    union = np.concatenate([np.empty(0, np.uint64), *(np.unique(np.concatenate(p)) for p in pieces)])
    write_table(fs.join(folder, f"{name}.arrow"), pa.table({"hash": union}))
    return union


def number_documents(
    wanted: UInt64[ndarray, " named"], records: Sequence[JsonRecord], folder: str
) -> Int64[ndarray, " named"]:
    """Return the row number of each wanted document, or MISSING_ROW or UNREADABLE_ROW."""
    place = np.full(len(wanted), tokens.MISSING_ROW, dtype=np.int64)
    start = 0
    for record in records:
        for doc_id in record["problems"]:
            place[np.searchsorted(wanted, hash_of(pa.array([doc_id])))] = tokens.UNREADABLE_ROW
        for name, part in files_of([record]):
            at = np.searchsorted(wanted, read_array(fs.join(folder, name)))
            if (place[at] >= 0).any() or len(np.unique(at)) < len(at):
                raise DataError(
                    "a doc_id occurs twice in the dataset, or two have the same 64-bit hash "
                    f"(found in slice {name}): rename one and re-run prepare"
                )
            place[at] = np.arange(start, start + len(at))
            start += part.rows or 0
    return place


def _finish_store(
    documents: Sequence[JsonRecord], rows: Sequence[JsonRecord], group: int, folder: str
) -> None:
    problems = {doc_id: reason for record in documents for doc_id, reason in record["problems"].items()}
    left_out, short = (sum(record[name] for record in rows) for name in ("left_out", "short"))
    if problems:
        doc_id, reason = next(iter(problems.items()))
        log.warning(
            "%s triplets left out: their positive is one of %s documents that cannot be read, for example "
            "%s: %s",
            f"{left_out:,}",
            f"{len(problems):,}",
            doc_id,
            reason,
        )
    if short:
        log.info("%s triplets have fewer than %s hard negatives", f"{short:,}", group - 1)
    parts = [record["parts"] for record in rows]
    by_part = {part: files_of(parts, part) for part in sorted({part for record in parts for part in record})}
    tables = {
        "documents": files_of(documents),
        "train": [file for files in by_part.values() for file in files],
        "validation": files_of(rows, "validation"),
    }
    facts = {
        "sizes": {part: total_rows(files) for part, files in by_part.items() if files},
        "documents": total_rows(tables["documents"]),
        "group": group,
        "short": short,
        "known": max(record["known"] for record in rows),
        "scored": any(record["scored"] for record in rows),
        "terms": max((record["terms"] for record in rows if record["terms"] is not None), default=None),
    }
    Store.finish(folder, tables, facts)


def file_name(table: str, number: int) -> str:
    """Return the name of the file of a table that the task with this number writes."""
    return f"{table}/{number:05d}.arrow"


def files_of(records: Iterable[JsonRecord], table: str = "files") -> list[tuple[str, Part]]:
    """List the files of a table that tasks with these records wrote, in order."""
    return [file for record in records for file in named_parts(record.get(table, []))]


def total_rows(files: Sequence[tuple[str, Part]]) -> int:
    """Count the rows of some files of a table."""
    return sum(part.rows or 0 for _, part in files)


def read_array(uri: str) -> Shaped[ndarray, " rows"]:
    """Read the first column of an Arrow file."""
    return np.asarray(read_table(uri).column(0).combine_chunks())
