"""A large index and the delta beside it are searched as one index of the final documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from live_histories import (
    HISTORIES,
    NEW,
    PROBES,
    TERMS,
    agree,
    built_of,
    first_documents,
    play,
    some_terms,
    write,
)
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.parts import map_here
from scalingnote.index.config import Flat, LiveConfig
from scalingnote.index.hybrid import Joining
from scalingnote.index.live import compaction, versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search.live_searcher import Delta, OverriddenSearcher, SearcherWithDelta
from scalingnote.search.searcher import Searcher, concatenate, rank, with_documents
from scalingnote.storage.artifact import Artifact

COUNT, K = 60, 9
BASE = first_documents(COUNT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built_of(f"{tmp_path_factory.mktemp('built')}/index", BASE, shards=3)


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
        agree(searcher, anew, truth)
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
    anew = Searcher.open(built_of(f"{tmp_path}/anew", truth, shards=1).uri)
    agree(SearcherWithDelta.over(live.folder), anew, truth)
    assert live.compact() is not None
    assert live.compact() is None  # nothing was written since
    assert len(live) == 0
    live.close()
