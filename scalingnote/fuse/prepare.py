"""Preparation of fusion: impressions, documents, queries and users become a store that ranks read by row.

    documents, users       ─► encodings        vocabularies and ranks
    impressions, users     ─► clicks           hashes of query and documents, profile of the user
    embeddings and codes   ─► documents        those that occur in clicks
    queries                ─► queries          by the query tower and the planner (actors)
    clicks                 ─► rows             clicks by row numbers, and log of each document's share

Work is done in slices, as in the preparation of stage I: a resumed run repeats only slices without a record.
Files hold the sorted hashes of all documents (``named.arrow``) and queries (``asked.arrow``) in clicks.
``shares.arrow`` has the share of all clicks of each document in ``named.arrow``.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float32, Int32
from numpy import ndarray

from scalingnote.core import cluster
from scalingnote.core.config import dump
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.encode.parts import EncodedPart, encode_parts
from scalingnote.fuse import impressions
from scalingnote.fuse.config import Feature, FuseConfig
from scalingnote.fuse.feature_encoding import Encoding, columns_of, encode, fit
from scalingnote.fuse.fusion import id_buckets, important_words
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.storage.shuffle import (
    JsonRecord,
    NumberedSlice,
    hash_of,
    named_parts,
    run_slices,
    slices,
    write_tables,
)
from scalingnote.train.data import Store, one_chunk
from scalingnote.train.prepare import file_name, merge_hashes, number_documents, read_array, total_rows
from scalingnote.train.tokens import in_sorted, row_numbers

log = get_logger("fuse")
WRITERS = "fuse.writers"
FEATURE_SAMPLE_ROWS = 1 << 20  # rows that features are fitted to
Encodings = dict[str, list[Encoding]]  # of the features of "documents" and "users"


class FusedCorpus(NamedTuple):
    """The artifacts that documents come from; a part has the same name in the folders of all three."""

    dataset: Artifact
    embeddings: Artifact
    semantic_ids: Artifact


def read_part(
    corpus: FusedCorpus, part: str, columns: Sequence[str]
) -> tuple[pa.Table, Float32[ndarray, "docs dim"], Int32[ndarray, "docs levels"]]:
    """Read the documents of a part of the embeddings, in its order.

    Returns:
        A table of doc_id and these columns of features, embeddings of the towers, codes of semantic IDs.

    Raises:
        ArtifactError: an embedding has no document or no semantic ID; the artifacts are from different runs.
    """
    name = part.removeprefix("embeddings/")
    embeddings = corpus.embeddings.table(part, ["doc_id", INDEXED_VIEW])
    doc_ids = embeddings["doc_id"]
    documents = corpus.dataset.table(f"documents/{name}", ["doc_id", *columns])
    codes = corpus.semantic_ids.table(f"codes/{name}", ["doc_id", "codes"])
    remedy = "re-run the stages between"
    codes = arrow.take_documents(codes, doc_ids, missing=f"semantic ID: {remedy}")
    return (
        arrow.take_documents(documents, doc_ids, missing=f"row in the dataset: {remedy}"),
        arrow.to_numpy(embeddings[INDEXED_VIEW]),
        arrow.to_matrix(codes["codes"]).astype(np.int32),
    )


def prepare(
    config: FuseConfig, corpus: FusedCorpus, *, planner: Artifact, tower: Artifact, folder: str
) -> dict[str, Any]:
    """Write the store of a run into `folder` unless it is there; return its facts.

    Args:
        config: of the stage.
        corpus: documents, and the impressions and users of its dataset.
        planner: scores the words of queries.
        tower: artifact with the query tower that encodes queries.
        folder: must belong to this config and these artifacts, like a Draft's work directory.

    Raises:
        ConfigError: the dataset lacks a declared feature.
        DataError: the dataset has no clicks to train on.
    """
    if Store.is_complete(folder):
        return Store.facts_of(folder)
    encodings = {
        "documents": _fit(config.document.features, corpus.dataset, "documents"),
        "users": _fit(config.query.profile, corpus.dataset, "users"),
    }
    write_clicks(config, corpus.dataset, encodings["users"], folder=folder)
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, section="fuse")
    task = partial(_documents, corpus=corpus, config=config, encodings=encodings["documents"], folder=folder)
    documents = run("documents", task, slices(corpus.embeddings, "embeddings"))
    queries = _encode_queries(config, corpus.dataset, planner, tower, folder)
    for name, records in (("named", documents), ("asked", queries)):
        place = number_documents(read_array(fs.join(folder, f"{name}.arrow")), records, folder)
        write_table(fs.join(folder, f"{name}-place.arrow"), pa.table({"row": place}))
    rows = run("rows", partial(_rows, folder=folder), range(config.parts))
    tables = {
        name: [file for record in records for file in named_parts(record["files"])]
        for name, records in (("documents", documents), ("queries", queries), ("rows", rows))
    }
    left_out = sum(record["left_out"] for record in rows)
    if left_out:
        log.warning(
            "%s clicks left out: their document has no embedding, or their query is not for training",
            f"{left_out:,}",
        )
    facts = {
        "sizes": {"rows": total_rows(tables["rows"])},
        "left_out": left_out,
        "encodings": {table: [dump(each) for each in fitted] for table, fitted in encodings.items()},
    }
    Store.finish(folder, {name: files for name, files in tables.items() if files}, facts)
    return facts


def _fit(features: Sequence[Feature], dataset: Artifact, table: str) -> list[Encoding]:
    """Fit features to all rows of a table, or to about FEATURE_SAMPLE_ROWS: parts at equal distances."""
    if not features:
        return []
    parts = dataset.table_parts(table)
    if not parts:
        raise ConfigError(f"fuse.query.profile reads columns of {table}, but {dataset.uri} has no such table")
    columns = sorted({feature.column for feature in features})
    known = pq.read_schema(dataset.open(parts[0])).names
    if missing := [column for column in columns if column not in known]:
        raise ConfigError(f"no column {missing[0]!r} in {table} for a feature of fuse: {known}")
    step = max(-(-sum(dataset.rows_of(parts).values()) // FEATURE_SAMPLE_ROWS), 1)
    return fit(features, pa.concat_tables(dataset.table(part, columns) for part in parts[::step]))


# --- clicks -----------------------------------------------------------------------------------------------


def write_clicks(config: FuseConfig, dataset: Artifact, profile: list[Encoding], *, folder: str) -> None:
    """Write clicks by bucket, hashes of the documents and queries in them, and the documents' shares."""
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, section="fuse")
    if not dataset.table_parts("impressions"):
        raise DataError(
            f"{dataset.uri} has no impressions, which fusion is trained on: "
            "set dataset.click_model, or fuse to null"
        )
    layouts, without = {"impressions": impressions.SCHEMA}, impressions.test_split(dataset)
    if profile:
        first = dataset.table_parts("users")[0]
        layouts["users"] = dataset.table(first, ["user_id", *columns_of(profile)]).schema
    for table, layout in layouts.items():
        scatter = partial(impressions.scatter, dataset=dataset, table=table, layout=layout)
        scatter = partial(scatter, without=without if table == "impressions" else {})
        run(f"scatter-{table}", partial(scatter, folder=folder, parts=config.parts), slices(dataset, table))
    clicks = partial(_clicks, config=config, profile=profile, layouts=layouts, folder=folder)
    run("clicks", clicks, range(config.parts))
    document_hashes, _ = (merge_hashes(folder, name, files=config.parts) for name in ("named", "asked"))
    counts = np.zeros(len(document_hashes), np.int64)
    for bucket in range(config.parts):
        bucket_counts = read_table(fs.join(folder, file_name("counts", bucket)))
        counts[np.searchsorted(document_hashes, bucket_counts["hash"])] += np.asarray(bucket_counts["count"])
    if not len(counts):
        raise DataError(f"{dataset.uri} has no clicks outside the test split to train on")
    write_table(fs.join(folder, "shares.arrow"), pa.table({"share": counts / counts.sum()}))


