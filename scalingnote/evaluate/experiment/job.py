"""The report on an experiment from access logs, user feedback and clicks, as an `experiment` artifact.

    logs ─► requests of the experiment ─► sums per unit ──────────────────┐
                     └─► a sample ─► pairs ─judge, on Ray─► sums per unit ─┴─► comparisons ─► report

Logs are streamed; only a row per unit, a latency per request and the sample are kept in memory.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core import cluster
from scalingnote.core.bm25 import document_texts
from scalingnote.core.log import Progress, environment, get_logger
from scalingnote.core.parts import PartStage
from scalingnote.core.reports import render
from scalingnote.datasets.input_files import Quarantine, find_files
from scalingnote.evaluate.experiment import access_log, outcomes, report
from scalingnote.evaluate.experiment.config import ExperimentConfig, Relevance
from scalingnote.evaluate.job import RecordedTasks
from scalingnote.evaluate.pool import find_documents
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, fingerprint, open_artifact
from scalingnote.storage.schema import TEXT_COLUMNS
from scalingnote.triplets.config import CrossEncoderConfig

log = get_logger("compare")
PAIRS_PER_BLOCK = 2048


def run(config: ExperimentConfig, *, dataset: str, output: str) -> Artifact:
    """Build the report as an artifact in `output`, named by a hash of the config and of the logs' contents.

    `dataset` is the URI of the documents, for the judge.

    Raises:
        DataError: the logs have no request of the experiment, or a file is missing.
        ConfigError: the judge cannot be loaded.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset")}
    logs = access_log.find_logs(config.logs)
    signals = [file.uri for path in (config.feedback, config.clicks) if path for file in find_files(path)]
    # Logs grow, so a report depends on their contents.
    inputs = [fs.checksum(uri) for uri in (*logs, *signals)]
    identity = "\n".join([fingerprint("experiment", config, parents), *inputs])
    place = fs.absolute(fs.join(output, hashlib.sha256(identity.encode()).hexdigest()[:12]))
    draft = Draft(place, kind="experiment", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    if config.relevance:
        cluster.connect()
        cluster.check_resources_early(config.resources, knob="resources")
    quarantine = Quarantine()
    requests, units, sample = outcomes.read_outcomes(config, logs, quarantine)
    judge = None
    if config.relevance:
        judged, judge = _judge(config, config.relevance, sample, parents["dataset"], draft)
        units = outcomes.add_sums([units, judged])
    rejected = dict(sorted(quarantine.rejected.items()))
    counts = {"requests": len(requests), "units": len(units), "rejected": sum(rejected.values())}
    request_counts = {
        "used": len(requests),
        "left_out": dict(quarantine.left_out),
        "rejected": counts["rejected"],
    }
    result = report.compare_arms(config, requests, units)
    result |= {"requests": request_counts, "judge": judge, "environment": environment()}
    result["warnings"] = report.warnings(result)
    for text in result["warnings"]:
        log.warning("%s", text)
    draft.write_table("units.parquet", units)
    draft.write_table("rejected.parquet", quarantine.table())
    draft.write_json("report.json", result)
    page = report.report_page(result)
    for name in ("report.html", "report.md"):
        draft.write_bytes(name, render(name, page=page).encode())
    log.info("%s", report.summary(result))
    return draft.commit(counts=counts, rejected_by_reason=rejected, inputs_sha256=inputs)


def _judge(
    config: ExperimentConfig, relevance: Relevance, sample: pa.Table, dataset: Artifact, draft: Draft
) -> tuple[pa.Table, dict[str, Any]]:
    """Judge the results of sampled requests, and return sums per unit and a section of the report.

    The scores of a block of pairs are a table in the work directory, which a run after a kill reuses.
    """
    cluster.check_resources(config.resources, knob="resources")
    keep = RecordedTasks(draft.work("passes"), cluster.map_tasks)
    results = outcomes.shown_documents(sample)
    order = [(name, "ascending") for name in outcomes.PAIR]
    pairs = results.group_by(outcomes.PAIR).aggregate([]).sort_by(order)
    documents = find_documents(dataset, pairs["doc_id"].to_pylist(), TEXT_COLUMNS, each=keep)
    available = pairs.filter(pc.is_in(pairs["doc_id"], documents["doc_id"].combine_chunks()))
    stage = PartStage(partial(load_judge, relevance.judge, available, documents))
    blocks = range(0, len(available), PAIRS_PER_BLOCK)
    tables = [available.slice(0, 0).append_column("score", pa.array([], pa.float32()))]
    with Progress("compare", total=len(available), unit="pairs judged") as progress:
        for table in keep(stage, blocks, each=partial(cluster.map_loaded, resources=config.resources)):
            tables.append(table)
            progress.advance(len(table))
    judged, below = pa.concat_tables(tables).sort_by(order), relevance.irrelevant_below
    draft.write_table("sample.parquet", sample)
    draft.write_table("judged.parquet", judged)
    section = {"path": relevance.judge.path, "irrelevant_below": below}
    section |= {"pairs": len(pairs), "unknown": len(pairs) - len(judged)}
    return outcomes.irrelevant_documents(results, judged, below=below), section


def load_judge(config: CrossEncoderConfig, pairs: pa.Table, documents: pa.Table) -> Callable[[int], pa.Table]:
    """Load a cross-encoder and return a function from the number of a block's first pair to scored pairs."""
    # Imported late, because it takes seconds.
    from scalingnote.triplets.collect.transformer_models import PairScorer

    scorer, doc_ids = PairScorer(config), documents["doc_id"].combine_chunks()

    def judge(first: int) -> pa.Table:
        block = pairs.slice(first, PAIRS_PER_BLOCK)
        texts = document_texts(documents.take(pc.index_in(block["doc_id"], doc_ids)))
        scores = scorer.score(block["query"].to_pylist(), texts)
        return block.append_column("score", pa.array(scores))

    return judge
