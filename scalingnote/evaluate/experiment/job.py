"""The report on an experiment from access logs, user feedback and clicks, as an `experiment` artifact.

    logs ─► requests of the experiment ─► sums per unit ──────────────────┐
                     └─► a sample ─► pairs ─judge, on Ray─► sums per unit ─┴─► comparisons ─► report

Logs are streamed; a row per unit, a latency per request and the sample stay in memory.
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
    """Build the report as an artifact below `output`, named by a hash of config and contents of the logs.

    `dataset` is the URI of the documents, for the judge.

    Raises:
        DataError: the log has no request of the experiment, or a file is missing.
        ConfigError: the judge cannot be loaded.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset")}
    logs = access_log.find_logs(config.logs)
    signals = [file.uri for path in (config.feedback, config.clicks) if path for file in find_files(path)]
    inputs = [fs.checksum(uri) for uri in (*logs, *signals)]  # logs grow: a report belongs to their contents
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
    logged = {"used": len(requests), "left_out": dict(quarantine.left_out), "rejected": counts["rejected"]}
    result = report.compare_arms(config, requests, units)
    result |= {"requests": logged, "judge": judge, "environment": environment()}
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
    """Judge what sampled requests showed: sums per unit, and the report's part on it.

    The scores of a block of pairs are a table in the work directory, which a run after a kill keeps.
    """
    cluster.check_resources(config.resources, knob="resources")
    keep = RecordedTasks(draft.work("passes"), cluster.map_tasks)
    shown = outcomes.shown_documents(sample)
    order = [(name, "ascending") for name in outcomes.PAIR]
    pairs = shown.group_by(outcomes.PAIR).aggregate([]).sort_by(order)
    documents = find_documents(dataset, pairs["doc_id"].to_pylist(), TEXT_COLUMNS, each=keep)
    known = pairs.filter(pc.is_in(pairs["doc_id"], documents["doc_id"].combine_chunks()))
    stage = PartStage(partial(load_judge, relevance.judge, known, documents))
    blocks = range(0, len(known), PAIRS_PER_BLOCK)
    scored = [known.slice(0, 0).append_column("score", pa.array([], pa.float32()))]
    with Progress("compare", total=len(known), unit="pairs judged") as progress:
        for table in keep(stage, blocks, each=partial(cluster.map_loaded, resources=config.resources)):
            scored.append(table)
            progress.advance(len(table))
    judged, below = pa.concat_tables(scored).sort_by(order), relevance.irrelevant_below
    draft.write_table("sample.parquet", sample)
    draft.write_table("judged.parquet", judged)
    section = {"path": relevance.judge.path, "irrelevant_below": below}
    section |= {"pairs": len(pairs), "unknown": len(pairs) - len(judged)}
    return outcomes.irrelevant_documents(shown, judged, below=below), section


def load_judge(config: CrossEncoderConfig, pairs: pa.Table, documents: pa.Table) -> Callable[[int], pa.Table]:
    """Load a cross-encoder: number of a block's first pair -> its pairs, and the `score` of each."""
    from scalingnote.triplets.collect.transformer_models import PairScorer  # late: it takes seconds

    scorer, doc_ids = PairScorer(config), documents["doc_id"].combine_chunks()

    def judge(first: int) -> pa.Table:
        block = pairs.slice(first, PAIRS_PER_BLOCK)
        texts = document_texts(documents.take(pc.index_in(block["doc_id"], doc_ids)))
        scores = scorer.score(block["query"].to_pylist(), texts)
        return block.append_column("score", pa.array(scores))

    return judge