def _clicks(
    item: tuple[int, int],
    *,
    config: FuseConfig,
    profile: list[Encoding],
    layouts: dict[str, pa.Schema],
    folder: str,
) -> JsonRecord:
    """Write the clicks of a bucket, with the profiles of their users, and the hashes in them."""
    bucket = item[1]
    gathered = {
        table: shuffle.gather(fs.join(folder, table), bucket, schema=layout)
        for table, layout in layouts.items()
    }
    last, skipped = config.query.history, config.losses.skipped
    users = clicks = impressions.training_rows(gathered["impressions"], last=last, skipped=skipped)
    if profile:
        known = gathered["users"]
        # An unknown user is a row of nulls.
        users = known.take(pc.index_in(clicks["user"], value_set=pa.array(hash_of(known["user_id"]))))
    clicks = clicks.append_column("features", arrow.to_arrow(encode(profile, users)))
    documents = arrow.to_matrix(clicks["group"])
    clicked, counts = np.unique(documents[:, 0], return_counts=True)
    tables = {
        "clicks": clicks.drop_columns("user"),
        "named": pa.table({"hash": np.unique(documents[documents != impressions.NO_HASH])}),
        "asked": pa.table({"hash": np.unique(clicks["query"])}),
        "counts": pa.table({"hash": clicked, "count": counts}),
    }
    for name, table in tables.items():
        write_table(fs.join(folder, file_name(name, bucket)), table.combine_chunks())
    return {"clicks": len(clicks)}


# --- documents, queries and rows --------------------------------------------------------------------------


