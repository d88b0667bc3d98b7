"""Synthetic corpora of any size, made part by part: the inputs of the stages in benchmarks/scale.py.

A part depends only on its number, so no process holds a corpus. A document is 16 words of a Zipf vocabulary;
its embedding is the sum of its words' vectors, which are longer for rarer words; a query is three words of
one document. So the query tower is a table with a row per word, like real ones.

    files of documents, queries, judgements ─► prepare (columns)
    files of documents and an impression log ─► prepare (logs)
    a table of words' vectors ─► dual_encoder;  sums of its rows ─► embeddings
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float, Int
from numpy import ndarray
from tokenizers import Tokenizer, models, pre_tokenizers

from scalingnote.core.config import Config
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft, write_table

DIM = 32
VOCABULARY = 30_000
TITLE_WORDS, CONTENT_WORDS, QUERY_WORDS = 4, 12, 3
DOCUMENTS_PER_PART = 50_000
TRAIN_QUERIES, TEST_QUERIES = 2_000, 500  # by default, of a corpus of any size
IMPRESSIONS_PER_SESSION = 10
TOPICS = 50
DAY_S = 86_400
TRAIN_START_S = 1_704_067_200  # 2024-01-01 UTC
TRAIN_DAYS = 30


class Synthetic(Config):
    """Config in place of those of the stages that usually build these artifacts."""

    documents: int


def files(folder: Path, documents: int, *, train_queries: int = TRAIN_QUERIES) -> None:
    """Write the files that the prepare stage reads; existing parts stay.

    `train_queries` must not exceed the number of documents.
    """
    for name in ("documents", "queries", "qrels", "impressions"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write = partial(_part_files, folder=folder, documents=documents, train_queries=train_queries)
    in_processes(write, parts(documents))


def towers(folder: Path, documents: int) -> Artifact:
    """Write the `dual_encoder` artifact: a lookup table as the query tower."""
    import torch  # late: the parts' processes do not need it

    from scalingnote.models import lookup

    draft = Draft(
        f"{folder}/dual_encoder", kind="dual_encoder", config=Synthetic(documents=documents), parents={}
    )
    if draft.finished:
        return draft.existing()
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words | {"[UNK]": VOCABULARY}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.concatenate([word_vectors(), np.zeros((1, DIM), np.float32)])
    tower = lookup.LookupTower(torch.from_numpy(table), tokenizer, max_length=16, storage="float32")
    tower.save(Path(draft.path("query")))
    return draft.commit(counts={"tokens": len(table)})


def embeddings(folder: Path, dataset: Artifact, dual_encoder: Artifact, documents: int) -> Artifact:
    """Write the `embeddings` artifact of a prepared corpus, with its documents in their order."""
    parents = {"dataset": dataset, "dual_encoder": dual_encoder}
    draft = Draft(
        f"{folder}/embeddings", kind="embeddings", config=Synthetic(documents=documents), parents=parents
    )
    if draft.finished:
        return draft.existing()
    write = partial(_embedded_part, uri=draft.uri, documents=documents)
    for name, part in in_processes(write, parts(documents)):
        draft.register(name, part)
    return draft.commit(counts={"documents": documents})


def parts(documents: int) -> range:
    """Return the numbers of the parts of a corpus."""
    return range(-(-documents // DOCUMENTS_PER_PART))


def in_processes(work: Callable[[int], Any], items: Iterable[int]) -> list[Any]:
    """Return the results of `work` for each item, from a process per core."""
    with ProcessPoolExecutor(cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, items))


@cache
def word_vectors() -> Float[ndarray, "words dim"]:
    """Return a vector for every word, longer for rarer ones."""
    rng = np.random.default_rng(0)
    rarity = np.log(1 / word_shares()).astype(np.float32)
    spectrum = np.arange(1, DIM + 1, dtype=np.float32) ** -0.5
    vectors: ndarray = rng.standard_normal((VOCABULARY, DIM), np.float32) * spectrum * rarity[:, None]
    return vectors


@cache
def word_shares() -> Float[ndarray, " words"]:
    """Return the probability of each word: Zipf's law, without its first ten words."""
    share = 1 / np.arange(10, 10 + VOCABULARY)
    shares: ndarray = share / share.sum()
    return shares


def words_of_part(number: int, documents: int) -> Int[ndarray, "documents words"]:
    """Draw the words of each document of a part."""
    size = min(DOCUMENTS_PER_PART, documents - number * DOCUMENTS_PER_PART)
    uniform = np.random.default_rng([0, number]).random((size, TITLE_WORDS + CONTENT_WORDS))
    words: ndarray = np.searchsorted(word_shares().cumsum()[:-1], uniform)
    return words


