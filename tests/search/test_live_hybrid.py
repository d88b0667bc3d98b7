"""Embeddings and terms of documents that are written and deleted while they are searched."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings

from live_histories import (
    HISTORIES,
    NEW,
    PROBES,
    TERMS,
    Document,
    agree,
    built_of,
    documents_of,
    first_documents,
    play,
)
from live_shards import DIM, NLIST, index, table
from scalingnote.core.errors import DataError, SearchError
from scalingnote.index import filters
from scalingnote.index.hybrid import Joining
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search.live_searcher import LiveSearcher
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

STRONGEST, MATRIX, BASE = 4, vectors(50, DIM), first_documents(50)


def _built(uri: str, documents: dict[str, Document], *, shards: int) -> Artifact:
    return built_of(uri, documents, shards=shards, strongest=STRONGEST)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return _built(f"{tmp_path_factory.mktemp('built')}/index", BASE, shards=2)


def _agree(live: LiveIndex, truth: dict[str, Document], uri: str) -> None:
    anew, here = Searcher.open(_built(uri, truth, shards=1).uri), LiveSearcher(live)
    facets = [filters.facets(each.documents(), each.fields, most=1000) for each in (here, anew)]
    assert facets[0] == facets[1]
    agree(here, anew, truth)


@settings(max_examples=8)
@given(HISTORIES)
def test_any_history_is_searched_like_an_index_built_anew(
    built: Artifact, tmp_path_factory: pytest.TempPathFactory, history: list
) -> None:
    folder = tmp_path_factory.mktemp("live")
    live, truth = play(history, LiveIndex(folder / "live", built.uri), BASE)
    _agree(live, truth, f"{folder}/anew")
    live.close()


def test_terms_are_optional_and_bad_ones_set_their_row_aside(built: Artifact, tmp_path: Path) -> None:
    live = LiveIndex(tmp_path / "live", built.uri)
    written = {f"n{i}": (NEW[i], {3: 1.0, 5: 2.0}) for i in range(4)}
    documents = documents_of(written)
    wrong = [None, [5, 3], [3, 5], [3]]
    documents = documents.set_column(
        documents.column_names.index("terms"), "terms", pa.array(wrong, pa.list_(pa.int32()))
    )
    documents = documents.set_column(
        documents.column_names.index("impacts"),
        "impacts",
        pa.array([None, [1.0, 2.0], [1.0, float("nan")], [1.0]], pa.list_(pa.float32())),
    )
    answers = live.upsert(documents, NEW[:4])
    rejected = sorted((row["row"], row["reason"]) for each in answers.values() for row in each.rejected)
    assert [name for name, _ in rejected] == ["n1", "n2"]
    assert "has term 3 with impact 2.0: terms must be ascending" in rejected[0][1]
    live.upsert(table(["n9"]), NEW[9:10])
    truth = dict(BASE) | {"n0": (NEW[0], {}), "n3": (NEW[3], {3: 1.0}), "n9": (NEW[9], {})}
    _agree(live, truth, f"{tmp_path}/anew")
    for nprobe in (0, -1):
        with pytest.raises(SearchError, match=f"nprobe is {nprobe}"):
            LiveSearcher(live).search(PROBES, k=3, nprobe=nprobe)
    with pytest.raises(DataError, match="no column 'impacts'"):
        live.upsert(documents.drop_columns("impacts"), NEW[:4])
    plain = LiveIndex(tmp_path / "plain", index(f"{tmp_path}/plain-index", [{"d0": MATRIX[0]}]).uri)
    plain.upsert(documents, NEW[:4])  # further columns are left out
    assert len(plain) == 5
    with pytest.raises(SearchError, match="this index has no terms"):
        LiveSearcher(plain).search(PROBES, TERMS, k=3)


def test_an_exact_hybrid_search_misses_nothing(built: Artifact, tmp_path: Path) -> None:
    for searcher in (Searcher.open(built.uri), LiveSearcher(LiveIndex(tmp_path / "live", built.uri))):

        def scores(searcher: Searcher | LiveSearcher = searcher, **knobs: Any) -> list[list[float]]:
            # Few of either kind: whom a list hides, terms do not find either.
            found = searcher.find(PROBES, terms=TERMS, k=5, joining=Joining(candidates=5), **knobs)
            return [sorted(answer.dense.tolist()) for answer in found]

        assert scores(nprobe=1, exact=True) == scores(nprobe=NLIST) != scores(nprobe=1)
