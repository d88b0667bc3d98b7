"""Evidence: one row for every time a document was seen beside a query, by a user or by a ranking model."""

import pyarrow as pa
import pyarrow.compute as pc

EVIDENCE = pa.schema(
    {
        "query_id": pa.string(),
        "doc_id": pa.string(),
        "clicked": pa.bool_(),  # set where a user was shown the document
        "satisfied": pa.bool_(),  # the click counts for a positive: it was long enough
        "score": pa.float32(),  # set where a ranking model scored it
    }
)


def exposures(impressions: pa.Table, *, min_dwell_s: float) -> pa.Table:
    """Evidence of a click log. A click below `min_dwell_s` does not satisfy; an unmeasured one does."""
    clicked = pc.fill_null(impressions["clicked"], False)
    long_enough = pc.fill_null(pc.greater_equal(impressions["dwell_s"], min_dwell_s), True)
    return _evidence(impressions, clicked=clicked, satisfied=pc.and_(clicked, long_enough))


def rankings(scores: pa.Table) -> pa.Table:
    """Evidence of a ranking model; rows without a score say nothing and are left out."""
    scores = scores.filter(pc.is_finite(pc.fill_null(scores["score"], float("nan"))))
    return _evidence(scores, score=scores["score"])


def _evidence(table: pa.Table, **given: pa.ChunkedArray) -> pa.Table:
    columns = {"query_id": table["query_id"], "doc_id": table["doc_id"], **given}
    return pa.table(
        [columns.get(field.name, pa.nulls(len(table), field.type)) for field in EVIDENCE], schema=EVIDENCE
    )
