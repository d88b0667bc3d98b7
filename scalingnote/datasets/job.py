"""The prepare stage: documents and supervision of any source become a `dataset` artifact.

    input -> `document_tasks`, slice by slice -> `supervision_tasks`, one or many -> manifest

Sources that name files are read in slices, on Ray where there are several; others, which fit in memory, are
one slice in this process. Logs are split by time and have a job of their own (`log_job`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from scalingnote.config import Resources
from scalingnote.datasets import document_tasks, file_formats, sources
from scalingnote.datasets.config import AnyDataset, Logs, NewDocuments
from scalingnote.datasets.document_tasks import Documents, resume_or_clear, slices_of
from scalingnote.datasets.raw_rows import Quarantine, SlicedRows, Source, files_of
from scalingnote.datasets.supervision import MAX_SIMULATED_DOCUMENTS, OUTPUTS
from scalingnote.datasets.supervision_tasks import BUCKET_BYTES, input_bytes, write_supervision
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.storage.artifact import Artifact, Draft, Part
from scalingnote.storage.shuffle import TaskRunner

log = get_logger("datasets")


def run(config: AnyDataset, *, output: str) -> Artifact:
    """Build the data set at `output`, or return it if it exists.

    Bad rows are set aside in `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).

    Raises:
        DataError: nothing usable remains.
    """
    if isinstance(config, Logs):
        from scalingnote.datasets import log_job  # late: other sources may not need Ray

        return log_job.run(config, output=output)
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    source = sources.read(config)
    _require_taste_columns(config, source)
    return build(config, source, draft, each=_runner(source, config))


def build(config: AnyDataset, source: Source, draft: Draft, *, each: TaskRunner) -> Artifact:
    """Build the data set of a source; `each` runs the tasks."""
    quarantine = Quarantine()
    simulated = config.click_model is not None and not source.impressions
    limit = MAX_SIMULATED_DOCUMENTS if simulated else None
    documents = _write_documents(config, source, draft, quarantine, each, limit=limit)
    supervision = write_supervision(
        replace(source, documents=()),
        config=config,
        parts=documents.parts,
        work=draft.work(),
        output=draft.uri,
        each=each,
        quarantine=quarantine,
    )
    for name, part in supervision.parts.items():
        draft.register(name, Part(**part))
    draft.write_table("rejected.parquet", quarantine.table())
    counts = {"documents": documents.rows, **supervision.counts}
    counts["rejected"] = sum(quarantine.rejected.values())
    left_out = supervision.left_out | {"documents": documents.left_out}
    about = sources.describe(config.name)
    artifact = draft.commit(
        counts=counts,
        simulated_clicks=supervision.click_model is not None,
        click_model=supervision.click_model,
        description=about.summary,
        licence=about.licence,
        rejected_by_reason=dict(sorted(quarantine.rejected.items())),
        mended=dict(sorted(quarantine.mended.items())),
        left_out={name: count for name, count in sorted(left_out.items()) if count},
        **source.notes,
    )
    log.info(
        "%s: %s documents, %s train and %s test queries, %s rejected rows -> %s",
        config.name,
        *(f"{counts[name]:,}" for name in ("documents", "train_queries", "test_queries", "rejected")),
        draft.uri,
    )
    return artifact


def prepare_documents(config: NewDocuments, *, output: str) -> Artifact:
    """Build a data set of documents only, with the checks of :func:`run`: input of a live index."""
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    source = file_formats.read_documents(config)
    quarantine = Quarantine()
    documents = _write_documents(config, source, draft, quarantine, _runner(source, config))
    draft.write_table("rejected.parquet", quarantine.table())
    counts = {"documents": documents.rows, "rejected": sum(quarantine.rejected.values())}
    log.info("%s new documents, %s rejected rows -> %s", *(f"{n:,}" for n in counts.values()), output)
    return draft.commit(
        counts=counts, rejected_by_reason=quarantine.rejected, mended=dict(sorted(quarantine.mended.items()))
    )


def _write_documents(
    config: AnyDataset | NewDocuments,
    source: Source,
    draft: Draft,
    quarantine: Quarantine,
    each: TaskRunner,
    *,
    limit: int | None = None,
) -> Documents:
    tables = (source.documents, *(getattr(source, name) for name in OUTPUTS))
    # Rows that are not in files are read anew: nothing is resumed.
    in_files = isinstance(source.documents, SlicedRows)
    resume_or_clear(draft, [asdict(f.part) for rows in tables for f in files_of(rows)] if in_files else [])
    return document_tasks.write_documents(
        draft, source, config=config, quarantine=quarantine, each=each, limit=limit
    )


def _require_taste_columns(config: AnyDataset, source: Source) -> None:
    taste = config.click_model.taste if config.click_model else None
    if missing := sorted(set(taste.columns if taste else ()) - set(source.features.names)):
        raise ConfigError(
            f"click_model.taste names {missing}, which are no features of {config.name}: it has "
            f"{source.features.names}"
        )


def _runner(source: Source, config: AnyDataset | NewDocuments) -> TaskRunner:
    """Tasks run on Ray where documents are several slices or other files are large, else in this process."""
    if len(slices_of(source, config)) == 1 and input_bytes(source) <= BUCKET_BYTES:
        return map
    from scalingnote import cluster  # late: small data sets do not need Ray

    cluster.connect()

    def each(task: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        if len(items) == 1:  # `map_tasks` would run it in this process, whose memory is small
            return cluster.map_tasks_in_order(task, items, Resources())
        return cluster.map_tasks(task, items)

    return each
