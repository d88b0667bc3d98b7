"""Evidence: what a slice of a log or of a ranking says of a document beside a query, a row for each pair."""

import pyarrow as pa
import pyarrow.compute as pc

EVIDENCE = pa.schema(
    {
        "query_id": pa.string(),
        "doc_id": pa.string(),
        "clicks": pa.int64(),  # set where users were shown the document
        "satisfied": pa.int64(),  # of these clicks, the ones that count for a positive: long enough
        "score": pa.float32(),  # set where a ranking model scored it
    }
)


def exposures(impressions: pa.Table, *, min_dwell_s: float) -> pa.Table:
    """Evidence of a click log. A click below `min_dwell_s` does not satisfy; an unmeasured one does."""
    clicked = pc.fill_null(impressions["clicked"], False)
    long_enough = pc.fill_null(pc.greater_equal(impressions["dwell_s"], min_dwell_s), True)
    # A head query is shown its first document a million times: count here, before it costs a shuffle.
    shown = pa.table(
        {
            "query_id": impressions["query_id"],
            "doc_id": impressions["doc_id"],
            "clicks": clicked.cast(pa.int64()),
            "satisfied": pc.and_(clicked, long_enough).cast(pa.int64()),
        }
    )
    pairs = shown.group_by(["query_id", "doc_id"], use_threads=False)
    counted = pairs.aggregate([("clicks", "sum"), ("satisfied", "sum")])
    return _evidence(counted, clicks=counted["clicks_sum"], satisfied=counted["satisfied_sum"])


def rankings(scores: pa.Table) -> pa.Table:
    """Evidence of a ranking model; rows without a score say nothing and are left out."""
    scores = scores.filter(pc.is_finite(pc.fill_null(scores["score"], float("nan"))))
    return _evidence(scores, score=scores["score"])


def _evidence(table: pa.Table, **given: pa.ChunkedArray) -> pa.Table:
    columns = {"query_id": table["query_id"], "doc_id": table["doc_id"], **given}
    return pa.table(
        [columns.get(field.name, pa.nulls(len(table), field.type)) for field in EVIDENCE], schema=EVIDENCE
    )
