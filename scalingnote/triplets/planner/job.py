"""The planner stage on Ray: word statistics of a dataset, or an encoder trained on its positives.

    statistics   texts -> frequencies of words, without rare ones (lexical/words.py) -> words.parquet
    learned      training queries and their positives -> examples.py -> a trained encoder          -> encoder/

The driver holds at most MAX_WORDS words.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core import cluster
from scalingnote.core.bm25 import document_texts
from scalingnote.core.config import identity
from scalingnote.core.errors import DataError
from scalingnote.core.log import configure_unless_set, get_logger
from scalingnote.datasets.splits import held_out_documents
from scalingnote.encode.lexical.words import count_frequencies
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table
from scalingnote.storage.shuffle import slices
from scalingnote.triplets.config import Learned, PlannerConfig, Statistics
from scalingnote.triplets.planner.examples import ExampleContext, gather_examples, read_examples
from scalingnote.triplets.planner.planner import WORD_COUNTS, words

log = get_logger("planner")
TEXTS_PER_BATCH = 4096
MAX_WORDS = 2_000_000  # the most frequent ones are kept; 12 bytes each
MIN_DF = 2  # minimum number of texts with a word: rarer words are mostly misspellings
VALIDATION_FRACTION = 0.1  # of the queries, for validation only


def run(config: PlannerConfig, *, dataset: str, output: str) -> Artifact:
    """Build the `planner` artifact of a dataset.

    Raises:
        DataError: the dataset has no words to count, or no positives to train on.
    """
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="planner", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()
    cluster.check_resources(config.resources, knob="planner.resources")
    facts: dict[str, Any] = {}
    if isinstance(config, Statistics):
        counts = _count(config, source, draft)
    else:
        counts, facts = _learn(config, source, draft)
    draft.write_json("planner.json", {"config": identity(config), "texts": counts["texts"]})
    artifact = draft.commit(counts=counts, **facts)
    log.info("%s -> %s", ", ".join(f"{n:,} {name}" for name, n in counts.items()), output)
    return artifact


# --- statistics ----------------------------------------------------------------------------------------


def _count(config: Statistics, source: Artifact, draft: Draft) -> dict[str, int]:
    frequencies = count_frequencies(
        slices(source, config.corpus),
        partial(_read_words, dataset=source, config=config),
        texts=sum(source.rows_of(source.table_parts(config.corpus)).values()),
        most=MAX_WORDS,
        least=MIN_DF,
        folder=draft.work(),
        each=partial(cluster.map_tasks, resources=config.resources),
        section="planner",
    )
    if not frequencies.distinct:
        raise DataError(f"{source.uri}: none of {frequencies.texts:,} {config.corpus} has a word to count")
    frequent_words = read_table(frequencies.words).rename_columns(WORD_COUNTS.names)
    draft.write_table("words.parquet", frequent_words)
    return {
        "texts": frequencies.texts,
        "words": len(frequent_words),
        "rare_words_left_out": frequencies.distinct - frequencies.frequent,
        "words_over_max_words": frequencies.frequent - len(frequent_words),
    }


def _read_words(parts: Sequence[str], *, dataset: Artifact, config: Statistics) -> Iterator[list[str]]:
    """Yield the words of each text of some parts that is counted."""
    columns: list[str] = [*config.fields] if config.corpus == "documents" else ["query", "split"]
    for part in parts:
        for batch in dataset.batches(part, rows=TEXTS_PER_BATCH, columns=columns):
            yield from map(words, _texts(batch, config))


def _texts(batch: pa.RecordBatch, config: Statistics) -> list[str]:
    """Return all documents, because an index has all of them, or the queries of the training split."""
    if config.corpus == "queries":
        train: list[str] = batch.filter(pc.equal(batch["split"], "train"))["query"].to_pylist()
        return train
    return document_texts(batch, config.fields)


# --- learned: tasks read the examples, one trains ------------------------------------------------------


def _learn(config: Learned, source: Artifact, draft: Draft) -> tuple[dict[str, int], dict[str, Any]]:
    held_out = held_out_documents(source, each=cluster.map_tasks)
    context = ExampleContext(draft.work(), 1, config, source, held_out)
    gather_examples(context, each=cluster.map_tasks)
    train = partial(_train, context)
    ((counts, facts),) = cluster.map_tasks(train, [draft.path("encoder")], config.resources)
    return counts, facts


def _train(context: ExampleContext, target: str) -> tuple[dict[str, int], dict[str, Any]]:
    import torch

    from scalingnote.triplets.planner import learned

    config = context.config
    configure_unless_set()
    torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
    texts, targets, pairs = read_examples(context)
    if not texts:
        sources = " or ".join(config.positives)
        raise DataError(
            f"{context.dataset.uri}: no training query has a positive by {sources} among the documents that "
            "training may use: set another source in planner.positives"
        )
    # The examples are already in random order: the first ones are for validation.
    held_out_count = min(round(len(texts) * VALIDATION_FRACTION), len(texts) - 1)
    model = learned.build_regressor(config, texts[held_out_count:])
    model.to("cuda" if config.resources.gpus_per_worker and torch.cuda.is_available() else "cpu")
    losses = learned.fit_regressor(model, texts[held_out_count:], targets[held_out_count:], config=config)
    facts: dict[str, Any] = {"loss": [round(loss, 6) for loss in losses]}
    if held_out_count:
        expected, mean = (
            np.concatenate(targets[:held_out_count]),
            np.concatenate(targets[held_out_count:]).mean(),
        )
        facts["validation_mse"] = round(
            float(((model.score(texts[:held_out_count]) - expected) ** 2).mean()), 6
        )
        facts["validation_mse_of_the_mean"] = round(float(((mean - expected) ** 2).mean()), 6)
    with tempfile.TemporaryDirectory() as folder:
        model.cpu().save(Path(folder))
        fs.upload(folder, target)
    return {"texts": len(texts), "positives": pairs}, facts
