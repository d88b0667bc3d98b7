"""The report on an experiment from access logs, user feedback and clicks, as an `experiment` artifact.

    logs ─► requests of the experiment ─► sums per unit ─────────────────┐
                     └─► a sample ─► pairs ─judge, on Ray─► sums per unit ─┴─► comparisons ─► report

Logs are streamed; a row per unit, a latency per request and the sample stay in memory.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.core import cluster
from scalingnote.core.bm25 import BM25, document_texts
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import Progress, environment, get_logger
from scalingnote.core.parts import PartStage
from scalingnote.core.reports import render
from scalingnote.core.units import DAY_S
from scalingnote.datasets.input_files import Quarantine, match_files
from scalingnote.evaluate.experiment import access_log, outcomes, report
from scalingnote.evaluate.experiment.access_log import RequestFilter
from scalingnote.evaluate.experiment.config import AnyJudge, DualPooledJudge, ExperimentConfig
from scalingnote.evaluate.experiment.outcomes import Outcomes, RequestSample
from scalingnote.models.prompt import TokenRow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, fingerprint, open_artifact, read_table, write_table
from scalingnote.storage.schema import DOCUMENT_COLUMNS
from scalingnote.storage.shuffle import run_slices
from scalingnote.triplets.collect.config import BM25Ranker, CrossEncoderConfig

log = get_logger("compare")
PAIRS_PER_BLOCK = 2048
PAIRS_FILE, DOCUMENTS_FILE = "pairs.parquet", "documents.parquet"  # all pairs and their documents
MAX_BM25_DOCUMENTS = 2_000_000  # of a BM25 index in the memory of an actor
# Queries and documents (DOCUMENT_COLUMNS), of equal length -> how well each answers its query; NaN: unknown.
Judge = Callable[[Sequence[str], pa.Table], Float32[ndarray, " pairs"]]


def run(config: ExperimentConfig, *, dataset: str, output: str) -> Artifact:
    """Build the report as an artifact below `output`, named by a hash of config and contents of the logs.

    `dataset` is the URI of the documents, for the judge.

    Raises:
        DataError: the log has no request of the experiment, or a file is missing.
        ConfigError: the judge does not fit in memory.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset")}
    logs = _check_inputs(config, parents["dataset"])
    inputs = _checksums(config, logs)
    identity = "\n".join([fingerprint("experiment", config, parents), *inputs])
    place = fs.absolute(fs.join(output, hashlib.sha256(identity.encode()).hexdigest()[:12]))
    draft = Draft(place, kind="experiment", config=config, parents=parents)
    if draft.finished:
        log.info("finished before: %s", place)
        return draft.existing()
    if config.relevance:
        cluster.connect()
        cluster.check_resources_early(config.resources.model_copy(update={"workers": 1}), knob="resources")
    quarantine = Quarantine()
    totals, sample, requests = _read_logs(config, logs, quarantine)
    units, judged = totals.units(), None
    if sample is not None:
        units, judged = _judge(config, sample.table(), units, parents["dataset"], draft)
    measures = outcomes.measures(
        judged=config.relevance is not None,
        satisfaction=config.feedback is not None,
        clicks=config.clicks is not None,
    )
    result = report.compare_arms(config, units, measures) | requests | {"judge": judged}
    for name, arm in result["arms"].items():
        arm["latency_ms"] = totals.percentiles(name, report.PERCENTILES)
    result |= {"warnings": report.warnings(result), "environment": environment()}
    for text in result["warnings"]:
        log.warning("%s", text)
    draft.write_table("units.parquet", units)
    draft.write_table("rejected.parquet", quarantine.table())
    draft.write_json("report.json", result)
    page = report.report_page(result)
    for name in ("report.html", "report.md"):
        draft.write_bytes(name, render(name, page=page).encode())
    log.info("%s", report.summary(result))
    rejected = dict(sorted(quarantine.rejected.items()))
    counts = {"requests": totals.requests, "units": len(units), "rejected": sum(rejected.values())}
    return draft.commit(counts=counts, rejected_by_reason=rejected, inputs_sha256=inputs)


def _check_inputs(config: ExperimentConfig, dataset: Artifact) -> list[str]:
    """The log files, after checking early that all inputs exist and the judge fits in memory."""
    logs = access_log.find_logs(config.logs)
    for pattern in (config.feedback, config.clicks):
        if pattern is not None:
            outcomes.check_files(pattern)
    if config.relevance and isinstance(config.relevance.judge, DualPooledJudge):
        open_artifact(config.relevance.judge.uri, kind="cross_encoder")
    documents = dataset.counts["documents"]
    if config.relevance and isinstance(config.relevance.judge, BM25Ranker) and documents > MAX_BM25_DOCUMENTS:
        raise ConfigError(
            f"BM25 as a judge holds all documents in memory, and {documents:,} are more than "
            f"{MAX_BM25_DOCUMENTS:,}: set relevance.judge to a cross-encoder, or relevance to null"
        )
    return logs


