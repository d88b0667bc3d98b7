"""Retrieval methods of the report: each ranks the documents for the test queries.

Query towers are searched exactly, and the served one also through the index. If documents have term weights,
there are also sparse search and each tower's hybrid with it; if the run has weighted words by BM25, each
tower's hybrid with BM25. BM25 over the same pool is the lexical baseline.

    each pool ─► scores by embeddings and by terms ─► their hybrids ─► ids of the rows found
    each shard of the index ─► its best documents, merged
    texts ─► document frequencies of the queries' words ─► BM25's impacts, in the search itself

Every pass runs in tasks; methods over the same documents share it. This process holds queries and results.
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
from scalingnote.storage.shuffle import TaskRunner

INDEX_RECALL_AT = (10, 100)
RUN_DEPTH = 100  # results kept per query and method: the deepest measure beside R@K
QUERIES_PER_SEARCH = 256
# Of a larger pool, exact search and BM25 search a seeded sample of about so many documents, and all judged
# ones; the index is always searched as a whole.
MAX_EXACT_DOCUMENTS = 10_000_000
TERM_SCORES, WORD_SCORES = "(terms)", "(words)"  # scores that are no method of their own name
Ranked = tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]  # scores and rows; a row of -1 is none
_NUMBERS = {name: pa.int64() for name in ("query", "shard", "rank")}
_HITS = pa.schema(_NUMBERS | {"score": pa.float64(), "doc_id": pa.string()})


def weigh_words(
    pool: Pool,
    queries: Sequence[str],
    *,
    language: Language = "none",
    k1: float = BM25Config().k1,
    b: float = BM25Config().b,
    each: TaskRunner = map,
) -> BM25Weights:
    """BM25's weights of the words of `queries`, by the texts of the pool's documents, without an index.

    Texts are split into words twice, here and by :func:`word_scores`, so that nothing is stored in between,
    and only words of queries are counted: the caller holds their frequencies alone.

    Raises:
        DataError: no document has a word.
    """
    words = list(dict.fromkeys(word for query in queries for word in terms(query, language)))
    documents = length = 0
    frequency = np.zeros(len(words), np.int64)
    task = partial(_count_group, pool=pool, words=words, language=language)
    total = pool.embeddings.counts["documents"]
    with Progress("evaluate", total=total, unit="documents counted for BM25") as progress:
        for found in each(task, pool.groups()):
            (row,) = found.to_pylist()
            documents, length = documents + row["documents"], length + row["words"]
            frequency += np.array(row["frequency"], np.int64)
            progress.advance(row["read"])
    if not length:
        raise DataError(
            f"none of {documents:,} documents of {pool.embeddings.uri} has a word for BM25: check title, "
            "topic and content, or set evaluate.bm25=false"
        )
    counted = pa.table({"word": words, "documents": frequency}, schema=WORDS)
    return BM25Weights(counted, documents=documents, length=length, k1=k1, b=b, language=language)


def _count_group(group: list[str], *, pool: Pool, words: Sequence[str], language: Language) -> pa.Table:
    """Documents read and counted, their length in words, and the document frequency of each word: a row."""
    known, frequency = frozenset(words), Counter[str]()
    documents = length = 0
    for part in pool.read(group, ["doc_id"]):
        for text in part.texts():
            own = terms(text, language)
            documents, length = documents + 1, length + len(own)
            frequency.update(known.intersection(own))
    read = sum(pool.embeddings.rows_of(group).values())
    row = {"read": read, "documents": documents, "words": length}
    return pa.Table.from_pylist([row | {"frequency": [frequency[word] for word in words]}])


def word_scores(weights: BM25Weights, queries: Sequence[str]) -> SparseScores:
    """Scores by BM25 of the documents' texts; words without a weight are ignored."""
    number = {word: number for number, word in enumerate(weights.words.to_pylist())}
    split = ((row, word) for row, query in enumerate(queries) for word in terms(query, weights.language))
    entries = np.array([(row, number[word]) for row, word in split if word in number], np.int64)
    counts = np.ones(len(entries), np.float32), tuple(entries.reshape(-1, 2).T)  # equal entries are added
    matrix = csr_array(counts, shape=(len(queries), len(number)))
    return SparseScores(matrix, partial(_word_matrix, weights=weights), ("doc_id",))