def _documents(
    item: NumberedSlice, *, corpus: FusedCorpus, config: FuseConfig, encodings: list[Encoding], folder: str
) -> JsonRecord:
    """Write the documents of a slice that occur in clicks, in the columns that the network reads."""
    clicked, pieces = read_array(fs.join(folder, "named.arrow")), []
    for part in item[1]:
        table, embeddings, codes = read_part(corpus, part, columns_of(encodings))
        hashes = hash_of(table["doc_id"])
        rows = np.flatnonzero(in_sorted(hashes, clicked))
        columns = {
            "hash": pa.array(hashes[rows]),
            "embeddings": arrow.to_arrow(embeddings[rows]),
            "codes": arrow.to_arrow(codes[rows]),
            "buckets": pa.array(id_buckets(hashes[rows], config.document)),
            "features": arrow.to_arrow(encode(encodings, table.take(pa.array(rows)))),
        }
        pieces.append(pa.table(columns))
    files = write_tables(folder, {file_name("documents", item[0]): pa.concat_tables(pieces)})
    return {"files": files, "problems": {}}


def _encode_queries(
    config: FuseConfig, dataset: Artifact, planner: Artifact, tower: Artifact, folder: str
) -> list[JsonRecord]:
    """Write the training queries that have clicks, in the columns that the network reads."""
    sizes = dataset.rows_of(dataset.table_parts("queries"))
    records = encode_parts(
        partial(QueryParts, tower=tower, planner=planner),
        read=partial(read_queries, dataset=dataset, folder=folder),
        output=folder,
        work=fs.join(folder, "encoded"),
        rows={file_name("queries", number): rows for number, rows in enumerate(sizes.values())},
        resources=config.writers,
        unit="queries",
        knob=WRITERS,
    )
    files = [(record["name"], record["part"]) for record in records if record["part"]["rows"]]
    return [{"files": files, "problems": {}}]


def read_queries(name: str, *, dataset: Artifact, folder: str) -> pa.Table:
    """Read hashes and texts of the training queries of a part that have clicks."""
    queries = dataset.table(dataset.table_parts("queries")[int(Path(name).stem)])
    queries = queries.filter(pc.equal(queries["split"], "train"))
    hashes = hash_of(queries["query_id"])
    clicked = in_sorted(hashes, read_array(fs.join(folder, "asked.arrow")))
    return pa.table({"hash": hashes, "query": queries["query"]}).filter(pa.array(clicked))


class QueryParts:
    """Worker that encodes queries by the query tower and the planner."""

    def __init__(self, *, tower: Artifact, planner: Artifact) -> None:
        from scalingnote.encode.query_encoder import QueryEncoder
        from scalingnote.triplets.planner.planner import load

        self._encoder, self._planner = QueryEncoder(tower.directory("query")), load(planner)

    def __call__(self, _: str, queries: pa.Table) -> EncodedPart:
        """Encode a part of the store."""
        texts = queries["query"].to_pylist()
        words, importances = important_words(self._planner.term_scores(texts), len(texts))
        columns = {
            "hash": queries["hash"].combine_chunks(),
            "embeddings": arrow.to_arrow(arrow.l2_normalize(self._encoder.encode_queries(texts))),
            "words": arrow.to_arrow(words),
            "importances": arrow.to_arrow(importances),
        }
        return EncodedPart(one_chunk(columns))


def _rows(item: tuple[int, int], *, folder: str) -> JsonRecord:
    """Write the clicks of a bucket by row numbers, without clicks whose query or document has no row."""
    clicks = read_table(fs.join(folder, file_name("clicks", item[1])))
    document_hashes, query_hashes = (
        read_array(fs.join(folder, f"{name}.arrow")) for name in ("named", "asked")
    )
    documents, queries = (read_array(fs.join(folder, f"{name}-place.arrow")) for name in ("named", "asked"))
    groups, histories = (arrow.to_matrix(clicks[name]) for name in ("group", "history"))
    group = row_numbers(groups.ravel(), document_hashes, documents).reshape(groups.shape)
    history = row_numbers(histories.ravel(), document_hashes, documents).reshape(histories.shape)
    query = row_numbers(np.asarray(clicks["query"]), query_hashes, queries)
    share = read_array(fs.join(folder, "shares.arrow"))[np.searchsorted(document_hashes, groups[:, 0])]
    columns = {
        "query": pa.array(query),
        "group": arrow.to_arrow(group),
        "history": arrow.to_arrow(history),
        "log_q": pa.array(np.log(share).astype(np.float32)),
        "features": clicks["features"].combine_chunks(),
    }
    usable = (query >= 0) & (group[:, 0] >= 0)
    rows = one_chunk(columns).filter(pa.array(usable))
    return {
        "files": write_tables(folder, {file_name("rows", item[1]): rows}),
        "left_out": int((~usable).sum()),
    }
