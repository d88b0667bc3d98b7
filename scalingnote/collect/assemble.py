"""One-hop triplets of one bucket: its queries' evidence comes in, triplets and what is known go out."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.clicks import click_triplets
from scalingnote.collect.config import CollectConfig
from scalingnote.collect.multi_hop import KNOWN, ONE_HOP
from scalingnote.collect.relevance import relevance_triplet
from scalingnote.collect.triplet import Triplet

# doc_id, clicks, satisfied (both None unless shown to a user), score (None unless ranked)
Seen = list[tuple[str, int | None, int | None, float | None]]


def assemble(
    evidence: pa.Table, query_ids: pa.Array, *, config: CollectConfig
) -> tuple[pa.Table, pa.Table, dict[str, int]]:
    """ONE_HOP triplets and KNOWN documents of the queries in `query_ids`, numbered by their place in it.

    Evidence of other queries is left out and counted (``ignored_rows``). So is a triplet with fewer than
    ``num_negatives`` negatives (``without_negatives``): a training row has exactly that many.
    """
    row = pc.index_in(evidence["query_id"], value_set=query_ids)
    evidence = evidence.append_column("row", row.cast(pa.int64())).filter(pc.is_valid(row))
    counts = Counter(ignored_rows=len(row) - len(evidence))
    order = [("row", "ascending"), ("score", "descending"), ("doc_id", "ascending")]
    evidence = evidence.take(pc.sort_indices(evidence, order))
    rows = evidence["row"].to_numpy()
    columns = [evidence[name].to_pylist() for name in ("doc_id", "clicks", "satisfied", "score")]
    triplets, known = [], []
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]):
        if start == stop:
            break
        number = int(rows[start])
        seen = list(zip(*(column[start:stop] for column in columns), strict=True))
        positives = {doc_id for doc_id, clicks, _, _ in seen if clicks}
        rejected = {doc_id for doc_id, clicks, _, _ in seen if clicks == 0}
        ranking: dict[str, float] = {}
        for doc_id, _, _, score in seen:
            if score is not None:
                ranking.setdefault(doc_id, score)  # a document scored twice keeps its better rank
        for source, triplet in _triplets(query_ids[number].as_py(), seen, ranking, config):
            positives.add(triplet.positive)
            rejected.update(triplet.negatives)
            if len(triplet.negatives) < config.num_negatives:
                counts["without_negatives"] += 1
            else:
                scores = [ranking.get(doc_id) for doc_id in (triplet.positive, *triplet.negatives)]
                scored = scores if None not in scores else None
                triplets.append((number, triplet.positive, triplet.negatives, source, scored))
        known += [(number, doc_id, True) for doc_id in sorted(positives)]
        known += [(number, doc_id, False) for doc_id in sorted(rejected - positives)]
    return _table(triplets, ONE_HOP), _table(known, KNOWN), dict(counts)


def _triplets(
    query_id: str, seen: Seen, ranking: dict[str, float], config: CollectConfig
) -> list[tuple[str, Triplet]]:
    exposures = [
        (doc_id, clicks, satisfied or 0) for doc_id, clicks, satisfied, _ in seen if clicks is not None
    ]
    found: list[tuple[str, Triplet]] = []
    if "relevance" in config.sources:
        triplet = relevance_triplet(
            query_id,
            list(ranking.items()),
            clicked={doc_id for doc_id, clicks, _ in exposures if clicks},
            top_k=config.top_k,
            top_t=config.top_t,
            num_negatives=config.num_negatives,
            max_score_ratio=config.max_negative_score_ratio,
            seed=config.seed,
        )
        found += [("relevance", triplet)] if triplet else []
    if "click" in config.sources:
        best = {triplet.positive for _, triplet in found}
        triplets = click_triplets(
            query_id,
            # What the ranking holds for the answer was not rejected by being passed over.
            [row for row in exposures if row[1] or row[0] not in best],
            num_negatives=config.num_negatives,
            min_clicks=config.min_clicks,
            seed=config.seed,
        )
        found += [("click", triplet) for triplet in triplets]
    return found


def _table(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    values = zip(*rows, strict=True) if rows else [[]] * len(schema)
    return pa.table(
        [pa.array(list(value), field.type) for value, field in zip(values, schema, strict=True)],
        schema=schema,
    )