def _word_matrix(part: PoolPart, *, weights: BM25Weights) -> Any:
    pieces = [csr_array((0, len(weights.idf)), dtype=np.float32)]
    for found in weights.saturations(part.texts()):
        impacts = (weights.idf[found.indices] * found.data).astype(np.float32)
        pieces.append(csr_array((impacts, found.indices, found.indptr), shape=found.shape))
    return vstack(pieces, format="csr")


# --- methods -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Methods:
    """The retrieval methods of a report: their names, and the artifacts that they search."""

    config: EvaluateConfig
    parents: Mapping[str, Artifact]
    each: TaskRunner = map  # runs the tasks

    @property
    def towers(self) -> dict[str, str]:
        """Method -> name of the parent artifact with its query tower; the last one is served."""
        names = {self.config.names.dual_encoder: "dual_encoder", self.config.names.student: "student"}
        return {name: kind for name, kind in names.items() if kind in self.parents}

    @property
    def served(self) -> str:
        """The name of the query tower that is searched through the index."""
        return list(self.towers)[-1]

    @property
    def names(self) -> list[str]:
        """Names of the methods of :func:`retrieve`, in its order."""
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
            names += [method for method, measured in of_tower.items() if measured]
        return [*names, "bm25"] if self.config.bm25 else names

    @property
    def baseline(self) -> str:
        """The method that all others are compared with; ConfigError if the config names an unknown one."""
        chosen, names = self.config.baseline, self.names
        if chosen is not None and chosen not in names:
            raise ConfigError(
                f"evaluate.baseline={chosen!r} is none of the methods: set one of {', '.join(names)}"
            )
        return chosen or names[0]

    def language(self) -> Language:
        """The language of BM25: that of the documents' words in the index, else as it is detected."""
        if (words := self.parents.get("bm25_terms")) is not None:
            language: Language = words.read_json(COLLECTION).get("language", "none")
            return language
        return language_of(self.parents["dataset"], section="evaluate")

    def has_terms(self, pool: str) -> bool:
        """Whether the documents of a parent artifact have terms, by towers with a sparse head."""
        if "dual_encoder" not in self.parents or "dual_encoder" not in self.parents[pool].manifest.parents:
            return False
        return bool(self.parents["dual_encoder"].names("sparse_query/"))

    def pool_of(self, kind: str) -> str:
        """The parent artifact with the document embeddings that a query tower is searched in."""
        own = kind == "dual_encoder" and "teacher_embeddings" in self.parents
        return "teacher_embeddings" if own else "embeddings"

    def pool(self, name: str, *, test: TestSet) -> Pool:
        """The documents of a parent artifact; above MAX_EXACT_DOCUMENTS, a sample with all judged ones."""
        sample, most = None, MAX_EXACT_DOCUMENTS
        total = self.parents["embeddings"].counts["documents"]
        if total > most:
            judged = pa.array(sorted({doc for judged in test.qrels.values() for doc in judged}), pa.string())
            divided = settings(self.parents["dataset"]) is not None
            sample = Sample(most / total, judged, passages=divided)
        return Pool(self.parents[name], self.parents["dataset"], sample)


def count_bm25(methods: Methods, queries: Sequence[str], *, test: TestSet) -> BM25Weights | None:
    """BM25 for these queries over the documents that are searched exactly; None if it is switched off."""
    if not methods.config.bm25:
        return None
    pool = methods.pool("embeddings", test=test)
    return weigh_words(pool, queries, language=methods.language(), each=methods.each)


