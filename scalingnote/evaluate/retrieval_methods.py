"""Retrieval methods of the report, each of which ranks the documents for the test queries.

Query towers search exactly, and the served tower also searches the index. If documents have term weights,
there are also sparse search and the hybrid of each tower with it; if the run has BM25 weights of words, there
is also the hybrid of each tower with BM25. BM25 over the same pool is the lexical baseline.

    each pool ─► scores by embeddings and by terms ─► their hybrids ─► ids of the rows
    each shard of the index ─► its best documents, merged
    texts ─► document frequencies of the queries' words ─► BM25's impacts, computed during search

Every pass runs in tasks, and methods over the same documents share it. This process holds queries and
results.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array, vstack

from scalingnote.core.bm25 import terms
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import Progress
from scalingnote.core.parts import Executor
from scalingnote.core.words import Language
from scalingnote.datasets.passages import settings
from scalingnote.encode.config import BM25Config
from scalingnote.encode.lexical.weights import COLLECTION, BM25Weights
from scalingnote.encode.lexical.words import WORDS, language_of
from scalingnote.evaluate import exact_search
from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.exact_search import DenseScores, JoinedScores, PoolScores, SparseScores
from scalingnote.evaluate.pool import Pool, PoolPart, Sample
from scalingnote.evaluate.test_set import QueryEmbeddings, TestSet
from scalingnote.evaluate.user_files import PairScoreFunction
from scalingnote.index import hybrid
from scalingnote.index import shard as shards
from scalingnote.search.searcher import Searcher
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

INDEX_RECALL_AT = (10, 100)
RUN_DEPTH = 100  # results per query and method: the depth of the deepest measure except R@K
QUERIES_PER_SEARCH = 256
# In a larger pool, exact search and BM25 search a seeded sample of about this number of documents, and all
# judged ones; the entire index is always searched.
MAX_EXACT_DOCUMENTS = 10_000_000
TERM_SCORES, WORD_SCORES = "(terms)", "(words)"  # names of scores that are not methods
Ranked = tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]  # scores and rows, padded with row -1
_NUMBERS = {name: pa.int64() for name in ("query", "shard", "rank")}
_HITS = pa.schema(_NUMBERS | {"score": pa.float64(), "doc_id": pa.string()})


def weigh_words(
    pool: Pool,
    queries: Sequence[str],
    *,
    language: Language = "none",
    k1: float = BM25Config().k1,
    b: float = BM25Config().b,
    each: Executor = map,
) -> BM25Weights:
    """Compute BM25's weights of the words of `queries` from the texts of the pool, without an index.

    Texts are split into words twice, here and by :func:`word_scores`, so that no result is stored in between.
    Only words of queries are counted: the caller holds only their frequencies.

    Raises:
        DataError: no document has a word.
    """
    words = list(dict.fromkeys(word for query in queries for word in terms(query, language)))
    documents = length = 0
    frequency = np.zeros(len(words), np.int64)
    task = partial(_count_group, pool=pool, words=words, language=language)
    total = pool.embeddings.counts["documents"]
    with Progress("evaluate", total=total, unit="documents counted for BM25") as progress:
        for table in each(task, pool.groups()):
            (row,) = table.to_pylist()
            documents, length = documents + row["documents"], length + row["words"]
            frequency += np.array(row["frequency"], np.int64)
            progress.advance(row["read"])
    if not length:
        raise DataError(
            f"none of {documents:,} documents of {pool.embeddings.uri} has a word for BM25: check title, "
            "topic and content, or set evaluate.bm25=false"
        )
    counts = pa.table({"word": words, "documents": frequency}, schema=WORDS)
    return BM25Weights(counts, documents=documents, length=length, k1=k1, b=b, language=language)


def _count_group(group: list[str], *, pool: Pool, words: Sequence[str], language: Language) -> pa.Table:
    """Count documents, their length in words, and the document frequency of each word, as one row."""
    query_words, frequency = frozenset(words), Counter[str]()
    documents = length = 0
    for part in pool.read(group, ["doc_id"]):
        for text in part.texts():
            text_words = terms(text, language)
            documents, length = documents + 1, length + len(text_words)
            frequency.update(query_words.intersection(text_words))
    documents_read = sum(pool.embeddings.rows_of(group).values())
    row = {"read": documents_read, "documents": documents, "words": length}
    return pa.Table.from_pylist([row | {"frequency": [frequency[word] for word in words]}])


def word_scores(weights: BM25Weights, queries: Sequence[str]) -> SparseScores:
    """Build BM25 scores of the texts of documents; words without a weight are ignored."""
    number = {word: number for number, word in enumerate(weights.words.to_pylist())}
    query_words = (
        (row, word) for row, query in enumerate(queries) for word in terms(query, weights.language)
    )
    entries = np.array([(row, number[word]) for row, word in query_words if word in number], np.int64)
    counts = np.ones(len(entries), np.float32), tuple(entries.reshape(-1, 2).T)  # equal entries are added
    matrix = csr_array(counts, shape=(len(queries), len(number)))
    return SparseScores(matrix, partial(_word_matrix, weights=weights), ("doc_id",))


def _word_matrix(part: PoolPart, *, weights: BM25Weights) -> Any:
    pieces = [csr_array((0, len(weights.idf)), dtype=np.float32)]
    for saturations in weights.saturations(part.texts()):
        impacts = (weights.idf[saturations.indices] * saturations.data).astype(np.float32)
        pieces.append(csr_array((impacts, saturations.indices, saturations.indptr), shape=saturations.shape))
    return vstack(pieces, format="csr")


# --- methods -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Methods:
    """Retrieval methods of a report: their names, and the artifacts that they search."""

    config: EvaluateConfig
    parents: Mapping[str, Artifact]
    each: Executor = map  # runs the tasks

    @property
    def towers(self) -> dict[str, str]:
        """Name of the parent artifact with the query tower of each method; the last one is served."""
        names = {self.config.names.dual_encoder: "dual_encoder", self.config.names.student: "student"}
        return {name: kind for name, kind in names.items() if kind in self.parents}

    @property
    def served(self) -> str:
        """Name of the query tower that searches the index."""
        return list(self.towers)[-1]

    @property
    def names(self) -> list[str]:
        """Names of the methods of :func:`retrieve`, in this order."""
        names = []
        for name, kind in self.towers.items():
            terms = self.has_terms(self.pool_of(kind))
            of_tower = {
                name: True,
                f"{name} (sparse)": terms and kind == "dual_encoder",
                f"{name} (hybrid)": terms,
                f"{name} (raw hybrid)": terms and self.config.hybrid.raw,
                f"{name} + bm25": "bm25_terms" in self.parents,
                f"{name} (index)": name == self.served and "index" in self.parents,
            }
            names += [method for method, is_measured in of_tower.items() if is_measured]
        return [*names, "bm25"] if self.config.bm25 else names

    @property
    def baseline(self) -> str:
        """Method with which all others are compared; a ConfigError if the config names an unknown one."""
        name, names = self.config.baseline, self.names
        if name is not None and name not in names:
            raise ConfigError(
                f"evaluate.baseline={name!r} is not a method of this report: set one of {', '.join(names)}"
            )
        return name or names[0]

    def language(self) -> Language:
        """Return the language of BM25: that of the documents' words in the index, else the detected one."""
        if (words := self.parents.get("bm25_terms")) is not None:
            language: Language = words.read_json(COLLECTION).get("language", "none")
            return language
        return language_of(self.parents["dataset"], section="evaluate")

    def has_terms(self, pool: str) -> bool:
        """Return whether the documents of a parent artifact have terms from towers with a sparse head."""
        if "dual_encoder" not in self.parents or "dual_encoder" not in self.parents[pool].manifest.parents:
            return False
        return bool(self.parents["dual_encoder"].names("sparse_query/"))

    def pool_of(self, kind: str) -> str:
        """Return the name of the parent artifact with the document embeddings that a query tower searches."""
        has_own_pool = kind == "dual_encoder" and "teacher_embeddings" in self.parents
        return "teacher_embeddings" if has_own_pool else "embeddings"

    def pool(self, name: str, *, test: TestSet) -> Pool:
        """Return the documents of a parent artifact, or a sample if these exceed MAX_EXACT_DOCUMENTS."""
        sample, most = None, MAX_EXACT_DOCUMENTS
        total = self.parents["embeddings"].counts["documents"]
        if total > most:
            judged = pa.array(sorted({doc for judged in test.qrels.values() for doc in judged}), pa.string())
            has_passages = settings(self.parents["dataset"]) is not None
            sample = Sample(most / total, judged, passages=has_passages)
        return Pool(self.parents[name], self.parents["dataset"], sample)


