"""Triplets with mined negatives, from rankings of their queries."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.one_hop import draw
from scalingnote.mine.config import MineConfig

RankedDocuments = Sequence[tuple[str, float]]  # doc_id and score, best first


def candidates(
    ranking: RankedDocuments, *, known: Collection[str], positive_score: float | None, config: MineConfig
) -> list[str]:
    """Documents of the rank window that may be negatives, best first.

    Ranks are counted before documents are left out: those in `known`, which answer the query, and those that
    score more than ``max_score_ratio`` times `positive_score` (if there is one, above 0), which probably do.
    """
    ratio = config.max_score_ratio
    bounded = ratio is not None and positive_score is not None and positive_score > 0
    limit = ratio * positive_score if bounded else float("inf")  # type: ignore[operator]
    window = ranking[config.first_rank - 1 : config.last_rank]
    return [doc_id for doc_id, score in window if doc_id not in known and score <= limit]


def refresh(
    triplets: pa.Table,
    rankings: Mapping[str, RankedDocuments],
    *,
    known: Mapping[str, Collection[str]],
    positive_scores: Sequence[float | None],
    config: MineConfig,
) -> tuple[pa.Table, dict[str, int]]:
    """Triplets with mined negatives.

    Args:
        triplets: of the schema TRIPLETS.
        rankings: query_id -> ranking.
        known: query_id -> documents that answer the query.
        positive_scores: the ranking model's score of each row's positive.
        config: rank window, number of negatives, bounds.

    Returns:
        The triplets, and counts of rows: ``mined``, ``kept`` (too few candidates, the old negatives stay),
        and ``lost`` (too few old negatives either; the row is left out).
    """
    counts: Counter[str] = Counter()
    unscored: list[bool] = []
    used_by_query: dict[str, set[str]] = {}
    negatives: list[list[str] | None] = []
    columns = [triplets[name].to_pylist() for name in ("query_id", "positive", "negatives")]
    for query_id, positive, old, score in zip(*columns, positive_scores, strict=True):
        ranking = rankings.get(query_id, ())
        allowed = candidates(ranking, known=known[query_id], positive_score=score, config=config)
        used = used_by_query.setdefault(query_id, set())
        if config.max_per_query is not None and len(used) + config.num_negatives > config.max_per_query:
            allowed = [doc_id for doc_id in allowed if doc_id in used]
        drawn = draw(allowed, config.num_negatives, seed=config.seed, key=f"mined {query_id} {positive}")
        if len(drawn) == config.num_negatives:
            counts["mined"] += 1
            used.update(drawn)
            negatives.append(drawn)
            unscored.append(True)
        elif len(old) >= config.num_negatives:
            counts["kept"] += 1
            negatives.append(old[: config.num_negatives])
            unscored.append(len(old) > config.num_negatives)
        else:
            counts["lost"] += 1
            negatives.append(None)
            unscored.append(True)
    at = triplets.schema.get_field_index("negatives")
    column = pa.array(negatives, triplets.schema.field(at).type)
    fresh = triplets.set_column(at, triplets.schema.field(at), column)
    # Scores belong to the old negatives.
    at = triplets.schema.get_field_index("scores")
    scores = pc.if_else(pa.array(unscored, pa.bool_()), None, triplets["scores"])
    fresh = fresh.set_column(at, triplets.schema.field(at), scores)
    return fresh.filter(pc.is_valid(column)), dict(counts)


def positives_by_query(*tables: pa.Table) -> dict[str, set[str]]:
    """Query_id -> positives, of tables with `query_id` and `positive`."""
    positives: dict[str, set[str]] = {}
    pairs = pa.concat_tables([table.select(["query_id", "positive"]) for table in tables])
    for query_id, positive in zip(pairs["query_id"].to_pylist(), pairs["positive"].to_pylist(), strict=True):
        positives.setdefault(query_id, set()).add(positive)
    return positives
