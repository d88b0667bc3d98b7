"""Triplets (query, positive, hard negatives) from the evidence of a query and of its associates.

    click log, rankings ─► EVIDENCE ─► one_hop_triplets ─► ONE_HOP triplets, KNOWN documents
    associations ⋈ ONE_HOP triplets of the associates ─► multi_hop_candidates ─► select_multi_hop

The method is that of ScalingNote, section 4.1. By the association q1 <- q2, q1 receives the positives and
hard negatives of q2. The evidence of q1 takes precedence, and a document that answers q1 never becomes its
negative. All choices are made by seeded hashes.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int, Int64
from numpy import ndarray

from scalingnote.triplets.config import MAX_EVIDENCE, CollectConfig

EVIDENCE = pa.schema(
    {
        "query_id": pa.string(),
        "doc_id": pa.string(),
        "clicks": pa.int64(),  # null if users were not shown the document
        "satisfied": pa.int64(),  # clicks with a dwell time that counts for a positive
        "score": pa.float32(),  # null if no ranking model scored the document
    }
)
CLICK_COLUMNS = ["query_id", "doc_id", "clicked", "dwell_s"]  # columns of a click log
# Queries of a bucket are numbered by their row in it.
ONE_HOP = pa.schema(
    {
        "row": pa.int64(),  # of the query
        "positive": pa.string(),
        "negatives": pa.list_(pa.string()),
        "source": pa.string(),  # click or relevance
        "scores": pa.list_(pa.float32()),  # of positive and negatives, if a ranking model scored all of them
    }
)
# Documents that the evidence of a query judges.
KNOWN = pa.schema({"row": pa.int64(), "doc_id": pa.string(), "positive": pa.bool_()})

MULTI_HOP = pa.schema(
    {
        "row": pa.int64(),  # of the query that receives the triplet
        "via": pa.string(),  # query_id of the associate that has the triplet
        "strength": pa.float32(),  # of the association
        "positive": pa.string(),
        "negatives": pa.list_(pa.string()),
        "source": pa.string(),
    }
)


class Triplet(NamedTuple):
    """A training target of one query: `positive` is to rank above each of `negatives` (doc_ids)."""

    positive: str
    negatives: list[str]


# --- seeded choices ------------------------------------------------------------------------------------


def draw(candidates: Iterable[str], count: int, *, seed: int, key: str) -> list[str]:
    """Draw a uniform sample of up to `count` candidates: those with the smallest hash of `key` and candidate.

    Hashes are used instead of a generator, so that a sample does not depend on the order of the candidates,
    on earlier samples, or on the machine.
    """
    return sorted(set(candidates), key=lambda candidate: _hash(seed, key, candidate))[:count]


def hash_fraction(key: str, *, seed: int) -> float:
    """Compute a number in [0, 1) from `key` and `seed`, uniform over keys."""
    return int.from_bytes(_hash(seed, key)) / 2**64


def _hash(*parts: object) -> bytes:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()


# --- evidence ------------------------------------------------------------------------------------------


def click_evidence(impressions: pa.Table, *, min_dwell_s: float) -> pa.Table:
    """Build EVIDENCE of a click log; a click with a dwell time of `min_dwell_s`, or unknown, is satisfied."""
    clicked = pc.fill_null(impressions["clicked"], False)
    long_enough = pc.fill_null(pc.greater_equal(impressions["dwell_s"], min_dwell_s), True)
    satisfied = pc.and_(clicked, long_enough)
    return _evidence(impressions, clicks=clicked.cast(pa.int64()), satisfied=satisfied.cast(pa.int64()))


def ranking_evidence(scores: pa.Table) -> pa.Table:
    """Build EVIDENCE of a ranking model; rows without a finite score are left out."""
    scores = scores.filter(pc.is_finite(pc.fill_null(scores["score"], float("nan"))))
    return _evidence(scores, score=scores["score"])


def condense(evidence: pa.Table, *, most: int, seed: int) -> pa.Table:
    """Add EVIDENCE of each query and document; keep `most` shown and `most` scored documents of a query.

    The shown documents with the smallest seeded hashes and the scored ones with the best scores are kept. A
    row that is kept from all evidence is kept from its slice, too: a log can be condensed by slices and then
    again, and a query with a tenth of all clicks does not fill the memory.
    """
    keyed = evidence.append_column("scored", pc.is_valid(evidence["score"]))
    sums = [("clicks", "sum"), ("satisfied", "sum"), ("score", "max")]
    added = keyed.group_by(["query_id", "doc_id", "scored"], use_threads=False).aggregate(sums)
    renamed = {f"{name}_{how}": name for name, how in sums}
    added = added.rename_columns([renamed.get(name, name) for name in added.schema.names])
    query = added["query_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    group = 2 * query + added["scored"].to_numpy()
    crowded = (np.bincount(group) > most)[group] if len(group) else np.zeros(0, bool)
    rest = added.filter(pa.array(crowded))
    if not len(rest):
        return added.select(EVIDENCE.names)
    pairs = zip(rest["query_id"].to_pylist(), rest["doc_id"].to_pylist(), strict=True)
    hashes = np.array([hash_fraction(f"evidence {query_id} {doc}", seed=seed) for query_id, doc in pairs])
    worst = -pc.fill_null(rest["score"], 0).to_numpy()
    order = np.lexsort((hashes, worst, group[crowded]))  # shown documents have equal scores
    best = rest.take(pa.array(np.sort(order[rank_within_runs(group[crowded][order]) < most])))
    return pa.concat_tables([added.filter(pa.array(~crowded)), best]).select(EVIDENCE.names)


def rank_within_runs(*columns: Int[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
    """Number rows 0, 1, 2... within each run of rows that are equal in all columns."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    starts = np.flatnonzero(new)
    return np.arange(len(new)) - np.repeat(starts, np.diff(starts, append=len(new)))