def count_bm25(methods: Methods, queries: Sequence[str], *, test: TestSet) -> BM25Weights | None:
    """Compute BM25 weights for queries over the documents of exact search; None if BM25 is disabled."""
    if not methods.config.bm25:
        return None
    pool = methods.pool("embeddings", test=test)
    return weigh_words(pool, queries, language=methods.language(), each=methods.each)


def retrieve(
    methods: Methods, encoded: Mapping[str, QueryEmbeddings], bm25: BM25Weights | None, *, test: TestSet
) -> tuple[dict[str, trec.Run], int]:
    """Search the test queries with every method; without `bm25` this method is left out.

    Returns:
        Method -> run, and the number of documents of exact search.
    """
    parents, towers = methods.parents, methods.towers
    depth = max(RUN_DEPTH, *methods.config.recall_at)
    runs: dict[str, trec.Run] = {}
    documents = 0
    for name in dict.fromkeys([*map(methods.pool_of, towers.values()), "embeddings"]):
        pool_towers = [tower for tower, kind in towers.items() if methods.pool_of(kind) == name]
        pool_bm25 = bm25 if name == "embeddings" else None
        if pool_towers or pool_bm25:
            queries_of = {tower: encoded[tower] for tower in pool_towers}
            ranked, documents = _search_pool(methods, name, queries_of, pool_bm25, test=test, k=depth)
            runs |= _runs(methods.pool(name, test=test), ranked, test=test, each=methods.each)
    if "index" in parents:
        queries = encoded[methods.served].unit(test.queries)
        runs[f"{methods.served} (index)"] = _through_index(
            parents["index"], queries, test=test, k=depth, each=methods.each
        )
    return {name: runs[name] for name in methods.names if name in runs}, documents


