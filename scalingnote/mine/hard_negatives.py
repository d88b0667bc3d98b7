"""Hard negatives from a ranking: what a model ranks high for a query, and nobody calls an answer."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.triplet import draw
from scalingnote.mine.config import MineConfig

Ranking = Sequence[tuple[str, float]]  # doc_id and score, best first


def candidates(
    ranking: Ranking, *, known: Collection[str], positive_score: float | None, config: MineConfig
) -> list[str]:
    """Documents of the rank window that may be negatives, best first.

    Ranks are counted before anything is left out. `known` answers the query; a document that scores more
    than ``max_score_ratio`` times `positive_score` probably does (where that score is there, and above 0).
    """
    ratio = config.max_score_ratio
    bounded = ratio is not None and positive_score is not None and positive_score > 0
    limit = ratio * positive_score if bounded else float("inf")  # type: ignore[operator]
    window = ranking[config.first_rank - 1 : config.last_rank]
    return [doc_id for doc_id, score in window if doc_id not in known and score <= limit]


def refresh(
    triplets: pa.Table,
    rankings: Mapping[str, Ranking],
    *,
    known: Mapping[str, Collection[str]],
    positive_scores: Sequence[float | None],
    config: MineConfig,
) -> tuple[pa.Table, dict[str, int]]:
    """`triplets` with mined negatives; a row that finds too few keeps its own where they are as many.

    `known` holds each query's positives, `positive_scores` what the ranking model gives each row's.
    Counted: ``mined``, ``kept`` (old negatives stayed) and ``lost`` (neither had ``num_negatives``, the row
    is left out).
    """
    counts: Counter[str] = Counter()
    unscored: list[bool] = []
    given: dict[str, set[str]] = {}
    negatives: list[list[str] | None] = []
    columns = [triplets[name].to_pylist() for name in ("query_id", "positive", "negatives")]
    for query_id, positive, old, score in zip(*columns, positive_scores, strict=True):
        ranking = rankings.get(query_id, ())
        found = candidates(ranking, known=known[query_id], positive_score=score, config=config)
        used = given.setdefault(query_id, set())
        if config.max_per_query is not None and len(used) + config.num_negatives > config.max_per_query:
            found = [doc_id for doc_id in found if doc_id in used]
        drawn = draw(found, config.num_negatives, seed=config.seed, key=f"mined {query_id} {positive}")
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
    at = triplets.schema.get_field_index("scores")  # they are of the old negatives
    scores = pc.if_else(pa.array(unscored, pa.bool_()), None, triplets["scores"])
    fresh = fresh.set_column(at, triplets.schema.field(at), scores)
    return fresh.filter(pc.is_valid(column)), dict(counts)


def positives_by_query(*tables: pa.Table) -> dict[str, set[str]]:
    """Every positive that tables with `query_id` and `positive` name, by query."""
    found: dict[str, set[str]] = {}
    triplets = pa.concat_tables([table.select(["query_id", "positive"]) for table in tables])
    for query_id, positive in zip(
        triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), strict=True
    ):
        found.setdefault(query_id, set()).add(positive)
    return found
