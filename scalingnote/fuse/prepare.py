"""Preparation of fusion: impressions, documents, queries and users become a store that ranks read by row.

    impressions ─by user─► bucket ─► clicks    hashes: query, user, clicked, skipped, history
    documents, users       ─► encodings        vocabularies and normalisers
    embeddings and codes   ─► documents        those that clicks refer to
    queries                ─► queries          by the query tower and the planner (actors, in the job)
    users                  ─► users            their profiles
    clicks                 ─► rows             clicks by row numbers, and log of each document's share

Work is done in slices, as in the preparation of stage I: a killed run repeats the slices without a record. A
bucket has all impressions of its users. Ids are 64-bit hashes; the sorted hashes of everything that clicks
refer to are in files:

    named.arrow         documents that were clicked or skipped; histories hold clicked ones
    asked.arrow         queries
    known.arrow         users
    popularity.arrow    clicked documents, with their share of all clicks
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, Int32, Int64, UInt64
from numpy import ndarray

from scalingnote.core.config import dump
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.datasets.splits import held_out_documents
from scalingnote.datasets.splits import queries as queries_of_split
from scalingnote.fuse.config import Feature, FuseConfig
from scalingnote.fuse.feature_encoding import Encoding, columns_of, encode, fit
from scalingnote.fuse.fusion import id_buckets
from scalingnote.models.prompt import list_column
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.schema import IMPRESSIONS, INDEXED_VIEW
from scalingnote.storage.shuffle import (
    JsonRecord,
    NumberedSlice,
    TaskRunner,
    hash_of,
    named_parts,
    run_slices,
    slices,
    write_tables,
)
from scalingnote.train.data import Store, one_chunk
from scalingnote.train.prepare import merge_hashes, number_documents, read_array
from scalingnote.train.tokens import in_sorted, row_numbers

log = get_logger("fuse")
ENCODINGS, SEEN = "encodings.json", "seen.arrow"
SCHEMA = pa.schema(
    IMPRESSIONS.field(name)
    for name in ("session_id", "user_id", "query_id", "doc_id", "position", "clicked", "timestamp")
)
FEATURE_SAMPLE_ROWS = 1 << 20  # that features are fitted to
NO_HASH = 0  # in place of a hash: an unknown user, no further document
_CLICKS, _EXCHANGE = "clicks", "impressions"  # folders of the store


@dataclass(frozen=True)
class FusedCorpus:
    """The artifacts that documents come from; a part has the same name in the folders of all three."""

    dataset: Artifact
    embeddings: Artifact
    semantic_ids: Artifact


@dataclass(frozen=True)
class DocumentRows:
    """Some documents: ids and features, embeddings of the towers, and the codes of their semantic IDs."""

    table: pa.Table
    embeddings: Float32[ndarray, "docs dim"]
    codes: Int32[ndarray, "docs levels"]


def read_part(corpus: FusedCorpus, part: str, columns: Sequence[str]) -> DocumentRows:
    """Read the documents of a part of the embeddings, in its order, with these columns of features.

    ArtifactError if an embedding has no document or no semantic ID: the artifacts are of different runs.
    """
    name = part.removeprefix("embeddings/")
    embeddings = corpus.embeddings.table(part, ["doc_id", INDEXED_VIEW])
    doc_ids = embeddings["doc_id"]
    documents = corpus.dataset.table(f"documents/{name}", ["doc_id", *columns])
    codes = corpus.semantic_ids.table(f"codes/{name}", ["doc_id", "codes"])
    remedy = "re-run the stages between"
    codes = arrow.take_documents(codes, doc_ids, missing=f"semantic ID: {remedy}")
    return DocumentRows(
        arrow.take_documents(documents, doc_ids, missing=f"row in the dataset: {remedy}"),
        arrow.to_numpy(embeddings[INDEXED_VIEW]),
        arrow.to_matrix(codes["codes"]).astype(np.int32),
    )


def require_columns(config: FuseConfig, dataset: Artifact) -> None:
    """ConfigError when the dataset lacks a declared feature; called before clicks are read."""
    for table, features in _features(config).items():
        parts = dataset.table_parts(table)
        if features and not parts:
            raise ConfigError(
                f"fuse.query.profile reads columns of users, and {dataset.uri} has no table of users"
            )
        columns = dataset.table(parts[0]).column_names if features else []
        for feature in features:
            if feature.column not in columns:
                raise ConfigError(f"no column {feature.column!r} in {table} for a feature of fuse: {columns}")


def _features(config: FuseConfig) -> dict[str, Sequence[Feature]]:
    return {"documents": config.document.features, "users": config.query.profile}


def write_store(
    config: FuseConfig,
    corpus: FusedCorpus,
    *,
    folder: str,
    each: TaskRunner,
    encode_queries: Callable[[], Sequence[Any]],
) -> dict[str, Any]:
    """Write the store into `folder`, or find it there; returns its facts.

    `each` runs the tasks. `encode_queries` is called when ``asked.arrow`` exists; it writes the queries, with
    their embeddings and words, and returns the files as :func:`write_tables` does. DataError if the dataset
    has no clicks to learn from.
    """
    if Store.is_complete(folder):
        return Store.facts_of(folder)
    run = partial(run_slices, folder=folder, each=each, section="fuse")
    test_clicks = _write_clicks(config, corpus.dataset, folder=folder, each=each)
    fitted = _fit_features(config, corpus.dataset, folder=folder)
    encoded: list[JsonRecord] = [{"files": encode_queries(), "problems": {}}]
    task = partial(_documents, corpus=corpus, encodings=fitted["documents"], folder=folder)
    documents = run("documents", task, slices(corpus.embeddings, "embeddings"))
    users: list[JsonRecord] = []
    if config.query.profile:
        task = partial(_users, dataset=corpus.dataset, encodings=fitted["users"], folder=folder)
        users = run("users", task, slices(corpus.dataset, "users"))
    for name, records in (("named", documents), ("known", users), ("asked", encoded)):
        place = number_documents(read_array(fs.join(folder, f"{name}.arrow")), records, folder)
        write_table(fs.join(folder, f"{name}-place.arrow"), pa.table({"row": place}))
    rows = run("rows", partial(_rows, folder=folder), range(config.parts))
    written = {"documents": documents, "queries": encoded, "users": users, "rows": rows}
    files = {
        name: [file for record in records for file in named_parts(record["files"])]
        for name, records in written.items()
    }
    sizes = {name: sum(part.rows or 0 for _, part in parts) for name, parts in files.items()}
    left_out = test_clicks + sum(record["left_out"] for record in rows)
    facts = {"sizes": {"rows": sizes.pop("rows")}, "left_out": left_out, **sizes}
    Store.finish(folder, {name: parts for name, parts in files.items() if parts}, facts)
    if left_out:
        log.warning(
            "%s clicks left out: of documents without an embedding, or of queries that are not for training",
            f"{left_out:,}",
        )
    return facts


def encodings(folder: str) -> dict[str, list[Encoding]]:
    """The fitted features of a store, by table: ``documents`` and ``users``."""
    values = json.loads(fs.read_bytes(fs.join(folder, ENCODINGS)))
    return {table: [Encoding.model_validate(each) for each in all_] for table, all_ in values.items()}


def _fit_features(config: FuseConfig, dataset: Artifact, *, folder: str) -> dict[str, list[Encoding]]:
    """Fit the features of documents and users, and mark the buckets of ids that training sees."""
    fitted = {
        table: fit(features, _sample(dataset, table, sorted({feature.column for feature in features})))
        for table, features in _features(config).items()
    }
    values = {table: [dump(encoding) for encoding in all_] for table, all_ in fitted.items()}
    fs.write_bytes(fs.join(folder, ENCODINGS), json.dumps(values).encode())
    seen = np.zeros(config.document.id_buckets or 1, bool)
    seen[id_buckets(read_array(fs.join(folder, "named.arrow")), config.document)] = True
    write_table(fs.join(folder, SEEN), pa.table({"seen": seen}))
    return fitted


def _sample(dataset: Artifact, table: str, columns: list[str]) -> pa.Table:
    """About FEATURE_SAMPLE_ROWS rows of a table, or all: parts at equal distances."""
    if not columns:
        return pa.table({})
    parts = dataset.table_parts(table)
    step = -(-sum(dataset.rows_of(parts).values()) // FEATURE_SAMPLE_ROWS)
    return pa.concat_tables(dataset.table(part, columns) for part in parts[:: max(step, 1)])


# --- clicks -----------------------------------------------------------------------------------------------


def _write_clicks(config: FuseConfig, dataset: Artifact, *, folder: str, each: TaskRunner) -> int:
    """Write clicks by bucket, and the sorted hashes of the documents, queries and users in them.

    Returns the number of clicks that are left out, as they are of test queries.
    """
    run = partial(run_slices, folder=folder, each=each, section="fuse")
    if not dataset.table_parts("impressions"):
        raise DataError(
            f"{dataset.uri} has no impressions, which fusion learns from: "
            "set dataset.click_model, or fuse to null"
        )
    scatter = partial(
        _scatter,
        dataset=dataset,
        folder=folder,
        parts=config.parts,
        held_out=held_out_documents(dataset),
        test_queries=queries_of_split(dataset, "test")["query_id"].combine_chunks(),
    )
    scattered = run("scatter", scatter, slices(dataset, "impressions"))
    clicks = run("clicks", partial(_clicks, config=config, folder=folder), range(config.parts))
    if not any(record["clicks"] for record in clicks):
        raise DataError(
            f"{dataset.uri} has no clicks outside the test split: fusion has nothing to learn from"
        )
    for name in ("named", "asked", "known"):
        merge_hashes(folder, name, files=config.parts)
    counts = pa.concat_tables(
        read_table(fs.join(folder, f"counts/{bucket:05d}.arrow")) for bucket in range(config.parts)
    )
    counts = counts.group_by("hash").aggregate([("count", "sum")]).sort_by("hash")
    share = np.asarray(counts["count_sum"]) / pc.sum(counts["count_sum"]).as_py()
    popularity = pa.table({"hash": counts["hash"], "share": share})
    write_table(fs.join(folder, "popularity.arrow"), popularity.combine_chunks())
    return sum(record["test_clicks"] for record in scattered)


def _scatter(
    item: NumberedSlice,
    *,
    dataset: Artifact,
    folder: str,
    parts: int,
    held_out: pa.Array,
    test_queries: pa.Array,
) -> JsonRecord:
    """Impressions by user, without those of test queries, which must not be in histories either."""
    table = pa.concat_tables(dataset.table(part, SCHEMA.names) for part in item[1])
    table = table.filter(pc.invert(pc.is_in(table["doc_id"], value_set=held_out)))
    test = pc.is_in(table["query_id"], value_set=test_queries)
    test_clicks = pc.sum(pc.and_(test, table["clicked"])).as_py() or 0
    table = table.filter(pc.invert(test))
    bucket = shuffle.bucket_of(shuffle_keys(table), parts)
    shuffle.scatter(table, bucket, target=fs.join(folder, _EXCHANGE), name=f"{item[0]:05d}")
    return {"rows": len(table), "test_clicks": test_clicks}


def _clicks(item: tuple[int, int], *, config: FuseConfig, folder: str) -> JsonRecord:
    bucket = item[1]
    table = training_rows(
        shuffle.gather(fs.join(folder, _EXCHANGE), bucket, schema=SCHEMA),
        last=config.query.history,
        skipped=config.losses.skipped,
    )
    clicked, counts = np.unique(np.asarray(table["clicked"]), return_counts=True)
    skipped = _flat(table["skipped"]) if "skipped" in table.column_names else clicked
    tables = {
        "named": pa.table({"hash": _distinct(np.concatenate([clicked, skipped]))}),
        "asked": pa.table({"hash": _distinct(np.asarray(table["query"]))}),
        "known": pa.table({"hash": _distinct(np.asarray(table["user"]))}),
        "counts": pa.table({"hash": clicked, "count": counts}),
        _CLICKS: one_chunk({name: table[name].combine_chunks() for name in table.column_names}),
    }
    for name, part in tables.items():
        write_table(fs.join(folder, f"{name}/{bucket:05d}.arrow"), part.combine_chunks())
    return {"clicks": len(table)}


def shuffle_keys(impressions: pa.Table) -> pa.ChunkedArray:
    """The key by which impressions are shuffled: the user, or the session of an unknown one."""
    return pc.coalesce(impressions["user_id"], impressions["session_id"])


def training_rows(impressions: pa.Table, *, last: int, skipped: int) -> pa.Table:
    """A row per click, ordered by user, start of the session, session and position.

    Args:
        impressions: of whole users, with the columns of SCHEMA.
        last: maximum length of a history.
        skipped: width of the column ``skipped``; 0: there is no such column.

    Returns:
        Columns of hashes: ``query``; ``user``, NO_HASH where unknown; ``clicked``; ``skipped``, documents
        shown for the same query in the same session and never clicked for it there, each once, first those
        above the click, the nearest first, padded with NO_HASH; ``history``, the last documents that the user
        clicked in sessions that started before this one, oldest first.
    """
    rows = pd.DataFrame(
        {
            "user": hash_of(shuffle_keys(impressions)),
            "known": np.asarray(pc.is_valid(impressions["user_id"])),
            "session": hash_of(impressions["session_id"]),
            "query": hash_of(impressions["query_id"]),
            "doc": hash_of(impressions["doc_id"]),
            "time": impressions["timestamp"].cast(pa.int64()).to_numpy(),
            "position": impressions["position"].to_numpy().astype(np.int64),
            "clicked": impressions["clicked"].to_numpy(zero_copy_only=False).astype(bool),
        }
    )
    rows["start"] = rows.groupby(["user", "session"])["time"].transform("min")
    rows = rows.sort_values(["user", "start", "session", "position"], ignore_index=True)
    clicks = rows[rows["clicked"]].reset_index(drop=True)
    user = np.where(clicks["known"], clicks["user"], np.uint64(NO_HASH))
    table = {
        "query": pa.array(clicks["query"].to_numpy()),
        "user": pa.array(user),
        "clicked": pa.array(clicks["doc"].to_numpy()),
        "history": _histories(clicks, last=last),
    }
    if skipped:
        documents = pa.array(_skipped_documents(rows, clicks, most=skipped).reshape(-1))
        table["skipped"] = pa.FixedSizeListArray.from_arrays(documents, skipped)
    return pa.table(table)


def _histories(clicks: pd.DataFrame, *, last: int) -> pa.Array:
    """The history of each click."""
    # Clicks are sorted by user and session start: a history is the clicks just before the session's first.
    clicks = clicks.assign(number=np.arange(len(clicks)))
    of_user = clicks.groupby("user")["number"].transform("min").to_numpy(np.int64)
    of_session = clicks.groupby(["user", "start"])["number"].transform("min").to_numpy(np.int64)
    lengths = np.where(clicks["known"], np.minimum(of_session - of_user, last), 0)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    docs = clicks["doc"].to_numpy()[np.repeat(of_session - lengths, lengths) + within]
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(docs))


def _skipped_documents(
    rows: pd.DataFrame, clicks: pd.DataFrame, *, most: int
) -> UInt64[ndarray, "clicks most"]:
    """Skipped documents of each click."""
    search = ["user", "session", "query"]
    # Some logs have one row for a document that was shown, and another for the click on it.
    was_clicked = rows.groupby([*search, "doc"])["clicked"].transform("any")
    others = rows.loc[~was_clicked, [*search, "doc", "position"]]
    pairs = clicks[[*search, "position"]].reset_index(names="click").merge(others, on=search)
    distance = pairs["position_y"] - pairs["position_x"]
    pairs = pairs.assign(below=distance > 0, distance=distance.abs())
    pairs = pairs.sort_values(["click", "below", "distance"]).drop_duplicates(["click", "doc"])
    place = pairs.groupby("click").cumcount().to_numpy()
    out = np.full((len(clicks), most), NO_HASH, np.uint64)
    first = place < most
    out[pairs["click"].to_numpy()[first], place[first]] = pairs["doc"].to_numpy()[first]
    return out


# --- documents, users and rows ----------------------------------------------------------------------------


def _documents(
    item: NumberedSlice, *, corpus: FusedCorpus, encodings: Sequence[Encoding], folder: str
) -> JsonRecord:
    pieces = []
    for part in item[1]:
        rows = read_part(corpus, part, columns_of(encodings))
        more = {"embedding": rows.embeddings, "codes": rows.codes}
        pieces.append(_encode_named(rows.table, "doc_id", encodings, fs.join(folder, "named.arrow"), **more))
    table = pa.concat_tables(pieces)
    return {"files": write_tables(folder, {f"documents/{item[0]:05d}.arrow": table}), "problems": {}}


def _users(
    item: NumberedSlice, *, dataset: Artifact, encodings: Sequence[Encoding], folder: str
) -> JsonRecord:
    columns = ["user_id", *columns_of(encodings)]
    table = pa.concat_tables(dataset.table(part, columns) for part in item[1])
    users = _encode_named(table, "user_id", encodings, fs.join(folder, "known.arrow"))
    return {"files": write_tables(folder, {f"users/{item[0]:05d}.arrow": users}), "problems": {}}


def _encode_named(
    table: pa.Table, key: str, encodings: Sequence[Encoding], named: str, **matrices: ndarray
) -> pa.Table:
    """Hashes, encoded features and further matrices of the rows whose hash is in the file `named`.

    The result has no columns of width 0.
    """
    hashes = hash_of(table[key])
    chosen = np.flatnonzero(in_sorted(hashes, read_array(named)))
    encoded = encode(encodings, table.take(pa.array(chosen)))
    columns = {"indices": encoded.indices, "numbers": encoded.numbers}
    columns |= {name: matrix[chosen] for name, matrix in matrices.items()}
    wide = {name: arrow.to_arrow(values) for name, values in columns.items() if values.shape[1]}
    return one_chunk({"hash": pa.array(hashes[chosen]), **wide})


def _rows(item: tuple[int, int], *, folder: str) -> JsonRecord:
    """Clicks of a bucket by row numbers, without those whose query or document is not in the store."""
    bucket = item[1]
    raw = read_table(fs.join(folder, f"{_CLICKS}/{bucket:05d}.arrow"))
    if not len(raw):
        return {"files": [], "left_out": 0}
    numbered = {
        column: _numbers(np.asarray(raw[column]), name, folder)
        for column, name in (("query", "asked"), ("user", "known"), ("clicked", "named"))
    }
    group = numbered["clicked"][:, None]
    if "skipped" in raw.column_names:
        passed = _numbers(_flat(raw["skipped"]), "named", folder).reshape(len(raw), -1)
        group = np.concatenate([group, passed], axis=1)
    lengths = np.asarray(pc.list_value_length(raw["history"]))
    history = _numbers(_flat(raw["history"]), "named", folder)
    of_row = np.repeat(np.arange(len(raw)), lengths)[history >= 0]
    ends = np.cumsum(np.bincount(of_row, minlength=len(raw)))
    popularity = read_table(fs.join(folder, "popularity.arrow"))
    clicked = np.searchsorted(np.asarray(popularity["hash"]), np.asarray(raw["clicked"]))
    log_q = np.log(np.asarray(popularity["share"])[clicked]).astype(np.float32)
    table = one_chunk(
        {
            "query": pa.array(numbered["query"]),
            "user": pa.array(numbered["user"]),
            "group": pa.FixedSizeListArray.from_arrays(pa.array(group.reshape(-1)), group.shape[1]),
            "history": list_column(history[history >= 0], [0, *ends.tolist()]),
            "log_q": pa.array(log_q),
        }
    )
    usable = (numbered["query"] >= 0) & (group[:, 0] >= 0)
    table = table.filter(pa.array(usable)).combine_chunks()
    files = write_tables(folder, {f"rows/{bucket:05d}.arrow": table})
    return {"files": files, "left_out": int((~usable).sum())}


def _numbers(hashes: UInt64[ndarray, " rows"], name: str, folder: str) -> Int64[ndarray, " rows"]:
    """Row numbers in the store of what has these hashes, which ``{name}.arrow`` lists."""
    known, place = (read_array(fs.join(folder, f"{file}.arrow")) for file in (name, f"{name}-place"))
    return row_numbers(hashes, known, place)


def _distinct(hashes: UInt64[ndarray, " rows"]) -> UInt64[ndarray, " distinct"]:
    return np.setdiff1d(hashes, np.array([NO_HASH], np.uint64))


def _flat(column: pa.ChunkedArray) -> ndarray:
    """The values of a column of lists."""
    return np.asarray(pc.list_flatten(column.combine_chunks()))
