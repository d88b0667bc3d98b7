"""The planner stage on Ray: word statistics of a data set, or an encoder trained on its positives.

    statistics   texts -> frequencies of words, without rare ones (lexical/frequencies.py)  -> words.parquet
    learned      train queries and their positives -> term recall -> a trained encoder    -> encoder/

The driver holds at most MAX_WORDS words.

A learned planner's examples are what the positives of sampled queries repeat:

    queries ─► a sample ─► their positives, a sample of each ─► texts of these ─► the target of each word

The target is DeepCT's query term recall r, the share of a query's positives that have the word: a word that
chosen documents repeat is one the query is about, unlike "how", "please" or "near me". Stop words are in all
documents, chosen or not. DeepCT removes them by a list; here the recall that chance explains is subtracted:

    recall r   = share of the query's positives that have the word
    chance c   = share of the other queries' positives that have it
    target     = max(0, r - c)

Dividing by 1 - c (Cohen's kappa) would give "the" a target of 1 whenever a query's only positive has it.

Slices of the tables are read in tasks, of which each keeps a sample. What is in the sample of the whole is in
that of its slice, so samples are sampled again; nothing holds more than the samples and one part.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, UInt64
from numpy import ndarray

from scalingnote.core import cluster
from scalingnote.core.config import identity
from scalingnote.core.errors import DataError
from scalingnote.core.log import configure_unless_set, get_logger
from scalingnote.datasets.splits import held_out_documents
from scalingnote.encode.lexical.frequencies import count_frequencies
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table, write_table
from scalingnote.storage.schema import QUERIES, TEXT_COLUMNS
from scalingnote.storage.shuffle import NumberedSlice, TaskRunner, hash_of, run_slices, slices
from scalingnote.triplets.planner.config import Learned, PlannerConfig, Statistics
from scalingnote.triplets.planner.planner import WORD_COUNTS, join_fields, load, words

log = get_logger("planner")
TEXTS_PER_BATCH = 4096
PAIR_COLUMNS = ["query_id", "doc_id"]
POSITIVE_SOURCES = {"clicks": ("impressions", "clicked"), "judgements": ("qrels", "relevance")}
_PAIRS = pa.schema({name: pa.string() for name in PAIR_COLUMNS})
_ROWS_BEFORE_FOLD = 1 << 20
Examples = tuple[list[list[str]], list[Float32[ndarray, " _"]], int]
MAX_WORDS = 2_000_000  # kept, the most frequent ones; 12 bytes each
MIN_DF = 2  # texts that hold a word: rarer ones are mostly misspellings
MAX_QUERIES = 100_000  # to learn from, drawn evenly
MAX_QUERY_POSITIVES = 20  # read of a query, drawn evenly
VALIDATION_FRACTION = 0.1  # of the queries, which only measure
SAMPLE = 1000  # queries of which the most and least important words are logged


def run(config: PlannerConfig, *, dataset: str, output: str) -> Artifact:
    """Build the `planner` artifact of a data set; DataError if it has nothing to learn from."""
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
    for side, extremes in _extremes(artifact, source).items():
        log.info("%s important in %d queries: %s", side, SAMPLE, ", ".join(extremes))
    return artifact


def _extremes(planner: Artifact, dataset: Artifact) -> dict[str, list[str]]:
    """The ten most and least important words of a few queries, for the log."""
    batch = next(dataset.batches("queries", rows=SAMPLE, columns=["query"]), None)
    queries = batch["query"].to_pylist() if batch else []
    scores = load(planner).term_scores(queries).scores.tolist()
    terms = [word for query in queries for word in dict.fromkeys(words(query))]
    best: dict[str, float] = {}
    for word, score in zip(terms, scores, strict=True):
        best[word] = max(score, best.get(word, 0.0))
    order = sorted(best, key=lambda word: (-best[word], word))
    return {"most": order[:10], "least": order[::-1][:10]}


# --- statistics ----------------------------------------------------------------------------------------


def _count(config: Statistics, source: Artifact, draft: Draft) -> dict[str, int]:
    found = count_frequencies(
        slices(source, config.corpus),
        partial(_read_words, dataset=source, config=config),
        texts=sum(source.rows_of(source.table_parts(config.corpus)).values()),
        most=MAX_WORDS,
        least=MIN_DF,
        folder=draft.work(),
        each=partial(cluster.map_tasks, resources=config.resources),
        section="planner",
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
    }


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
    train = partial(_train, config, source.uri, folder)
    ((counts, facts),) = cluster.map_tasks(train, [draft.path("encoder")], config.resources)
    return counts, facts


def _train(config: Learned, dataset: str, folder: str, target: str) -> tuple[dict[str, int], dict[str, Any]]:
    import torch

    from scalingnote.triplets.planner import learned

    configure_unless_set()
    torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
    texts, targets, pairs = read_examples(config, folder)
    if not texts:
        raise DataError(
            f"{dataset}: no training query has a positive by {' or '.join(config.positives)} among the "
            "documents training may see: name another source in planner.positives"
        )
    # The examples are in random order already: the first ones are for validation.
    held = min(round(len(texts) * VALIDATION_FRACTION), len(texts) - 1)
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


# --- examples: functions of an `item` are tasks, which return the number of rows that they wrote ----------


def gather_examples(
    config: Learned, dataset: Artifact, *, held_out: pa.Array, folder: str, each: TaskRunner
) -> None:
    """Write what :func:`read_examples` reads to `folder`: sampled queries and the texts of their positives.

    Training may not see the documents `held_out`.
    """
    do = partial(run_slices, folder=folder, each=each, section="planner")
    given: dict[str, Any] = {"config": config, "dataset": dataset, "folder": folder}
    do("queries", partial(_take_queries, **given), slices(dataset, "queries"))
    do("sample", partial(_join_queries, config=config), [folder], unit="samples")
    logs = [
        [kind, *parts] for kind in config.positives for parts in slices(dataset, POSITIVE_SOURCES[kind][0])
    ]
    do("positives", partial(_take_pairs, **given, held_out=held_out), logs)
    do("pairs", partial(_join_pairs, config=config), [folder], unit="samples")
    do("texts", partial(_take_texts, **given), slices(dataset, "documents"))


def read_examples(config: Learned, folder: str) -> Examples:
    """The words of queries in random order, the target of each word, and the number of positive pairs."""
    queries, pairs = _read(folder, "queries"), _read(folder, "pairs")
    row_of = {query_id: row for row, query_id in enumerate(queries["query_id"].to_pylist())}
    queries_of: dict[str, list[int]] = {}
    for query_id, doc_id in zip(pairs["query_id"].to_pylist(), pairs["doc_id"].to_pylist(), strict=True):
        queries_of.setdefault(doc_id, []).append(row_of[query_id])
    texts = [words(query) for query in queries["query"].to_pylist()]
    documents = (
        (doc_id, words(text))
        for table in _tables(folder, "texts")
        for doc_id, text in zip(table["doc_id"].to_pylist(), table["text"].to_pylist(), strict=True)
    )
    recalls = term_recall(texts, queries_of, documents)
    examples = [(t, r) for t, r in zip(texts, recalls, strict=True) if t and r is not None]
    return [t for t, _ in examples], [r for _, r in examples], len(pairs)


def _take_queries(item: NumberedSlice, *, config: Learned, dataset: Artifact, folder: str) -> int:
    """A sample of the training queries of a slice."""
    tables = (dataset.table(part, QUERIES.names) for part in item[1])
    train = (table.filter(pc.equal(table["split"], "train")) for table in tables)
    sampled = sample_queries(train, MAX_QUERIES, seed=config.seed)
    return _write(sampled, folder, f"queries/{item[0]:05d}")


def _join_queries(item: tuple[int, str], *, config: Learned) -> int:
    """The sample of all queries."""
    tables = chain([QUERIES.empty_table()], _tables(item[1], "queries"))
    return _write(sample_queries(tables, MAX_QUERIES, seed=config.seed), item[1], "queries")


def _take_pairs(
    item: NumberedSlice, *, config: Learned, dataset: Artifact, folder: str, held_out: pa.Array
) -> int:
    """A sample of the positives, which training may see, of the sampled queries in a slice of a log."""
    kind, *parts = item[1]
    column = POSITIVE_SOURCES[kind][1]
    query_ids = _read(folder, "queries")["query_id"].combine_chunks()

    def pairs() -> Iterator[pa.Table]:
        for part in parts:
            table = dataset.table(part, [*PAIR_COLUMNS, column])
            positive = table.filter(pc.greater(table[column].cast(pa.int32()), 0)).select(PAIR_COLUMNS)
            seen = positive.filter(pc.invert(pc.is_in(positive["doc_id"], value_set=held_out)))
            yield seen.filter(pc.is_in(seen["query_id"], value_set=query_ids))

    sampled = sample_positives(pairs(), most=MAX_QUERY_POSITIVES, seed=config.seed)
    return _write(sampled, folder, f"positives/{item[0]:05d}")


def _join_pairs(item: tuple[int, str], *, config: Learned) -> int:
    """The sample of all positives."""
    pairs = sample_positives(_tables(item[1], "positives"), most=MAX_QUERY_POSITIVES, seed=config.seed)
    return _write(pairs, item[1], "pairs")


def _take_texts(item: NumberedSlice, *, config: Learned, dataset: Artifact, folder: str) -> int:
    """The texts of the positives in a slice of the documents."""
    doc_ids = _read(folder, "pairs")["doc_id"].combine_chunks()
    found = [pa.schema({"doc_id": pa.string(), "text": pa.string()}).empty_table()]
    for part in item[1]:
        table = dataset.table(part, ["doc_id", *TEXT_COLUMNS])
        table = table.filter(pc.is_in(table["doc_id"], value_set=doc_ids))
        texts = pa.array(join_fields(table, TEXT_COLUMNS), pa.string())
        found.append(pa.table({"doc_id": table["doc_id"], "text": texts}))
    return _write(pa.concat_tables(found), folder, f"texts/{item[0]:05d}")


def _write(table: pa.Table, folder: str, name: str) -> int:
    return write_table(fs.join(folder, f"{name}.parquet"), table).rows or 0


def _read(folder: str, name: str) -> pa.Table:
    return read_table(fs.join(folder, f"{name}.parquet"))


def _tables(folder: str, kind: str) -> Iterator[pa.Table]:
    """What the tasks of a kind wrote, in the order of their slices."""
    names = [name for name in fs.list_files(fs.join(folder, kind)) if name.endswith(".parquet")]
    return (read_table(fs.join(folder, kind, name)) for name in sorted(names))


def sample_queries(queries: Iterable[pa.Table], size: int, *, seed: int) -> pa.Table:
    """A uniform sample of `size` rows: those whose seeded hash of query_id is smallest, in its order.

    The result does not depend on the order of the tables. At most 2 x `size` rows and one table are held.
    """
    kept: list[pa.Table] = []
    for table in queries:
        kept.append(table.append_column("key", pa.array(_random_keys(table["query_id"], seed=seed))))
        if sum(map(len, kept)) > 2 * size:
            kept = [_smallest(kept, size)]
    return _smallest(kept, size).drop_columns("key")


def sample_positives(pairs: Iterable[pa.Table], *, most: int, seed: int) -> pa.Table:
    """Distinct (query_id, doc_id) pairs, a uniform sample of at most `most` per query, sorted.

    At most twice the sampled pairs are held, however many clicks there are.
    """
    kept: list[pa.Table] = [_PAIRS.empty_table()]
    for table in pairs:
        kept.append(table.select(PAIR_COLUMNS))
        if sum(map(len, kept[1:])) > max(len(kept[0]), _ROWS_BEFORE_FOLD):
            kept = [_sample_per_query(pa.concat_tables(kept), most, seed=seed)]
    return _sample_per_query(pa.concat_tables(kept), most, seed=seed)


def term_recall(
    queries: Sequence[Sequence[str]],
    queries_of: Mapping[str, Sequence[int]],
    documents: Iterable[tuple[str, Sequence[str]]],
) -> list[Float32[ndarray, " _"] | None]:
    """The target of each distinct word of each query (see the docstring of the module).

    Args:
        queries: the words of each query.
        queries_of: doc_id -> the queries (indices) of which it is a positive.
        documents: (doc_id, words) of positives; they are streamed.

    Returns:
        An array per query, or None for a query without a positive among the documents.
    """
    distinct = [list(dict.fromkeys(query)) for query in queries]
    vocabulary = {word for query in distinct for word in query}
    hits_of = [np.zeros(len(query)) for query in distinct]  # positives of the query with each word
    positives_of = [0] * len(distinct)
    df: Counter[str] = Counter()
    count = 0
    for doc_id, text in documents:
        present = vocabulary.intersection(text)
        df.update(present)
        count += 1
        for row in queries_of.get(doc_id, ()):
            hits_of[row] += [word in present for word in distinct[row]]
            positives_of[row] += 1
    targets: list[Float32[ndarray, " _"] | None] = []
    for query, hits, positives in zip(distinct, hits_of, positives_of, strict=True):
        recall = hits / max(positives, 1)
        if count > positives:
            chance = (np.array([df[word] for word in query]) - hits) / (count - positives)
            recall = np.maximum(recall - chance, 0)
        targets.append(recall.astype(np.float32) if positives else None)
    return targets


def _smallest(tables: Sequence[pa.Table], size: int) -> pa.Table:
    return pa.concat_tables(tables).sort_by([("key", "ascending"), ("query_id", "ascending")]).slice(0, size)


def _sample_per_query(pairs: pa.Table, most: int, *, seed: int) -> pa.Table:
    pairs = pairs.group_by(PAIR_COLUMNS).aggregate([])
    if not pairs.num_rows:
        return pairs
    keys = _random_keys(pc.binary_join_element_wise(pairs["query_id"], pairs["doc_id"], " "), seed=seed)
    table = pairs.append_column("key", pa.array(keys))
    table = table.sort_by([("query_id", "ascending"), ("key", "ascending"), ("doc_id", "ascending")])
    ids = np.asarray(table["query_id"].combine_chunks().dictionary_encode().indices)
    first = np.flatnonzero(np.diff(ids, prepend=-1))
    rank = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    kept = table.filter(pa.array(rank < most)).select(PAIR_COLUMNS)
    return kept.sort_by([("query_id", "ascending"), ("doc_id", "ascending")])


def _random_keys(ids: pa.ChunkedArray, *, seed: int) -> UInt64[ndarray, " ids"]:
    return hash_of(pa.array([f"{seed} {value}" for value in ids.to_pylist()], pa.string()))