def _checksums(config: ExperimentConfig, logs: Sequence[str]) -> list[str]:
    """Checksums of every input file, because a report belongs to the contents of growing logs."""
    further = [p for pattern in (config.feedback, config.clicks) if pattern for p in match_files(pattern)]
    return [fs.checksum(uri) for uri in (*logs, *map(str, further))]


def _read_logs(
    config: ExperimentConfig, logs: Sequence[str], quarantine: Quarantine
) -> tuple[Outcomes, RequestSample | None, dict[str, Any]]:
    """One pass over the logs: sums per unit, the sample to judge, and the report's part on requests."""
    satisfied = outcomes.read_feedback(config.feedback) if config.feedback else None
    clicked = outcomes.read_clicks(config.clicks) if config.clicks else None
    selection = RequestFilter(
        config.split,
        start=config.start.timestamp() if config.start else -math.inf,
        end=config.end.timestamp() if config.end else math.inf,
    )
    totals = Outcomes(satisfied=satisfied, clicked=clicked)
    sample = RequestSample(config.relevance.requests_per_arm) if config.relevance else None
    read = 0
    with Progress("compare", total=len(logs), unit="log files") as progress:
        for uri in logs:
            for batch in access_log.read_requests([uri], quarantine):
                read += len(batch)
                progress.advance(0, f"{read:,} lines")
                if len(selected := selection(batch)):
                    totals.add(selected)
                    if sample is not None:
                        sample.add(selected)
            progress.advance(1)
    if not totals.requests:
        left = ", ".join(f"{count:,} {reason}" for reason, count in selection.left_out.items())
        raise DataError(
            f"no request of experiment {config.split.name!r} in {len(logs)} files of {read:,} lines"
            + (f" ({left})" if left else "")
            + ": check split, start and end against what was served"
        )
    rejected = sum(quarantine.rejected.values())
    ends = (selection.first, selection.last)
    first, last = (datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds") for moment in ends)
    requests: dict[str, Any] = {"read": read + rejected, "rejected": rejected, "used": totals.requests}
    if satisfied is not None:
        requests["rated"] = totals.rated
    if clicked is not None:
        requests["clicked"] = totals.clicks
    requests["left_out"] = dict(selection.left_out)
    days = (selection.last - selection.first) / DAY_S
    return totals, sample, {"first": first, "last": last, "days": days, "requests": requests}


def _judge(
    config: ExperimentConfig, sampled: pa.Table, units: pa.Table, dataset: Artifact, draft: Draft
) -> tuple[pa.Table, dict[str, Any]]:
    """Add what the judge says of the sample to the sums per unit; returns the report's part on it too."""
    assert config.relevance is not None
    pairs = outcomes.pairs_to_judge(sampled)
    scores = pairs.append_column("score", pa.array(_scores(config, pairs, dataset, draft), pa.float32()))
    draft.write_table("sample.parquet", sampled)
    draft.write_table("judged.parquet", scores)
    below = config.relevance.irrelevant_below
    section = {
        "kind": config.relevance.judge.kind,
        "irrelevant_below": below,
        "requests": len(sampled),
        "pairs": len(scores),
        "unknown": scores["score"].null_count,
    }
    irrelevant = outcomes.irrelevant_by_unit(sampled, scores, below=below)
    return outcomes.join_by_unit(units, irrelevant), section


def _scores(config: ExperimentConfig, pairs: pa.Table, dataset: Artifact, draft: Draft) -> list[float | None]:
    """Scores of pairs. Blocks are tasks, and finished ones survive a killed run."""
    assert config.relevance is not None
    judge, work = config.relevance.judge, draft.work()
    write_table(fs.join(work, PAIRS_FILE), pairs)
    if len(pairs) and not fs.exists(fs.join(work, DOCUMENTS_FILE)):  # one pass over the corpus for all blocks
        write_table(fs.join(work, DOCUMENTS_FILE), document_rows(dataset, pc.unique(pairs["doc_id"])))
    # Every BM25 actor would index the whole dataset, so there is one.
    workers = 1 if isinstance(judge, BM25Ranker) else cluster.workers(config.resources)

    def each(task: PartStage | Callable[[Any], Any], blocks: Sequence[Any]) -> Iterator[Any]:
        resources = config.resources.model_copy(update={"workers": min(workers, len(blocks))})
        cluster.check_resources(resources, knob="resources")
        return cluster.map_loaded(task, blocks, resources)

    scores = run_slices(
        "judged",
        PartStage(partial(BlockJudge, judge, dataset, work)),
        range(0, len(pairs), PAIRS_PER_BLOCK),
        folder=work,
        each=each,
        section="compare",
        unit="blocks of pairs",
    )
    return [*chain.from_iterable(scores)]


class BlockJudge:
    """Judges blocks of pairs, in an actor."""

    def __init__(self, config: AnyJudge, dataset: Artifact, work: str) -> None:
        self._judge = load_judge(config, dataset)
        self._pairs, self._documents = (read_table(fs.join(work, n)) for n in (PAIRS_FILE, DOCUMENTS_FILE))

    def __call__(self, item: tuple[int, int]) -> list[float | None]:
        """Scores of a block, given its number and its first pair; None if a score is unknown."""
        block = self._pairs.slice(item[1], PAIRS_PER_BLOCK)
        scores: list[float | None] = judge_pairs(self._judge, block, self._documents)["score"].to_pylist()
        return scores


# --- judges: models that score pairs of query and document -------------------------------------------------


def load_judge(config: AnyJudge, dataset: Artifact) -> Judge:
    """Load the judge that a config names."""
    match config:
        case BM25Ranker():
            return _bm25_judge(dataset)
        case CrossEncoderConfig():
            from scalingnote.triplets.collect.transformer_models import (
                PairScorer,  # late: the import takes seconds
            )

            scorer = PairScorer(config)
            return lambda queries, documents: scorer.score(queries, document_texts(documents))
        case DualPooledJudge():
            return _pair_judge(config)


def document_rows(dataset: Artifact, doc_ids: pa.Array) -> pa.Table:
    """DOCUMENT_COLUMNS of documents in the order of the dataset, without documents it does not have."""
    batches = (batch.filter(pc.is_in(batch["doc_id"], value_set=doc_ids)) for batch in _documents(dataset))
    return pa.Table.from_batches(
        batches, schema=pa.schema([(name, pa.string()) for name in DOCUMENT_COLUMNS])
    )


def judge_pairs(judge: Judge, pairs: pa.Table, documents: pa.Table) -> pa.Table:
    """Add a `score` to `pairs` (`query`, `doc_id`); null if the document is not in `documents`."""
    row = pc.index_in(pairs["doc_id"], value_set=documents["doc_id"].combine_chunks())
    known = pc.is_valid(row)
    scores = np.full(len(pairs), np.nan, np.float32)
    scores[known.to_numpy()] = judge(
        pairs["query"].filter(known).to_pylist(), documents.take(row.drop_null())
    )
    return pairs.append_column("score", pa.array(scores, from_pandas=True))


def _bm25_judge(dataset: Artifact) -> Judge:
    """BM25 as a share of the score of the query's best document in the whole dataset, from 0 to 1.

    NaN for a query without a word of any document.
    """
    whole = pa.Table.from_batches(_documents(dataset))
    row_of = {doc_id: row for row, doc_id in enumerate(whole["doc_id"].to_pylist())}
    bm25 = BM25.build(document_texts(whole))

    def judge(queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        rows = np.array([row_of[doc_id] for doc_id in documents["doc_id"].to_pylist()], np.int64)
        out, query_of = np.full(len(queries), np.nan, np.float32), np.array(queries, object)
        for query in dict.fromkeys(queries):
            scores, pairs = bm25.scores(query), query_of == query
            if best := float(scores.max(initial=0)):
                out[pairs] = scores[rows[pairs]] / best
        return out

    return judge


def _pair_judge(config: DualPooledJudge) -> Judge:
    """Sigmoids of the logits of a cross-encoder of ours; NaN for a document that its prompt cannot hold."""
    from scalingnote.train.cross_encoder.pairs import PairEncoder

    artifact = open_artifact(config.uri, kind="cross_encoder")
    temperature = artifact.manifest.config["temperature"]
    encoder = PairEncoder.load(artifact.directory("model"), temperature=temperature)

    def judge(queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        query_rows = encoder.model.query_prompt.rows(list(queries))
        texts = (documents[name].fill_null("").to_pylist() for name in DOCUMENT_COLUMNS[1:])
        document_rows = encoder.model.document_prompt.rows(*texts)
        out = np.full(len(queries), np.nan, np.float32)
        usable = {i: row for i, row in enumerate(document_rows) if isinstance(row, TokenRow)}
        if usable:
            logits = encoder.scores([query_rows[i] for i in usable], list(usable.values()))
            out[list(usable)] = 1 / (1 + np.exp(-logits))
        return out

    return judge


def _documents(dataset: Artifact) -> Iterator[pa.RecordBatch]:
    return dataset.batches("documents", columns=DOCUMENT_COLUMNS)
