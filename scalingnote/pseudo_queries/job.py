"""The stage that builds pseudo-queries: documents in, distinct texts for a teacher out.

    documents ─draw─► buckets by text ┐
    test and validation queries ──────┼─merge─► parts: query_id, query, role, split
    real queries, if any ─────────────┘

Tasks run on Ray and shuffle through files, so memory is bounded by a slice of documents and by a bucket of
texts at any corpus size, and a task that runs again writes the same files again. A text that repeats a test
query, or a validation query of the triplets, is left out: the student must not train on what it is measured
with.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import cluster
from scalingnote.datasets.columns import table_rows
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.rows import Unreadable
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import get_logger
from scalingnote.pseudo_queries.config import PseudoQueriesConfig
from scalingnote.pseudo_queries.sampling import Document, draw
from scalingnote.storage import exchange, schema
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, write_table
from scalingnote.storage.slices import Record, Slice, listed, run_slices, slices

log = get_logger("pseudo_queries")
TABLE = "queries"
BUCKET_ROWS = 1 << 20
LOG_ROWS = 1 << 18  # of a query log, scattered at once
SCATTERED = pa.schema(
    {"key": pa.string(), "query": pa.string(), "role": pa.string(), "split": pa.string(), "order": pa.int8()}
)
_HELD_OUT = pa.schema({"key": pa.string()})
_REAL, _DRAWN = 0, 1  # of equal texts the real query is kept


def run(config: PseudoQueriesConfig, *, dataset: str, triplets: str | None = None, output: str) -> Artifact:
    """Build the artifact `pseudo_queries` from a dataset's documents.

    Args:
        config: kinds of texts, their number, real queries to add.
        dataset: URI of the dataset; its test queries are held out.
        triplets: URI of triplets whose validation queries are held out, where stage I was trained on some.
        output: URI of the artifact.

    Raises:
        DataError: the documents give no text, or the query log cannot be read.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset")}
    if triplets is not None:
        parents["triplets"] = open_artifact(triplets, kind="triplets")
    draft = Draft(output, kind="pseudo_queries", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    source = parents["dataset"]
    documents = source.counts["documents"]
    expected = len(config.mix) * documents if config.count is None else config.count
    buckets = max(-(-expected // BUCKET_ROWS), 1)
    where: dict[str, Any] = {"folder": draft.work(), "buckets": buckets}
    do = partial(run_slices, folder=draft.work(), each=cluster.map_tasks, room="pseudo_queries", unit="tasks")
    per_document = None if config.count is None else config.count / max(documents, 1)
    drawn = do(
        "draw",
        partial(scatter_documents, dataset=source, config=config, per_document=per_document, **where),
        slices(source, "documents"),
    )
    real = do(
        "real", partial(scatter_queries, dataset=source, config=config, **where), slices(source, "queries")
    )
    if "triplets" in parents:
        held = partial(hold_out_validation, triplets=parents["triplets"], **where)
        do("validation", held, slices(parents["triplets"], "triplets"))
    logged: list[Record] = []
    if config.query_log:
        logged = do("log", partial(scatter_log, config=config, **where), [config.query_log])
    merged = do(
        "merge",
        partial(merge, folder=draft.work(), output=draft.uri, rows=config.rows_per_part),
        range(buckets),
    )
    for record in merged:
        for name, part in listed(record["files"]):
            draft.register(name, part)
    counts = {name: sum(record[name] for record in merged) for name in ("queries", "validation", "held_out")}
    if not counts["queries"]:
        raise DataError(f"{source.uri}: none of {documents:,} documents has a title or content to draw from")
    counts |= {"drawn": sum(drawn), "real": sum(real) + sum(record["rows"] for record in logged)}
    counts["unreadable"] = sum(record["unreadable"] for record in logged)
    log.info(
        "%s distinct texts (%s for validation); %s left out because a test or validation query is equal",
        *(f"{counts[name]:,}" for name in ("queries", "validation", "held_out")),
    )
    return draft.commit(counts=counts)


def scatter_documents(
    item: Slice,
    *,
    dataset: Artifact,
    config: PseudoQueriesConfig,
    per_document: float | None,
    folder: str,
    buckets: int,
) -> int:
    """Draw the texts of a slice of documents and write them to buckets; returns the number of texts."""
    number, parts = item
    rows: dict[str, tuple[str, str, str]] = {}
    for part in parts:
        table = dataset.table(part, ["doc_id", "title", "content"])
        keys = exchange.hash_of(table["doc_id"])
        texts = zip(keys.tolist(), table["title"].to_pylist(), table["content"].to_pylist(), strict=True)
        for key, title, content in texts:
            split = _split(key, config)
            for found in draw(Document(key, title or "", content or ""), config, per_document=per_document):
                rows.setdefault(text_key(found.text), (found.text, found.role, split))
    _scatter(
        [(key, *row, _DRAWN) for key, row in rows.items()], f"{number:05d}", folder=folder, buckets=buckets
    )
    return len(rows)


def scatter_queries(
    item: Slice, *, dataset: Artifact, config: PseudoQueriesConfig, folder: str, buckets: int
) -> int:
    """Hold out a slice's test queries and write the wanted training queries to buckets; returns these."""
    number, parts = item
    table = pa.concat_tables(dataset.table(part, ["query", "split"]) for part in parts)
    training = pc.equal(table["split"], "train")
    name = f"queries-{number:05d}"
    _hold_out(table.filter(pc.invert(training))["query"], name, folder=folder, buckets=buckets)
    texts = sorted(table.filter(training)["query"].unique().to_pylist())
    if config.train_queries is not None:
        total = max(dataset.counts.get("queries", len(table)), 1)
        hashes = exchange.hash_of(pa.array(texts, pa.string()))
        # The smallest hashes: the same texts for one count, more of them for a larger one.
        room = -(-config.train_queries * len(table) // total)
        texts = [texts[row] for row in np.argsort(hashes, kind="stable")[:room]]
    return _scatter_real(texts, name, config, folder=folder, buckets=buckets)


def hold_out_validation(item: Slice, *, triplets: Artifact, folder: str, buckets: int) -> int:
    """Hold out the validation queries of a slice of triplets; returns their number."""
    number, parts = item
    table = pa.concat_tables(triplets.table(part, ["query", "split"]) for part in parts)
    held = table.filter(pc.equal(table["split"], "validation"))["query"]
    return _hold_out(held, f"triplets-{number:05d}", folder=folder, buckets=buckets)


def scatter_log(item: tuple[int, str], *, config: PseudoQueriesConfig, folder: str, buckets: int) -> Record:
    """Write the queries of a log to buckets; `rows` written and `unreadable` rows are counted."""
    texts: list[str] = []
    written = unreadable = chunk = 0
    for text in _log_texts(item[1]):
        if text is None:
            unreadable += 1
            continue
        texts.append(text)
        if len(texts) == LOG_ROWS:
            written += _scatter_real(texts, f"log-{chunk:05d}", config, folder=folder, buckets=buckets)
            texts, chunk = [], chunk + 1
    written += _scatter_real(texts, f"log-{chunk:05d}", config, folder=folder, buckets=buckets)
    if unreadable:
        log.warning("%s: %s rows have no readable query and were left out", item[1], f"{unreadable:,}")
    return {"rows": written, "unreadable": unreadable}


def merge(item: tuple[int, int], *, folder: str, output: str, rows: int) -> Record:
    """Write the distinct texts of a bucket, less what is held out, as parts of at most `rows` rows.

    Of equal texts a real query is kept before a drawn one, and validation before training.
    """
    bucket = item[1]
    table = exchange.gather(_target(folder, "texts"), bucket, schema=SCATTERED)
    held = exchange.gather(_target(folder, "held"), bucket, schema=_HELD_OUT)["key"].combine_chunks()
    keys = [("key", "ascending"), ("order", "ascending"), ("split", "descending"), ("query", "ascending")]
    table = table.sort_by(keys)
    names = ["query", "role", "split"]
    distinct = table.group_by("key", use_threads=False).aggregate([(name, "first") for name in names])
    kept = distinct.filter(pc.invert(pc.is_in(distinct["key"], value_set=held)))
    numbers = exchange.hash_of(kept["key"])
    order = np.argsort(numbers, kind="stable")  # or texts of one beginning would share a part
    columns = {name: kept[f"{name}_first"] for name in names}
    ids = pa.array([f"text {number:016x}" for number in numbers.tolist()], pa.string())
    whole = pa.table({"query_id": ids, **columns}).take(pa.array(order)).cast(schema.PSEUDO_QUERIES)
    files = []
    for part, start in enumerate(range(0, len(whole), rows)):
        name = f"{TABLE}/part-{bucket:05d}-{part:05d}.parquet"
        files.append((name, vars(write_table(fs.join(output, name), whole.slice(start, rows)))))
    validation = pc.sum(pc.equal(whole["split"], "validation")).as_py() or 0
    return {
        "files": files,
        "queries": len(whole),
        "validation": validation,
        "held_out": len(distinct) - len(kept),
    }


def text_key(text: str) -> str:
    """Equal for texts that differ in case, spaces and punctuation at their ends alone."""
    return " ".join(text.casefold().split()).strip(" .,:;?!。，：；？！\"'")


def _split(key: int, config: PseudoQueriesConfig) -> str:
    """The split of a document's texts, or of a real query, by its hash."""
    return "validation" if key < config.validation_share * 2.0**64 else "train"


def _scatter_real(
    texts: Iterable[str], name: str, config: PseudoQueriesConfig, *, folder: str, buckets: int
) -> int:
    found = {key: text for text in texts if (key := text_key(text))}
    splits = map(partial(_split, config=config), exchange.hash_of(pa.array([*found], pa.string())).tolist())
    rows = [
        (key, text, "query", split, _REAL) for (key, text), split in zip(found.items(), splits, strict=True)
    ]
    _scatter(rows, name, folder=folder, buckets=buckets)
    return len(rows)


def _scatter(rows: list[tuple[str, str, str, str, int]], name: str, *, folder: str, buckets: int) -> None:
    rows = [row for row in rows if row[0]]
    columns = zip(*rows, strict=True) if rows else ((),) * len(SCATTERED)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCATTERED, strict=True)]
    table = pa.table(arrays, schema=SCATTERED)
    exchange.scatter(table, _buckets(table, buckets), target=_target(folder, "texts"), name=name)


def _hold_out(queries: pa.ChunkedArray, name: str, *, folder: str, buckets: int) -> int:
    """Write the keys of queries that no text may equal; returns their number."""
    keys = {text_key(text) for text in queries.unique().to_pylist()} - {""}
    table = pa.table({"key": sorted(keys)}, schema=_HELD_OUT)
    exchange.scatter(table, _buckets(table, buckets), target=_target(folder, "held"), name=name)
    return len(table)


def _buckets(table: pa.Table, buckets: int) -> Any:
    return exchange.bucket_of(table["key"], buckets) if len(table) else np.empty(0, np.int64)


def _target(folder: str, what: str) -> str:
    return fs.join(folder, "scattered", what)


def _log_texts(path: str) -> Iterator[str | None]:
    """Queries of a log; None for a row without a readable one. ConfigError for a file of another kind."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"pseudo_queries.query_log: no file at {path}")
    if file.suffix == ".txt":
        with file.open("rb") as lines:
            for line in lines:
                try:
                    yield line.decode().strip() or None
                except UnicodeDecodeError:
                    yield None
        return
    for row in table_rows(TableFile(path=path), ["query"], needs=["query"]):
        text = None if isinstance(row, Unreadable) else row.get("query")
        yield text if isinstance(text, str) and text.strip() else None
