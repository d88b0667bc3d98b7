"""A real searcher over a few texts, with two query towers that need no training.

    words      hashed words        the first half of an embedding
    trigrams   hashed letter trigrams      the second half

A document has both halves, so both towers search one index and rank it differently.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.index import families, ivf, shard
from scalingnote.index.config import Flat
from scalingnote.search.searcher import Searcher
from scalingnote.storage.arrow import l2_normalize

Features = Callable[[str], Iterator[str]]
TowerFunction = Callable[[str], np.ndarray]  # text -> embedding with the dimension of the index
WORD = re.compile(r"[^\W\u4e00-\u9fff]+|[\u4e00-\u9fff]")  # a Chinese character is a word


def words(text: str) -> Iterator[str]:
    return (match[0] for match in WORD.finditer(text.casefold()))


def trigrams(text: str) -> Iterator[str]:
    for word in words(text):
        padded = f" {word} "
        yield from (padded[at : at + 3] for at in range(max(1, len(padded) - 2)))


@dataclass(frozen=True)
class SmallIndex:
    """A searcher of all shards, one for each shard, and the query towers."""

    searcher: Searcher
    shards: Sequence[Searcher]
    towers: Mapping[str, TowerFunction]  # by name


def build(rows: Sequence[Mapping[str, Any]], *, fields: Sequence[str], width: int, shards: int) -> SmallIndex:
    """Build an index of `rows` with doc_id, title, topic, content and `fields`.

    An embedding has 2 * width dimensions.
    """
    texts = [f"{row['title']} {row['title']} {row['content']}" for row in rows]
    halves = {name: _Half.fit(texts, features, width) for name, features in _FEATURES.items()}
    matrix = l2_normalize(np.hstack([np.stack([half(text) for text in texts]) for half in halves.values()]))
    towers = {
        name: lambda text, half=half, at=at: np.pad(half(text), (at * width, (1 - at) * width))
        for at, (name, half) in enumerate(halves.items())
    }
    shared = families.train(matrix, Flat(), nlist=1, seed=0)
    bounds = [len(rows) * number // shards for number in range(shards + 1)]
    searched_shards = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        lists = ivf.empty(shared)
        ivf.add(lists, matrix[start:stop])
        searched_shards.append(shard.Shard(number, lists, _table(rows[start:stop], fields)))
    layout = shard.IndexLayout(
        dim=2 * width,
        documents=len(rows),
        shards=shards,
        family="flat",
        refine="flat",
        nlist=1,
        nprobe=1,
        refine_factor=1,
        recall=None,
        filters=("topic", *fields),
    )
    searcher = Searcher(layout, searched_shards, mapped=True)
    searcher.search(matrix[:1], k=1)  # compiles, which can exceed the timeout of a page
    return SmallIndex(searcher, [Searcher(layout, [each], mapped=True) for each in searched_shards], towers)


def _table(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> pa.Table:
    """Build the table of documents in the form of an index."""
    columns: dict[str, list[Any]] = {
        name: [row[name] for row in rows] for name in ("doc_id", "title", "topic")
    }
    columns["snippet"] = [" ".join(row["content"].split())[:240] for row in rows]
    columns["semantic_id"] = [f"{zlib.crc32(row['topic'].encode()) % 64}-{at}" for at, row in enumerate(rows)]
    return pa.table(columns | {name: [row[name] for row in rows] for name in fields})


_FEATURES: dict[str, Features] = {"words": words, "trigrams": trigrams}


@dataclass(frozen=True)
class _Half:
    """Function from a text to one half of an embedding: hashed features, of which rare ones weigh most."""

    features: Features
    width: int
    documents: int
    frequency: Counter[str]

    @classmethod
    def fit(cls, texts: Sequence[str], features: Features, width: int) -> "_Half":
        frequency = Counter(feature for text in texts for feature in set(features(text)))
        return cls(features, width, len(texts), frequency)

    def __call__(self, text: str) -> np.ndarray:
        vector = np.zeros(self.width, np.float32)
        for feature, count in Counter(self.features(text)).items():
            hashed = zlib.crc32(feature.encode())
            weight = np.log1p(self.documents / (1 + self.frequency[feature])) * (1 + np.log(count))
            vector[hashed % self.width] += weight if hashed >> 31 else -weight
        if not vector.any():
            vector[0] = 1.0
        return l2_normalize(vector[None])[0]
