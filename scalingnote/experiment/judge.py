"""The judge: pairs of query and document come in, a ranking model's scores go out."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.bm25 import BM25, document_texts
from scalingnote.collect.config import BM25Ranker, CrossEncoderConfig
from scalingnote.experiment.config import AnyJudge, DualPooledJudge
from scalingnote.models.prompt import Row
from scalingnote.storage.artifact import Artifact, open_artifact

FIELDS = ["doc_id", "title", "topic", "content"]
DOCUMENTS = "documents.parquet"  # what :func:`texts` gave of all pairs
BM25_DOCUMENTS = 2_000_000  # that words may be counted of, in the memory of an actor
# How well each row of a table of FIELDS answers the query beside it; NaN where a judge cannot say.
Judge = Callable[[Sequence[str], pa.Table], Float32[ndarray, " pairs"]]


def load(config: AnyJudge, dataset: Artifact) -> Judge:
    """The judge that a config names, loaded."""
    match config:
        case BM25Ranker():
            return ByWords(config, dataset)
        case CrossEncoderConfig():
            return ByCrossEncoder(config)
        case DualPooledJudge():
            return ByDualPooled(config)


def texts(dataset: Artifact, doc_ids: pa.Array) -> pa.Table:
    """FIELDS of those documents that the dataset has, in its order; the others are left out."""
    found = (batch.filter(pc.is_in(batch["doc_id"], value_set=doc_ids)) for batch in _documents(dataset))
    return pa.Table.from_batches(found, schema=pa.schema([(name, pa.string()) for name in FIELDS]))


def judge_pairs(judge: Judge, pairs: pa.Table, documents: pa.Table) -> pa.Table:
    """`pairs` (`query`, `doc_id`) with a `score`; null where the document is not among `documents`."""
    row = pc.index_in(pairs["doc_id"], value_set=documents["doc_id"].combine_chunks())
    known = pc.is_valid(row)
    scores = np.full(len(pairs), np.nan, np.float32)
    scores[known.to_numpy()] = judge(
        pairs["query"].filter(known).to_pylist(), documents.take(row.drop_null())
    )
    return pairs.append_column("score", pa.array(scores, from_pandas=True))


class ByWords:
    """BM25, as a share of what the query's best document of the whole data set scores: from 0 to 1."""

    def __init__(self, config: BM25Ranker, dataset: Artifact) -> None:
        documents = pa.Table.from_batches(_documents(dataset))
        self._row = {doc_id: row for row, doc_id in enumerate(documents["doc_id"].to_pylist())}
        self._bm25 = BM25.build(document_texts(documents), k1=config.k1, b=config.b)

    def __call__(self, queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        """Shares; NaN for a query that shares no word with any document."""
        rows = np.array([self._row[doc_id] for doc_id in documents["doc_id"].to_pylist()], np.int64)
        out = np.full(len(queries), np.nan, np.float32)
        asked = np.array(queries, object)
        for query in dict.fromkeys(queries):
            mine = asked == query
            scores = self._bm25.scores(query)
            if best := float(scores.max(initial=0)):
                out[mine] = scores[rows[mine]] / best
        return out


class ByCrossEncoder:
    """A cross-encoder of sentence-transformers."""

    def __init__(self, config: CrossEncoderConfig) -> None:
        from scalingnote.collect.transformer_models import PairScorer  # here: seconds of imports

        self._model = PairScorer(config)

    def __call__(self, queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        """Scores as the config's `activation` gives them."""
        return self._model.score(queries, document_texts(documents))


class ByDualPooled:
    """A cross-encoder that this system trained."""

    def __init__(self, config: DualPooledJudge) -> None:
        from scalingnote.cross_encoder.pairs import PairEncoder

        model = open_artifact(config.uri, kind="cross_encoder")
        self._encoder = PairEncoder.load(model.directory("model"), token_budget=config.token_budget)

    def __call__(self, queries: Sequence[str], documents: pa.Table) -> Float32[ndarray, " pairs"]:
        """Sigmoids of logits; NaN for a document that its prompt cannot hold."""
        model = self._encoder.model
        asked = model.query_prompt.rows(list(queries))
        read = model.document_prompt.rows(*(documents[name].fill_null("").to_pylist() for name in FIELDS[1:]))
        out = np.full(len(queries), np.nan, np.float32)
        whole = [(i, q, d) for i, (q, d) in enumerate(zip(asked, read, strict=True)) if isinstance(d, Row)]
        if whole:
            places, rows, fields = zip(*whole, strict=True)
            logits = self._encoder.scores(rows, fields)
            out[list(places)] = 1 / (1 + np.exp(-logits))
        return out


def _documents(dataset: Artifact) -> Iterator[pa.RecordBatch]:
    return dataset.batches("documents", columns=FIELDS)
