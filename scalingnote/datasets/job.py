"""The prepare stage: documents and supervision of any source become a `dataset` artifact.

    input -> slices -> check -> `documents` by id -> `supervision` by query -> manifest

Tasks read and write files and return a record of a few hundred bytes: no row passes through the driver or
Ray's object store. They run on Ray if the input is larger than a slice of documents and a bucket of other
rows, else in this process. After a kill, records of finished tasks are kept if the input is unchanged; the
other tasks write the same files again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from scalingnote.core.config import Resources
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor
from scalingnote.datasets import documents, passages, readers, sources, splits, supervision
from scalingnote.datasets.config import (
    AnyDataset,
    Logs,
    NewDocuments,
    Passages,
    PositionClicks,
    SampledDataset,
)
from scalingnote.datasets.documents import PrepareContext
from scalingnote.datasets.input_files import SLICE_BYTES, Quarantine, Source
from scalingnote.storage.artifact import Artifact, Draft, Part
from scalingnote.storage.schema import PASSAGE
from scalingnote.storage.shuffle import JsonRecord, run_slices

log = get_logger("datasets")
MAX_SIMULATED_DOCUMENTS = 10_000_000
BUCKET_BYTES = 128 << 20  # of input files
_MAX_LOG_BUCKET_BYTES = 1 << 30  # of input; above it, a warning advises more buckets
_COUNTS = ("documents", "queries", "qrels", "impressions", "scores", "train_queries", "test_queries")
# Runs the tasks of one step.
_Steps = Callable[..., list[Any]]


def run(config: AnyDataset, *, output: str) -> Artifact:
    """Build the data set at `output`, or return it if it exists.

    Bad rows are set aside in `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).

    Raises:
        DataError: a file lacks a column, or nothing usable remains.
    """
    return _run(config, output, sources.read)


def prepare_documents(config: NewDocuments, *, output: str) -> Artifact:
    """Build a data set of documents only, with the checks of :func:`run`, as input of a live index."""
    return _run(config, output, readers.read_documents)


def _run(config: Any, output: str, read: Callable[[Any], Source]) -> Artifact:
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    source = read(config)
    return build(config, source, draft, each=_runner(config, source))


def _runner(config: AnyDataset | NewDocuments, source: Source) -> Executor:
    if _bytes_of(source, ["documents"]) <= SLICE_BYTES and _bytes_beside(source) <= BUCKET_BYTES:
        return map
    from scalingnote.core import cluster  # late: small data sets do not need Ray

    resources = config.resources if isinstance(config, Logs) else Resources()
    cluster.connect()
    cluster.check_resources(resources, knob="dataset.resources")
    return partial(cluster.map_tasks, resources=resources)


def _bytes_of(source: Source, tables: Sequence[str]) -> int:
    return sum(part.size for part in source.parts(tables))


def _bytes_beside(source: Source) -> int:
    """Add up the sizes of the slices of all tables except the documents."""
    return _bytes_of(source, [table for table in source.tables if table != "documents"])


def build(config: AnyDataset | NewDocuments, source: Source, draft: Draft, *, each: Executor) -> Artifact:
    """Build the data set of a source; `each` runs the tasks."""
    in_files = not any(isinstance(rows, list) for table in source.tables.values() for rows in table)
    # Rows that are not in files are read again: no work is resumed.
    plan = [{"table": t, **asdict(p)} for t in source.tables for p in source.parts([t])] if in_files else []
    documents.resume_or_clear(draft, plan)
    if config.passages is not None:
        if conflicts := sorted({*PASSAGE.names} & {*source.features.names}):
            raise ConfigError(
                f"dataset.passages adds a column {conflicts[0]!r}: rename that of the documents"
            )
        tokenizer = passages.tokenizer_json(_counting_model(config.passages))
        draft.write_bytes(passages.TOKENIZER, tokenizer)
    slices = [(table, rows) for table, table_slices in source.tables.items() for rows in table_slices]
    context = PrepareContext(
        config,
        source.features,
        source.profile,
        document_slices=len(source.tables["documents"]),
        work=draft.work(),
        output=draft.uri,
    )
    quarantine = Quarantine()
    run_step = partial(_run_step, each=each, quarantine=quarantine, draft=draft)
    checked = run_step("check", partial(documents.check_slice, context=context), slices)
    context = _plan_buckets(context, source, checked, quarantine)
    parts, facts = _write_documents(context, checked, run_step, quarantine)
    if not isinstance(config, NewDocuments):
        facts |= _write_supervision(context, checked, parts, run_step, quarantine)
    return _commit(config, draft, quarantine, facts | source.notes)


def _counting_model(config: Passages) -> str:
    """Return the model whose tokenizer counts; ConfigError if none is configured."""
    if config.tokenizer is None:
        raise ConfigError("dataset.passages counts the tokens of a model: set dataset.passages.tokenizer")
    return config.tokenizer


def _run_step(
    name: str, task: Any, items: Sequence[Any], *, each: Executor, quarantine: Quarantine, draft: Draft
) -> list[Any]:
    """Run the tasks of a step, add up their rejected rows and counts, and register their parts."""
    work = draft.work()
    records = run_slices(name, task, items, folder=work, each=each, section="datasets", unit="tasks")
    for record in records:
        if isinstance(record, dict) and "quarantine" in record:
            quarantine.add(record["quarantine"])
            for part, fields in record.get("parts", {}).items():
                draft.register(part, Part(**fields))
    return records


def _plan_buckets(
    context: PrepareContext, source: Source, checked: Sequence[JsonRecord], quarantine: Quarantine
) -> PrepareContext:
    """Return the context with the number of buckets of queries, and the windows of a log."""
    config, size = context.config, _bytes_beside(source)
    other_records = [record for record in checked if record["table"] != "documents"]
    if not isinstance(config, Logs):
        many = sum(record["rows"] for record in other_records) > supervision.MAX_TASK_ROWS
        return replace(context, query_buckets=max(-(-size // BUCKET_BYTES), 2) if many else 1)
    if size // config.parts > _MAX_LOG_BUCKET_BYTES:
        log.warning(
            "%s MB of input for each of %d buckets: raise dataset.parts to keep tasks small",
            f"{size // config.parts // 10**6:,}",
            config.parts,
        )
    spans = [(record["first"], record["last"]) for record in other_records if "first" in record]
    if not spans:
        raise DataError(f"logs: no usable row of impressions{quarantine.reasons(of='impressions')}")
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    windows = splits.choose_windows(config, first=first, last=last)
    return replace(context, query_buckets=config.parts, windows=windows)


# --- documents --------------------------------------------------------------------------------------------


def _write_documents(
    context: PrepareContext,
    checked: Sequence[JsonRecord],
    do: _Steps,
    quarantine: Quarantine,
) -> tuple[list[str], dict[str, Any]]:
    """Write the parts of documents, and return their names and facts for the manifest."""
    config = context.config
    slice_records = [record for record in checked if record["table"] == "documents"]
    rows, texts = (sum(record[name] for record in slice_records) for name in ("rows", "text_bytes"))
    size = config.max_documents if isinstance(config, SampledDataset) else None
    if size is not None and rows > size:
        texts = texts * size // rows
    per_part = documents.rows_per_part(
        config, rows=rows if size is None else min(rows, size), text_bytes=texts
    )
    find = partial(documents.find_ids, context=context, per_part=per_part)
    records = do("ids", find, range(context.id_buckets))
    documents_count = sum(record["documents"] for record in records)
    if not context.by_time:
        dropped = Counter[str]()
        for record in records:
            dropped.update(record["repeats"])
        left_out = Counter[str]()
        if isinstance(config, SampledDataset) and size is not None:
            (counts,) = do("choose", partial(documents.choose, context=context), [(size, config.seed)])
            left_out.update(counts)
        quarantine.left_out["documents"] += left_out.total()
        kept_counts = [
            record["rows"] - (dropped + left_out)[str(n)] for n, record in enumerate(slice_records)
        ]
        documents_count = sum(kept_counts)
        _require_fewer(context, documents_count, checked)
        sections = documents.plan_sections(kept_counts, per_part)
        records = do("write", partial(documents.write_section, context=context), sections)
    parts = {name: part["rows"] for record in records for name, part in record["parts"].items()}
    quarantine.counts["documents"] += sum(parts.values())
    if not parts:
        raise DataError(f"{config.name}: no usable row of documents{quarantine.reasons(of='documents')}")
    divided = {} if config.passages is None else {"whole_documents": documents_count}
    return list(parts), {"documents_per_part": per_part} | divided


def _require_fewer(context: PrepareContext, rows: int, checked: Sequence[JsonRecord]) -> None:
    """Raise DataError if there are more documents than clicks can be simulated for."""
    if rows > MAX_SIMULATED_DOCUMENTS and _clicks_to_simulate(context, checked):
        raise DataError(
            f"{context.config.name}: {rows:,} documents, but clicks are simulated for "
            f"{MAX_SIMULATED_DOCUMENTS:,} at most: set dataset.click_model to null, give impressions, or "
            "take a subset by dataset.max_documents"
        )


def _clicks_to_simulate(context: PrepareContext, checked: Sequence[JsonRecord]) -> PositionClicks | None:
    """Return the click model if the source has queries and no impressions, else None."""
    tables = {record["table"] for record in checked if record["rows"]}
    model: PositionClicks | None = getattr(context.config, "click_model", None)
    return model if "queries" in tables and "impressions" not in tables else None


# --- the other tables -------------------------------------------------------------------------------------


def _write_supervision(
    context: PrepareContext,
    checked: Sequence[JsonRecord],
    parts: Sequence[str],
    do: _Steps,
    quarantine: Quarantine,
) -> dict[str, Any]:
    """Write all tables except the documents, which have these `parts`; return facts for the manifest."""
    other_slices = [
        (n, record["table"]) for n, record in enumerate(checked) if record["table"] != "documents"
    ]
    do("route", partial(supervision.route_slice, context=context), other_slices)
    buckets = range(context.query_buckets)
    if context.by_time:
        do("queries", partial(supervision.write_log_queries, context=context), buckets)
        return _describe_windows(context, checked, quarantine)
    judge = partial(supervision.judge_queries, context=context, documents=parts)
    judged = do("judge", judge, buckets)
    if other_slices and not any(record["queries"] for record in judged):
        raise DataError(
            f"{context.config.name}: no query with a relevant document remains{quarantine.reasons()}"
        )
    do("split", partial(supervision.split_queries, context=context), [context.config])
    do("queries", partial(supervision.write_queries, context=context), buckets)
    for table in ("queries", *supervision.PAIR_SCHEMAS):
        valid = sum(record["valid"][table] for record in judged)
        quarantine.left_out[table] += valid - quarantine.counts[table]
    clicks = None if quarantine.counts["impressions"] else _clicks_to_simulate(context, checked)
    if clicks:
        do("clicks", partial(supervision.simulate_clicks, context=context, documents=parts), [clicks])
    undecided = any(record["undecided"] for record in judged)
    _warn_of_one_side(context.config, quarantine.counts, undecided=undecided)
    return {"click_model": "position" if clicks else None}


def _warn_of_one_side(config: Any, counts: Counter[str], *, undecided: bool) -> None:
    """Warn if a drawn split has no query on one side."""
    train, test = counts["train_queries"], counts["test_queries"]
    if undecided and 0 < config.test_fraction < 1 and not (train and test):
        log.warning(
            "all %d queries are for %s: they share too many documents, or are too few, for test_fraction=%g",
            counts["queries"],
            "train" if train else "test",
            config.test_fraction,
        )


def _describe_windows(
    context: PrepareContext, checked: Sequence[JsonRecord], quarantine: Quarantine
) -> dict[str, Any]:
    config = context.config
    assert isinstance(config, Logs)
    assert context.windows is not None
    windows = context.windows.as_iso()
    if not quarantine.counts["train_queries"]:
        window, why = " to ".join(windows["train"]), quarantine.reasons(of="impressions")
        raise DataError(f"logs: no query to train on in the window {window}{why}: widen dataset.train")
    if not quarantine.counts["test_queries"]:
        log.warning("no query to test with in the window %s to %s: widen dataset.test", *windows["test"])
    spans = [(record["first"], record["last"]) for record in checked if "first" in record]
    span = (min(first for first, _ in spans), max(last for _, last in spans))
    return {
        "windows": windows,
        "span": splits.SplitWindows(span, span).as_iso()["train"],
        "hold_out_documents": config.hold_out_documents,
    }


def _commit(
    config: AnyDataset | NewDocuments, draft: Draft, quarantine: Quarantine, facts: dict[str, Any]
) -> Artifact:
    """Commit the data set with the numbers of written, rejected, repaired and omitted rows."""
    draft.write_table("rejected.parquet", quarantine.table())
    counts = dict.fromkeys(_COUNTS, 0) | dict(quarantine.counts)
    counts["rejected"] = sum(quarantine.rejected.values())
    artifact = draft.commit(
        counts=counts,
        simulated_clicks=bool(facts.get("click_model")),
        description=sources.SUMMARIES.get(config.name, ""),
        rejected_by_reason=_above_zero(quarantine.rejected),
        repaired=_above_zero(quarantine.repaired),
        left_out=_above_zero(quarantine.left_out),
        **facts,
    )
    count_names = ("documents", "impressions", "train_queries", "test_queries", "rejected")
    prefix = f"{facts['whole_documents']:,} documents as " if "whole_documents" in facts else ""
    log.info(
        "%s: %s%s %s, %s impressions, %s train and %s test queries, %s rejected rows -> %s",
        config.name,
        prefix,
        f"{counts['documents']:,}",
        "passages" if prefix else "documents",
        *(f"{counts[name]:,}" for name in count_names[1:]),
        draft.uri,
    )
    return artifact


def _above_zero(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
