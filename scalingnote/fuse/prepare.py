"""Preparing fusion: impressions and all they name become a store that every rank reads by number.

    impressions ─by user─► bucket ─► clicks    hashes: query, user, clicked, passed over, history
    documents, users       ─► encodings        vocabularies and normalisers
    embeddings and codes   ─► documents        of those that clicks name
    queries                ─► queries          by the query tower and the planner (actors, in the job)
    users                  ─► users            their profiles
    clicks                 ─► rows             the same as row numbers, and log of each document's share

Work is done in slices, as in stage I's preparing: a killed run does again what has no record.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64, UInt64
from numpy import ndarray
from pydantic import TypeAdapter

from scalingnote.config import dump
from scalingnote.datasets.trainable import held_out_documents
from scalingnote.datasets.trainable import queries as of_split
from scalingnote.errors import ConfigError, DataError
from scalingnote.fuse.config import Feature, FuseConfig
from scalingnote.fuse.document_fusion import buckets
from scalingnote.fuse.feature_encoding import Encoding, encode, fit, observe
from scalingnote.fuse.impressions import NOBODY, SCHEMA, together, training_rows
from scalingnote.fuse.parts import Corpus, read_part
from scalingnote.log import get_logger
from scalingnote.models.token_rows import list_column
from scalingnote.storage import exchange, vectors
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table
from scalingnote.storage.slices import Each, Record, Slice, listed, run_slices, slices, write_tables
from scalingnote.train.corpus import among
from scalingnote.train.prepare import array, merged, place_of
from scalingnote.train.stream import Store, one_chunk
from scalingnote.train.tokens import rows_of

log = get_logger("fuse")
DOCUMENTS, QUERIES, USERS, ROWS = "documents", "queries", "users", "rows"
ENCODINGS, SEEN = "encodings.json", "seen.arrow"
_RAW, _EXCHANGE = "clicks", "impressions"


@dataclass(frozen=True)
class Prepared:
    """What is known once clicks have been read, before queries are encoded."""

    queries: UInt64[ndarray, " asked"]  # hashes of those that were clicked for, sorted
    clicks: int
    left_out: int  # clicks of test queries


def read_clicks(config: FuseConfig, dataset: Artifact, *, folder: str, each: Each) -> Prepared:
    """Clicks by bucket, and what they name. DataError when there are none to learn from."""
    run = partial(run_slices, folder=folder, each=each, room="fuse")
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
        test_queries=of_split(dataset, "test")["query_id"].combine_chunks(),
    )
    scattered = run("scatter", scatter, slices(dataset, "impressions"))
    raw = run("clicks", partial(_clicks, config=config, folder=folder), range(config.parts))
    clicks = sum(record["clicks"] for record in raw)
    if not clicks:
        raise DataError(
            f"{dataset.uri}: nothing was clicked that training may see; fusion has nothing to learn"
        )
    for name in ("named", "shown", "asked", "known"):
        found = merged([array(fs.join(folder, f"{name}/{b:05d}.arrow")) for b in range(config.parts)])
        write_table(fs.join(folder, f"{name}.arrow"), pa.table({"hash": found}))
    _write_popularity(config, folder)
    left_out = sum(record["test_clicks"] for record in scattered)
    return Prepared(array(fs.join(folder, "asked.arrow")), clicks, left_out)


def require_columns(config: FuseConfig, dataset: Artifact) -> None:
    """ConfigError names a feature that the dataset lacks, before any click is read."""
    for table, features in _features(config).items():
        parts = dataset.table_parts(table)
        if features and not parts:
            raise ConfigError(
                f"fuse.query.profile reads columns of users, and {dataset.uri} has no table of users"
            )
        there = dataset.table(parts[0]).column_names if features else []
        for feature in features:
            if feature.column not in there:
                raise ConfigError(f"no column {feature.column!r} in {table} for a feature of fuse: {there}")


def _features(config: FuseConfig) -> dict[str, Sequence[Feature]]:
    return {"documents": config.document.features, "users": config.query.profile}


def fit_features(config: FuseConfig, dataset: Artifact, *, folder: str, each: Each) -> None:
    """Vocabularies and normalisers of documents and users, and which buckets of ids clicks ever met."""
    fitted: dict[str, list[Encoding]] = {}
    for table, features in _features(config).items():
        parts = slices(dataset, table)
        task = partial(_observe, dataset=dataset, features=features)
        found = (
            run_slices(f"fit-{table}", task, parts, folder=folder, each=each, room="fuse") if features else []
        )
        fitted[table] = fit(features, [record["observed"] for record in found])
    values = {
        table: [{"feature": dump(e.feature), "facts": e.facts} for e in encodings]
        for table, encodings in fitted.items()
    }
    fs.write_bytes(fs.join(folder, ENCODINGS), json.dumps(values).encode())
    ids = config.document.ids
    seen = np.zeros(ids.buckets if ids else 1, bool)
    seen[buckets(array(fs.join(folder, "shown.arrow")), config.document)] = True
    write_table(fs.join(folder, SEEN), pa.table({"seen": seen}))


def encodings(folder: str) -> dict[str, list[Encoding]]:
    """What :func:`fit_features` fitted, by table."""
    adapter: TypeAdapter[Any] = TypeAdapter(Feature)
    found = json.loads(fs.read_bytes(fs.join(folder, ENCODINGS)))
    return {
        table: [Encoding(adapter.validate_python(e["feature"]), e["facts"]) for e in listed_]
        for table, listed_ in found.items()
    }


def finish(
    config: FuseConfig,
    corpus: Corpus,
    *,
    queries: Sequence[tuple[str, Part]],
    folder: str,
    each: Each,
    left_out: int = 0,
) -> dict[str, Any]:
    """Write what is left of the store, given the files of its queries; returns its facts.

    `left_out` are clicks that :func:`read_clicks` left out: they are counted with the others.
    """
    if not Store.finished(folder):
        run = partial(run_slices, folder=folder, each=each, room="fuse")
        known = encodings(folder)
        documents = run(
            DOCUMENTS,
            partial(_documents, corpus=corpus, encodings=known["documents"], folder=folder),
            slices(corpus.embeddings, "embeddings"),
        )
        _write_place("named", documents, folder)
        users = []
        if config.query.profile:
            task = partial(_users, dataset=corpus.dataset, encodings=known["users"], folder=folder)
            users = run(USERS, task, slices(corpus.dataset, USERS))
        _write_place("known", users, folder)
        asked = [{"problems": {}, "files": [(name, asdict(part)) for name, part in queries]}]
        _write_place("asked", asked, folder)
        rows = run(ROWS, partial(_rows, folder=folder), range(config.parts))
        files = {
            DOCUMENTS: [file for record in documents for file in listed(record["files"])],
            QUERIES: list(queries),
            USERS: [file for record in users for file in listed(record["files"])],
            ROWS: [file for record in rows for file in listed(record["files"])],
        }
        sizes = {name: sum(part.rows or 0 for _, part in found) for name, found in files.items()}
        left_out += sum(record["left_out"] for record in rows)
        facts = {"sizes": {ROWS: sizes.pop(ROWS)}, "left_out": left_out, **sizes}
        Store.finish(folder, {name: found for name, found in files.items() if found}, facts)
    facts = Store.facts_of(folder)
    if facts["left_out"]:
        log.warning(
            "%s clicks left out: of documents without an embedding, or of queries that are not for training",
            f"{facts['left_out']:,}",
        )
    return facts


# --- tasks ------------------------------------------------------------------------------------------------


def _scatter(
    item: Slice, *, dataset: Artifact, folder: str, parts: int, held_out: pa.Array, test_queries: pa.Array
) -> Record:
    """Impressions that training may see, by user: what a test query shows of users is not for histories."""
    table = pa.concat_tables(dataset.table(part, SCHEMA.names) for part in item[1])
    table = table.filter(pc.invert(pc.is_in(table["doc_id"], value_set=held_out)))
    test = pc.is_in(table["query_id"], value_set=test_queries)
    test_clicks = pc.sum(pc.and_(test, table["clicked"])).as_py() or 0
    table = table.filter(pc.invert(test))
    bucket = exchange.bucket_of(together(table), parts)
    exchange.scatter(table, bucket, target=fs.join(folder, _EXCHANGE), name=f"{item[0]:05d}")
    return {"rows": len(table), "test_clicks": test_clicks}


def _clicks(item: tuple[int, int], *, config: FuseConfig, folder: str) -> Record:
    bucket = item[1]
    history = config.query.history
    table = training_rows(
        exchange.gather(fs.join(folder, _EXCHANGE), bucket, schema=SCHEMA),
        last=history.last if history else 0,
        skipped=config.losses.group - 1,
    )
    shown = [np.asarray(table["clicked"])]
    if "skipped" in table.column_names:
        shown.append(_flat(table["skipped"]))
    all_shown = _distinct(np.concatenate(shown))
    named = _distinct(np.concatenate([all_shown, _flat(table["history"])]))
    clicked, counts = np.unique(np.asarray(table["clicked"]), return_counts=True)
    found = {
        "named": pa.table({"hash": named}),
        "shown": pa.table({"hash": all_shown}),
        "asked": pa.table({"hash": _distinct(np.asarray(table["query"]))}),
        "known": pa.table({"hash": _distinct(np.asarray(table["user"]))}),
        "counts": pa.table({"hash": clicked, "count": counts}),
        _RAW: one_chunk({name: table[name].combine_chunks() for name in table.column_names}),
    }
    for name, part in found.items():
        write_table(fs.join(folder, f"{name}/{bucket:05d}.arrow"), part.combine_chunks())
    return {"clicks": len(table)}


def _observe(item: Slice, *, dataset: Artifact, features: Sequence[Feature]) -> Record:
    columns = list(dict.fromkeys(feature.column for feature in features))
    table = pa.concat_tables(dataset.table(part, columns) for part in item[1])
    return {"observed": observe(features, table)}


def _documents(item: Slice, *, corpus: Corpus, encodings: Sequence[Encoding], folder: str) -> Record:
    wanted = array(fs.join(folder, "named.arrow"))
    columns = list(dict.fromkeys(encoding.feature.column for encoding in encodings))
    pieces = []
    for part in item[1]:
        found = read_part(corpus, part, columns)
        hashes = exchange.hash_of(found.table["doc_id"])
        kept = np.flatnonzero(among(hashes, wanted))
        pieces.append(
            _matrices(
                hashes[kept],
                found.table.take(pa.array(kept)),
                encodings,
                embedding=found.embeddings[kept],
                codes=found.codes[kept],
            )
        )
    table = pa.concat_tables(pieces).combine_chunks()
    return {"files": write_tables(folder, {f"{DOCUMENTS}/{item[0]:05d}.arrow": table}), "problems": {}}


def _users(item: Slice, *, dataset: Artifact, encodings: Sequence[Encoding], folder: str) -> Record:
    columns = list(dict.fromkeys(encoding.feature.column for encoding in encodings))
    table = pa.concat_tables(dataset.table(part, ["user_id", *columns]) for part in item[1])
    hashes = exchange.hash_of(table["user_id"])
    kept = np.flatnonzero(among(hashes, array(fs.join(folder, "known.arrow"))))
    found = _matrices(hashes[kept], table.take(pa.array(kept)), encodings)
    return {"files": write_tables(folder, {f"{USERS}/{item[0]:05d}.arrow": found}), "problems": {}}


def _rows(item: tuple[int, int], *, folder: str) -> Record:
    """Clicks of a bucket by row numbers; those whose query or document is not there are left out."""
    bucket = item[1]
    with fs.open_input(fs.join(folder, f"{_RAW}/{bucket:05d}.arrow")) as source:
        raw = pa.ipc.open_file(source).read_all()
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
    popular, share = (array_of(fs.join(folder, "popularity.arrow"), name) for name in ("hash", "share"))
    log_q = np.log(share[np.searchsorted(popular, np.asarray(raw["clicked"]))]).astype(np.float32)
    table = one_chunk(
        {
            "query": pa.array(numbered["query"]),
            "user": pa.array(numbered["user"]),
            "group": pa.FixedSizeListArray.from_arrays(pa.array(group.reshape(-1)), group.shape[1]),
            "history": list_column(history[history >= 0], [0, *ends.tolist()], pa.large_list(pa.int64())),
            "log_q": pa.array(log_q),
        }
    )
    usable = (numbered["query"] >= 0) & (group[:, 0] >= 0)
    table = table.filter(pa.array(usable)).combine_chunks()
    files = write_tables(folder, {f"{ROWS}/{bucket:05d}.arrow": table})
    return {"files": files, "left_out": int((~usable).sum())}


# --- pieces -----------------------------------------------------------------------------------------------


def _write_popularity(config: FuseConfig, folder: str) -> None:
    """The share of all clicks that each clicked document has; none of a test query is among them."""
    found = [
        [array_of(fs.join(folder, f"counts/{b:05d}.arrow"), name) for name in ("hash", "count")]
        for b in range(config.parts)
    ]
    hashes, place = np.unique(np.concatenate([hashes for hashes, _ in found]), return_inverse=True)
    counts = np.bincount(place, weights=np.concatenate([count for _, count in found]))
    write_table(
        fs.join(folder, "popularity.arrow"), pa.table({"hash": hashes, "share": counts / counts.sum()})
    )


def _write_place(name: str, written: Sequence[Record], folder: str) -> None:
    """The row of each of the `name`d hashes among what was written of them."""
    place = place_of(array(fs.join(folder, f"{name}.arrow")), written, folder)
    write_table(fs.join(folder, f"{name}-place.arrow"), pa.table({"row": place}))


def _numbers(hashes: UInt64[ndarray, " rows"], name: str, folder: str) -> Int64[ndarray, " rows"]:
    found = (array(fs.join(folder, f"{file}.arrow")) for file in (name, f"{name}-place"))
    return rows_of(hashes, *found)


def _matrices(
    hashes: UInt64[ndarray, " rows"],
    table: pa.Table,
    encodings: Sequence[Encoding],
    **more: ndarray,
) -> pa.Table:
    """Hashes, further matrices, and features as they were fitted; columns without width are left out."""
    encoded = encode(encodings, table)
    columns = {"indices": encoded.indices, "numbers": encoded.numbers, **more}
    wide = {name: vectors.to_arrow(values) for name, values in columns.items() if values.shape[1]}
    return one_chunk({"hash": pa.array(hashes), **wide})


def _distinct(hashes: UInt64[ndarray, " rows"]) -> UInt64[ndarray, " distinct"]:
    found: ndarray = np.setdiff1d(hashes, np.array([NOBODY], np.uint64))
    return found


def _flat(column: pa.ChunkedArray) -> ndarray:
    return np.asarray(pc.list_flatten(column.combine_chunks()))


def array_of(uri: str, name: str) -> ndarray:
    """A column of an Arrow file."""
    with fs.open_input(uri) as source:
        table = pa.ipc.open_file(source).read_all()
    return np.asarray(table[name].combine_chunks())
