"""Writes, deletes and searches of documents in a live index of passages, compared with a dictionary."""

from pathlib import Path

import numpy as np
import pytest

from live_shards import DIM, index, table
from scalingnote.core.errors import DataError
from scalingnote.index import filters
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search import searcher as searchers
from scalingnote.search.live_searcher import LiveSearcher, SearcherWithDelta
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import document_of, passage_id
from synthetic_corpus import vectors

MATRIX, NEW = vectors(60, DIM), vectors(200, DIM, seed=7)
LENGTHS = {f"d{n}": 1 + n % 7 for n in range(15)}
ROWS = [passage_id(doc_id, n + 1) for doc_id, length in LENGTHS.items() for n in range(length)]
BUILT = dict(zip(ROWS, MATRIX, strict=False))
# The border between the shards is inside a document.
SHARDS = [dict([*BUILT.items()][:24]), dict([*BUILT.items()][24:])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return index(f"{tmp_path_factory.mktemp('built')}/index", SHARDS, passages=True)


@pytest.fixture
def live(built: Artifact, tmp_path: Path) -> LiveIndex:
    return LiveIndex(tmp_path / "live", built.uri)


def expected(rows: dict[str, np.ndarray], query: np.ndarray) -> list[tuple[str, int]]:
    """Return documents and the number of their best passage, best first."""
    unit = query / np.linalg.norm(query)
    scores = {name: float(vector @ unit / np.linalg.norm(vector)) for name, vector in rows.items()}
    passage_of: dict[str, int] = {}
    for name in sorted(scores, key=lambda each: -scores[each]):
        passage_of.setdefault(document_of(name), int(name.rpartition("#")[2]))
    return [*passage_of.items()]


def check(searcher: Searcher, rows: dict[str, np.ndarray]) -> None:
    for k in (1, 4, 100):
        for query, hits in zip(NEW[:5], searcher.search(NEW[:5], k=k), strict=True):
            results = [(hit.doc_id, hit.document["passage"]["number"]) for hit in hits]
            assert results == expected(rows, query)[:k]
    documents = {document_of(name) for name in rows}
    assert sum(filters.facets(searcher.documents(), searcher.fields, most=1000)["topic"].values()) == len(
        documents
    )


@pytest.mark.parametrize("first", [1, 4])
def test_a_built_index_of_passages_returns_documents(built, first, monkeypatch):
    monkeypatch.setattr(searchers, "FIRST_DEPTH", first)
    check(Searcher.open(built.uri), BUILT)


@pytest.mark.parametrize("delta", [False, True])
def test_random_writes_and_deletes_equal_a_dictionary(built, tmp_path, delta):
    live = LiveIndex(tmp_path / "live", built.uri, delta=delta)
    searcher = SearcherWithDelta.over(live.folder) if delta else LiveSearcher(live)
    rng, rows = np.random.default_rng(0), dict(BUILT)
    for step in range(25):
        doc_id = f"d{rng.integers(20)}"
        rows = {name: vector for name, vector in rows.items() if document_of(name) != doc_id}
        if step % 4 == 3:
            live.delete([doc_id, "unknown"])
        else:
            passages = {
                passage_id(doc_id, n + 1): NEW[(9 * step + n) % 200] for n in range(rng.integers(1, 9))
            }
            live.upsert(table([*passages], step, passages=True), np.stack([*passages.values()]))
            rows |= passages
        assert delta or len(live) == len(rows)
        if step == 12:
            live.compact()
            assert live.layout.passages
    searcher.refresh()
    check(searcher, rows)
    check(SearcherWithDelta.over(live.folder) if delta else searcher, rows)
    for name in ("d3#1", "d3#4", "d19#1", "unknown#1"):
        assert (searcher.get(name) is None) == (name not in rows)
    live.close()


def test_the_next_write_deletes_the_remains_of_a_crash(live, monkeypatch):
    names = [passage_id("new", n + 1) for n in range(9)]
    live.upsert(table(names, passages=True), NEW[:9])

    def crash(rows):
        for passage in rows:  # only one shard has deleted its passages
            if live.shards[0].knows([passage])[0]:
                live.shards[0].delete([passage])
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "_delete", crash)
    with pytest.raises(KeyboardInterrupt):
        live.upsert(table(names[:1], 1, passages=True), NEW[:1])
    monkeypatch.undo()
    assert len(live._passages(["new"])) > 1
    live.upsert(table(names[:1], 1, passages=True), NEW[:1])
    assert live._passages(["new"]) == {"new#1"}
    live.close()


def test_rows_without_a_document_id_are_refused(live):
    with pytest.raises(DataError, match="with its id in document_id"):
        live.upsert(table(["new#1"]), NEW[:1])
    live.close()