def _search_pool(
    methods: Methods,
    name: str,
    encoded: Mapping[str, QueryEmbeddings],
    bm25: BM25Weights | None,
    *,
    test: TestSet,
    k: int,
) -> tuple[dict[str, Ranked], int]:
    """Find the best documents of a pool by every method, and return the number of searched documents.

    A hybrid needs the score ranges of the entire pool, and therefore a second pass.
    """
    parents, queries, pool = methods.parents, test.queries, methods.pool(name, test=test)
    search = partial(exact_search.search, pool, k=k, each=methods.each)
    sides: dict[str, PoolScores] = {tower: DenseScores(one.unit(queries)) for tower, one in encoded.items()}
    hybrids: dict[str, tuple[str, str]] = {}
    if methods.has_terms(name):
        sides[TERM_SCORES] = exact_search.term_scores(parents["dual_encoder"], queries)
        hybrids |= {f"{tower} (hybrid)": (tower, TERM_SCORES) for tower in encoded}
    if "bm25_terms" in parents:
        sides[WORD_SCORES] = exact_search.term_scores(parents["bm25_terms"], queries)
        hybrids |= {f"{tower} + bm25": (tower, WORD_SCORES) for tower in encoded}
    if bm25 is not None:
        sides["bm25"] = word_scores(bm25, queries)
    single = search(sides)
    ranked = {name: (one.scores, one.ids) for name, one in single.items()}
    for lexical in {TERM_SCORES, WORD_SCORES, "bm25"} & sides.keys():
        # A document that shares no term with the query has no rank, as in the service.
        scores, rows = ranked[lexical]
        ranked[lexical] = scores, np.where(scores > 0, rows, -1)
    by_method = {method: ranked[method] for method in [*encoded, "bm25"] if method in ranked}
    if TERM_SCORES in sides and (dual := methods.config.names.dual_encoder) in encoded:
        by_method[f"{dual} (sparse)"] = ranked[TERM_SCORES]
    joining, joined_scores = methods.config.hybrid, {}
    if joining.dense_weight == 0:  # only terms, which find no document without a term of the query
        for method, (_, sparse) in hybrids.items():
            scores, rows = ranked[sparse]
            term_scores = np.where(rows < 0, 0.0, scores)
            by_method[method] = hybrid.normalise(term_scores, *single[sparse].ranges), rows
    else:
        joined_scores = {
            method: JoinedScores(both, (single[both[0]].ranges, single[both[1]].ranges), joining.dense_weight)
            for method, both in hybrids.items()
        }
    if joining.raw and TERM_SCORES in sides:
        raw = {f"{tower} (raw hybrid)": (tower, TERM_SCORES) for tower in encoded}
        joined_scores |= {method: JoinedScores(both, None, dense_weight=0.5) for method, both in raw.items()}
    if joined_scores:
        needed = {side: sides[side] for one in joined_scores.values() for side in one.names}
        by_method |= {
            method: (one.scores, one.ids) for method, one in search(needed, joined=joined_scores).items()
        }
    return by_method, next(iter(single.values())).documents


