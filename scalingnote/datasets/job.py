"""The prepare stage: checks and splits the rows of any source, simulates clicks, writes a `dataset` artifact.

Documents are streamed into parts; ids, groups and topics, queries and judgements are held in memory. Logs,
which may not fit in memory, have a job of their own (`logs.job`).
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets import click_simulator, file_formats, row_checks, sources, splits
from scalingnote.datasets.config import AnyClickModel, AnyDataset, Logs, NewDocuments, Texts
from scalingnote.datasets.raw_rows import Quarantine, Row, Source
from scalingnote.datasets.splits import held_out
from scalingnote.datasets.user_behavior import Tastes
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import get_logger
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES, USERS

log = get_logger("datasets")
_LOG_INTERVAL_S = 5.0


def run(config: AnyDataset, *, output: str) -> Artifact:
    """Build the data set at `output`, or return it if it exists.

    Bad rows are set aside in `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).

    Raises:
        DataError: nothing usable remains.
    """
    if isinstance(config, Logs):
        from scalingnote.datasets.logs.job import run as run_logs  # late, since other sources do not need Ray

        return run_logs(config, output=output)
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.afresh()  # the input files may have changed since an earlier run
    about = sources.describe(config.name)
    source = sources.read(config)
    quarantine = Quarantine()

    catalogue = _write_documents(draft, source, config=config, quarantine=quarantine)
    tables, left_out = _supervision(source, catalogue, config=config, quarantine=quarantine)
    simulator = None if tables["impressions"].num_rows else config.click_model
    if simulator:
        tastes = _tastes(simulator, catalogue, source.features)
        tables["impressions"] = _simulated(tables, catalogue, config=simulator, tastes=tastes)
        if tastes is not None:
            tables["users"] = tastes.profiles()

    for name, table in tables.items():
        if table.num_rows or name in ("queries", "qrels"):
            draft.write_table(f"{name}.parquet", table)
    draft.write_table("rejected.parquet", quarantine.table())
    counts = {"documents": len(catalogue.group_of), **{name: t.num_rows for name, t in tables.items()}}
    for split in ("train", "test"):
        counts[f"{split}_queries"] = pc.sum(pc.equal(tables["queries"]["split"], split)).as_py() or 0
    counts["rejected"] = sum(quarantine.rejected.values())
    artifact = draft.commit(
        counts=counts,
        simulated_clicks=simulator is not None,
        click_model=simulator.kind if simulator else None,
        description=about.summary,
        licence=about.licence,
        rejected_by_reason=dict(sorted(quarantine.rejected.items())),
        mended=dict(sorted(quarantine.mended.items())),
        left_out=left_out,
        **source.notes,
    )
    log.info(
        "%s: %s documents, %s train and %s test queries, %s rejected rows -> %s",
        config.name,
        *(f"{counts[name]:,}" for name in ("documents", "train_queries", "test_queries", "rejected")),
        output,
    )
    return artifact


def prepare_documents(config: NewDocuments, *, output: str) -> Artifact:
    """Build a data set of documents only, with the checks of :func:`run`: input of a live index."""
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.afresh()
    quarantine = Quarantine()
    catalogue = _write_documents(
        draft, file_formats.read_documents(config), config=config, quarantine=quarantine
    )
    draft.write_table("rejected.parquet", quarantine.table())
    counts = {"documents": len(catalogue.group_of), "rejected": sum(quarantine.rejected.values())}
    log.info("%s new documents, %s rejected rows -> %s", *(f"{n:,}" for n in counts.values()), output)
    return draft.commit(
        counts=counts, rejected_by_reason=quarantine.rejected, mended=dict(sorted(quarantine.mended.items()))
    )


class _Catalogue:
    """Facts about documents that later steps need: ids of all valid ones, groups and topics of those kept."""

    def __init__(self, features: Sequence[str]) -> None:
        """`features` are the columns whose values are kept, too."""
        self.valid_ids: set[str] = set()
        self.group_of: dict[str, str] = {}
        self.topics: list[str] = []
        self.features: dict[str, list[Any]] = {name: [] for name in features}

    def record_valid(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Record all valid rows while they are streamed."""
        for row in rows:
            self.valid_ids.add(row["doc_id"])
            yield row

    def record_kept(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Record the rows of the data set while they are streamed."""
        for row in rows:
            self.group_of[row["doc_id"]] = row["group"]
            self.topics.append(row["topic"])
            for name, values in self.features.items():
                values.append(row[name])
            yield row


def _write_documents(
    draft: Draft, source: Source, *, config: AnyDataset | NewDocuments, quarantine: Quarantine
) -> _Catalogue:
    taste = config.click_model.taste if config.click_model else None
    taste_columns = taste.columns if taste else ()
    if missing := sorted(set(taste_columns) - set(source.features.names)):
        raise ConfigError(
            f"click_model.taste names {missing}, which are no features of {config.name}: it has "
            f"{source.features.names}"
        )
    catalogue = _Catalogue(taste_columns)
    rows: Iterable[Row] = catalogue.record_valid(
        row_checks.documents(source.documents, config=config, features=source.features, quarantine=quarantine)
    )
    if config.max_documents is not None:
        rows = splits.subset(rows, size=config.max_documents, seed=config.seed, rank=source.rank)
    rows = catalogue.record_kept(rows)
    schema = pa.schema([*DOCUMENTS, *source.features])
    last_log = time.monotonic()
    number = 0
    while part := list(islice(rows, config.documents_per_part)):
        draft.write_table(f"documents/part-{number:05d}.parquet", pa.Table.from_pylist(part, schema=schema))
        number += 1
        if time.monotonic() - last_log > _LOG_INTERVAL_S:
            last_log = time.monotonic()
            log.info("%s documents", f"{len(catalogue.group_of):,}")
    if not number:
        raise DataError(f"{config.name}: no usable document{_reasons(quarantine)}")
    return catalogue


def _supervision(
    source: Source, catalogue: _Catalogue, *, config: AnyDataset, quarantine: Quarantine
) -> tuple[dict[str, pa.Table], dict[str, int]]:
    """The other tables, and how many of their valid rows the subsets left out.

    Rows are checked against all valid documents, so that rows about documents outside a subset are left out,
    not rejected.
    """
    queries = {row["query_id"]: row for row in row_checks.queries(source.queries, quarantine=quarantine)}
    pairs = {
        name: list(
            row_checks.pairs(
                name, rows, query_ids=queries, doc_ids=catalogue.valid_ids, quarantine=quarantine
            )
        )
        for name, rows in (
            ("qrels", source.qrels),
            ("impressions", source.impressions),
            ("scores", source.scores),
        )
    }  # fmt: skip
    valid = {name: len(rows) for name, rows in {"queries": queries, **pairs}.items()}

    usable = _supervised(pairs)
    for query_id in [query_id for query_id in queries if query_id not in usable]:
        quarantine.reject("queries", queries.pop(query_id), "no relevant document and no impression")
        valid["queries"] -= 1
    pairs = {name: [r for r in rows if r["doc_id"] in catalogue.group_of] for name, rows in pairs.items()}
    usable = _supervised(pairs)
    chosen: Iterable[Row] = [row for row in queries.values() if row["query_id"] in usable]
    if config.max_queries is not None:
        chosen = splits.subset(chosen, size=config.max_queries, seed=config.seed, key="query_id")
    queries = {row["query_id"]: row for row in chosen}
    pairs = {name: [r for r in rows if r["query_id"] in queries] for name, rows in pairs.items()}
    if not queries and not isinstance(config, Texts):
        raise DataError(f"{config.name}: no query with a relevant document remains{_reasons(quarantine)}")

    _split(queries, pairs, group_of=catalogue.group_of, config=config)
    tables = {
        "queries": pa.Table.from_pylist(list(queries.values()), schema=QUERIES),
        "qrels": pa.Table.from_pylist(pairs["qrels"], schema=QRELS),
        "impressions": pa.Table.from_pylist(pairs["impressions"], schema=IMPRESSIONS),
        "scores": pa.Table.from_pylist(pairs["scores"], schema=SCORES),
    }
    users = list(row_checks.users(source.users, profile=source.profile, quarantine=quarantine))
    left_out = {name: count - tables[name].num_rows for name, count in valid.items()}
    left_out["documents"] = len(catalogue.valid_ids) - len(catalogue.group_of)
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
    test = held_out(
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


def _tastes(config: AnyClickModel, catalogue: _Catalogue, features: pa.Schema) -> Tastes | None:
    """The tastes of the simulated users, or None if all users are alike."""
    if config.taste is None:
        return None
    file_formats = {
        name: pa.array(values, features.field(name).type) for name, values in catalogue.features.items()
    }
    return Tastes.draw(config.taste, pa.table(file_formats), users=config.users, seed=config.seed)


def _simulated(
    tables: dict[str, pa.Table], catalogue: _Catalogue, *, config: AnyClickModel, tastes: Tastes | None
) -> pa.Table:
    """Impressions of training queries; documents of a group that a test query is judged on are not shown."""
    queries, qrels = tables["queries"], tables["qrels"]
    test = queries.filter(pc.equal(queries["split"], "test"))["query_id"]
    is_test = pc.is_in(qrels["query_id"], value_set=test.combine_chunks())
    relevant = qrels.filter(pc.and_(is_test, pc.greater(qrels["relevance"], 0)))
    hidden = {catalogue.group_of[doc_id] for doc_id in relevant["doc_id"].to_pylist()}
    seen = [
        (doc_id, topic, row)
        for row, ((doc_id, group), topic) in enumerate(
            zip(catalogue.group_of.items(), catalogue.topics, strict=True)
        )
        if group not in hidden
    ]
    return click_simulator.simulate(
        qrels.filter(pc.invert(is_test)),
        doc_ids=[doc_id for doc_id, _, _ in seen],
        topics=[topic for _, topic, _ in seen],
        config=config,
        tastes=tastes.of_documents([row for _, _, row in seen]) if tastes else None,
    )


def _reasons(quarantine: Quarantine) -> str:
    worst = quarantine.rejected.most_common(3)
    return "; set aside: " + ", ".join(f"{count:,} x {reason}" for reason, count in worst) if worst else ""
