"""Relevance of shown results: a judge scores pairs of query and document from sampled requests.

    sampled requests ─pairs_to_judge─► pairs ─judge_pairs─► scores ─irrelevant_by_unit─► sums per unit

A pair is judged once, however many requests showed it.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.bm25 import BM25, document_texts
from scalingnote.collect.config import BM25Ranker, CrossEncoderConfig
from scalingnote.experiment.config import AnyJudge, DualPooledJudge
from scalingnote.experiment.outcomes import KEYS, sum_by_unit
from scalingnote.models.prompt import Row
from scalingnote.storage.artifact import Artifact, open_artifact

FIELDS = ["doc_id", "title", "topic", "content"]
DOCUMENTS_FILE = "documents.parquet"  # documents of all pairs, see document_rows
MAX_BM25_DOCUMENTS = 2_000_000  # of a BM25 index in the memory of an actor
# Queries and a table of FIELDS, of equal length -> how well each document answers its query; NaN: unknown.
Judge = Callable[[Sequence[str], pa.Table], Float32[ndarray, " pairs"]]
PAIRS = pa.schema({"query": pa.string(), "doc_id": pa.string()})
JUDGED = pa.schema({**{field.name: field.type for field in PAIRS}, "score": pa.float32()})  # null: not known


def load_judge(config: AnyJudge, dataset: Artifact) -> Judge:
    """Load the judge that a config names."""
    match config:
        case BM25Ranker():
            return Bm25Judge(config, dataset)
        case CrossEncoderConfig():
            return CrossEncoderJudge(config)
        case DualPooledJudge():
            return PairEncoderJudge(config)


def document_rows(dataset: Artifact, doc_ids: pa.Array) -> pa.Table:
    """FIELDS of documents in the order of the dataset, without documents it does not have."""
    batches = (batch.filter(pc.is_in(batch["doc_id"], value_set=doc_ids)) for batch in _documents(dataset))
    return pa.Table.from_batches(batches, schema=pa.schema([(name, pa.string()) for name in FIELDS]))


def judge_pairs(judge: Judge, pairs: pa.Table, documents: pa.Table) -> pa.Table:
    """Add a `score` to `pairs` (`query`, `doc_id`); null if the document is not in `documents`."""
    row = pc.index_in(pairs["doc_id"], value_set=documents["doc_id"].combine_chunks())
    known = pc.is_valid(row)
    scores = np.full(len(pairs), np.nan, np.float32)
    scores[known.to_numpy()] = judge(
        pairs["query"].filter(known).to_pylist(), documents.take(row.drop_null())
    )
    return pairs.append_column("score", pa.array(scores, from_pandas=True))


class Bm25Judge:
    """BM25 as a share of the score of the query's best document in the whole dataset, from 0 to 1."""

    def __init__(self, config: BM25Ranker, dataset: Artifact) -> None:
        documents = pa.Table.from_batches(_documents(dataset))
        self._row = {doc_id: row for row, doc_id in enumerate(documents["doc_id"].to_pylist())}
        self._bm25 = BM25.build(document_texts(documents), k1=config.k1, b=config.b)

    def __call__(self, queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        """Shares from 0 to 1; NaN for a query without a word of any document."""
        rows = np.array([self._row[doc_id] for doc_id in documents["doc_id"].to_pylist()], np.int64)
        out = np.full(len(queries), np.nan, np.float32)
        query_of = np.array(queries, object)
        for query in dict.fromkeys(queries):
            pairs = query_of == query
            scores = self._bm25.scores(query)
            if best := float(scores.max(initial=0)):
                out[pairs] = scores[rows[pairs]] / best
        return out


class CrossEncoderJudge:
    """A cross-encoder of sentence-transformers."""

    def __init__(self, config: CrossEncoderConfig) -> None:
        from scalingnote.collect.transformer_models import PairScorer  # late: the import takes seconds

        self._model = PairScorer(config)

    def __call__(self, queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        """Scores as the config's `activation` gives them."""
        return self._model.score(queries, document_texts(documents))


class PairEncoderJudge:
    """A cross-encoder that this system trained."""

    def __init__(self, config: DualPooledJudge) -> None:
        from scalingnote.cross_encoder.config import score_temperature
        from scalingnote.cross_encoder.pairs import PairEncoder

        model = open_artifact(config.uri, kind="cross_encoder")
        self._encoder = PairEncoder.load(
            model.directory("model"),
            token_budget=config.token_budget,
            temperature=score_temperature(model.manifest.config),
        )

    def __call__(self, queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        """Sigmoids of logits; NaN for a document that its prompt cannot hold."""
        model = self._encoder.model
        query_rows = model.query_prompt.rows(list(queries))
        texts = (documents[name].fill_null("").to_pylist() for name in FIELDS[1:])
        document_rows = model.document_prompt.rows(*texts)
        out = np.full(len(queries), np.nan, np.float32)
        pairs = enumerate(zip(query_rows, document_rows, strict=True))
        usable = [(i, query, document) for i, (query, document) in pairs if isinstance(document, Row)]
        if usable:
            places, queries_of, documents_of = zip(*usable, strict=True)
            logits = self._encoder.scores(queries_of, documents_of)
            out[list(places)] = 1 / (1 + np.exp(-logits))
        return out


def _documents(dataset: Artifact) -> Iterator[pa.RecordBatch]:
    return dataset.batches("documents", columns=FIELDS)


def pairs_to_judge(sample: pa.Table) -> pa.Table:
    """Distinct pairs of query and document that the sampled requests showed, sorted."""
    pairs = _shown_documents(sample).select(PAIRS.names)
    return pairs.group_by(PAIRS.names).aggregate([]).sort_by([(name, "ascending") for name in PAIRS.names])


def irrelevant_by_unit(
    sample: pa.Table, judged: pa.Table, *, below: float, depths: Sequence[int]
) -> pa.Table:
    """Sums per unit: number of irrelevant documents and of scored documents in the top K.

    Args:
        sample: requests, as :meth:`RequestSample.table` returns them.
        judged: pairs with scores; a pair that several requests showed is judged once.
        below: score under which a document is irrelevant. Documents without a score do not count.
        depths: values of K.
    """
    rows = _shown_documents(sample).join(judged, keys=PAIRS.names, join_type="left outer")
    scored = pc.is_valid(rows["score"])
    irrelevant = pc.fill_null(pc.less(rows["score"], below), False)
    columns = {name: rows[name] for name in KEYS}
    for depth in depths:
        inside = pc.and_(pc.less(rows["rank"], depth), scored)
        columns[f"irrelevant@{depth}.sum"] = pc.cast(pc.and_(inside, irrelevant), pa.float64())
        columns[f"irrelevant@{depth}.count"] = pc.cast(inside, pa.float64())
    return sum_by_unit(pa.table(columns))


def _shown_documents(sample: pa.Table) -> pa.Table:
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
