"""What is asked: test queries that have a relevant document, and the judgements of each."""

from dataclasses import dataclass

from scalingnote.datasets import trainable
from scalingnote.errors import DataError
from scalingnote.evaluate.typos import with_typos
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

_MISTYPED = "\n"  # no id of a dataset has a new line at its end


@dataclass(frozen=True)
class TestSet:
    """Test queries that have a relevant document, and the judgements of each."""

    query_ids: list[str]
    queries: list[str]
    qrels: trec.Qrels
    without_relevant: int  # test queries left out

    @property
    def documents(self) -> list[str]:
        """The document that answers each query best; of equal grades the first by its id."""
        return [max(sorted(judged), key=judged.__getitem__) for judged in self.qrels.values()]

    def mistyped(self, *, share: float, seed: int) -> "TestSet":
        """The same queries with typos, under ids of their own."""
        ids = {query_id: f"{query_id}{_MISTYPED}" for query_id in self.query_ids}
        queries = [with_typos(query, share=share, seed=seed) for query in self.queries]
        qrels = {ids[query_id]: judged for query_id, judged in self.qrels.items()}
        return TestSet(list(ids.values()), queries, qrels, self.without_relevant)

    def and_also(self, other: "TestSet") -> "TestSet":
        """Both asked at once."""
        ids, queries = self.query_ids + other.query_ids, self.queries + other.queries
        return TestSet(ids, queries, self.qrels | other.qrels, self.without_relevant)


def load_test_set(dataset: Artifact, *, judgements: str | None = None) -> TestSet:
    """Queries of the test split, in the order of their ids.

    `judgements` is a TREC file that is taken in place of the dataset's own. DataError when no query has a
    relevant document.
    """
    queries = trainable.queries(dataset, "test").sort_by("query_id")
    text = dict(zip(queries["query_id"].to_pylist(), queries["query"].to_pylist(), strict=True))
    qrels: trec.Qrels = {query_id: {} for query_id in text}
    if judgements is None:
        for row in trainable.judgements(dataset, queries["query_id"]).sort_by("doc_id").to_pylist():
            qrels[row["query_id"]][row["doc_id"]] = row["relevance"]
    else:
        qrels |= {q: judged for q, judged in trec.read_qrels(judgements).items() if q in text}
    usable = [query_id for query_id, judged in qrels.items() if any(grade > 0 for grade in judged.values())]
    if not usable:
        raise DataError(
            f"none of {len(text):,} test queries of {dataset.uri} has a relevant document in "
            f"{judgements or 'its qrels'}: raise dataset.test_fraction, or add judgements and check their "
            "query ids"
        )
    return TestSet(usable, [text[q] for q in usable], {q: qrels[q] for q in usable}, len(text) - len(usable))
