"""The planner stage on Ray: word statistics of a data set, or an encoder trained on its positives.

    statistics   texts -> frequencies of words, without rare ones (lexical/frequencies.py)  -> words.parquet
    learned      train queries and their positives -> term recall -> a trained encoder    -> encoder/

The driver holds at most `max_words` words.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from scalingnote import cluster
from scalingnote.config import identity
from scalingnote.datasets.splits import held_out_documents
from scalingnote.errors import DataError
from scalingnote.lexical.frequencies import count_frequencies, read_frequencies
from scalingnote.log import Progress, configure, get_logger
from scalingnote.planner.config import Learned, PlannerConfig, Statistics
from scalingnote.planner.planner import WORD_COUNTS, load, words
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.schema import QUERIES
from scalingnote.storage.shuffle import slices

log = get_logger("planner")
ROW_GROUP = 65_536  # rows of a row group in the parts of artifacts
TEXTS_PER_BATCH = 4096
PAIR = ["query_id", "doc_id"]
POSITIVES = {"clicks": ("impressions", "clicked"), "judgements": ("qrels", "relevance")}
SAMPLE = 1000  # queries of which the most and least important words are logged


def run(config: PlannerConfig, *, dataset: str, output: str) -> Artifact:
    """Build the `planner` artifact of a data set; DataError if it has nothing to learn from."""
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="planner", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()
    cluster.check_resources(config.resources, knob="planner.resources")
    if isinstance(config, Statistics):
        counts, facts = _count(config, source, draft)
    else:
        counts, facts = _learn(config, source, draft)
    draft.write_json("planner.json", {"config": identity(config), "texts": counts["texts"]})
    artifact = draft.commit(counts=counts, **facts)
    log.info("%s -> %s", ", ".join(f"{n:,} {name}" for name, n in counts.items()), output)
    for side, extremes in _extremes(artifact, source).items():
        log.info("%s important in %d queries: %s", side, SAMPLE, ", ".join(extremes))
    return artifact


def _extremes(planner: Artifact, dataset: Artifact, *, size: int = 10) -> dict[str, list[str]]:
    """The most and the least important words of a few queries, for the log."""
    batch = next(dataset.batches("queries", rows=SAMPLE, columns=["query"]), None)
    queries = batch["query"].to_pylist() if batch else []
    scores = load(planner).term_scores(queries).scores.tolist()
    terms = [word for query in queries for word in dict.fromkeys(words(query))]
    best: dict[str, float] = {}
    for word, score in zip(terms, scores, strict=True):
        best[word] = max(score, best.get(word, 0.0))
    order = sorted(best, key=lambda word: (-best[word], word))
    return {"most": order[:size], "least": order[::-1][:size]}


# --- statistics ----------------------------------------------------------------------------------------


def _count(config: Statistics, source: Artifact, draft: Draft) -> tuple[dict[str, int], dict[str, Any]]:
    found = count_frequencies(
        slices(source, config.corpus),
        partial(_read_words, dataset=source, config=config),
        texts=sum(source.manifest.parts[part].rows or 0 for part in source.table_parts(config.corpus)),
        most=config.max_words,
        least=config.min_df,
        folder=draft.work(),
        each=partial(cluster.map_tasks_in_order, resources=config.resources),
        room="planner",
    )
    if not found.distinct:
        raise DataError(f"{source.uri}: none of {found.texts:,} {config.corpus} has a word to count")
    kept = read_frequencies(found.words).rename_columns(WORD_COUNTS.names)
    draft.write_table("words.parquet", kept)
    return {
        "texts": found.texts,
        "words": len(kept),
        "rare_words_left_out": found.distinct - found.frequent,
        "words_over_max_words": found.frequent - len(kept),
    }, {}


def _read_words(parts: Sequence[str], *, dataset: Artifact, config: Statistics) -> Iterator[list[str]]:
    """The words of every text that counts in some parts."""
    columns = list(config.fields) if config.corpus == "documents" else ["query", "split"]
    for part in parts:
        for batch in dataset.batches(part, rows=TEXTS_PER_BATCH, columns=columns):
            yield from map(words, _texts(batch, config))


def _texts(batch: pa.RecordBatch, config: Statistics) -> list[str]:
    """All documents, since an index has all of them; of the queries those of the train split."""
    if config.corpus == "queries":
        train: list[str] = batch.filter(pc.equal(batch["split"], "train"))["query"].to_pylist()
        return train
    return _join(batch, config.fields)


def _join(batch: pa.RecordBatch, fields: tuple[str, ...]) -> list[str]:
    columns = (batch[name].to_pylist() for name in fields)
    return ["\n".join(value or "" for value in row) for row in zip(*columns, strict=True)]


# --- learned: one task reads, trains and writes --------------------------------------------------------


def _learn(config: Learned, source: Artifact, draft: Draft) -> tuple[dict[str, int], dict[str, Any]]:
    train = ray.remote(**cluster.actor_options(config.resources))(_train)
    counts, facts = cluster.task_result(train.remote(config, source.uri, draft.path("encoder")))
    return counts, facts


def _train(config: Learned, dataset: str, target: str) -> tuple[dict[str, int], dict[str, Any]]:
    import torch

    from scalingnote.planner import learned

    configure()
    torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
    source = open_artifact(dataset, kind="dataset")
    texts, targets, pairs = _examples(config, source)
    if not texts:
        raise DataError(
            f"{dataset}: no training query has a positive by {' or '.join(config.positives)} among the "
            "documents training may see: name another source in planner.positives"
        )
    # The examples are in random order already: the first ones are for validation.
    held = min(round(len(texts) * config.validation_fraction), len(texts) - 1)
    model = learned.build_regressor(config, texts[held:])
    model.to("cuda" if config.resources.gpus_per_worker and torch.cuda.is_available() else "cpu")
    losses = learned.fit_regressor(model, texts[held:], targets[held:], config=config)
    facts: dict[str, Any] = {"loss": [round(loss, 6) for loss in losses]}
    if held:
        expected, mean = np.concatenate(targets[:held]), np.concatenate(targets[held:]).mean()
        facts["validation_mse"] = round(float(((model.score(texts[:held]) - expected) ** 2).mean()), 6)
        facts["validation_mse_of_the_mean"] = round(float(((mean - expected) ** 2).mean()), 6)
    with tempfile.TemporaryDirectory() as folder:
        model.cpu().save(Path(folder))
        fs.upload(folder, target)
    return {"texts": len(texts), "positives": pairs}, facts


def _examples(config: Learned, source: Artifact) -> tuple[list[list[str]], list[Any], int]:
    """The words of queries in random order, the target of each word, and the number of positive pairs."""
    from scalingnote.planner import learned

    queries = learned.sample_queries(_queries(source), config.max_queries, seed=config.seed)
    candidates = _pairs(config, source, queries["query_id"].combine_chunks())
    pairs = learned.sample_positives(candidates, most=config.max_positives, seed=config.seed)
    row_of = {query_id: row for row, query_id in enumerate(queries["query_id"].to_pylist())}
    queries_of: dict[str, list[int]] = {}
    for query_id, doc_id in zip(pairs["query_id"].to_pylist(), pairs["doc_id"].to_pylist(), strict=True):
        queries_of.setdefault(doc_id, []).append(row_of[query_id])
    texts = [words(query) for query in queries["query"].to_pylist()]
    recalls = learned.term_recall(
        texts, queries_of, _documents(config, source, queries_of), against_chance=config.against_chance
    )
    examples = [(t, r) for t, r in zip(texts, recalls, strict=True) if t and r is not None]
    return [t for t, _ in examples], [r for _, r in examples], len(pairs)


def _queries(source: Artifact) -> Iterator[pa.Table]:
    """The queries of the train split, batch by batch."""
    yield QUERIES.empty_table()
    for batch in source.batches("queries", rows=ROW_GROUP, columns=QUERIES.names):
        yield pa.Table.from_batches([batch.filter(pc.equal(batch["split"], "train"))])


def _pairs(config: Learned, source: Artifact, query_ids: pa.Array) -> Iterator[pa.Table]:
    """(query_id, doc_id) of these queries and their clicked or relevant documents that training may see."""
    held_out = held_out_documents(source)
    for kind in config.positives:
        table, column = POSITIVES[kind]
        for batch in source.batches(table, rows=ROW_GROUP, columns=[*PAIR, column]):
            chosen = pc.greater(batch[column].cast(pa.int32()), 0)
            of_ours = pc.is_in(batch["query_id"], value_set=query_ids)
            pairs = pa.Table.from_batches([batch.filter(pc.and_(chosen, of_ours)).select(PAIR)])
            yield pairs.filter(pc.invert(pc.is_in(pairs["doc_id"], value_set=held_out)))


def _documents(
    config: Learned, source: Artifact, queries_of: dict[str, list[int]]
) -> Iterator[tuple[str, list[str]]]:
    ids = pa.array(sorted(queries_of), pa.string())
    with Progress("planner", total=len(ids), unit="positives read") as progress:
        for batch in source.batches("documents", rows=ROW_GROUP, columns=["doc_id", *config.fields]):
            kept = batch.filter(pc.is_in(batch["doc_id"], value_set=ids))
            texts = map(words, _join(kept, config.fields))
            yield from zip(kept["doc_id"].to_pylist(), texts, strict=True)
            progress.advance(kept.num_rows)