def _runs(
    pool: Pool, rankings: Mapping[str, Ranked], *, test: TestSet, each: Executor
) -> dict[str, trec.Run]:
    """Convert rankings of rows to runs of document ids."""
    all_rows = np.concatenate([rows for _, rows in rankings.values()], axis=1)
    distinct, doc_ids = pools.document_ids(pool, all_rows, each=each)
    if pool.passages:
        doc_ids = pools.document_ids_of(doc_ids)

    def hits(values: Float[ndarray, " k"], rows: Int[ndarray, " k"]) -> list[tuple[str, float]]:
        is_hit = rows >= 0
        names = doc_ids.take(pa.array(np.searchsorted(distinct, rows[is_hit]))).to_pylist()
        return list(zip(names, values[is_hit].tolist(), strict=True))

    return {
        name: {query_id: hits(*line) for query_id, *line in zip(test.query_ids, *ranked, strict=True)}
        for name, ranked in rankings.items()
    }


def pair_scorer(
    methods: Methods, encoded: Mapping[str, QueryEmbeddings], bm25: BM25Weights | None
) -> PairScoreFunction:
    """Return a function that scores pairs of query and document by query towers and BM25."""

    def score(queries: Sequence[str], pairs: pa.Table) -> dict[str, Float[ndarray, " pairs"]]:
        sides: dict[str, dict[str, PoolScores]] = {}
        for name, kind in methods.towers.items():
            sides.setdefault(methods.pool_of(kind), {})[name] = DenseScores(encoded[name].unit(queries))
        if bm25 is not None:
            sides.setdefault("embeddings", {})["bm25"] = word_scores(bm25, queries)
        by_method: dict[str, Float[ndarray, " pairs"]] = {}
        for name, pool_sides in sides.items():
            pool = Pool(methods.parents[name], methods.parents["dataset"])
            by_method |= exact_search.score_pairs(pool, pool_sides, queries, pairs, each=methods.each)
        return {name: by_method[name] for name in [*methods.towers, "bm25"] if name in by_method}

    return score


def _through_index(
    index: Artifact, queries: Float[ndarray, "queries dim"], *, test: TestSet, k: int, each: Executor
) -> trec.Run:
    """Search an index shard by shard, like searchers with one shard each."""
    best, numbers = _HITS.empty_table(), range(shards.open_layout(index).shards)
    with Progress("evaluate", total=len(numbers), unit="shards searched through the index") as progress:
        for hits in each(partial(_search_shard, index=index.uri, queries=queries, k=k), numbers):
            order = [("query", "ascending"), ("score", "descending"), ("shard", "ascending")]
            both = pa.concat_tables([best, hits]).sort_by([*order, ("rank", "ascending")])
            query = both["query"].to_numpy()
            best = both.filter(pa.array(np.arange(len(query)) - np.searchsorted(query, query) < k))
            progress.advance(1)
    run: dict[str, dict[str, float]] = {query_id: {} for query_id in test.query_ids}
    for number, doc_id, score in zip(
        *(best[name].to_pylist() for name in ("query", "doc_id", "score")), strict=True
    ):
        run[test.query_ids[number]].setdefault(doc_id, score)  # passages of a document may be in two shards
    return {query_id: [*hits.items()] for query_id, hits in run.items()}


def _search_shard(number: int, *, index: str, queries: Float[ndarray, "queries dim"], k: int) -> pa.Table:
    searcher = Searcher.open(index, shards=[number], mapped=True)
    rows = [
        {"query": query, "shard": number, "rank": rank, "score": float(hit.score), "doc_id": hit.doc_id}
        for start in range(0, len(queries), QUERIES_PER_SEARCH)
        for query, hits in enumerate(searcher.search(queries[start : start + QUERIES_PER_SEARCH], k=k), start)
        for rank, hit in enumerate(hits)
    ]
    return pa.Table.from_pylist(rows, schema=_HITS)
