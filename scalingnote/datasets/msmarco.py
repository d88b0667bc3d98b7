"""Files in the MS MARCO layout (Bajaj et al. 2016): a collection, and queries and qrels of each split.

    collection      doc_id <tab> content, or doc_id <tab> title <tab> content
    queries         query_id <tab> query
    qrels           query_id 0 doc_id relevance (TREC), any white space between

Where only one split is given, it is divided by `test_fraction`.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from scalingnote.datasets.config import MsMarco
from scalingnote.datasets.rows import Row, Source, Unreadable, files, separated


def read(config: MsMarco, directory: Path | None = None) -> Source:
    """Documents, queries and qrels; the collection is streamed and may be a glob of files."""
    splits = {
        "train": (config.train_queries, config.train_qrels),
        "test": (config.test_queries, config.test_qrels),
    }
    given = {split: (q, r) for split, (q, r) in splits.items() if q is not None and r is not None}

    def queries() -> Iterator[Row | Unreadable]:
        # Test first: a query that is in both splits is not trained on.
        for split, (path, _) in sorted(given.items()):
            for row in _tabbed(path, ("query_id", "query")):
                if isinstance(row, dict) and len(given) == 2:
                    row["split"] = split
                yield row

    def qrels() -> Iterator[Row | Unreadable]:
        for _, path in given.values():
            for file in files(path):
                yield from separated(
                    file, columns=("query_id", "iteration", "doc_id", "relevance"), separator=" "
                )

    return Source(documents=_collection(config.collection), queries=queries(), qrels=qrels())


def _collection(pattern: str) -> Iterator[Row | Unreadable]:
    for path in files(pattern):
        with path.open("rb") as stream:
            width = max((line.count(b"\t") + 1 for line in islice(stream, 1)), default=2)
        columns = ("doc_id", "content") if width == 2 else ("doc_id", "title", "content")
        yield from separated(path, columns=columns)


def _tabbed(pattern: str, columns: tuple[str, ...]) -> Iterator[Row | Unreadable]:
    for path in files(pattern):
        yield from separated(path, columns=columns)
