"""TREC files: judgements (qrels) and ranked results (runs), as every IR tool reads and writes them.

The format separates columns by blanks, so a blank or ``%`` inside an id is written percent-encoded.
"""

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs

Qrels = dict[str, dict[str, int]]  # query_id -> doc_id -> relevance
Run = dict[str, list[tuple[str, float]]]  # query_id -> (doc_id, score), best first


def write_qrels(uri: str, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """One line ``query 0 document relevance`` per judgement, in the order given."""
    lines = [
        f"{_escape(query_id)} 0 {_escape(doc_id)} {relevance}\n"
        for query_id, judged in qrels.items()
        for doc_id, relevance in judged.items()
    ]
    fs.write_bytes(uri, "".join(lines).encode())


def read_qrels(uri: str) -> Qrels:
    """The judgements of a file; DataError names the first line that is none."""
    qrels: Qrels = {}
    for place, (query_id, _, doc_id, relevance) in _rows(uri, columns=4):
        qrels.setdefault(query_id, {})[doc_id] = int(_number(relevance, place))
    return qrels


def write_run(uri: str, run: Mapping[str, Sequence[tuple[str, float]]], *, tag: str) -> None:
    """One line ``query Q0 document rank score tag`` per result; ranks count from 1."""
    lines = [
        f"{_escape(query_id)} Q0 {_escape(doc_id)} {rank} {score:.9g} {_escape(tag)}\n"
        for query_id, results in run.items()
        for rank, (doc_id, score) in enumerate(results, 1)
    ]
    fs.write_bytes(uri, "".join(lines).encode())


def read_run(uri: str) -> Run:
    """The results of a file, ordered by rank; DataError names the first line that is none."""
    ranked: dict[str, list[tuple[float, str, float]]] = {}
    for place, (query_id, _, doc_id, rank, score, _) in _rows(uri, columns=6):
        found = (_number(rank, place), doc_id, _number(score, place))
        ranked.setdefault(query_id, []).append(found)
    return {query_id: [found[1:] for found in sorted(results)] for query_id, results in ranked.items()}


def _rows(uri: str, *, columns: int) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(fs.read_bytes(uri).decode().split("\n"), 1):
        values = line.split()
        if len(values) not in (0, columns):
            raise DataError(f"{uri}, line {number}: {len(values)} columns, expected {columns}: {line[:80]!r}")
        if values:
            yield f"{uri}, line {number}", [unquote(value) for value in values]


def _number(text: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{place}: {text!r} is not a number") from None


def _escape(text: str) -> str:
    if not text:
        raise DataError("an empty id cannot stand in a TREC file: give every query and document an id")
    return "".join(
        "".join(f"%{byte:02X}" for byte in character.encode())
        if character.isspace() or character in "%\x00\x1c\x1d\x1e\x1f\x85"
        else character
        for character in text
    )
