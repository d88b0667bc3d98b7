"""Preparation of fusion: impressions, documents, queries and users become a store that ranks read by row.

    impressions            ─► clicks           see :mod:`scalingnote.fuse.impressions`
    documents, users       ─► encodings        vocabularies and normalisers
    embeddings and codes   ─► documents        those that clicks refer to
    queries                ─► queries          by the query tower and the planner (actors, in the job)
    users                  ─► users            their profiles
    clicks                 ─► rows             clicks by row numbers, and log of each document's share

Work is done in slices, as in the preparation of stage I: a killed run repeats the slices without a record.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float32, Int32, Int64, UInt64
from numpy import ndarray

from scalingnote.config import dump
from scalingnote.errors import ConfigError
from scalingnote.fuse.config import Feature, FuseConfig
from scalingnote.fuse.feature_encoding import (
    EncodedFeatures,
    Encoding,
    encode,
    fit,
    no_values,
    observe,
)
from scalingnote.fuse.fusion import (
    ImportantWords,
    document_inputs,
    id_buckets,
    important_words,
    last_codes,
    query_inputs,
)
from scalingnote.fuse.impressions import CLICKS, flat
from scalingnote.fuse.networks import Clicks, Documents, Queries
from scalingnote.log import get_logger
from scalingnote.models.prompt import list_column
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.shuffle import (
    JsonRecord,
    NumberedSlice,
    TaskRunner,
    named_parts,
    run_slices,
    slices,
    write_tables,
)
from scalingnote.train.data import Order, Rows, Store, one_chunk
from scalingnote.train.prepare import number_documents, read_array
from scalingnote.train.tokens import in_sorted, row_numbers

log = get_logger("fuse")
VIEW = "summary"  # the embedding that is searched
DOCUMENTS, QUERIES, USERS, ROWS = "documents", "queries", "users", "rows"
ENCODINGS, SEEN = "encodings.json", "seen.arrow"


# --- parts of the corpus ----------------------------------------------------------------------------------


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
    embeddings = corpus.embeddings.table(part, ["doc_id", VIEW])
    doc_ids = embeddings["doc_id"]
    documents = corpus.dataset.table(f"documents/{name}", ["doc_id", *columns])
    codes = corpus.semantic_ids.table(f"codes/{name}", ["doc_id", "codes"])
    remedy = "re-run the stages between"
    codes = arrow.take_documents(codes, doc_ids, missing=f"semantic ID: {remedy}")
    return DocumentRows(
        arrow.take_documents(documents, doc_ids, missing=f"row in the dataset: {remedy}"),
        arrow.to_numpy(embeddings[VIEW]),
        arrow.to_matrix(codes["codes"]).astype(np.int32),
    )


# --- the store --------------------------------------------------------------------------------------------


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


def fit_features(config: FuseConfig, dataset: Artifact, *, folder: str, each: TaskRunner) -> None:
    """Fit the features of documents and users, and mark the buckets of ids that training sees."""
    fitted: dict[str, list[dict[str, Any]]] = {}
    for table, features in _features(config).items():
        records: list[JsonRecord] = []
        if features:
            task = partial(_observe, dataset=dataset, features=features)
            parts = slices(dataset, table)
            records = run_slices(f"fit-{table}", task, parts, folder=folder, each=each, section="fuse")
        observed = [record["observed"] for record in records]
        fitted[table] = [dump(encoding) for encoding in fit(features, observed)]
    fs.write_bytes(fs.join(folder, ENCODINGS), json.dumps(fitted).encode())
    ids = config.document.ids
    seen = np.zeros(ids.buckets if ids else 1, bool)
    seen[id_buckets(read_array(fs.join(folder, "shown.arrow")), config.document)] = True
    write_table(fs.join(folder, SEEN), pa.table({"seen": seen}))


def encodings(folder: str) -> dict[str, list[Encoding]]:
    """The encodings that :func:`fit_features` fitted, by table."""
    values = json.loads(fs.read_bytes(fs.join(folder, ENCODINGS)))
    return {table: [Encoding.model_validate(each) for each in all_] for table, all_ in values.items()}


def finish(
    config: FuseConfig,
    corpus: FusedCorpus,
    *,
    queries: Sequence[Any],
    folder: str,
    each: TaskRunner,
    left_out: int = 0,
) -> dict[str, Any]:
    """Write the rest of the store: documents, users and rows; returns its facts.

    `queries` are the files that the query tower has encoded, as :func:`write_tables` names them, `left_out`
    the number of clicks that :func:`read_clicks` left out; more may be left out here.
    """
    run = partial(run_slices, folder=folder, each=each, section="fuse")
    known = encodings(folder)
    task = partial(_documents, corpus=corpus, encodings=known["documents"], folder=folder)
    documents = run(DOCUMENTS, task, slices(corpus.embeddings, "embeddings"))
    users: list[JsonRecord] = []
    if config.query.profile:
        task = partial(_users, dataset=corpus.dataset, encodings=known["users"], folder=folder)
        users = run(USERS, task, slices(corpus.dataset, USERS))
    encoded: list[JsonRecord] = [{"files": queries, "problems": {}}]
    for name, records in (("named", documents), ("known", users), ("asked", encoded)):
        place = number_documents(read_array(fs.join(folder, f"{name}.arrow")), records, folder)
        write_table(fs.join(folder, f"{name}-place.arrow"), pa.table({"row": place}))
    rows = run(ROWS, partial(_rows, folder=folder), range(config.parts))
    written = {DOCUMENTS: documents, QUERIES: encoded, USERS: users, ROWS: rows}
    files = {
        name: [file for record in records for file in named_parts(record["files"])]
        for name, records in written.items()
    }
    sizes = {name: sum(part.rows or 0 for _, part in found) for name, found in files.items()}
    left_out += sum(record["left_out"] for record in rows)
    facts = {"sizes": {ROWS: sizes.pop(ROWS)}, "left_out": left_out, **sizes}
    Store.finish(folder, {name: found for name, found in files.items() if found}, facts)
    if left_out:
        log.warning(
            "%s clicks left out: of documents without an embedding, or of queries that are not for training",
            f"{left_out:,}",
        )
    return facts


# --- tasks ------------------------------------------------------------------------------------------------


def _observe(item: NumberedSlice, *, dataset: Artifact, features: Sequence[Feature]) -> JsonRecord:
    columns = list(dict.fromkeys(feature.column for feature in features))
    table = pa.concat_tables(dataset.table(part, columns) for part in item[1])
    return {"observed": observe(features, table)}


def _documents(
    item: NumberedSlice, *, corpus: FusedCorpus, encodings: Sequence[Encoding], folder: str
) -> JsonRecord:
    wanted = read_array(fs.join(folder, "named.arrow"))
    columns = list(dict.fromkeys(encoding.feature.column for encoding in encodings))
    pieces = []
    for part in item[1]:
        documents = read_part(corpus, part, columns)
        hashes = shuffle.hash_of(documents.table["doc_id"])
        kept = np.flatnonzero(in_sorted(hashes, wanted))
        pieces.append(
            _matrices(
                hashes[kept],
                documents.table.take(pa.array(kept)),
                encodings,
                embedding=documents.embeddings[kept],
                codes=documents.codes[kept],
            )
        )
    table = pa.concat_tables(pieces).combine_chunks()
    return {"files": write_tables(folder, {f"{DOCUMENTS}/{item[0]:05d}.arrow": table}), "problems": {}}


def _users(
    item: NumberedSlice, *, dataset: Artifact, encodings: Sequence[Encoding], folder: str
) -> JsonRecord:
    columns = list(dict.fromkeys(encoding.feature.column for encoding in encodings))
    table = pa.concat_tables(dataset.table(part, ["user_id", *columns]) for part in item[1])
    hashes = shuffle.hash_of(table["user_id"])
    kept = np.flatnonzero(in_sorted(hashes, read_array(fs.join(folder, "known.arrow"))))
    users = _matrices(hashes[kept], table.take(pa.array(kept)), encodings)
    return {"files": write_tables(folder, {f"{USERS}/{item[0]:05d}.arrow": users}), "problems": {}}


def _rows(item: tuple[int, int], *, folder: str) -> JsonRecord:
    """Clicks of a bucket by row numbers, without those whose query or document is not in the store."""
    bucket = item[1]
    raw = read_table(fs.join(folder, f"{CLICKS}/{bucket:05d}.arrow"))
    if not len(raw):
        return {"files": [], "left_out": 0}
    numbered = {
        column: _numbers(np.asarray(raw[column]), name, folder)
        for column, name in (("query", "asked"), ("user", "known"), ("clicked", "named"))
    }
    group = numbered["clicked"][:, None]
    if "skipped" in raw.column_names:
        passed = _numbers(flat(raw["skipped"]), "named", folder).reshape(len(raw), -1)
        group = np.concatenate([group, passed], axis=1)
    lengths = np.asarray(pc.list_value_length(raw["history"]))
    history = _numbers(flat(raw["history"]), "named", folder)
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
    files = write_tables(folder, {f"{ROWS}/{bucket:05d}.arrow": table})
    return {"files": files, "left_out": int((~usable).sum())}


# --- pieces -----------------------------------------------------------------------------------------------


def _numbers(hashes: UInt64[ndarray, " rows"], name: str, folder: str) -> Int64[ndarray, " rows"]:
    """Row numbers in the store of what has these hashes, which ``{name}.arrow`` lists."""
    known, place = (read_array(fs.join(folder, f"{file}.arrow")) for file in (name, f"{name}-place"))
    return row_numbers(hashes, known, place)


def _matrices(
    hashes: UInt64[ndarray, " rows"],
    table: pa.Table,
    encodings: Sequence[Encoding],
    **more: ndarray,
) -> pa.Table:
    """A table of hashes, encoded features and further matrices, without columns of width 0."""
    encoded = encode(encodings, table)
    columns = {"indices": encoded.indices, "numbers": encoded.numbers, **more}
    wide = {name: arrow.to_arrow(values) for name, values in columns.items() if values.shape[1]}
    return one_chunk({"hash": pa.array(hashes), **wide})


# --- batches ----------------------------------------------------------------------------------------------


class ClickBatches:
    """Reads one rank's clicks of any step from a finished store; `order` decides which rows a step has.

    A step's rows follow from its number alone, as those of stage I do, so training resumes at any step.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        config: FuseConfig,
        *,
        documents: Sequence[Encoding],
        users: Sequence[Encoding],
        rank: int,
        world: int,
    ) -> None:
        self._rows, self._documents, self._queries = store[ROWS], store[DOCUMENTS], store[QUERIES]
        self._users = store.tables.get(USERS)
        self._order, self._config, self._rank, self._world = order, config, rank, world
        self._document_encodings, self._user_encodings = documents, users

    def __call__(self, step: int) -> Clicks:
        """This rank's rows of a step."""
        rows = self._order.batch(step)[self._rank :: self._world]
        group = self._rows.values("group", rows)
        return Clicks(
            queries=self._query_rows(rows),
            documents=self._document_rows(np.maximum(group, 0).reshape(-1)),
            group=torch.from_numpy(group),
            log_q=torch.from_numpy(self._rows.values("log_q", rows)),
        )

    def _query_rows(self, rows: Int64[ndarray, " rows"]) -> Queries:
        queries, users = self._rows.values("query", rows), self._rows.values("user", rows)
        side = self._config.query
        words = important_words(None, len(rows), most=0)
        if side.planner:
            hashes, importances = (self._queries.values(name, queries) for name in ("words", "importances"))
            words = ImportantWords(hashes, importances)
        return query_inputs(
            self._queries.values("embedding", queries),
            words,
            self._profiles(users),
            self._histories(rows),
            config=side,
            encodings=self._user_encodings,
        )

    def _document_rows(self, documents: Int64[ndarray, " docs"]) -> Documents:
        return document_inputs(
            self._documents.values("embedding", documents),
            self._documents.values("codes", documents),
            self._documents.values("hash", documents),
            _read_features(self._documents, documents, self._document_encodings),
            config=self._config.document,
        )

    def _profiles(self, users: Int64[ndarray, " rows"]) -> EncodedFeatures:
        profiles = no_values(self._user_encodings, len(users))
        known = users >= 0
        if self._users is not None and known.any():
            read = _read_features(self._users, users[known], self._user_encodings)
            profiles.indices[known], profiles.numbers[known] = read.indices, read.numbers
        return profiles

    def _histories(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, "rows last levels"]:
        history = self._config.query.history
        if history is None:
            return np.zeros((len(rows), 0, 0), np.int64)
        histories = self._rows.lists("history", rows)
        documents = np.concatenate([np.empty(0, np.int64), *histories])
        levels = self._documents.values("codes", np.zeros(1, np.int64)).shape[1]
        codes = self._documents.values("codes", documents).reshape(-1, levels)
        ends = np.cumsum([len(history) for history in histories])
        return last_codes(np.split(codes, ends[:-1]), last=history.last, levels=levels)


def _read_features(
    table: Rows, rows: Int64[ndarray, " rows"], encodings: Sequence[Encoding]
) -> EncodedFeatures:
    """The encoded features of some rows; a table lacks a column of width 0."""
    empty = no_values(encodings, len(rows))
    return EncodedFeatures(
        table.values("indices", rows) if empty.indices.shape[1] else empty.indices,
        table.values("numbers", rows) if empty.numbers.shape[1] else empty.numbers,
    )
