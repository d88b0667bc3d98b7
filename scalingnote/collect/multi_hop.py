"""Multi-hop triplets: what associated queries learnt from their users and rankings, lent to a query.

    associations of lenders ⋈ lenders' triplets ─► `lend` ─► by borrower ─► `borrow` ─► multi-hop triplets

The association q1 <- q2 gives q1 the positives and hard negatives of q2 (ScalingNote, section 4.1). What
q1 itself knows stands above what it borrows, and a document that answers q1 never becomes its negative.
"""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64
from numpy import ndarray

from scalingnote.collect.triplet import share

# One hop, of one bucket: rows are numbered within it.
ONE_HOP = pa.schema(
    {
        "row": pa.int64(),  # of the query
        "positive": pa.string(),
        "negatives": pa.list_(pa.string()),
        "source": pa.string(),
        "scores": pa.list_(pa.float32()),  # of positive and negatives, where a ranking model gave all
    }
)
# What a query knows of a document by itself.
KNOWN = pa.schema({"row": pa.int64(), "doc_id": pa.string(), "positive": pa.bool_()})
LOANS = pa.schema(
    {
        "row": pa.int64(),  # of the borrower
        "via": pa.string(),  # query_id of the lender
        "strength": pa.float32(),
        "positive": pa.string(),
        "negatives": pa.list_(pa.string()),
        "source": pa.string(),
    }
)


def lend(
    triplets: pa.Table,
    query_ids: pa.Array,
    *,
    source: str,
    lender: Int64[ndarray, " pairs"],
    borrower: Int64[ndarray, " pairs"],
    strength: ndarray,
    most: int,
    seed: int,
) -> tuple[pa.Table, int]:
    """LOANS: the ONE_HOP triplets of `source` of each pair's lender, made out to its borrower.

    `query_ids` names the lenders by row; borrowers keep whatever numbers they came with. A lender with
    more than `most` triplets lends those of the smallest seeded hash, or one popular lender would fill
    the memory; also returned is how many loans this cost.
    """
    triplets = triplets.filter(pc.equal(triplets["source"], source))
    # Not the row: that changes with the number of buckets.
    keys = zip(query_ids.take(triplets["row"]).to_pylist(), triplets["positive"].to_pylist(), strict=True)
    drawn = pa.array([share(f"lend {via} {doc_id}", seed=seed) for via, doc_id in keys], pa.float64())
    triplets = triplets.append_column("drawn", drawn)
    order = [("row", "ascending"), ("drawn", "ascending"), ("positive", "ascending")]
    triplets = triplets.take(pc.sort_indices(triplets, order))
    rows = triplets["row"].to_numpy()
    start = np.searchsorted(rows, lender)
    full = np.searchsorted(rows, lender, side="right") - start
    count = np.minimum(full, most)
    pair = np.repeat(np.arange(len(lender)), count)
    within = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
    taken = triplets.take(pa.array(start[pair] + within))
    loans = pa.table(
        {
            "row": borrower[pair],
            "via": query_ids.take(pa.array(lender[pair])),
            "strength": strength[pair],
            "positive": taken["positive"],
            "negatives": taken["negatives"],
            "source": taken["source"],
        },
        schema=LOANS,
    )
    return loans, int((full - count).sum())


def borrow(loans: pa.Table, known: pa.Table, *, most: int, seed: int) -> tuple[pa.Table, dict[str, int]]:
    """The loans of one bucket's queries that teach something new, best lender first, and what was refused.

    Per query and source at most `most` are kept, each document once, through its strongest lender. Left
    out and counted: ``multi_already_known`` (the query has that positive itself), ``multi_contradicted``
    (its own users or ranking rejected it), ``multi_negative_is_positive`` (one of the negatives answers
    the query, by its own evidence or by another loan), ``multi_duplicate`` and ``multi_over_cap``.
    """
    counts: Counter[str] = Counter()
    loans, known = loans.combine_chunks(), known.combine_chunks()
    negatives = loans["negatives"].combine_chunks()
    documents = pa.concat_arrays(
        [known["doc_id"].combine_chunks(), loans["positive"].combine_chunks(), negatives.flatten()]
    ).dictionary_encode()
    codes = documents.indices.to_numpy().astype(np.int64)
    known_codes, positive_codes, negative_codes = np.split(codes, np.cumsum([len(known), len(loans)]))
    width = max(len(documents.dictionary), 1)
    rows, known_rows = loans["row"].to_numpy(), known["row"].to_numpy()

    pair = rows * width + positive_codes
    is_positive = known["positive"].to_numpy(zero_copy_only=False)
    known_pair = known_rows * width + known_codes
    already = np.isin(pair, known_pair[is_positive])
    contradicted = np.isin(pair, known_pair[~is_positive]) & ~already
    sound = ~already & ~contradicted

    answers = np.concatenate([known_pair[is_positive], pair[sound]])
    lengths = pc.list_value_length(negatives).to_numpy(zero_copy_only=False).astype(np.int64)
    owner = np.repeat(np.arange(len(loans)), lengths)
    spoilt = np.zeros(len(loans), dtype=bool)
    spoilt[owner[np.isin(rows[owner] * width + negative_codes, answers)]] = True
    usable = sound & ~spoilt
    counts["multi_already_known"] = int(already.sum())
    counts["multi_contradicted"] = int(contradicted.sum())
    counts["multi_negative_is_positive"] = int((sound & spoilt).sum())

    loans, chosen = loans.filter(pa.array(usable)), usable
    loans = loans.append_column("pair", pa.array(pair[chosen]))
    # Ties are the normal case: one lender's triplets are equally strong. Ids must not decide among them.
    keys = zip(loans["via"].to_pylist(), loans["positive"].to_pylist(), strict=True)
    drawn = [share(f"borrow {via} {doc_id}", seed=seed) for via, doc_id in keys]
    loans = loans.append_column("drawn", pa.array(drawn, pa.float64()))
    best_first = [
        ("row", "ascending"), ("source", "ascending"), ("strength", "descending"),
        ("drawn", "ascending"), ("via", "ascending"), ("positive", "ascending"),
    ]  # fmt: skip
    loans = loans.take(pc.sort_indices(loans, best_first))
    source = loans["source"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    first = _first_of_each(loans["pair"].to_numpy(), source)
    counts["multi_duplicate"] = int((~first).sum())
    loans, source = loans.filter(pa.array(first)), source[first]
    within = _number_within(loans["row"].to_numpy(), source)
    counts["multi_over_cap"] = int((within >= most).sum())
    return loans.filter(pa.array(within < most)).select(LOANS.names), dict(counts)


def _first_of_each(
    pair: Int64[ndarray, " loans"], source: Int64[ndarray, " loans"]
) -> Bool[ndarray, " loans"]:
    both = np.stack([pair, source], axis=1)
    _, first = np.unique(both, axis=0, return_index=True)
    mask = np.zeros(len(pair), dtype=bool)
    mask[first] = True
    return mask


def _number_within(
    row: Int64[ndarray, " loans"], source: Int64[ndarray, " loans"]
) -> Int64[ndarray, " loans"]:
    """0, 1, 2... within each run of equal (row, source)."""
    new = np.ones(len(row), dtype=bool)
    new[1:] = (row[1:] != row[:-1]) | (source[1:] != source[:-1])
    starts = np.flatnonzero(new)
    return np.arange(len(row)) - np.repeat(starts, np.diff([*starts, len(row)]))
