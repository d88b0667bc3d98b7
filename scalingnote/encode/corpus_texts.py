"""Texts of documents that a teacher answers as if they were queries.

    documents ─deal─► buckets by text ─(less what is held out)─► further lessons of a student

Training queries hold the words that somebody asked for; titles and first sentences hold those that nobody has
asked for yet, and there are always enough of them. EmbedDistill (section 4.3) has queries generated for that;
these are there. A text that repeats a test or a validation query is left out, or the student would have seen
the question.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.storage import exchange
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.slices import Slice

Text = Literal["title", "sentence"]
DEALT = pa.schema({"key": pa.string(), "query": pa.string()})
LONGEST = 256  # characters: a query's length, and more than any query tower reads of it
_END = re.compile(r"(?<=[。！？])|(?<=[.!?])\s|\n")


def deal(
    item: Slice, *, dataset: Artifact, texts: Sequence[Text], share: float, folder: str, buckets: int
) -> int:
    """Scatter the texts of a slice of documents; returns how many it has, equal ones counted once."""
    number, parts = item
    found: dict[str, str] = {}
    for part in parts:
        table = dataset.table(part, ["title", "content"])
        for text in _texts(table, texts):
            found.setdefault(key(text), text)
    found.pop("", None)
    dealt = pa.table({"key": [*found], "query": [*found.values()]}, schema=DEALT)
    drawn = exchange.hash_of(dealt["key"]) < share * 2.0**64
    _scatter(dealt.filter(pa.array(drawn)), "texts", name=f"{number:05d}", folder=folder, buckets=buckets)
    return int(drawn.sum())


def hold_out(queries: pa.Table, *, name: str, folder: str, buckets: int) -> None:
    """Scatter queries that no text may repeat; `name` tells those of one task from those of others."""
    texts = queries["query"].unique().to_pylist()
    dealt = pa.table({"key": [key(text) for text in texts], "query": texts}, schema=DEALT)
    _scatter(dealt, "held", name=name, folder=folder, buckets=buckets)


def hold_out_tests(item: Slice, *, dataset: Artifact, folder: str, buckets: int) -> int:
    """:func:`hold_out` of the test queries of a slice; returns how many it has."""
    number, parts = item
    table = pa.concat_tables(dataset.table(part, ["query", "split"]) for part in parts)
    tests = table.filter(pc.not_equal(table["split"], "train"))
    hold_out(tests, name=f"dataset-{number:05d}", folder=folder, buckets=buckets)
    return len(tests)


def settle(bucket: int, *, folder: str) -> pa.Table:
    """The texts of a bucket, each once and none that is held out: `query_id`, `query`, `split`."""
    dealt, held = (exchange.gather(_target(folder, what), bucket, schema=DEALT) for what in ("texts", "held"))
    firsts = dealt.group_by("key", use_threads=False).aggregate([("query", "first")])
    kept = firsts.filter(pc.invert(pc.is_in(firsts["key"], value_set=held["key"].combine_chunks())))
    ids = [f"text {number:016x}" for number in exchange.hash_of(kept["key"]).tolist()] if len(kept) else []
    columns = {"query_id": pa.array(ids, pa.string()), "query": kept["query_first"]}
    return pa.table(columns | {"split": pa.array(["train"] * len(kept), pa.string())})


def key(text: str) -> str:
    """Equal for texts that differ in case, spaces and marks at their ends alone."""
    return " ".join(text.casefold().split()).strip(" .,:;?!。，：；？！\"'")


def _texts(documents: pa.Table, texts: Sequence[Text]) -> Iterator[str]:
    if "title" in texts:
        yield from (title[:LONGEST] for title in documents["title"].to_pylist() if title)
    if "sentence" in texts:
        yield from (_first_sentence(content) for content in documents["content"].to_pylist() if content)


def _first_sentence(content: str) -> str:
    return _END.split(content[: 4 * LONGEST].lstrip(), maxsplit=1)[0].strip()[:LONGEST]


def _scatter(table: pa.Table, what: str, *, name: str, folder: str, buckets: int) -> None:
    bucket = exchange.bucket_of(table["key"], buckets) if len(table) else np.empty(0, np.int64)
    exchange.scatter(table, bucket, target=_target(folder, what), name=name)


def _target(folder: str, what: str) -> str:
    return fs.join(folder, "dealt", what)
