"""Queries that arrive together are searched together: the work of a searcher's batches."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from scalingnote.core.errors import DatabaseError, SearchError
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.backend import SearchBackend
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve.towers import Refused

MAX_SEARCHED = 32  # queries scanned together
SearchCall = tuple[SearchBackend, Query]  # the searcher of the version, looked up when the call arrives


def search_batch(batch: Sequence[SearchCall]) -> list[Candidates | Refused | Exception]:
    """Answers in the order of the batch; searches with equal batch keys are done together."""
    order = sorted(range(len(batch)), key=lambda number: batch[number][1].batch_key)
    answers: dict[int, Candidates | Refused | Exception] = {}
    for _, numbers in groupby(order, key=lambda number: batch[number][1].batch_key):
        group = list(numbers)
        searcher = batch[group[0]][0]
        answers |= zip(group, _search_group(searcher, [batch[n][1] for n in group]), strict=True)
    return [answers[number] for number in range(len(batch))]


def _search_group(
    searcher: SearchBackend, queries: Sequence[Query]
) -> Sequence[Candidates | Refused | Exception]:
    first = queries[0]
    try:
        return searcher.find(
            np.concatenate([query.embedding for query in queries]),
            _stack([query.terms for query in queries if query.terms is not None]),
            k=first.k,
            nprobe=first.nprobe,
            where=first.where,
            exact=first.exact,
        )
    except SearchError as error:
        if len(queries) > 1:  # one of them may be the reason: the others are answered by themselves
            return [answer for query in queries for answer in _search_group(searcher, [query])]
        return [Refused(str(error))]
    except DatabaseError as error:
        return [Refused(str(error), temporary=True)] * len(queries)
    except Exception as error:
        return [error] * len(queries)


def _stack(rows: Sequence[SparseRows]) -> SparseRows | None:
    """Concatenate sparse matrices by rows; None for no matrix."""
    if len(rows) <= 1:
        return rows[0] if rows else None
    sizes = np.concatenate([np.diff(each.offsets) for each in rows])
    return SparseRows(
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate([each.terms for each in rows]),
        np.concatenate([each.values for each in rows]),
    )
