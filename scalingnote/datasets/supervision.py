"""Queries, judgements, impressions and scores of a data set: checked, split, completed by simulated clicks.

One task holds all of these rows, and the groups of the documents that they name; simulated clicks need the
ids and topics of all documents. MAX_ROWS and MAX_SIMULATED_DOCUMENTS bound its memory to about 5 GB. A larger
log is a source of its own, `logs`, which is joined by shuffles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from scalingnote.datasets import row_checks, simulate, splits
from scalingnote.datasets.config import AnyClickModel, AnyDataset, Texts
from scalingnote.datasets.raw_rows import Quarantine, Row, Source, UnreadableRow
from scalingnote.datasets.simulate import Tastes
from scalingnote.errors import DataError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import IMPRESSIONS, QRELS, QUERIES, SCORES, USERS, is_valid_unicode
from scalingnote.storage.shuffle import JsonRecord

log = get_logger("datasets")
MAX_ROWS = 5_000_000
MAX_SIMULATED_DOCUMENTS = 10_000_000
OUTPUTS = ("queries", "qrels", "impressions", "scores", "users")
_PARTS_PER_READ = 256
_Tables = dict[str, list[Row | UnreadableRow]]


def write_supervision(
    source: Source, *, config: AnyDataset, parts: Sequence[str], left_out: str, output: str
) -> JsonRecord:
    """Write the tables beside the documents.

    Args:
        source: without its documents.
        config: of the data set.
        parts: of the documents.
        left_out: URI of the ids of valid documents that a subset left out.
        output: URI of the artifact.

    Returns:
        The parts, and the counts of rows: written, left out, and in the quarantine.

    Raises:
        DataError: there are more than MAX_ROWS rows, or no query with a relevant document remains.
    """
    quarantine = Quarantine()
    given = _bounded(source, config.name)
    named = _named_documents([*given["qrels"], *given["impressions"], *given["scores"]])
    found = _read_documents(parts, output, ["doc_id", "group"], named=named)
    group_of = dict(zip(found["doc_id"].to_pylist(), found["group"].to_pylist(), strict=True))
    valid_ids = set(group_of)
    if config.max_documents is not None:
        valid_ids.update(read_table(left_out)["doc_id"].to_pylist())
    tables, missing = _tables(
        given, source, group_of=group_of, valid_ids=valid_ids, config=config, quarantine=quarantine
    )
    simulator = None if tables["impressions"].num_rows else config.click_model
    if simulator:
        tables |= _simulated(tables, parts, output, group_of=group_of, config=simulator)
    counts = {name: table.num_rows for name, table in tables.items()}
    for split in ("train", "test"):
        counts[f"{split}_queries"] = pc.sum(pc.equal(tables["queries"]["split"], split)).as_py() or 0
    return {
        "parts": {
            f"{name}.parquet": asdict(write_table(fs.join(output, f"{name}.parquet"), table))
            for name, table in tables.items()
            if table.num_rows or name in ("queries", "qrels")
        },
        "counts": counts,
        "left_out": missing,
        "click_model": simulator.kind if simulator else None,
        "quarantine": {"rejected": dict(quarantine.rejected), "mended": dict(quarantine.mended)},
        "rejected": quarantine.table().to_pylist(),
    }


def _bounded(source: Source, name: str) -> _Tables:
    """The raw rows of all tables; DataError if there are more than MAX_ROWS."""
    given: _Tables = {}
    left = MAX_ROWS
    for table in OUTPUTS:
        given[table] = list(islice(getattr(source, table), left + 1))
        left -= len(given[table])
        if left < 0:
            raise DataError(
                f"{name}: more than {MAX_ROWS:,} rows of {', '.join(OUTPUTS)}, which one task holds: use "
                "dataset.name=logs, which takes impressions and judgements of any number"
            )
    return given


def _named_documents(rows: Iterable[Row | UnreadableRow]) -> set[str]:
    """The doc_ids of rows, as `row_checks` reads them; invalid ones too, unless Arrow cannot hold them."""
    ids = {str(row.get("doc_id")).strip() for row in rows if isinstance(row, dict)}
    return {doc_id for doc_id in ids if is_valid_unicode(doc_id)}


def _read_documents(
    parts: Sequence[str], output: str, columns: list[str], *, named: set[str] | None = None
) -> pa.Table:
    """Columns of all documents, or of those whose id is in `named`, in order."""
    value_set = pa.array(sorted(named), pa.string()) if named is not None else None

    def read(part: str) -> pa.Table:
        return read_table(fs.join(output, part), columns)

    found = []
    for start in range(0, len(parts), _PARTS_PER_READ):
        rows = pa.concat_tables(fs.map_files(read, parts[start : start + _PARTS_PER_READ]))
        found.append(rows if named is None else rows.filter(pc.is_in(rows["doc_id"], value_set=value_set)))
    return pa.concat_tables(found)


def _tables(
    given: _Tables,
    source: Source,
    *,
    group_of: dict[str, str],
    valid_ids: set[str],
    config: AnyDataset,
    quarantine: Quarantine,
) -> tuple[dict[str, pa.Table], dict[str, int]]:
    """The tables, and how many of their valid rows the subsets left out.

    Rows are checked against all valid documents, so that rows about documents outside a subset are left out,
    not rejected.
    """
    queries = {row["query_id"]: row for row in row_checks.queries(given["queries"], quarantine=quarantine)}
    pairs = {
        name: list(
            row_checks.pairs(name, given[name], query_ids=queries, doc_ids=valid_ids, quarantine=quarantine)
        )
        for name in ("qrels", "impressions", "scores")
    }
    valid = {name: len(rows) for name, rows in {"queries": queries, **pairs}.items()}

    usable = _supervised(pairs)
    for query_id in [query_id for query_id in queries if query_id not in usable]:
        quarantine.reject("queries", queries.pop(query_id), "no relevant document and no impression")
        valid["queries"] -= 1
    pairs = {name: [r for r in rows if r["doc_id"] in group_of] for name, rows in pairs.items()}
    usable = _supervised(pairs)
    chosen: Iterable[Row] = [row for row in queries.values() if row["query_id"] in usable]
    if config.max_queries is not None:
        chosen = splits.subset(chosen, size=config.max_queries, seed=config.seed, key="query_id")
    queries = {row["query_id"]: row for row in chosen}
    pairs = {name: [r for r in rows if r["query_id"] in queries] for name, rows in pairs.items()}
    if not queries and not isinstance(config, Texts):
        raise DataError(f"{config.name}: no query with a relevant document remains{quarantine.reasons()}")

    _split(queries, pairs, group_of=group_of, config=config)
    tables = {
        "queries": pa.Table.from_pylist(list(queries.values()), schema=QUERIES),
        "qrels": pa.Table.from_pylist(pairs["qrels"], schema=QRELS),
        "impressions": pa.Table.from_pylist(pairs["impressions"], schema=IMPRESSIONS),
        "scores": pa.Table.from_pylist(pairs["scores"], schema=SCORES),
    }
    users = list(row_checks.users(given["users"], profile=source.profile, quarantine=quarantine))
    left_out = {name: count - tables[name].num_rows for name, count in valid.items()}
    tables["users"] = pa.Table.from_pylist(users, schema=pa.schema([*USERS, *source.profile]))
    return tables, {name: count for name, count in sorted(left_out.items()) if count}


def _supervised(pairs: dict[str, list[Row]]) -> set[str]:
    """Queries with a relevant document or an impression."""
    relevant = {row["query_id"] for row in pairs["qrels"] if row["relevance"] > 0}
    return relevant | {row["query_id"] for row in pairs["impressions"]}


def _split(
    queries: dict[str, Row], pairs: dict[str, list[Row]], *, group_of: dict[str, str], config: AnyDataset
) -> None:
    """Fill in `split` where the source has none."""
    undecided = [query_id for query_id, row in queries.items() if not row["split"]]
    positives = [(r["query_id"], r["doc_id"]) for r in pairs["qrels"] if r["relevance"] > 0]
    positives += [(r["query_id"], r["doc_id"]) for r in pairs["impressions"] if r["clicked"]]
    test = splits.held_out(
        positives, query_ids=queries, group_of=group_of, fraction=config.test_fraction, seed=config.seed
    )
    for query_id in undecided:
        queries[query_id]["split"] = "test" if query_id in test else "train"
    sides = {row["split"] for row in queries.values()}
    if undecided and 0 < config.test_fraction < 1 and len(sides) < 2:
        log.warning(
            "all %d queries are for %s: they share too many documents, or are too few, for test_fraction=%g",
            len(queries),
            *sides,
            config.test_fraction,
        )


def _simulated(
    tables: dict[str, pa.Table],
    parts: Sequence[str],
    output: str,
    *,
    group_of: dict[str, str],
    config: AnyClickModel,
) -> dict[str, pa.Table]:
    """Impressions of training queries, and the profiles of users who have tastes.

    Documents of a group that a test query is judged on are not shown.
    """
    taste = config.taste
    columns = ["doc_id", "group", "topic", *(taste.columns if taste else ())]
    documents = _read_documents(parts, output, columns)
    queries, qrels = tables["queries"], tables["qrels"]
    test = queries.filter(pc.equal(queries["split"], "test"))["query_id"]
    is_test = pc.is_in(qrels["query_id"], value_set=test.combine_chunks())
    relevant = qrels.filter(pc.and_(is_test, pc.greater(qrels["relevance"], 0)))
    hidden = pa.array({group_of[doc_id] for doc_id in relevant["doc_id"].to_pylist()}, pa.string())
    rows = np.flatnonzero(~np.asarray(pc.is_in(documents["group"], value_set=hidden)))
    seen = documents.select(["doc_id", "topic"]).take(rows)
    tastes = Tastes.draw(taste, documents, users=config.users, seed=config.seed) if taste else None
    impressions = simulate.simulate(
        qrels.filter(pc.invert(is_test)),
        doc_ids=seen["doc_id"].to_pylist(),
        topics=seen["topic"].to_pylist(),
        config=config,
        tastes=tastes.of_documents(rows.tolist()) if tastes else None,
    )
    return {"impressions": impressions} | ({"users": tastes.profiles()} if tastes else {})
