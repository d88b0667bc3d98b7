"""The steps that load something once and use it often: an index, a planner, a model. One actor holds each.

What is heavy to import is imported where it is loaded.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.bm25 import BM25, document_texts
from scalingnote.collect.config import BM25Ranker, CrossEncoderConfig, QueryGenerationConfig
from scalingnote.collect.decontaminate import CLEAN, EXACT, NEAR, Decontaminator
from scalingnote.collect.evidence import rankings
from scalingnote.collect.steps import (
    QUERY,
    Context,
    Counts,
    Item,
    ids_of,
    keep_evidence,
    queries_of,
    read,
    row_group,
    scatter_by,
)
from scalingnote.collect.term_keys import own_keys
from scalingnote.planner.planner import load as load_planner
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table

QUERIES_PER_SLICE = 512  # about 0.1-0.2 s of BM25: often enough for progress, rarely enough for Ray


def build_index(context: Context, ranker: BM25Ranker | CrossEncoderConfig, local: str) -> None:
    """Write a BM25 index over the training documents, and their ids and texts beside it, to a folder."""
    documents = context.dataset.table("documents", ["doc_id", "title", "topic", "content"])
    documents = documents.filter(pc.invert(pc.is_in(documents["doc_id"], value_set=context.held_out)))
    knobs = ranker if isinstance(ranker, BM25Ranker) else BM25Ranker()
    BM25.build(document_texts(documents), k1=knobs.k1, b=knobs.b).save(local)
    columns = ["doc_id"] if isinstance(ranker, BM25Ranker) else documents.schema.names
    write_table(f"{local}/documents.arrow", documents.select(columns))


class TakeQueries:
    """Takes row groups of queries: those for training, less what repeats a test query."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._find = _decontaminator(context)

    def __call__(self, item: Item) -> Counts:
        """One row group, scattered by query."""
        table = row_group(item)
        table = table.filter(pc.equal(table["split"], "train")).select(QUERY.names)
        counts = {"query_rows": len(table)}
        if self._find:
            verdict = self._find(table["query"]).verdict
            counts["exact_duplicates"] = int((verdict == EXACT).sum())
            counts["near_duplicates"] = int((verdict == NEAR).sum())
            table = table.filter(pa.array(verdict == CLEAN))
        scatter_by(table, "query_id", self._context.folder("queries"), item["slice"], self._context)
        return counts | {"queries": len(table)}


class Ranker:
    """Ranks slices of a bucket's queries; what it loads is mapped, so a machine's actors share it."""

    def __init__(
        self, context: Context, ranker: BM25Ranker | CrossEncoderConfig, index: str, version: str
    ) -> None:
        local = fs.download(index, list(fs.list_files(index)), version=version)
        self._context, self._bm25 = context, BM25.load(local)
        self._documents = pa.ipc.open_file(pa.memory_map(f"{local}/documents.arrow")).read_all()
        self._depth = context.config.top_t
        self._cross: Any = None
        if isinstance(ranker, CrossEncoderConfig):
            from scalingnote.collect.cross_encoder import CrossEncoder

            self._cross, self._depth = CrossEncoder(ranker), ranker.candidates
        self._queries: tuple[int, pa.Table] = (-1, QUERY.empty_table())

    def __call__(self, item: Item) -> Counts:
        """Rank one slice and scatter the best of it as evidence."""
        if self._queries[0] != item["bucket"]:
            self._queries = (item["bucket"], queries_of(item["bucket"], self._context))
        queries = self._queries[1].slice(item["start"], QUERIES_PER_SLICE)
        rows, scores = self._bm25.search(queries["query"].to_pylist(), self._depth)
        which, rank = np.nonzero(rows >= 0)
        found: dict[str, Any] = {
            "query_id": queries["query_id"].take(pa.array(which)),
            "doc_id": self._documents["doc_id"].take(pa.array(rows[which, rank])),
            "score": scores[which, rank],
        }
        if self._cross:
            texts = document_texts(self._documents.take(pa.array(rows[which, rank])))
            pairs = queries["query"].take(pa.array(which)).to_pylist()
            found["score"] = self._cross.score(pairs, texts)
        name = f"ranked-{item['bucket']:05d}-{item['start']:09d}"
        return keep_evidence(rankings(pa.table(found)), name, self._context) | {"ranked": len(queries)}


class OwnKeys:
    """Scores the words of a bucket's queries, and scatters what each query asks for by key."""

    def __init__(self, context: Context) -> None:
        self._context, self._planner = context, load_planner(context.planner)

    def __call__(self, item: Item) -> Counts:
        """One bucket."""
        context, bucket = self._context, item["bucket"]
        assert context.config.association is not None
        queries = read(context.bucket(bucket, "queries"))
        scores = self._planner.term_scores(queries["query"].to_pylist())
        write_table(context.bucket(bucket, "terms"), scores.to_arrow(), use_dictionary=[])
        own, counts = own_keys(scores, ids_of(bucket, len(queries)), config=context.config.association)
        del counts["queries"]  # counted when they were taken
        scatter_by(own, "key", context.folder("own"), f"{bucket:05d}", context)
        write_table(context.bucket(bucket, "own"), own)  # whole, for the filter: one file a bucket
        return counts


class Generate:
    """Writes a bucket's generated queries as a part of their own, less what repeats a test query."""

    def __init__(self, context: Context, config: QueryGenerationConfig) -> None:
        from scalingnote.collect.query_generation import QueryGenerator

        self._context, self._generate = context, QueryGenerator(config)
        self._find = _decontaminator(context)

    def __call__(self, item: Item) -> Counts:
        """One bucket; every query of it, with triplets or without."""
        context, bucket = self._context, item["bucket"]
        found, counts = self._generate(queries_of(bucket, context))
        if self._find:
            clean = self._find(found["query"]).verdict == CLEAN
            counts["generated_duplicates"] = int((~clean).sum())
            found = found.filter(pa.array(clean))
        write_table(fs.join(context.output, f"generated/part-{bucket:05d}.parquet"), found)
        return counts


def _decontaminator(context: Context) -> Decontaminator | None:
    if not context.config.decontamination or not len(context.test_queries):
        return None
    return Decontaminator(context.test_queries, context.config.decontamination)
