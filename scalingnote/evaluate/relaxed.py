"""Relaxed judgements: documents whose text contains an answer count as relevant, whoever judged them.

Open-domain question answering measures so (Karpukhin et al., 2020; EmbedDistill's relaxed recall): the
answer's words, one after the other and in any case, somewhere in the document.
"""

import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import regex  # type: ignore[import-untyped]

from scalingnote.bm25 import document_texts
from scalingnote.evaluate.retrieval import Rankings
from scalingnote.storage.artifact import Artifact

# Of a script without blanks between words, each character is a token: an answer may begin anywhere.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}]"
_TOKEN = regex.compile(rf"{_UNSPACED}|[[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED}]+", regex.V1)


def tokens(text: str) -> str:
    """Words of a text in lower case, between blanks."""
    found = _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())
    return f" {' '.join(found)} "


def judged(
    documents: Iterable[tuple[str, str]],
    *,
    asked: Mapping[str, Collection[str]],
    answers: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Query -> document -> 1 for those that contain one of its answers.

    `documents` are (doc_id, text); `asked` names the queries of interest for a document.
    """
    known = {query: [t for a in given if (t := tokens(a)).strip()] for query, given in answers.items()}
    found: dict[str, dict[str, int]] = {query: {} for query in answers}
    for doc_id, text in documents:
        if queries := asked.get(doc_id):
            words = tokens(text)
            for query in queries:
                if any(answer in words for answer in known[query]):
                    found[query][doc_id] = 1
    return found


def relaxed_recall(
    dataset: Artifact,
    rankings: Mapping[str, Rankings],
    *,
    answers: Mapping[str, Sequence[str]],
    recall_at: Sequence[int],
) -> dict[str, Any]:
    """The report's part: the share of queries with an answer among their first K documents, per method."""
    asked: dict[str, set[str]] = {}
    for found in rankings.values():
        for query in answers:
            for doc_id in found[query][: max(recall_at)]:
                asked.setdefault(doc_id, set()).add(query)
    qrels = judged(_texts(dataset, asked), asked=asked, answers=answers)

    def share(found: Rankings, k: int) -> float:
        return sum(any(doc in qrels[q] for doc in found[q][:k]) for q in answers) / len(answers)

    return {
        "queries": len(answers),
        "methods": {name: {f"R@{k}": share(found, k) for k in recall_at} for name, found in rankings.items()},
    }


def _texts(dataset: Artifact, wanted: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    ids = pa.array(sorted(wanted), pa.string())
    for batch in dataset.batches("documents", columns=["doc_id", "title", "topic", "content"]):
        table = pa.table(batch.filter(pc.is_in(batch["doc_id"], value_set=ids)))
        yield from zip(table["doc_id"].to_pylist(), document_texts(table), strict=True)
