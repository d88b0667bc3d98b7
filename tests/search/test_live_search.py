"""A live index, and a large index with its delta, are searched like an index of the final documents."""

from collections.abc import Iterator
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
    some_terms,
    write,
)
from live_shards import NLIST, index, table
from scalingnote.core.errors import ArtifactError, ConfigError, DataError, SearchError
from scalingnote.core.parts import map_here
from scalingnote.index import filters, hybrid
from scalingnote.index.config import Flat, LiveConfig
from scalingnote.index.live import compaction, versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search.live_searcher import Delta, LiveSearcher, OverriddenSearcher, SearcherWithDelta
from scalingnote.search.searcher import Searcher, concatenate, rank, with_documents
from scalingnote.storage.artifact import Artifact

COUNT, K, STRONGEST = 60, 9, 4
BASE = first_documents(COUNT)


def _built(uri: str, documents: dict[str, Document], *, shards: int = 1) -> Artifact:
    return built_of(uri, documents, shards=shards, strongest=STRONGEST)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return _built(f"{tmp_path_factory.mktemp('built')}/index", BASE, shards=3)


@pytest.mark.parametrize("delta", [False, True])
@settings(max_examples=7)
@given(history=HISTORIES)
def test_any_history_is_searched_like_a_new_index(
    built: Artifact, tmp_path_factory: pytest.TempPathFactory, delta: bool, history: list
) -> None:
    folder = tmp_path_factory.mktemp("live")
    live = LiveIndex(folder / "live", built.uri, delta=delta)
    before = SearcherWithDelta.over(live.folder) if delta else None
    live, truth = play(history, live, BASE)
    new_index = Searcher.open(_built(f"{folder}/anew", truth).uri)
    searcher = SearcherWithDelta.over(live.folder) if delta else LiveSearcher(live)
    agree(searcher, new_index, truth)
    if not delta:
        facets = [filters.facets(each.documents(), each.fields, most=1000) for each in (searcher, new_index)]
        assert facets[0] == facets[1]
    elif versions.listing(live.folder)[0].number > 0:
        with pytest.raises(ArtifactError, match="adopt the current index version"):
            before.refresh()  # the log keeps only what the listed versions need
    else:
        before.refresh()
        agree(before, new_index, truth)  # it keeps its version, even if another is current
    live.close()


def test_terms_are_optional_and_bad_terms_reject_a_row(built: Artifact, tmp_path: Path) -> None:
    live = LiveIndex(tmp_path / "live", built.uri)
    documents_with_terms = {f"n{i}": (NEW[i], {3: 1.0, 5: 2.0}) for i in range(4)}
    documents = documents_of(documents_with_terms)
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
    agree(LiveSearcher(live), Searcher.open(_built(f"{tmp_path}/anew", truth).uri), truth)
    for nprobe in (0, -1):
        with pytest.raises(SearchError, match=f"nprobe is {nprobe}"):
            LiveSearcher(live).search(PROBES, k=3, nprobe=nprobe)
    with pytest.raises(DataError, match="no column 'impacts'"):
        live.upsert(documents.drop_columns("impacts"), NEW[:4])
    plain = LiveIndex(tmp_path / "plain", index(f"{tmp_path}/plain-index", [{"d0": NEW[0]}]).uri)
    plain.upsert(documents, NEW[:4])  # other columns are left out
    assert len(plain) == 5
    with pytest.raises(SearchError, match="this index has no terms"):
        LiveSearcher(plain).search(PROBES, TERMS, k=3)