def _evidence(table: pa.Table, **columns: pa.ChunkedArray) -> pa.Table:
    columns |= {"query_id": table["query_id"], "doc_id": table["doc_id"]}
    return pa.table(
        [columns.get(field.name, pa.nulls(len(table), field.type)) for field in EVIDENCE], schema=EVIDENCE
    )


# --- one hop -------------------------------------------------------------------------------------------


def click_triplets(
    query_id: str, exposures: Iterable[tuple[str, int, int]], config: CollectConfig
) -> list[Triplet]:
    """Make one triplet per positive document, sorted by doc_id; hard negatives were shown and never clicked.

    `exposures` are (doc_id, clicks, satisfied clicks) over all sessions of the query, each document once. A
    positive has at least `min_clicks` satisfied clicks. A clicked document with fewer of them is not a
    negative, and a document that was not shown is not a negative either, because no user rejected it
    (ScalingNote, section 4.1). So a triplet may have fewer than `num_negatives` negatives.
    """
    exposures = sorted(exposures)
    rejected = [doc_id for doc_id, clicks, _ in exposures if not clicks]
    return [
        Triplet(
            doc_id, draw(rejected, config.num_negatives, seed=config.seed, key=f"click {query_id} {doc_id}")
        )
        for doc_id, clicks, satisfied in exposures
        if clicks and satisfied >= config.min_clicks
    ]


def relevance_triplet(
    query_id: str,
    ranking: Sequence[tuple[str, float]],
    config: CollectConfig,
    *,
    clicked: Collection[str] = (),
) -> Triplet | None:
    """Make a triplet of the best document of a ranking and negatives drawn from ranks `top_k` + 1 to `top_t`.

    `ranking` is (doc_id, score), best first. Ranks 2 to `top_k` are left out, because many of them are
    relevant, and the model cannot distinguish them (ScalingNote, section 4.1). A negative is not in
    `clicked`. Return None for an empty ranking; the triplet of a short ranking has fewer negatives.
    """
    if not ranking:
        return None
    positive, _ = ranking[0]
    candidates = {doc_id for doc_id, _ in ranking[config.top_k : config.top_t]} - {*clicked, positive}
    key = f"relevance {query_id}"
    return Triplet(positive, draw(candidates, config.num_negatives, seed=config.seed, key=key))


