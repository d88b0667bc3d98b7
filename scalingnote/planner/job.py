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
from scalingnote.lexical.frequencies import count_frequencies
from scalingnote.log import configure, get_logger
from scalingnote.planner.config import Learned, PlannerConfig, Statistics
from scalingnote.planner.examples import gather_examples, read_examples
from scalingnote.planner.planner import WORD_COUNTS, join_fields, load, words
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table
from scalingnote.storage.shuffle import slices

log = get_logger("planner")
TEXTS_PER_BATCH = 4096
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
        texts=sum(source.rows_of(source.table_parts(config.corpus)).values()),
        most=config.max_words,
        least=config.min_df,
        folder=draft.work(),
        each=partial(cluster.map_tasks_in_order, resources=config.resources),
        room="planner",
    )
    if not found.distinct:
        raise DataError(f"{source.uri}: none of {found.texts:,} {config.corpus} has a word to count")
    kept = read_table(found.words).rename_columns(WORD_COUNTS.names)
    draft.write_table("words.parquet", kept)
    return {
        "texts": found.texts,
        "words": len(kept),
        "rare_words_left_out": found.distinct - found.frequent,
        "words_over_max_words": found.frequent - len(kept),
    }, {}


def _read_words(parts: Sequence[str], *, dataset: Artifact, config: Statistics) -> Iterator[list[str]]:
    """The words of every text that counts in some parts."""
    columns: list[str] = [*config.fields] if config.corpus == "documents" else ["query", "split"]
    for part in parts:
        for batch in dataset.batches(part, rows=TEXTS_PER_BATCH, columns=columns):
            yield from map(words, _texts(batch, config))


def _texts(batch: pa.RecordBatch, config: Statistics) -> list[str]:
    """All documents, since an index has all of them; of the queries those of the train split."""
    if config.corpus == "queries":
        train: list[str] = batch.filter(pc.equal(batch["split"], "train"))["query"].to_pylist()
        return train
    return join_fields(batch, config.fields)


# --- learned: tasks read the examples, one trains ------------------------------------------------------


def _learn(config: Learned, source: Artifact, draft: Draft) -> tuple[dict[str, int], dict[str, Any]]:
    folder = draft.work()
    held_out = held_out_documents(source, each=cluster.map_tasks)
    gather_examples(config, source, held_out=held_out, folder=folder, each=cluster.map_tasks)
    train = ray.remote(**cluster.actor_options(config.resources))(_train)
    counts, facts = cluster.task_result(train.remote(config, source.uri, folder, draft.path("encoder")))
    return counts, facts


def _train(config: Learned, dataset: str, folder: str, target: str) -> tuple[dict[str, int], dict[str, Any]]:
    import torch

    from scalingnote.planner import learned

    configure()
    torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
    texts, targets, pairs = read_examples(config, folder)
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
