"""The service with slow, dead or lost searchers and encoders: answers may be partial, but never late."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.core.errors import ConfigError
from scalingnote.evaluate.experiment.config import Arm as Share
from scalingnote.evaluate.experiment.config import TrafficSplit
from scalingnote.index.shard import SHARD_DOCUMENTS, IndexLayout
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve.access import RefusedError
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.messages import SearchRequest, SimilarRequest
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import RequestObserver, RequestRecord
from scalingnote.serve.versions import VersionContent, Versions

# The query selects the behaviour of the fakes. It is passed to them in the embedding.
BEHAVIOURS = ["all well", "one slow", "one dead", "all dead", "encoder slow", "encoder dead"]
SLOW_S = 120.0
METRICS = ("observe_request", "observe_search")
LAYOUT = IndexLayout(
    dim=1,
    documents=20,
    shards=2,
    family="flat",
    refine="flat",
    nlist=1,
    nprobe=1,
    refine_factor=1,
    recall=None,
    filters=("topic",),
)
LAYOUTS = {"v1": LAYOUT, "wide": replace(LAYOUT, dim=3), "three shards": replace(LAYOUT, shards=3)}


class Encoder:
    async def encode(self, query: str, user_id: str | None) -> Query:
        if query == "encoder slow":
            await asyncio.sleep(SLOW_S)
        if query == "encoder dead":
            raise OSError("the table is gone")
        return Query(np.float32([[BEHAVIOURS.index(query)]]), personalised=user_id == "known")

    async def ping(self) -> bool:
        return True


class Shard:
    """Ten documents. Shard s has the scores s, s+2, s+4, ..., so that the merged results interleave."""

    def __init__(self, shard: int) -> None:
        self._shard = shard

    async def search(self, query: Query) -> Candidates:
        behaviour = BEHAVIOURS[int(query.embedding[0, 0])]
        if behaviour == "one slow" and self._shard == 1:
            await asyncio.sleep(SLOW_S)
        if behaviour == "all dead" or (behaviour == "one dead" and self._shard == 1):
            raise OSError("the disk is gone")
        rows = np.arange(10)[::-1][: query.k]
        rows = rows[::2] if query.exact else rows
        documents = [{name: f"{name} {self._shard}/{row}" for name in SHARD_DOCUMENTS.names} for row in rows]
        ids, shards = 2 * rows + self._shard, np.full(len(rows), self._shard)
        return Candidates(ids, shards, np.float32(ids), None, documents, searched=1, version=query.version)

    async def describe(self, version: str) -> VersionContent:
        return VersionContent(
            LAYOUTS[version],
            1,
            10,
            pa.schema([("topic", pa.string())]),
            {"topic": {"x": 10, f"{self._shard}": 1}},
        )

    async def load(self, version: Version) -> bool:
        return True

    async def vector(self, version: str, doc_id: str) -> np.ndarray:
        if self._shard == 1:
            raise OSError("the disk is gone")
        return np.zeros((0, 1), np.float32)

    async def ping(self, version: str) -> int:
        if self._shard == 1:
            await asyncio.sleep(SLOW_S)
        return 1


class Reranker:
    async def score(self, query: str, texts: list[str]) -> list[float]:
        if query == "one slow":
            await asyncio.sleep(SLOW_S)
        return [-int(text.rsplit("/", 1)[1]) for text in texts]


@pytest.fixture(scope="module")
def service() -> Service:
    config = ServeConfig(deadline_s=0.5, rerank="a fake")
    version = Version("v1", "nowhere", 20, 1, "")
    groups = [LocalHandle(Shard(number)) for number in range(2)]
    arms = [ServedArm("default", LocalHandle(Encoder()), "fake", personalised=True)]
    gateway = Service(Deployed(arms, Catalog(version), groups, reranker=LocalHandle(Reranker())), config)
    asyncio.run(gateway.versions.start())
    return gateway


def search(service: Service, query: str, **options: Any) -> Any:
    request = SearchRequest(query=query, **options)
    return asyncio.run(service.search(request, RequestRecord("r1")))


def test_results_of_all_groups_are_merged_best_first(service):
    answer = search(service, "all well", k=5)
    assert [hit["doc_id"] for hit in answer["results"]] == [
        f"doc_id {at}" for at in ("1/9", "0/9", "1/8", "0/8", "1/7")
    ]
    assert [hit["score"] for hit in answer["results"]] == [19.0, 18.0, 17.0, 16.0, 15.0]
    assert (answer["shards"], answer["shards_answered"]) == (2, 2)
    took = answer["timings_ms"]
    assert took["total"] >= took["encode"] + took["search"] + took["rerank"] - 0.01 > 0


@pytest.mark.parametrize("behaviour", ["one slow", "one dead"])
def test_a_slow_or_dead_shard_is_left_out_of_the_answer(service, behaviour):
    answer = search(service, behaviour, k=3)
    assert [hit["doc_id"] for hit in answer["results"]] == ["doc_id 0/9", "doc_id 0/8", "doc_id 0/7"]
    assert (answer["shards"], answer["shards_answered"]) == (2, 1)
    assert answer["timings_ms"]["total"] < 1000 * SLOW_S


@pytest.mark.parametrize("behaviour", ["all dead", "encoder slow", "encoder dead"])
def test_without_any_answer_the_client_gets_503(service, behaviour):
    with pytest.raises(RefusedError) as refused:
        search(service, behaviour)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)


def test_a_document_of_a_silent_shard_is_not_a_404(service):
    with pytest.raises(RefusedError, match="does not answer") as refused:
        asyncio.run(service.similar(SimilarRequest(doc_id="x"), RequestRecord("r1")))
    assert refused.value.status == 503


def test_only_a_known_user_gets_a_personal_answer(service):
    assert search(service, "all well", user_id="known")["personalised"]
    assert not search(service, "all well", user_id="a stranger")["personalised"]
    assert not search(service, "all well")["personalised"]


def test_reranking_sorts_only_the_best_results(service):
    answer = search(service, "all well", k=5, rerank=4, explain=True)
    ranked = [(hit["doc_id"][-3:], hit["explain"]["rerank"]) for hit in answer["results"]]
    assert ranked == [("1/8", -8.0), ("0/8", -8.0), ("1/9", -9.0), ("0/9", -9.0), ("1/7", None)]
    wide = search(service, "all well", k=2, rerank=8)
    assert [hit["doc_id"][-3:] for hit in wide["results"]] == ["1/6", "0/6"]


def test_without_a_reranker_in_time_results_are_unchanged(service):
    answer = search(service, "one slow", k=3, rerank=3, explain=True)
    assert [hit["doc_id"] for hit in answer["results"]] == ["doc_id 0/9", "doc_id 0/8", "doc_id 0/7"]
    assert all(hit["explain"]["rerank"] is None for hit in answer["results"])


def test_reranking_too_many_results_is_refused(service):
    with pytest.raises(RefusedError, match="up to 100"):
        search(service, "all well", rerank=101)


def test_facets_of_all_groups_are_added(service):
    facets = service.info().facets["topic"]
    assert [(facet.value, facet.count) for facet in facets] == [("x", 20), ("0", 1), ("1", 1)]


def test_a_canary_measures_recall_by_an_exact_search(service, monkeypatch):
    recalls: list[float] = []
    monkeypatch.setattr(service, "_on_recall", recalls.append)
    monkeypatch.setattr(service, "_config", service._config.model_copy(update={"canary": 1.0}))
    request = SearchRequest(query="all well", k=4)

    async def ask() -> None:
        await service.search(request, RequestRecord("r1"))
        await service._canary

    asyncio.run(ask())
    assert recalls == [0.5]  # the exact search of these fakes finds every other document


class Whole(Shard):
    """A searcher of all shards of a version."""

    async def search(self, query: Query) -> Candidates:
        return replace(await super().search(query), searched=LAYOUTS[query.version].shards)

    async def describe(self, version: str) -> VersionContent:
        return replace(await super().describe(version), held=LAYOUTS[version].shards)

    async def ping(self, version: str) -> int:
        return LAYOUTS[version].shards


def test_answers_have_the_number_of_shards_of_the_version(tmp_path: Path):
    first, more = (Version(name, f"runs/{name}", 20, 1, "") for name in ("v1", "three shards"))
    searchers = [LocalHandle(Whole(0))]
    arms = [ServedArm("default", LocalHandle(Encoder()), "fake", False)]
    gateway = Service(Deployed(arms, Catalog(first, str(tmp_path)), searchers), ServeConfig())

    def shard_counts() -> set[tuple[int, int]]:
        answer, health = search(gateway, "all well"), asyncio.run(gateway.health())
        assert gateway.info().shards == answer["shards"]
        return {(answer["shards"], answer["shards_answered"]), (health.shards, health.shards_answered)}

    asyncio.run(gateway.versions.start())
    assert shard_counts() == {(2, 2)}
    asyncio.run(gateway.versions.activate(more))
    assert shard_counts() == {(3, 3)}


def test_health_counts_the_shards_that_answer(service):
    health = asyncio.run(service.health())
    assert (health.status, health.encoder_answers, health.shards_answered) == ("degraded", True, 1)


class Pinged(Shard):
    def __init__(self) -> None:
        super().__init__(0)

    async def describe(self, version: str) -> VersionContent:
        return replace(await super().describe(version), held=2)

    async def ping(self, *version: str) -> int:
        return 2


class Silent(Pinged):
    async def ping(self, *version: str) -> int:
        raise OSError("no answer")


@pytest.mark.parametrize(
    ("control", "treated", "monitored", "shard", "status"),
    [
        (Pinged, Pinged, Pinged, Pinged, "ok"),
        (Pinged, Silent, Pinged, Pinged, "degraded"),
        (Pinged, Pinged, Silent, Pinged, "degraded"),
        (Silent, Silent, Pinged, Pinged, "down"),
        (Pinged, Pinged, Pinged, Silent, "down"),
    ],
)
def test_the_service_is_down_when_no_query_can_be_answered(control, treated, monitored, shard, status):
    shares = {"control": 0.5, "treated": 0.5, "monitored": 0.0}
    split = TrafficSplit(arms=tuple(Share(name=name, share=share) for name, share in shares.items()))
    encoders = dict(zip(shares, (control, treated, monitored), strict=True))
    arms = [ServedArm(name, LocalHandle(encoder()), "fake", False) for name, encoder in encoders.items()]
    catalog = Catalog(Version("v1", "nowhere", 20, 1, ""))
    gateway = Service(Deployed(arms, catalog, [LocalHandle(shard())]), ServeConfig(split=split))
    asyncio.run(gateway.versions.start())
    health = asyncio.run(gateway.health())
    assert (health.status, health.encoder_answers) == (status, Silent not in encoders.values())


def test_a_request_with_an_arm_is_not_in_the_experiment(service):
    lines: list[dict[str, Any]] = []
    metrics = SimpleNamespace(**dict.fromkeys(METRICS, lambda *_: None))
    observer = RequestObserver(metrics, SimpleNamespace(append=lines.append))
    for arm in (None, "default"):
        record = RequestRecord("r1")
        asyncio.run(service.search(SearchRequest(query="all well", user_id="a", arm=arm), record))
        observer("/search", record, 200, 0.01)
    by_the_split, with_arm = lines
    assert (by_the_split["arm"], by_the_split["unit"][:2]) == ("default", "u:")
    assert (with_arm["arm"], with_arm["unit"]) == ("default", None)
    assert by_the_split["doc_ids"] == with_arm["doc_ids"] != []


def test_a_vector_must_have_the_dimension_of_its_index():
    first, wide = (Version(name, "nowhere", 20, LAYOUTS[name].dim, "") for name in ("v1", "wide"))
    groups = [LocalHandle(Shard(number)) for number in range(2)]
    arms = [
        ServedArm(name, LocalHandle(Encoder()), "fake", False, version)
        for name, version in (("a", None), ("b", "wide"))
    ]
    gateway = Service(Deployed(arms, Catalog(first, pinned=(wide,)), groups), ServeConfig())
    asyncio.run(gateway.versions.start())
    for arm, dim in (("a", 1), ("b", 3)):
        request = SearchRequest(vector=[0.1] * dim, arm=arm, k=1)
        answer = asyncio.run(gateway.search(request, RequestRecord("r1")))
        assert answer["index_version"] == ("wide" if arm == "b" else "v1")
        request = SearchRequest(vector=[0.1] * 2, arm=arm)
        with pytest.raises(RefusedError, match=f"2 numbers, the index has embeddings of dim {dim}"):
            asyncio.run(gateway.search(request, RequestRecord("r1")))


def test_an_index_with_more_shards_than_searchers_is_refused(tmp_path: Path):
    first, more = (Version(name, f"runs/{name}", 20, 1, "") for name in ("v1", "three shards"))
    groups = [LocalHandle(Shard(number)) for number in range(2)]
    versions = Versions(Catalog(first, str(tmp_path)), groups)

    async def change() -> None:
        await versions.start()
        with pytest.raises(ConfigError, match=r"runs/three shards has 3 shards.* hold 2: .*index\.shards=2"):
            await versions.activate(more)

    asyncio.run(change())
    assert versions.active == Catalog(first, str(tmp_path)).read()[0] == first
    with pytest.raises(ConfigError, match="has 3 shards"):
        asyncio.run(Versions(Catalog(more), groups).start())