def one_hop_triplets(
    evidence: pa.Table, query_ids: pa.Array, *, config: CollectConfig
) -> tuple[pa.Table, pa.Table, dict[str, int]]:
    """Make ONE_HOP triplets and KNOWN documents of the queries in `query_ids`, and counts.

    Evidence of other queries is left out and counted (``ignored_rows``). A triplet with fewer than
    ``num_negatives`` negatives, or none, is kept and counted (``short_of_negatives``): training masks missing
    negatives, and `mine` adds them.
    """
    evidence = condense(evidence, most=MAX_EVIDENCE, seed=config.seed)
    row_of = pc.index_in(evidence["query_id"], value_set=query_ids)
    evidence = evidence.append_column("row", row_of.cast(pa.int64())).filter(pc.is_valid(row_of))
    counts = Counter(ignored_rows=len(row_of) - len(evidence))
    order = [("row", "ascending"), ("score", "descending"), ("doc_id", "ascending")]
    evidence = evidence.take(pc.sort_indices(evidence, order))
    columns = (evidence[name].to_pylist() for name in ("row", "doc_id", "clicks", "satisfied", "score"))
    triplets: list[dict[str, object]] = []
    known: list[dict[str, object]] = []
    for number, group in groupby(zip(*columns, strict=True), key=itemgetter(0)):
        judgements = list(group)
        exposures = [
            (doc_id, clicks, satisfied)
            for _, doc_id, clicks, satisfied, _ in judgements
            if clicks is not None
        ]
        ranking = {doc_id: score for _, doc_id, _, _, score in judgements if score is not None}
        positives = {doc_id for doc_id, clicks, _ in exposures if clicks}
        rejected = {doc_id for doc_id, clicks, _ in exposures if not clicks}
        for source, triplet in _query_triplets(query_ids[number].as_py(), exposures, ranking, config):
            positives.add(triplet.positive)
            rejected.update(triplet.negatives)
            if len(triplet.negatives) < config.num_negatives:
                counts["short_of_negatives"] += 1
            scores = [ranking.get(doc_id) for doc_id in (triplet.positive, *triplet.negatives)]
            row = {"row": number, "source": source, "scores": None if None in scores else scores}
            triplets.append(row | triplet._asdict())
        known += [{"row": number, "doc_id": doc_id, "positive": True} for doc_id in sorted(positives)]
        judged = sorted(rejected - positives)
        known += [{"row": number, "doc_id": doc_id, "positive": False} for doc_id in judged]
    known_table = pa.Table.from_pylist(known, schema=KNOWN)
    return pa.Table.from_pylist(triplets, schema=ONE_HOP), known_table, dict(counts)


def _query_triplets(
    query_id: str, exposures: list[tuple[str, int, int]], ranking: dict[str, float], config: CollectConfig
) -> list[tuple[str, Triplet]]:
    triplets: list[tuple[str, Triplet]] = []
    if "relevance" in config.sources:
        clicked = {doc_id for doc_id, clicks, _ in exposures if clicks}
        if triplet := relevance_triplet(query_id, list(ranking.items()), config, clicked=clicked):
            triplets.append(("relevance", triplet))
            # The positive of the ranking is not a click negative, although users skipped it.
            exposures = [row for row in exposures if row[1] or row[0] != triplet.positive]
    if "click" in config.sources:
        triplets += [("click", triplet) for triplet in click_triplets(query_id, exposures, config)]
    return triplets


# --- multi-hop -----------------------------------------------------------------------------------------


def multi_hop_candidates(
    triplets: pa.Table,
    query_ids: pa.Array,
    *,
    source: str,
    associates: Int64[ndarray, " pairs"],
    queries: Int64[ndarray, " pairs"],
    strength: ndarray,
    limit: int,
    seed: int,
) -> tuple[pa.Table, int]:
    """Make MULTI_HOP rows: for each pair's query, the ONE_HOP triplets of `source` of the pair's associate.

    `associates` are rows of `query_ids`; `queries` may have any numbering and are copied to ``row``. Only the
    `limit` triplets of an associate with the smallest seeded hashes are used: otherwise a popular associate
    could fill the memory. Return also the number of rows that this left out.
    """
    triplets = triplets.filter(pc.equal(triplets["source"], source))
    # By query_id, not by row: rows change with the number of buckets.
    keys = zip(query_ids.take(triplets["row"]).to_pylist(), triplets["positive"].to_pylist(), strict=True)
    hashes = pa.array(
        [hash_fraction(f"lend {via} {doc_id}", seed=seed) for via, doc_id in keys], pa.float64()
    )
    triplets = triplets.append_column("hash", hashes)
    order = [("row", "ascending"), ("hash", "ascending"), ("positive", "ascending")]
    triplets = triplets.take(pc.sort_indices(triplets, order))
    rows = triplets["row"].to_numpy()
    start = np.searchsorted(rows, associates)
    full = np.searchsorted(rows, associates, side="right") - start
    count = np.minimum(full, limit)
    pair = np.repeat(np.arange(len(associates)), count)
    pair_triplets = triplets.take(pa.array(start[pair] + rank_within_runs(pair)))
    columns = {
        "row": queries[pair],
        "via": query_ids.take(pa.array(associates[pair])),
        "strength": strength[pair],
        **{name: pair_triplets[name] for name in ("positive", "negatives", "source")},
    }
    return pa.table(columns, schema=MULTI_HOP), int((full - count).sum())


