"""The pseudo_queries stage: distinct texts from documents that a teacher encodes.

    documents ─draw─► buckets by text ┐
    test and validation queries ──────┼─merge─► parts: query_id, query, split
    real queries, if any ─────────────┘

Tasks run on Ray and shuffle through files, so memory is bounded by a slice of documents and by a bucket of
texts for a corpus of any size, and a repeated task writes the same files again. A text that equals a test
query, or a validation query of the dataset or of the triplets, is left out: the student must not train on
evaluation data.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core import cluster
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.core.words import checked_text
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.file_heads import columns_of
from scalingnote.datasets.input_files import UnreadableRow, find_files
from scalingnote.datasets.passages import settings
from scalingnote.datasets.readers import table_rows
from scalingnote.storage import schema, shuffle
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.shuffle import (
    JsonRecord,
    NumberedSlice,
    named_parts,
    run_slices,
    slices,
    write_tables,
)
from scalingnote.triplets.config import PseudoQueriesConfig
from scalingnote.triplets.pseudo_queries.sampling import draw
from scalingnote.triplets.work_folder import WorkFolder, read_slice

log = get_logger("pseudo_queries")
MAX_BUCKET_TEXTS = 1 << 20
LOG_CHUNK_ROWS = 1 << 18  # rows of a query log that are scattered at once
SCATTERED = pa.schema({"key": pa.string(), "query": pa.string(), "split": pa.string(), "order": pa.int8()})
HELD_OUT = pa.schema({"key": pa.string()})
_REAL, _DRAWN = 0, 1  # values of `order`: if texts are equal, the real query is kept


def run(config: PseudoQueriesConfig, *, dataset: str, triplets: str | None = None, output: str) -> Artifact:
    """Build the artifact `pseudo_queries` from a dataset's documents.

    Args:
        config: kinds of texts, their number, real queries to add.
        dataset: URI of the dataset; its test and validation queries are held out.
        triplets: URI of the triplets of stage I, if there are any; their validation queries are held out.
        output: URI of the artifact.

    Raises:
        ConfigError: the query log does not exist, or has no column of queries.
        DataError: no text can be drawn from the documents, or the query log cannot be read.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset")}
    if triplets is not None:
        parents["triplets"] = open_artifact(triplets, kind="triplets")
    draft = Draft(output, kind="pseudo_queries", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    if config.query_log:
        _query_column(config.query_log)  # raises an error before any work
    source = parents["dataset"]
    documents = source.counts["documents"]
    expected = len(config.mix) * documents if config.count is None else config.count
    per_document = None if config.count is None else config.count / max(documents, 1)
    buckets = max(-(-expected // MAX_BUCKET_TEXTS), 1)
    context = TextContext(draft.work(), buckets, config, source, per_document, draft.uri)
    do = partial(
        run_slices, folder=draft.work(), each=cluster.map_tasks, section="pseudo_queries", unit="tasks"
    )
    draw_counts = do("draw", partial(scatter_documents, context=context), slices(source, "documents"))
    real_counts = do("real", partial(scatter_queries, context=context), slices(source, "queries"))
    if "triplets" in parents:
        hold_out = partial(hold_out_validation, context=context, triplets=parents["triplets"])
        do("validation", hold_out, slices(parents["triplets"], "triplets"))
    log_records: list[JsonRecord] = []
    if config.query_log:
        log_records = do("log", partial(scatter_log, context=context), [config.query_log])
    records = do("merge", partial(merge_bucket, context=context), range(buckets))
    for record in records:
        for name, part in named_parts(record["files"]):
            draft.register(name, part)
    counts = {name: sum(record[name] for record in records) for name in ("queries", "validation", "held_out")}
    if not counts["queries"]:
        raise DataError(f"{source.uri}: none of {documents:,} documents has a title or content to draw from")
    counts |= {
        "drawn": sum(draw_counts),
        "real": sum(real_counts) + sum(record["rows"] for record in log_records),
    }
    counts["unreadable"] = sum(record["unreadable"] for record in log_records)
    log.info(
        "%s distinct texts (%s for validation); %s left out because they equal a test or validation query",
        *(f"{counts[name]:,}" for name in ("queries", "validation", "held_out")),
    )
    return draft.commit(counts=counts)


@dataclass(frozen=True)
class TextContext(WorkFolder):
    """Input that all tasks share. Texts, and keys that are held out, are in buckets by their keys."""

    config: PseudoQueriesConfig
    dataset: Artifact
    per_document: float | None  # number of texts to draw; None: one of each kind
    output: str

    def write_texts(self, rows: Iterable[tuple[str, str, str, int]], name: str) -> None:
        """Write SCATTERED rows; rows with an empty key are left out."""
        records = [dict(zip(SCATTERED.names, row, strict=True)) for row in rows if row[0]]
        self.scatter(pa.Table.from_pylist(records, schema=SCATTERED), "key", "texts", name)

    def write_real(self, texts: Iterable[str], name: str) -> int:
        """Write real queries; return the number of distinct ones."""
        by_key = {key: text for text in texts if (key := text_key(text))}
        held_out = shuffle.hash_of(pa.array([*by_key], pa.string())) < self.config.validation_share * 2.0**64
        splits = np.where(held_out, "validation", "train").tolist()
        rows = zip(by_key.items(), splits, strict=True)
        self.write_texts([(key, text, split, _REAL) for (key, text), split in rows], name)
        return len(by_key)

    def hold_out(self, queries: pa.ChunkedArray, name: str) -> int:
        """Write the keys of queries that no text may equal; return their number."""
        keys = {text_key(text) for text in queries.unique().to_pylist()} - {""}
        self.scatter(pa.table({"key": sorted(keys)}, schema=HELD_OUT), "key", "held", name)
        return len(keys)


def scatter_documents(item: NumberedSlice, *, context: TextContext) -> int:
    """Draw the texts of a slice of documents and write them to buckets; return the number of texts."""
    number, parts = item
    config, dataset = context.config, context.dataset
    # All passages of a document are held out together, because they share sentences.
    id_column = "doc_id" if settings(dataset) is None else "document_id"
    ids = read_slice(dataset, parts, [*dict.fromkeys(("doc_id", id_column))])
    documents = shuffle.hash_of(ids[id_column])
    limit = int(config.validation_share * 2.0**64)  # documents with a lower hash are held out
    distinct = np.unique(documents)
    if limit and len(distinct) > 1:  # at least one document, or a small collection has no validation
        limit = max(limit, 1 + int(distinct[0]))
    splits = np.where(documents < limit, "validation", "train").tolist()
    numbered = zip(shuffle.hash_of(ids["doc_id"]).tolist(), splits, strict=True)
    rows: dict[str, tuple[str, str]] = {}
    for part in parts:
        table = dataset.table(part, ["title", "content"])
        for title, content in zip(table["title"].to_pylist(), table["content"].to_pylist(), strict=True):
            key, split = next(numbered)
            for text in draw(key, title or "", content or "", config, per_document=context.per_document):
                rows.setdefault(text_key(text), (text, split))
    context.write_texts([(key, *row, _DRAWN) for key, row in rows.items()], f"{number:05d}")
    return len(rows)


def scatter_queries(item: NumberedSlice, *, context: TextContext) -> int:
    """Hold out a slice's test and validation queries, and write its training queries; return their number."""
    number, parts = item
    limit = context.config.train_queries
    table = read_slice(context.dataset, parts, ["query", "split"])
    training = pc.equal(table["split"], "train")
    name = f"queries-{number:05d}"
    context.hold_out(table.filter(pc.invert(training))["query"], name)
    texts = sorted(table.filter(training)["query"].unique().to_pylist())
    if limit is not None:
        total = max(context.dataset.counts.get("queries", len(table)), 1)
        hashes = shuffle.hash_of(pa.array(texts, pa.string()))
        # The smallest hashes, so that a larger number keeps the texts of a smaller one.
        share = -(-limit * len(table) // total)
        texts = [texts[row] for row in np.argsort(hashes, kind="stable")[:share]]
    return context.write_real(texts, name)


def hold_out_validation(item: NumberedSlice, *, context: TextContext, triplets: Artifact) -> int:
    """Hold out the validation queries of a slice of triplets; return their number."""
    number, parts = item
    table = read_slice(triplets, parts, ["query", "split"])
    queries = table.filter(pc.equal(table["split"], "validation"))["query"]
    return context.hold_out(queries, f"triplets-{number:05d}")


def scatter_log(item: tuple[int, str], *, context: TextContext) -> JsonRecord:
    """Write the queries of a log to buckets; count the `rows` that are written and `unreadable` ones."""
    rows = _log_texts(item[1])
    count = unreadable = chunk = 0
    while some := list(islice(rows, LOG_CHUNK_ROWS)):
        texts = [text for text in some if text is not None]
        count += context.write_real(texts, f"log-{chunk:05d}")
        unreadable += len(some) - len(texts)
        chunk += 1
    if unreadable:
        log.warning("%s: %s rows have no readable query and were left out", item[1], f"{unreadable:,}")
    return {"rows": count, "unreadable": unreadable}


def merge_bucket(item: tuple[int, int], *, context: TextContext) -> JsonRecord:
    """Write the distinct texts of a bucket that are not held out, as parts of at most `rows_per_part` rows.

    If texts are equal, a real query is kept rather than a drawn text, and validation rather than training.
    """
    bucket, rows = item[1], context.config.rows_per_part
    table, held_out = context.gather("texts", bucket, SCATTERED), context.gather("held", bucket, HELD_OUT)
    keys = [("key", "ascending"), ("order", "ascending"), ("split", "descending"), ("query", "ascending")]
    table = table.sort_by(keys)
    names = ["query", "split"]
    distinct = table.group_by("key", use_threads=False).aggregate([(name, "first") for name in names])
    excluded = pc.is_in(distinct["key"], value_set=held_out["key"].combine_chunks())
    allowed = distinct.filter(pc.invert(excluded))
    numbers = shuffle.hash_of(allowed["key"])
    # Sorted by hash: in the order of keys, texts with equal first words would be in one part.
    order = np.argsort(numbers, kind="stable")
    columns = {name: allowed[f"{name}_first"] for name in names}
    ids = pa.array([f"text {number:016x}" for number in numbers.tolist()], pa.string())
    texts = pa.table({"query_id": ids, **columns}).take(pa.array(order)).cast(schema.PSEUDO_QUERIES)
    parts = {
        f"queries/part-{bucket:05d}-{part:05d}.parquet": texts.slice(start, rows)
        for part, start in enumerate(range(0, len(texts), rows))
    }
    return {
        "files": write_tables(context.output, parts),
        "queries": len(texts),
        "validation": pc.sum(pc.equal(texts["split"], "validation")).as_py() or 0,
        "held_out": len(distinct) - len(allowed),
    }


def text_key(text: str) -> str:
    """Compute a key, equal for texts that differ only in case, spaces, and punctuation at both ends."""
    return " ".join(text.casefold().split()).strip(" .,:;?!。，：；？！\"'")


def _log_texts(path: str) -> Iterator[str | None]:
    """Yield the queries of a log, None for a row without a readable query."""
    file, column = Path(path), _query_column(path)
    if column is None:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    yield line.decode("utf-8-sig").strip() or None  # a byte-order mark is not text
                except UnicodeDecodeError:
                    yield None
        return
    slices = table_rows(TableFile(path=path, columns={"query": column}), ["query"])
    for row in chain.from_iterable(slices):
        text = None if isinstance(row, UnreadableRow) else row.get("query")
        yield checked_text(text) if isinstance(text, str) and text.strip() else None


def _query_column(path: str) -> str | None:
    """Find the column of queries of a log, None for text lines; raise ConfigError for other files."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"pseudo_queries.query_log: no file at {path}")
    if file.suffix == ".txt":
        return None
    columns = [column for each in find_files(path) for column in columns_of(each)]
    query_column = next((name for name in ("query", "text") if name in columns), None)
    if columns and query_column is None:
        raise ConfigError(
            f"pseudo_queries.query_log: {path} has no column `query` or `text`, only {columns}: rename one"
        )
    return query_column or "query"
