"""A directory in the BEIR layout (Thakur et al. 2021): corpus, queries and qrels per split.

    corpus.jsonl    {"_id": ..., "title": ..., "text": ...}
    queries.jsonl   {"_id": ..., "text": ...}
    qrels/*.tsv     a header, then query-id <tab> corpus-id <tab> score

qrels/train.tsv decides what is for training, qrels/test.tsv (else dev.tsv) what is for test. Where only one
of them is there, the split is drawn by `test_fraction`.
"""

from collections.abc import Iterator
from pathlib import Path

from scalingnote.datasets.config import Beir
from scalingnote.datasets.rows import Row, Source, Unreadable, json_lines, mapped, readable, separated
from scalingnote.errors import DataError


def read(config: Beir, directory: Path | None = None) -> Source:
    """Documents and queries as they are; a query in both splits is for test."""
    base = Path(config.path)
    judged = _qrels_files(base)
    ids = {split: {row["query_id"] for row in readable(_qrels(path))} for split, path in judged.items()}
    given = len(judged) == 2

    def query(row: Row) -> Row:
        query_id = str(row["_id"])
        split = ("test" if query_id in ids["test"] else "train") if given else ""
        return {"query_id": query_id, "query": row["text"], "split": split}

    # BEIR keeps the queries of all splits in one file; those of a split that is not read are no loss.
    known = set().union(*ids.values())
    queries = mapped(json_lines(base / "queries.jsonl"), query)
    return Source(
        documents=mapped(json_lines(base / "corpus.jsonl"), _document),
        queries=(row for row in queries if isinstance(row, Unreadable) or row["query_id"] in known),
        qrels=(row for path in judged.values() for row in _qrels(path)),
    )


def _qrels_files(base: Path) -> dict[str, Path]:
    candidates = {"train": ("train.tsv",), "test": ("test.tsv", "dev.tsv")}
    found = {
        split: next((base / "qrels" / name for name in names if (base / "qrels" / name).is_file()), None)
        for split, names in candidates.items()
    }
    judged = {split: path for split, path in found.items() if path is not None}
    if not judged:
        raise DataError(f"no qrels/train.tsv, test.tsv or dev.tsv in {base}: check the path")
    return judged


def _document(row: Row) -> Row:
    return {
        "doc_id": row["_id"],
        "title": row.get("title"),
        "topic": row.get("topic"),
        "content": row["text"],
    }


def _qrels(path: Path) -> Iterator[Row | Unreadable]:
    return separated(path, columns=("query_id", "doc_id", "relevance"), header=True)
