"""Evidence about queries (exposures with clicks, ranked candidates) comes in, the rows of one part go out."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.clicks import click_triplets
from scalingnote.collect.config import CollectConfig
from scalingnote.collect.relevance import relevance_triplet
from scalingnote.collect.triplet import Triplet, share
from scalingnote.storage.schema import TRIPLETS

# One row is a document seen beside a query: exposed to a user (`clicked` is set) or ranked (`score` is set).
EVIDENCE = pa.schema(
    {"query_id": pa.string(), "doc_id": pa.string(), "clicked": pa.bool_(), "score": pa.float32()}
)


def exposures(impressions: pa.Table) -> pa.Table:
    """Evidence of a click log."""
    clicked = pc.fill_null(impressions["clicked"], False)
    return _evidence(impressions["query_id"], impressions["doc_id"], clicked=clicked)


def rankings(scores: pa.Table) -> pa.Table:
    """Evidence of a ranking model; rows without a score say nothing and are left out."""
    scores = scores.filter(pc.is_finite(pc.fill_null(scores["score"], float("nan"))))
    return _evidence(scores["query_id"], scores["doc_id"], score=scores["score"])


def assemble(
    evidence: pa.Table, queries: pa.Table, *, config: CollectConfig
) -> tuple[pa.Table, dict[str, int]]:
    """Triplets of all queries in `evidence`, sorted by query_id, source and positive, and their counts.

    `queries` holds the text of every query_id. A triplet with fewer than ``num_negatives`` negatives is
    left out and counted as ``without_negatives``: a training row has exactly that many.
    """
    text = dict(zip(queries["query_id"].to_pylist(), queries["query"].to_pylist(), strict=True))
    order = [("query_id", "ascending"), ("score", "descending"), ("doc_id", "ascending")]
    evidence = evidence.take(pc.sort_indices(evidence, order))
    query_ids = evidence["query_id"].to_pylist()
    columns = [evidence[name].to_pylist() for name in ("doc_id", "clicked", "score")]
    rows = []
    counts: Counter[str] = Counter()
    for start, stop in pairwise(_borders(query_ids)):
        query_id = query_ids[start]
        seen = list(zip(*(column[start:stop] for column in columns), strict=True))
        split = "validation" if share(query_id, seed=config.seed) < config.validation_fraction else "train"
        for source, triplet in _triplets(query_id, seen, config):
            if len(triplet.negatives) < config.num_negatives:
                counts["without_negatives"] += 1
                continue
            counts.update(["triplets", source, split])
            rows.append((query_id, text[query_id], triplet.positive, triplet.negatives, source, split))
    values = zip(*rows, strict=True) if rows else [[]] * len(TRIPLETS)
    table = pa.table(
        [pa.array(list(value), field.type) for value, field in zip(values, TRIPLETS, strict=True)],
        schema=TRIPLETS,
    )
    return table, dict(counts)


def _triplets(
    query_id: str, seen: list[tuple[str, bool | None, float | None]], config: CollectConfig
) -> list[tuple[str, Triplet]]:
    impressions = [(doc_id, clicked) for doc_id, clicked, _ in seen if clicked is not None]
    found: list[tuple[str, Triplet]] = []
    if "click" in config.sources:
        triplets = click_triplets(
            query_id,
            impressions,
            num_negatives=config.num_negatives,
            min_clicks=config.min_clicks,
            seed=config.seed,
        )
        found += [("click", triplet) for triplet in triplets]
    if "relevance" in config.sources:
        triplet = relevance_triplet(
            query_id,
            # A document scored twice keeps its better rank.
            list(dict.fromkeys(doc_id for doc_id, _, score in seen if score is not None)),
            clicked={doc_id for doc_id, clicked in impressions if clicked},
            top_k=config.top_k,
            top_t=config.top_t,
            num_negatives=config.num_negatives,
            seed=config.seed,
        )
        found += [("relevance", triplet)] if triplet else []
    return found


def _borders(sorted_ids: list[str]) -> list[int]:
    if not sorted_ids:
        return []
    ids = np.array(sorted_ids, dtype=object)
    return [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]


def _evidence(
    query_id: pa.ChunkedArray,
    doc_id: pa.ChunkedArray,
    *,
    clicked: pa.ChunkedArray | None = None,
    score: pa.ChunkedArray | None = None,
) -> pa.Table:
    rows = len(query_id)
    none = {name: pa.nulls(rows, EVIDENCE.field(name).type) for name in ("clicked", "score")}
    columns = [query_id, doc_id, none["clicked"] if clicked is None else clicked]
    return pa.table([*columns, none["score"] if score is None else score], schema=EVIDENCE)