def retrieve(
    methods: Methods, encoded: Mapping[str, QueryEmbeddings], bm25: BM25Weights | None, *, test: TestSet
) -> tuple[dict[str, trec.Run], int]:
    """Search the test queries with every method; `bm25` is left out if it is None.

    Returns:
        Method -> run, and the number of documents that were searched exactly.
    """
    parents, towers = methods.parents, methods.towers
    depth = max(RUN_DEPTH, *methods.config.recall_at)
    runs: dict[str, trec.Run] = {}
    documents = 0
    for name in dict.fromkeys([*map(methods.pool_of, towers.values()), "embeddings"]):
        mine = [tower for tower, kind in towers.items() if methods.pool_of(kind) == name]
        counted = bm25 if name == "embeddings" else None
        if mine or counted:
            own = {tower: encoded[tower] for tower in mine}
            found, documents = _search_pool(methods, name, own, counted, test=test, k=depth)
            runs |= _runs(methods.pool(name, test=test), found, test=test, each=methods.each)
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
    """Every method's best documents of a pool, and the number of documents searched.

    A hybrid needs the score ranges of the whole pool, so that it takes a second pass.
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
        # A document that shares no term with the query has no rank, as in service.
        scored, rows = ranked[lexical]
        ranked[lexical] = scored, np.where(scored > 0, rows, -1)
    found = {method: ranked[method] for method in [*encoded, "bm25"] if method in ranked}
    if TERM_SCORES in sides and (dual := methods.config.names.dual_encoder) in encoded:
        found[f"{dual} (sparse)"] = ranked[TERM_SCORES]
    joining, joined = methods.config.hybrid, {}
    if joining.dense_weight == 0:  # terms alone, which find no document without a term of the query
        for method, (_, sparse) in hybrids.items():
            scored, rows = ranked[sparse]
            shown = np.where(rows < 0, 0.0, scored)
            found[method] = hybrid.normalise(shown, *single[sparse].ranges), rows
    else:
        joined = {
            method: JoinedScores(both, (single[both[0]].ranges, single[both[1]].ranges), joining.dense_weight)
            for method, both in hybrids.items()
        }
    if joining.raw and TERM_SCORES in sides:
        raw = {f"{tower} (raw hybrid)": (tower, TERM_SCORES) for tower in encoded}
        joined |= {method: JoinedScores(both, None, dense_weight=0.5) for method, both in raw.items()}
    if joined:
        needed = {side: sides[side] for one in joined.values() for side in one.names}
        found |= {method: (one.scores, one.ids) for method, one in search(needed, joined=joined).items()}
    return found, next(iter(single.values())).documents


def _runs(pool: Pool, found: Mapping[str, Ranked], *, test: TestSet, each: TaskRunner) -> dict[str, trec.Run]:
    """Runs of rows as runs of document ids."""
    everything = np.concatenate([rows for _, rows in found.values()], axis=1)
    distinct, doc_ids = pools.document_ids(pool, everything, each=each)
    if pool.passages:
        doc_ids = pools.document_ids_of(doc_ids)

    def hits(values: Float[ndarray, " k"], rows: Int[ndarray, " k"]) -> list[tuple[str, float]]:
        found = rows >= 0
        names = doc_ids.take(pa.array(np.searchsorted(distinct, rows[found]))).to_pylist()
        return list(zip(names, values[found].tolist(), strict=True))

    return {
        name: {query_id: hits(*line) for query_id, *line in zip(test.query_ids, *ranked, strict=True)}
        for name, ranked in found.items()
    }


def pair_scorer(
    methods: Methods, encoded: Mapping[str, QueryEmbeddings], bm25: BM25Weights | None
) -> PairScoreFunction:
    """Scores of any pairs of query and document by the methods that have some: query towers and BM25."""

    def score(queries: Sequence[str], pairs: pa.Table) -> dict[str, Float[ndarray, " pairs"]]:
        sides: dict[str, dict[str, PoolScores]] = {}
        for name, kind in methods.towers.items():
            sides.setdefault(methods.pool_of(kind), {})[name] = DenseScores(encoded[name].unit(queries))
        if bm25 is not None:
            sides.setdefault("embeddings", {})["bm25"] = word_scores(bm25, queries)
        found: dict[str, Float[ndarray, " pairs"]] = {}
        for name, own in sides.items():
            pool = Pool(methods.parents[name], methods.parents["dataset"])
            found |= exact_search.score_pairs(pool, own, queries, pairs, each=methods.each)
        return {name: found[name] for name in [*methods.towers, "bm25"] if name in found}

    return score


def _through_index(
    index: Artifact, queries: Float[ndarray, "queries dim"], *, test: TestSet, k: int, each: TaskRunner
) -> trec.Run:
    """Search an index shard by shard, like searchers with one shard each."""
    best, numbers = _HITS.empty_table(), range(shards.open_layout(index).shards)
    with Progress("evaluate", total=len(numbers), unit="shards searched through the index") as progress:
        for found in each(partial(_search_shard, index=index.uri, queries=queries, k=k), numbers):
            order = [("query", "ascending"), ("score", "descending"), ("shard", "ascending")]
            both = pa.concat_tables([best, found]).sort_by([*order, ("rank", "ascending")])
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
