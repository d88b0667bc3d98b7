"""What is asked: test queries that have a relevant document, and the judgements of each."""

from dataclasses import dataclass

import pyarrow.compute as pc

from scalingnote.errors import DataError
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact


@dataclass(frozen=True)
class TestSet:
    """Test queries that have a relevant document, and the judgements of each."""

    query_ids: list[str]
    queries: list[str]
    qrels: trec.Qrels
    without_relevant: int  # test queries left out


def test_set(dataset: Artifact) -> TestSet:
    """Queries of the test split, in the order of their ids."""
    queries = dataset.table("queries").sort_by("query_id")
    queries = queries.filter(pc.equal(queries["split"], "test"))
    text = dict(zip(queries["query_id"].to_pylist(), queries["query"].to_pylist(), strict=True))
    qrels: trec.Qrels = {query_id: {} for query_id in text}
    for row in dataset.table("qrels").sort_by("doc_id").to_pylist():
        if row["query_id"] in qrels:
            qrels[row["query_id"]][row["doc_id"]] = row["relevance"]
    usable = [query_id for query_id, judged in qrels.items() if any(grade > 0 for grade in judged.values())]
    if not usable:
        raise DataError(
            f"none of {len(text):,} test queries of {dataset.uri} has a relevant document: "
            "raise dataset.test_fraction or add judgements"
        )
    return TestSet(usable, [text[q] for q in usable], {q: qrels[q] for q in usable}, len(text) - len(usable))