def _embedded_part(number: int, *, uri: str, documents: int) -> tuple[str, Any]:
    matrix = arrow.l2_normalize(word_vectors()[words_of_part(number, documents)].sum(axis=1))
    columns = {"doc_id": _doc_ids(number, len(matrix)), "summary": arrow.to_arrow(matrix)}
    name = f"embeddings/part-{number:05d}.parquet"
    return name, write_table(f"{uri}/{name}", pa.table(columns))


def _part_files(number: int, *, folder: Path, documents: int, train_queries: int) -> None:
    """Write the files of one part; the log is written last."""
    last = folder / "impressions" / f"{number:05d}.parquet"
    if last.exists():
        return
    words = words_of_part(number, documents)
    rng = np.random.default_rng([1, number])
    doc_ids = _doc_ids(number, len(words))
    table = {
        "doc_id": doc_ids,
        "title": _texts(words[:, :TITLE_WORDS]),
        "topic": [f"topic {topic}" for topic in rng.integers(TOPICS, size=len(words)).tolist()],
        "content": _texts(words[:, TITLE_WORDS:]),
        "group": doc_ids,
    }
    count = len(parts(documents))
    train = _questions(words, _share(train_queries, number, count), rng)
    test = _questions(words, _share(TEST_QUERIES, number, count), rng)
    rows = np.concatenate([train[0], test[0]])
    query_ids = [f"q{number}-{at}" for at in range(len(rows))]
    splits = ["train"] * len(train[0]) + ["test"] * len(test[0])
    texts = pa.concat_arrays([train[1], test[1]])
    queries = pa.table({"query_id": query_ids, "query": texts, "split": splits})
    answers, grades = doc_ids.take(pa.array(rows)), np.ones(len(rows), np.int32)
    qrels = pa.table({"query_id": query_ids, "doc_id": answers, "relevance": grades})
    for name, columns in (("documents", pa.table(table)), ("queries", queries), ("qrels", qrels)):
        pq.write_table(columns, folder / name / f"{number:05d}.parquet")
    pq.write_table(_impressions(number, words, doc_ids, test, rng), last)


def _impressions(
    number: int, words: ndarray, doc_ids: pa.Array, test: tuple[ndarray, pa.Array], rng: np.random.Generator
) -> pa.Table:
    """Draw a log with an impression per document, two sessions per query, and then those of test queries."""
    size = len(words)
    sessions = size // IMPRESSIONS_PER_SESSION
    rows, queries = _questions(words, max(sessions // 2, 1), rng)
    questions = rng.integers(len(rows), size=sessions)
    clicked = np.concatenate([rows[questions], test[0]])
    text = pa.concat_arrays([queries.take(pa.array(questions)), test[1]])
    start = np.concatenate(
        [
            TRAIN_START_S + rng.integers(TRAIN_DAYS * DAY_S, size=sessions),
            TRAIN_START_S + TRAIN_DAYS * DAY_S + rng.integers(DAY_S, size=len(test[0])),
        ]
    )
    shown_rows = rng.integers(size, size=(len(clicked), IMPRESSIONS_PER_SESSION))
    place = rng.integers(IMPRESSIONS_PER_SESSION, size=len(clicked))
    shown_rows[np.arange(len(clicked)), place] = clicked
    session = np.repeat(np.arange(len(clicked)), IMPRESSIONS_PER_SESSION)
    position = np.tile(np.arange(IMPRESSIONS_PER_SESSION), len(clicked))
    return pa.table(
        {
            "session_id": pc.binary_join_element_wise(f"s{number}", pa.array(session).cast(pa.string()), "-"),
            "query": text.take(pa.array(session)),
            "doc_id": doc_ids.take(pa.array(shown_rows.reshape(-1))),
            "position": pa.array(position + 1, pa.int32()),
            "clicked": pa.array(position == place[session]),
            "timestamp": pa.array(start[session]),
        }
    )


def _questions(words: ndarray, count: int, rng: np.random.Generator) -> tuple[ndarray, pa.Array]:
    """Draw documents, each once, and three words of each as a query."""
    rows = np.sort(rng.permutation(len(words))[:count])
    chosen = rng.permuted(words[rows], axis=1)[:, :QUERY_WORDS]
    return rows, _texts(chosen)


def _texts(words: Int[ndarray, "rows words"]) -> pa.Array:
    """Join rows of words to texts."""
    vocabulary = pa.array([f"w{number}" for number in range(VOCABULARY)])
    offsets = np.arange(0, words.size + 1, words.shape[1], dtype=np.int32)
    return pc.binary_join(
        pa.ListArray.from_arrays(offsets, vocabulary.take(pa.array(words.reshape(-1)))), " "
    )


def _doc_ids(number: int, size: int) -> pa.Array:
    first = number * DOCUMENTS_PER_PART
    return pc.binary_join_element_wise("d", pa.array(np.arange(first, first + size)).cast(pa.string()), "")


def _share(total: int, number: int, of: int) -> int:
    """Return the share of one of `of` parts in `total` items."""
    return total * (number + 1) // of - total * number // of
