"""Relevance of what was shown: sampled requests become pairs to judge, judged pairs each unit's counts."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.experiment.outcomes import KEYS, added

PAIRS = pa.schema({"query": pa.string(), "doc_id": pa.string()})
JUDGED = pa.schema({**{field.name: field.type for field in PAIRS}, "score": pa.float32()})  # null: not known


def pairs(sample: pa.Table) -> pa.Table:
    """Every pair of query and document that the sampled requests showed, once, query by query."""
    shown = _shown(sample).select(PAIRS.names)
    return shown.group_by(PAIRS.names).aggregate([]).sort_by([(name, "ascending") for name in PAIRS.names])


def by_unit(sample: pa.Table, judged: pa.Table, *, below: float, depths: Sequence[int]) -> pa.Table:
    """Per unit and depth K: how many documents in the top K score `below`, of how many that have a score.

    What both arms show is judged once. A document without a score counts nowhere.
    """
    rows = _shown(sample).join(judged, keys=PAIRS.names, join_type="left outer")
    scored = pc.is_valid(rows["score"])
    irrelevant = pc.fill_null(pc.less(rows["score"], below), False)
    columns = {name: rows[name] for name in KEYS}
    for depth in depths:
        inside = pc.and_(pc.less(rows["rank"], depth), scored)
        columns[f"irrelevant@{depth}.sum"] = pc.cast(pc.and_(inside, irrelevant), pa.float64())
        columns[f"irrelevant@{depth}.count"] = pc.cast(inside, pa.float64())
    return added(pa.table(columns))


def _shown(sample: pa.Table) -> pa.Table:
    """A row per document shown: `arm`, `unit`, `query`, `doc_id`, and `rank`, 0 at the top."""
    sample = sample.combine_chunks()
    doc_ids = sample["doc_ids"].combine_chunks()
    request = pc.list_parent_indices(doc_ids)
    starts = doc_ids.offsets.take(request)
    places = pa.array(range(len(request)), pa.int32())
    return pa.table(
        {
            **{name: sample[name].take(request) for name in (*KEYS, "query")},
            "doc_id": pc.list_flatten(doc_ids),
            "rank": pc.subtract(places, pc.subtract(starts, doc_ids.offsets[0])),
        }
    )