def select_multi_hop(
    candidates: pa.Table, known: pa.Table, *, limit: int, seed: int
) -> tuple[pa.Table, dict[str, int]]:
    """Select the MULTI_HOP candidates of one bucket's queries to train on; return them and counts.

    At most `limit` are kept per query and source, those of the strongest associates, each document once. The
    others are counted: ``multi_already_known`` (a positive of the query itself), ``multi_contradicted`` (a
    document that the query's users or ranking rejected), ``multi_negative_is_positive`` (a negative answers
    the query, by its KNOWN documents or by another candidate), ``multi_duplicate``, ``multi_over_cap``.
    """
    usable, pairs, counts = _usable_candidates(candidates.combine_chunks(), known.combine_chunks())
    selected = candidates.filter(pa.array(usable)).append_column("pair", pa.array(pairs[usable]))
    # Ties are common, because all triplets of one associate are equally strong. A hash breaks them, not ids.
    keys = zip(selected["via"].to_pylist(), selected["positive"].to_pylist(), strict=True)
    hashes = [hash_fraction(f"borrow {via} {doc_id}", seed=seed) for via, doc_id in keys]
    selected = selected.append_column("hash", pa.array(hashes, pa.float64()))
    best_first = [
        ("row", "ascending"), ("source", "ascending"), ("strength", "descending"),
        ("hash", "ascending"), ("via", "ascending"), ("positive", "ascending"),
    ]  # fmt: skip
    selected = selected.take(pc.sort_indices(selected, best_first)).combine_chunks()
    source = selected["source"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    first = np.zeros(len(selected), bool)
    by_source = np.stack([selected["pair"].to_numpy(), source], axis=1)
    first[np.unique(by_source, axis=0, return_index=True)[1]] = True
    counts["multi_duplicate"] = int((~first).sum())
    selected, source = selected.filter(pa.array(first)), source[first]
    rank = rank_within_runs(selected["row"].to_numpy(), source)
    counts["multi_over_cap"] = int((rank >= limit).sum())
    return selected.filter(pa.array(rank < limit)).select(MULTI_HOP.names), counts


def _usable_candidates(
    candidates: pa.Table, known: pa.Table
) -> tuple[Bool[ndarray, " candidates"], Int64[ndarray, " candidates"], dict[str, int]]:
    """Find the candidates that the query's evidence allows, a number per (query, positive), and counts."""
    negatives = candidates["negatives"].combine_chunks()
    documents = pa.concat_arrays(
        [known["doc_id"].combine_chunks(), candidates["positive"].combine_chunks(), negatives.flatten()]
    ).dictionary_encode()
    codes = documents.indices.to_numpy().astype(np.int64)
    known_codes, positive_codes, negative_codes = np.split(codes, np.cumsum([len(known), len(candidates)]))
    # One integer per (query, document), so that pairs are compared as sets of integers.
    width = max(len(documents.dictionary), 1)
    rows = candidates["row"].to_numpy()
    pairs = rows * width + positive_codes
    known_pairs = known["row"].to_numpy() * width + known_codes
    is_positive = known["positive"].to_numpy(zero_copy_only=False)
    already_known = np.isin(pairs, known_pairs[is_positive])
    contradicted = np.isin(pairs, known_pairs[~is_positive]) & ~already_known
    consistent = ~already_known & ~contradicted

    answers = np.concatenate([known_pairs[is_positive], pairs[consistent]])
    lengths = pc.list_value_length(negatives).to_numpy(zero_copy_only=False).astype(np.int64)
    owner = np.repeat(np.arange(len(candidates)), lengths)
    false_negative = np.zeros(len(candidates), bool)
    false_negative[owner[np.isin(rows[owner] * width + negative_codes, answers)]] = True
    counts = {
        "multi_already_known": int(already_known.sum()),
        "multi_contradicted": int(contradicted.sum()),
        "multi_negative_is_positive": int((consistent & false_negative).sum()),
    }
    return consistent & ~false_negative, pairs, counts