def test_an_exact_hybrid_search_misses_nothing(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few candidates of either kind, so that terms do not find documents that unscanned lists hide.
    monkeypatch.setattr(hybrid, "CANDIDATES_PER_SCORE", 5)
    for searcher in (Searcher.open(built.uri), LiveSearcher(LiveIndex(tmp_path / "live", built.uri))):

        def scores(searcher: Searcher | LiveSearcher = searcher, **knobs: Any) -> list[list[float]]:
            answers = searcher.find(PROBES, terms=TERMS, k=5, **knobs)
            return [sorted(answer.dense.tolist()) for answer in answers]

        assert scores(nprobe=1, exact=True) == scores(nprobe=NLIST) != scores(nprobe=1)


def test_an_exact_index_gives_identical_answers(tmp_path: Path) -> None:
    """The index is flat; two groups of shards, one of them mapped, and a delta have separate searchers."""
    base = built_of(f"{tmp_path}/index", BASE, shards=3, family=Flat())
    live = LiveIndex(tmp_path / "live", base.uri, delta=True)
    write(live, {f"d{n}": (NEW[n], some_terms(n + 100)) for n in range(0, 90, 2)})
    live.delete([f"d{n}" for n in range(0, 90, 5)])
    truth = dict(BASE) | {f"d{n}": (NEW[n], some_terms(n + 100)) for n in range(0, 90, 2)}
    truth = {name: document for name, document in truth.items() if int(name[1:]) % 5}
    new_index = Searcher.open(built_of(f"{tmp_path}/anew", truth, shards=1, family=Flat()).uri)
    delta, groups = Delta(live.folder, versions.current(live.folder)), []
    for shards, mapped in (([0], False), ([1, 2], True)):
        group = OverriddenSearcher.open(base.uri, shards=shards, mapped=mapped)
        group.follow(versions.log_folder(live.folder, 0), after=0)
        groups.append(group)
    store = Searcher.open(base.uri).store
    for terms in (None, TERMS):
        moment = delta.now()
        answers_of_parts = [
            each.find(PROBES, terms, k=K) for each in (*(g.at(moment.record) for g in groups), moment)
        ]
        expected = new_index.search(PROBES, terms, k=K)
        for answers, hits in zip(zip(*answers_of_parts, strict=True), expected, strict=True):
            candidates = concatenate(answers)
            assert candidates.searched == 3  # the delta does not count as a shard
            best = with_documents(rank(candidates, k=K, layout=groups[0].layout), store)
            assert [hit.doc_id for hit in best.hits()] == [hit.doc_id for hit in hits]
            assert best.scores == [hit.score for hit in hits]
    live.close()


def test_all_parts_answer_as_of_one_record_of_the_log(built: Artifact, tmp_path: Path) -> None:
    live = LiveIndex(tmp_path / "live", built.uri, delta=True)
    log = versions.log_folder(live.folder, 0)
    ahead, behind = (OverriddenSearcher.open(built.uri) for _ in range(2))
    for each in (ahead, behind):
        each.follow(log, after=0)
    delta = Delta(live.folder, versions.current(live.folder))
    truths, moments = [dict(BASE)], [delta.now()]
    for step in range(6):
        writes = {f"d{n}": (NEW[10 * step + n % 10], some_terms(n)) for n in range(step, 60, 7)}
        write(live, writes)
        live.delete([f"d{step}"])
        truths.append({n: d for n, d in (truths[-1] | writes).items() if n != f"d{step}"})
        delta.refresh()
        moments.append(delta.now())
    ahead.refresh()
    with pytest.raises(ArtifactError, match=r"was read up to record 0, not 12: refresh first"):
        behind.at(moments[-1].record)
    for truth, moment in zip(truths, moments, strict=True):  # rows of an earlier moment do not change
        new_index = Searcher.open(_built(f"{tmp_path}/{moment.record}", truth).uri)
        pair = ahead.at(moment.record).find(PROBES, k=100), moment.find(PROBES, k=100)
        for answers, hits in zip(zip(*pair, strict=True), new_index.search(PROBES, k=100), strict=True):
            best = rank(concatenate(answers), k=100, layout=ahead.layout)
            assert [hit.doc_id for hit in with_documents(best, ahead.store).hits()] == [
                h.doc_id for h in hits
            ]
    live.close()


def test_a_folder_keeps_its_kind(built: Artifact, tmp_path: Path) -> None:
    LiveIndex(tmp_path / "delta", built.uri, delta=True).close()
    LiveIndex(tmp_path / "whole", built.uri).close()
    with pytest.raises(ConfigError, match=r"created with a delta, .* set serve\.live\.delta to true"):
        LiveIndex(tmp_path / "delta", built.uri, delta=False)
    with pytest.raises(ConfigError, match=r"created with no delta, .* set serve\.live\.delta to false"):
        LiveIndex(tmp_path / "whole", built.uri, delta=True)
    LiveIndex(tmp_path / "delta").close()  # without an argument, the folder decides


def test_a_delta_is_folded_at_a_share_of_the_large_index(built: Artifact, tmp_path: Path) -> None:
    live = LiveIndex(tmp_path / "live", built.uri, delta=True, config=LiveConfig(compact_at=0.5))
    write(live, {f"n{n}": (NEW[n], {}) for n in range(29)})
    assert live._compaction is None
    write(live, {"n29": (NEW[29], {})})
    assert live._compaction is not None
    live._compaction.result()
    assert (live.version, len(live)) == (1, 0)
    assert versions.current(live.folder).documents == COUNT + 30
    live.close()


def test_a_killed_fold_resumes_with_unfinished_shards(built: Artifact, tmp_path: Path) -> None:
    def killed(stage: Any, parts: Any) -> Iterator[Any]:
        yield next(iter(map_here(stage, parts)))
        raise KeyboardInterrupt

    live = LiveIndex(tmp_path / "live", built.uri, delta=True)
    truth = dict(BASE)
    for step in range(2):
        writes = {f"d{n}": (NEW[40 * step + n], some_terms(n)) for n in range(step, 80, 9)}
        write(live, writes)
        truth |= writes
        if not step:
            with pytest.raises(KeyboardInterrupt):
                compaction.compact(live.folder, each=killed)
    assert versions.current(live.folder).number == 0
    first = tmp_path / "live/versions/00001/shard-00000/lists.faiss"
    before = first.stat().st_mtime_ns
    live.compact()
    assert (live.version, versions.current(live.folder).included) == (
        1,
        (1,),
    )  # the log up to the start of the fold
    assert first.stat().st_mtime_ns == before
    new_index = Searcher.open(_built(f"{tmp_path}/anew", truth).uri)
    agree(SearcherWithDelta.over(live.folder), new_index, truth)
    assert live.compact() is not None
    assert live.compact() is None  # there are no new writes
    assert len(live) == 0
    live.close()
