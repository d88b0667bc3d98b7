"""A large index and the delta beside it are searched as one index of the final documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from live_histories import (
    HISTORIES,
    NEW,
    PROBES,
    TERMS,
    built_of,
    first_documents,
    play,
    some_terms,
    write,
)
from live_shards import DIM, index, table
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.parts import map_here
from scalingnote.index.config import Flat, LiveConfig
from scalingnote.index.hybrid import Joining
from scalingnote.index.live import compaction, versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search.live_searcher import Delta, OverriddenSearcher, SearcherWithDelta
from scalingnote.search.searcher import Searcher, concatenate, rank, with_documents
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import document_of, passage_id
from synthetic_corpus import vectors

COUNT, K = 60, 9
MATRIX, BASE = vectors(COUNT, DIM), first_documents(COUNT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built_of(f"{tmp_path_factory.mktemp('built')}/index", BASE, shards=3)


def agree(found: Searcher, expected: Searcher) -> None:
    """Results and scores are equal: by embeddings, by terms too, through filters, to the last document."""
    for where in (None, {"topic": [f"topic 0 of d{i}" for i in range(0, 90, 3)]}):
        for k in (1, K, 200):
            here, there = (each.search(PROBES, k=k, where=where) for each in (found, expected))
            for hits, wanted in zip(here, there, strict=True):
                assert [hit.document for hit in hits] == [hit.document for hit in wanted]
                assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in wanted], abs=1e-6)
        for joining in (Joining(), Joining(dense_weight=0.2, candidates=20)):
            knobs: dict[str, Any] = {"k": K, "joining": joining, "where": where}
            here, there = (each.search(PROBES, TERMS, **knobs) for each in (found, expected))
            for hits, wanted in zip(here, there, strict=True):
                np.testing.assert_allclose([h.score for h in hits], [w.score for w in wanted], atol=1e-6)
                last = wanted[-1].score + 1e-6 if wanted else 0  # of equal scores another may be the last
                assert {h.doc_id for h in hits if h.score > last} == {
                    w.doc_id for w in wanted if w.score > last
                }


@settings(max_examples=6)
@given(HISTORIES)
def test_any_history_is_searched_like_an_index_built_anew(
    built: Artifact, tmp_path_factory: pytest.TempPathFactory, history: list
) -> None:
    folder = tmp_path_factory.mktemp("live")
    live = LiveIndex(folder / "live", built.uri, delta=True)
    before = SearcherWithDelta.over(folder / "live")  # stays on its version, whatever becomes current
    live, truth = play(history, live, BASE)
    anew = Searcher.open(built_of(f"{folder}/anew", truth, shards=1).uri)
    for searcher in (before, SearcherWithDelta.over(folder / "live")):
        if searcher is before and versions.listing(live.folder)[0].number > 0:
            with pytest.raises(ArtifactError, match="adopt the current index version"):
                searcher.refresh()  # the log keeps only what the listed versions need
            searcher.close()
            continue
        searcher.refresh()
        agree(searcher, anew)
        for name in ("d7", "d59", "d80", "nothing"):
            assert searcher.get(name) == anew.get(name)
            vector, wanted = searcher.vector(name), anew.vector(name)
            assert (vector is None) == (wanted is None)
            assert vector is None or np.allclose(vector, wanted, atol=1e-6)
        searcher.close()
    live.close()


def test_an_exact_index_has_the_very_same_answers(tmp_path: Path) -> None:
    """Of a flat index of vectors and documents in three groups, one of them mapped, each in a searcher."""
    base = built_of(f"{tmp_path}/index", BASE, shards=3, family=Flat())
    live = LiveIndex(tmp_path / "live", base.uri, delta=True)
    write(live, {f"d{n}": (NEW[n], some_terms(n + 100)) for n in range(0, 90, 2)})
    live.delete([f"d{n}" for n in range(0, 90, 5)])
    truth = dict(BASE) | {f"d{n}": (NEW[n], some_terms(n + 100)) for n in range(0, 90, 2)}
    truth = {name: document for name, document in truth.items() if int(name[1:]) % 5}
    anew = Searcher.open(built_of(f"{tmp_path}/anew", truth, shards=1, family=Flat()).uri)
    delta, groups = Delta(live.folder, versions.current(live.folder)), []
    for shards, mapped in (([0], False), ([1, 2], True)):
        group = OverriddenSearcher.open(base.uri, shards=shards, mapped=mapped)
        group.follow(versions.log_folder(live.folder, 0), after=0)
        groups.append(group)
    store = Searcher.open(base.uri).store
    for terms in (None, TERMS):
        moment = delta.now()
        found = [each.find(PROBES, terms, k=K) for each in (*(g.at(moment.record) for g in groups), moment)]
        wanted = anew.search(PROBES, terms, k=K)
        for answers, hits in zip(zip(*found, strict=True), wanted, strict=True):
            candidates = concatenate(answers)
            assert candidates.searched == 3  # the delta is no shard of the index
            best = with_documents(rank(candidates, k=K, joining=Joining(), layout=groups[0].layout), store)
            assert [hit.doc_id for hit in best.hits()] == [hit.doc_id for hit in hits]
            assert best.scores == [hit.score for hit in hits]
    live.close()


def test_parts_that_have_read_more_or_less_of_the_log_answer_as_of_one_record(
    built: Artifact, tmp_path: Path
) -> None:
    live = LiveIndex(tmp_path / "live", built.uri, delta=True)
    log = versions.log_folder(live.folder, 0)
    ahead, behind = (OverriddenSearcher.open(built.uri) for _ in range(2))
    for each in (ahead, behind):
        each.follow(log, after=0)
    delta = Delta(live.folder, versions.current(live.folder))
    truths, moments = [dict(BASE)], [delta.now()]
    for step in range(6):
        written = {f"d{n}": (NEW[10 * step + n % 10], some_terms(n)) for n in range(step, 60, 7)}
        write(live, written)
        live.delete([f"d{step}"])
        truths.append({n: d for n, d in (truths[-1] | written).items() if n != f"d{step}"})
        delta.refresh()
        moments.append(delta.now())
    ahead.refresh()
    with pytest.raises(ArtifactError, match=r"was read up to record 0, not 12: refresh first"):
        behind.at(moments[-1].record)
    for truth, moment in zip(truths, moments, strict=True):  # the delta's own rows stay as they were
        anew = Searcher.open(built_of(f"{tmp_path}/{moment.record}", truth, shards=1).uri)
        pair = ahead.at(moment.record).find(PROBES, k=100), moment.find(PROBES, k=100)
        for answers, hits in zip(zip(*pair, strict=True), anew.search(PROBES, k=100), strict=True):
            best = rank(concatenate(answers), k=100, joining=Joining(), layout=ahead.layout)
            assert [hit.doc_id for hit in with_documents(best, ahead.store).hits()] == [
                h.doc_id for h in hits
            ]
    live.close()


LENGTHS = {f"d{n}": 1 + n % 7 for n in range(15)}
PASSAGES = [passage_id(doc_id, n + 1) for doc_id, length in LENGTHS.items() for n in range(length)]


def test_passages_of_overridden_documents_are_hidden_in_every_shard(tmp_path: Path) -> None:
    """Random writes and deletes beside a dictionary; the border of the shards lies within a document."""
    rows = dict(zip(PASSAGES, MATRIX, strict=False))
    names = list(rows)
    base = index(
        f"{tmp_path}/index",
        [{name: rows[name] for name in part} for part in (names[:24], names[24:])],
        passages=True,
    )
    live = LiveIndex(tmp_path / "live", base.uri, delta=True)
    rng, searcher = np.random.default_rng(0), SearcherWithDelta.over(tmp_path / "live")
    for step in range(25):
        doc_id = f"d{rng.integers(20)}"
        rows = {name: vector for name, vector in rows.items() if document_of(name) != doc_id}
        if step % 4 == 3:
            live.delete([doc_id, "unknown"])
        else:
            own = {passage_id(doc_id, n + 1): NEW[9 * step + n] for n in range(rng.integers(1, 9))}
            live.upsert(table([*own], step, passages=True), np.stack([*own.values()]))
            rows |= own
        if step == 12:
            live.compact()
    searcher.refresh()
    anew = Searcher.open(index(f"{tmp_path}/anew", [rows], passages=True).uri)
    for found in (searcher, SearcherWithDelta.over(tmp_path / "live")):
        for k in (1, 4, 100):
            for hits, wanted in zip(found.search(PROBES, k=k), anew.search(PROBES, k=k), strict=True):
                assert [(h.doc_id, h.document["passage"]) for h in hits] == [
                    (w.doc_id, w.document["passage"]) for w in wanted
                ]
        for name in ("d3#1", "d3#4", "d19#1", "unknown#1"):
            assert (found.get(name) is None) == (name not in rows)
    live.close()


def test_a_folder_keeps_its_kind(built: Artifact, tmp_path: Path) -> None:
    LiveIndex(tmp_path / "delta", built.uri, delta=True).close()
    LiveIndex(tmp_path / "whole", built.uri).close()
    with pytest.raises(ConfigError, match=r"made with a delta .* set serve\.live\.delta to true"):
        LiveIndex(tmp_path / "delta", built.uri, delta=False)
    with pytest.raises(ConfigError, match=r"made with no delta .* set serve\.live\.delta to false"):
        LiveIndex(tmp_path / "whole", built.uri, delta=True)
    LiveIndex(tmp_path / "delta").close()  # without a word the folder decides


def test_a_delta_is_folded_once_it_is_a_share_of_the_large_index(built: Artifact, tmp_path: Path) -> None:
    live = LiveIndex(tmp_path / "live", built.uri, delta=True, config=LiveConfig(compact_at=0.5))
    write(live, {f"n{n}": (NEW[n], {}) for n in range(29)})
    assert live._compaction is None
    write(live, {"n29": (NEW[29], {})})
    assert live._compaction is not None
    live._compaction.result()
    assert (live.version, len(live)) == (1, 0)
    assert versions.current(live.folder).documents == COUNT + 30
    live.close()


def test_a_killed_fold_goes_on_with_the_shards_that_it_has_not_finished(
    built: Artifact, tmp_path: Path
) -> None:
    def killed(stage: Any, parts: Any) -> Iterator[Any]:
        yield next(iter(map_here(stage, parts)))
        raise KeyboardInterrupt

    live = LiveIndex(tmp_path / "live", built.uri, delta=True)
    truth = dict(BASE)
    for step in range(2):
        written = {f"d{n}": (NEW[40 * step + n], some_terms(n)) for n in range(step, 80, 9)}
        write(live, written)
        truth |= written
        if not step:
            with pytest.raises(KeyboardInterrupt):
                compaction.compact(live.folder, each=killed)
    assert versions.current(live.folder).number == 0
    first = tmp_path / "live/versions/00001/shard-00000/lists.faiss"
    before = first.stat().st_mtime_ns
    live.compact()
    assert (live.version, versions.current(live.folder).included) == (1, (1,))  # as when it began
    assert first.stat().st_mtime_ns == before
    agree(
        SearcherWithDelta.over(live.folder), Searcher.open(built_of(f"{tmp_path}/anew", truth, shards=1).uri)
    )
    assert live.compact() is not None
    assert live.compact() is None  # nothing was written since
    assert len(live) == 0
    live.close()
