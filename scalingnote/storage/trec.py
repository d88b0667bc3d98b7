"""TREC files: judgements (qrels) and ranked results (runs), the format of all IR tools.

The format separates columns by blanks. An id with a blank is written percent-encoded after the prefix ``%:``;
all other ids are written unchanged.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.errors import DataError
from scalingnote.storage import filesystem as fs

Qrels = dict[str, dict[str, int]]  # query_id -> doc_id -> relevance
Run = dict[str, list[tuple[str, float]]]  # query_id -> (doc_id, score), best first
_ORDER = [("query_id", "ascending"), ("score", "descending"), ("rank", "ascending")]
_ENCODED = "%:"
# A reader may treat these as the end of a column or of the file, or as a byte-order mark.
_BREAKS = r"\s\x00\ufeff"


def write_qrels(uri: str, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Write a line ``query 0 document relevance`` per judgement, in the order of `qrels`."""
    lines = [
        f"{_escape(query_id)} 0 {_escape(doc_id)} {relevance}\n"
        for query_id, judged in qrels.items()
        for doc_id, relevance in judged.items()
    ]
    fs.write_bytes(uri, "".join(lines).encode())


def qrels_rows(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, str, int]]:
    """Yield query, document and grade of the lines of a file, which errors call `name`."""
    for place, (query_id, _, doc_id, relevance) in _rows(lines, name, columns=4):
        grade = _number(relevance, place)
        if not grade.is_integer():
            raise DataError(
                f"{place}: {relevance!r} is not a grade: scale grades to whole numbers, 0 for none"
            )
        yield query_id, doc_id, int(grade)


def write_run(uri: str, run: Mapping[str, Sequence[tuple[str, float]]], *, tag: str) -> None:
    """Write a line ``query Q0 document rank score tag`` per result; ranks start at 1.

    Other tools ignore ranks and order by score. A score that is not below the previous one is therefore
    written as the next smaller float32. DataError for a score that is NaN.
    """
    tag = _escape(tag)
    lines = []
    for query_id, results in run.items():
        scores = _descending(query_id, results)
        for rank, ((doc_id, _), score) in enumerate(zip(results, scores, strict=True), 1):
            lines.append(f"{_escape(query_id)} Q0 {_escape(doc_id)} {rank} {score} {tag}\n")
    fs.write_bytes(uri, "".join(lines).encode())


def run_rows(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield place, query, document, score and rank of the lines of a file, which errors call `name`."""
    for place, (query_id, _, doc_id, rank, score, _) in _rows(lines, name, columns=6):
        yield place, query_id, doc_id, _number(score, place), _number(rank, place)


def ordered_run(rows: pa.Table, name: str) -> Run:
    """Build the run of rows of `query_id`, `doc_id`, `score` and `rank`: ordered by score, ties by rank.

    DataError, with the `name` of the file, if a query has a document twice.
    """
    pairs = rows.group_by(["query_id", "doc_id"]).aggregate([([], "count_all")])
    if twice := pairs.filter(pc.greater(pairs["count_all"], 1)).to_pylist():
        raise DataError(
            f"{name}: document {twice[0]['doc_id']!r} is twice in query {twice[0]['query_id']!r}: "
            "keep one of them"
        )
    run: Run = {}
    ordered = rows.sort_by(_ORDER)
    columns = (ordered[name].to_pylist() for name in ("query_id", "doc_id", "score"))
    for query_id, doc_id, score in zip(*columns, strict=True):
        run.setdefault(query_id, []).append((doc_id, score))
    return run


def _rows(lines: Iterable[bytes], name: str, *, columns: int) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(lines, 1):
        # utf-8-sig: Windows editors write a byte-order mark, which does not belong to the first id.
        text = line.decode("utf-8-sig")
        values = text.split()
        if len(values) not in (0, columns):
            excerpt = text.rstrip("\n")[:80]
            raise DataError(f"{name}, line {number}: {len(values)} columns, expected {columns}: {excerpt!r}")
        if values:
            yield f"{name}, line {number}", [_unescape(value) for value in values]


def _descending(query_id: str, results: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yield the scores as text, strictly descending also in float32, which trec_eval reads."""
    previous = np.float32(np.inf)
    for doc_id, score in results:
        if math.isnan(score):
            raise DataError(f"document {doc_id!r} of query {query_id!r} has the score NaN: it has no rank")
        text = f"{score:.9g}"
        if not (value := np.float32(text)) < previous:
            value = np.nextafter(previous, np.float32(-np.inf))
            text = f"{value:.9g}"
        yield text
        previous = value


def _number(text: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise DataError(f"{place}: {text!r} is not a number")
    return number


def _escape(text: str) -> str:
    if not text:
        raise DataError("a TREC file cannot contain an empty id: give every query and document an id")
    if not (text.startswith(_ENCODED) or re.search(f"[{_BREAKS}]", text)):
        return text
    return _ENCODED + re.sub(f"[{_BREAKS}%]", lambda match: quote(match[0], safe=""), text)


def _unescape(text: str) -> str:
    return unquote(text.removeprefix(_ENCODED)) if text.startswith(_ENCODED) else text
