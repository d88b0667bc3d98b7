"""What the learned planner is taught: a word's recall, the share of a query's positives that hold it.

    train queries -> a seeded draw -> their clicked or judged documents -> recall of each word

This is DeepCT's target for queries (Dai and Callan 2019, "query term recall"): a word that the documents
people chose repeat is one the query is about; one they leave out (how, please, near me) is not. Only
"the" and "of" stand in all of them, chosen or not. DeepCT's labels leave stop words out; here no list is
needed, because what chance explains is taken off:

    recall r   = share of the query's positives that hold the word
    chance c   = share of the other queries' positives that hold it
    target     = max(0, r - c)

Dividing by 1 - c (Cohen's kappa) would give "the" a target of 1 wherever a query's one positive holds it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, UInt64
from numpy import ndarray

from scalingnote.planner.words import hash_words, words

PAIR = ["query_id", "doc_id"]
_ROWS_BEFORE_FOLD = 1 << 20


def draw(queries: Iterable[pa.Table], size: int, *, seed: int) -> pa.Table:
    """Up to `size` rows of all tables, every query_id equally likely: those whose hash is smallest.

    The rows come in the order of the hash, whatever order they arrive in; at most 2 x `size` are held.
    """
    kept: list[pa.Table] = []
    for table in queries:
        kept.append(table.append_column("lot", pa.array(_lots(table["query_id"], seed=seed))))
        if sum(map(len, kept)) > 2 * size:
            kept = [_smallest(kept, size)]
    return _smallest(kept, size).drop_columns("lot")


def positives(pairs: Iterable[pa.Table], *, most: int, seed: int) -> pa.Table:
    """Distinct (query_id, doc_id) of all tables, at most `most` per query, drawn evenly; sorted.

    Held are at most twice the pairs that are kept, however often people clicked.
    """
    kept: list[pa.Table] = [pa.table({name: pa.array([], pa.string()) for name in PAIR})]
    for table in pairs:
        kept.append(table.select(PAIR))
        if sum(map(len, kept[1:])) > max(len(kept[0]), _ROWS_BEFORE_FOLD):
            kept = [_drawn_per_query(pa.concat_tables(kept), most, seed=seed)]
    return _drawn_per_query(pa.concat_tables(kept), most, seed=seed)


def term_recall(
    queries: Sequence[Sequence[str]],
    wanted: Mapping[str, Sequence[int]],
    documents: Iterable[tuple[str, str]],
    *,
    against_chance: bool = True,
) -> list[Float32[ndarray, " _"] | None]:
    """The target of each distinct word of each query; plain recall unless it is taken `against_chance`.

    `queries` are words; `wanted` names, for a doc_id, the rows of the queries it is a positive of. The
    documents, (doc_id, text), pass through once and are not kept. None for a query without a positive among
    them.
    """
    distinct = [list(dict.fromkeys(query)) for query in queries]
    vocabulary = {word for query in distinct for word in query}
    held = [np.zeros(len(query)) for query in distinct]  # positives of the query that hold each word
    own = [0] * len(distinct)  # its positives
    everywhere: Counter[str] = Counter()
    read = 0
    for doc_id, text in documents:
        found = vocabulary.intersection(words(text))
        everywhere.update(found)
        read += 1
        for row in wanted.get(doc_id, ()):
            held[row] += [word in found for word in distinct[row]]
            own[row] += 1
    targets: list[Float32[ndarray, " _"] | None] = []
    for query, hits, positives in zip(distinct, held, own, strict=True):
        recall = hits / max(positives, 1)
        if against_chance and read > positives:
            chance = (np.array([everywhere[word] for word in query]) - hits) / (read - positives)
            recall = np.maximum(recall - chance, 0)
        targets.append(recall.astype(np.float32) if positives else None)
    return targets


def _smallest(tables: Sequence[pa.Table], size: int) -> pa.Table:
    return pa.concat_tables(tables).sort_by([("lot", "ascending"), ("query_id", "ascending")]).slice(0, size)


def _drawn_per_query(pairs: pa.Table, most: int, *, seed: int) -> pa.Table:
    pairs = pairs.group_by(PAIR).aggregate([])
    if not pairs.num_rows:
        return pairs
    lots = _lots(pc.binary_join_element_wise(pairs["query_id"], pairs["doc_id"], " "), seed=seed)
    table = pairs.append_column("lot", pa.array(lots))
    table = table.sort_by([("query_id", "ascending"), ("lot", "ascending"), ("doc_id", "ascending")])
    ids = np.asarray(table["query_id"].combine_chunks().dictionary_encode().indices)
    first = np.flatnonzero(np.diff(ids, prepend=-1))
    rank = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    kept = table.filter(pa.array(rank < most)).select(PAIR)
    return kept.sort_by([("query_id", "ascending"), ("doc_id", "ascending")])


def _lots(ids: pa.ChunkedArray, *, seed: int) -> UInt64[ndarray, " ids"]:
    return hash_words([f"{seed} {value}" for value in ids.to_pylist()])
