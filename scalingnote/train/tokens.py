"""One slice of preparing: tables of triplets and documents come in, rows that are read by number go out.

A document is known by a 64-bit hash of its doc_id until it has a row number. All rows of a query lie in one
part of a triplets artifact (collect deals queries out, mine keeps the parts), so what is known to answer a
query is found within a slice.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64, UInt64
from numpy import ndarray

from scalingnote.errors import TrainingError
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, Row
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.models.token_rows import IDS, list_column, token_columns
from scalingnote.storage.exchange import hash_of
from scalingnote.train.corpus import among
from scalingnote.train.stream import one_chunk

MISSING, UNREADABLE = -1, -2  # in place of a row number
# Known positives of a query kept for masking; more than this many are not masked.
MAX_KNOWN_POSITIVES = 16
_BLOCK = 8192


def named(batches: Iterable[pa.RecordBatch]) -> UInt64[ndarray, " named"]:
    """Sorted hashes of the documents that triplets name."""
    found = [np.empty(0, np.uint64)]
    for batch in batches:
        ids = pa.concat_arrays([batch["positive"], pc.list_flatten(batch["negatives"])])
        found.append(np.unique(hash_of(ids)))
    return np.unique(np.concatenate(found))


def tokenise_slice(
    batches: Iterable[pa.RecordBatch], *, prompt: DocumentPrompt, wanted: UInt64[ndarray, " named"]
) -> tuple[pa.Table, dict[str, str]]:
    """Token rows of the documents whose hashes are `wanted` (sorted), and doc_id -> reason for the others.

    Columns: ``hash``, ``ids``, ``positions``; in the order of the documents.
    """
    hashes = [np.empty(0, np.uint64)]
    problems: dict[str, str] = {}

    def blocks() -> Iterator[list[Row]]:
        for batch in batches:
            found = hash_of(batch["doc_id"])
            kept = among(found, wanted)
            texts = batch.filter(pa.array(kept))
            rows = prompt.rows(*(texts[name].to_pylist() for name in ("title", "topic", "content")))
            readable = np.array([isinstance(row, Row) for row in rows], dtype=bool)
            for at in np.flatnonzero(~readable).tolist():
                problems[texts["doc_id"][at].as_py()] = str(rows[at])
            hashes.append(found[kept][readable])
            yield [row for row in rows if isinstance(row, Row)]

    columns = token_columns(blocks(), views=prompt.width)
    return one_chunk({"hash": pa.array(np.concatenate(hashes)), **columns}), problems


def triplet_slice(
    triplets: pa.Table,
    answers: pa.Table | None,
    *,
    prompt: QueryPrompt | LookupPrompt,
    wanted: UInt64[ndarray, " named"],
    place: Int64[ndarray, " named"],
    sparse: SparseQuery | None = None,
) -> tuple[pa.Table, int]:
    """Rows of triplets that training can read, and how many name an unreadable document and were left out.

    Columns of a row: ``ids`` and ``positions`` of its query, ``terms`` of the `sparse` one, and those of
    :func:`triplet_columns`.
    """
    columns, readable = triplet_columns(triplets, answers, wanted=wanted, place=place)
    texts = pc.dictionary_encode(triplets["query"].combine_chunks())
    distinct = texts.dictionary.to_pylist()
    blocks = (prompt.rows(distinct[start : start + _BLOCK]) for start in range(0, len(distinct), _BLOCK))
    tokens = token_columns(blocks, views=len(prompt.views))
    if sparse is not None:
        terms = sparse.tokens(distinct)
        flat = np.array([term for row in terms for term in row], dtype=np.int32)
        tokens["terms"] = list_column(flat, [0, *accumulate(map(len, terms))], IDS)
    table = one_chunk({**{name: column.take(texts.indices) for name, column in tokens.items()}, **columns})
    return table.filter(pa.array(readable)).combine_chunks(), int((~readable).sum())


def triplet_columns(
    triplets: pa.Table,
    answers: pa.Table | None,
    *,
    wanted: UInt64[ndarray, " named"],
    place: Int64[ndarray, " named"],
) -> tuple[dict[str, pa.Array], Bool[ndarray, " rows"]]:
    """What triplets say but for the texts, and which of them name readable documents alone.

    `place` holds a row number for each of the `wanted` hashes, or why there is none. Columns of a row:
    ``query`` (see :func:`query_number`), ``documents`` (row numbers, the positive first), ``known`` (row
    numbers of documents known to answer the query), ``weight``, ``scores`` (NaN where there are none), and
    ``split`` and ``part`` (source/hop), by which rows are filed.
    """
    group = 1 + _width(triplets["negatives"])
    ids = pa.chunked_array(
        [*triplets["positive"].chunks, *pc.list_flatten(triplets["negatives"]).chunks], pa.string()
    )
    hashes = hash_of(ids)
    rows = rows_of(hashes, wanted, place)
    if (rows == MISSING).any():
        lost = ids[int(np.flatnonzero(rows == MISSING)[0])].as_py()
        raise TrainingError(f"triplets name document {lost!r}, which the dataset lacks: re-run collect")
    size = len(triplets)
    documents = np.concatenate([rows[:size, None], rows[size:].reshape(size, group - 1)], axis=1)
    coded = pc.dictionary_encode(triplets["query_id"].combine_chunks())
    columns = {
        "query": pa.array(query_number(coded.dictionary)).take(coded.indices),
        "documents": pa.FixedSizeListArray.from_arrays(pa.array(documents.reshape(-1)), group),
        "known": _known(coded, documents[:, 0], answers, wanted, place).take(coded.indices),
        "weight": triplets["weight"].combine_chunks().cast(pa.float32()),
        "scores": _scores(triplets, group),
        "split": triplets["split"].combine_chunks(),
        "part": pc.binary_join_element_wise(triplets["source"], triplets["hop"], "/").combine_chunks(),
    }
    readable: ndarray = np.asarray((documents >= 0).all(axis=1))
    return columns, readable


def query_number(query_ids: pa.Array | pa.ChunkedArray) -> Int64[ndarray, " rows"]:
    """What a query is known by while training: 63 bits of a hash of its id."""
    numbers: ndarray = (hash_of(query_ids) >> np.uint64(1)).astype(np.int64)
    return numbers


def rows_of(
    hashes: UInt64[ndarray, " hashes"], wanted: UInt64[ndarray, " named"], place: Int64[ndarray, " named"]
) -> Int64[ndarray, " hashes"]:
    """Row numbers of documents by the hashes of their ids, or why there is none: `place` of the `wanted`."""
    found = among(hashes, wanted)
    rows = np.full(len(hashes), MISSING, dtype=np.int64)
    rows[found] = place[np.searchsorted(wanted, hashes[found])]
    return rows


def _width(negatives: pa.ChunkedArray) -> int:
    widths = pc.unique(pc.list_value_length(negatives)).to_pylist()
    if len(widths) > 1 or None in widths:
        raise TrainingError(f"triplets carry unequal numbers of negatives ({widths}): re-run collect")
    return int(widths[0]) if widths else 0


def _scores(triplets: pa.Table, group: int) -> pa.FixedSizeListArray:
    """A ranking model's scores of each row's documents; NaN where it gave none."""
    out = np.full((len(triplets), group), np.nan, dtype=np.float32)
    if "scores" in triplets.column_names:
        scored = np.asarray(pc.is_valid(triplets["scores"]))
        widths = pc.unique(pc.list_value_length(triplets["scores"]).drop_null()).to_pylist()
        if widths not in ([], [group]):
            raise TrainingError(f"triplets carry {widths} scores for {group} documents: re-run collect")
        values = pc.fill_null(pc.list_flatten(triplets["scores"]), np.nan)
        out[scored] = values.to_numpy().reshape(-1, group)
        out[np.isnan(out).any(axis=1)] = np.nan
    return pa.FixedSizeListArray.from_arrays(pa.array(out.reshape(-1)), group)


def _known(
    queries: pa.DictionaryArray,
    positives: Int64[ndarray, " rows"],
    answers: pa.Table | None,
    wanted: UInt64[ndarray, " named"],
    place: Int64[ndarray, " named"],
) -> pa.Array:
    """Rows of the documents known to answer each distinct query: its positives first, then `answers`."""
    codes, documents = [queries.indices.to_numpy().astype(np.int64)], [positives]
    if answers is not None:
        code = pc.index_in(answers["query_id"], value_set=queries.dictionary)
        answers = answers.append_column("code", code).filter(pc.is_valid(code))
        codes.append(answers["code"].to_numpy().astype(np.int64))
        documents.append(rows_of(hash_of(answers["positive"]), wanted, place))
    code, document = np.concatenate(codes), np.concatenate(documents)
    code, document = code[document >= 0], document[document >= 0]
    _, first = np.unique(code * (len(place) + 1) + document, return_index=True)
    first = np.sort(first)  # each pair once, where it came first
    first = first[np.argsort(code[first], kind="stable")]
    code, document = code[first], document[first]
    starts = np.searchsorted(code, code)
    kept = np.arange(len(code)) - starts < MAX_KNOWN_POSITIVES
    lengths = np.bincount(code[kept], minlength=len(queries.dictionary))
    return list_column(document[kept], [0, *accumulate(lengths.tolist())], pa.large_list(pa.int64()))
