"""A change of the model during requests: each answer is from one query tower and its own index."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_here import Client
from pair import student

from scalingnote.cli.main import main
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.run import migration, pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import AppArgs, ServeConfig
from scalingnote.search.searcher import Searcher
from scalingnote.serve import api, app, artifacts, cut_over, tower_versions
from scalingnote.serve.catalog import CATALOG_FILE, Catalog, PairedTowers, Version, towers_of
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.encoders import ArmEncoder
from scalingnote.serve.messages import SearchRequest
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import RequestRecord
from scalingnote.serve.tower_versions import TowerVersions
from scalingnote.storage.artifact import open_artifact
from two_models import WIDTH, restored

QUERIES = ["bakoli menura", "tavezo", "silime ko", "zoranu batako", "me nu ra"]


@pytest.fixture
def run_dir(compared: Path) -> Iterator[str]:
    """Yield this run; a test may change the version in it."""
    with restored(compared, without="serve") as folder:
        yield folder


@pytest.fixture
def both(run_dir: str) -> tuple[RunConfig, RunConfig]:
    state = migration.read(run_dir)
    return state.before, state.after


def service(run_dir: str, **knobs: Any) -> Service:
    """Build the service of a gateway like the application, with all parts in this process."""
    served = artifacts.find(AppArgs(run_dir=run_dir, serve=ServeConfig.model_validate(knobs)))
    parts = Deployed(served.arms, served.catalog, name=served.name, similarity=served.similarity)
    if served.embeds_documents:
        parts = replace(parts, documents=LocalHandle(TowerVersions(served.catalog, "document")))
    return Service(app.load_own_parts(parts, served.config).for_gateway(), served.config)


def ask(served: Service, query: str) -> Any:
    """Return a coroutine that answers a search."""
    return served.search(SearchRequest(query=query, k=10), RequestRecord("r1"))


def expected(config: RunConfig) -> tuple[str, dict[str, list[str]]]:
    """Return the name of a run's version, and the results of its own tower in its own index."""
    index, tower = pipeline.locate(config, "index"), pipeline.locate(config, "dual_encoder")
    embeddings = QueryEncoder(tower.directory("query")).encode(QUERIES)
    hits = Searcher.open(index.uri).search(embeddings, k=10)
    return index.digest[:12], {q: [hit.doc_id for hit in one] for q, one in zip(QUERIES, hits, strict=True)}


def test_a_change_during_requests_mixes_no_pairs(run_dir, both):
    expected_ids = dict(map(expected, both))
    assert all(a != b for a, b in zip(*(ids.values() for ids in expected_ids.values()), strict=True))
    served, counts, stop = service(run_dir), Counter[str](), asyncio.Event()

    async def load() -> None:
        while not stop.is_set():
            for query in QUERIES:
                answer = await ask(served, query)
                right = [hit["doc_id"] for hit in answer["results"]] == expected_ids[answer["index_version"]][
                    query
                ]
                counts[answer["index_version"] if right else f"mixed: {query}"] += 1

    async def change() -> None:
        await served.versions.start()
        asking = [asyncio.create_task(load()) for _ in range(3)]
        for config in (both[1], both[0], both[1]):
            before = sum(counts.values())
            uri = pipeline.locate(config, "index").uri
            await served.versions.activate(await asyncio.to_thread(Version.with_towers, uri))
            while sum(counts.values()) < before + 20:
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*asking)

    asyncio.run(change())
    assert (
        counts.keys() == expected_ids.keys()
    )  # no answer mixes the tower of one version with the index of the other


def test_a_request_ends_with_the_pair_that_it_began_with(run_dir, both, monkeypatch):
    (old, of_old), (new, of_new) = map(expected, both)
    encode, waiting, go_on = ArmEncoder.encode, asyncio.Event(), asyncio.Event()

    async def wait(self: ArmEncoder, query: str, user_id: str | None = None) -> Any:
        if query == QUERIES[0] and not waiting.is_set():
            waiting.set()
            await go_on.wait()
        return await encode(self, query, user_id)

    monkeypatch.setattr(ArmEncoder, "encode", wait)
    served = service(run_dir, deadline_s=60)

    async def change() -> list[Any]:
        await served.versions.start()
        early = asyncio.create_task(ask(served, QUERIES[0]))
        await waiting.wait()
        uri = pipeline.locate(both[1], "index").uri
        await served.versions.activate(await asyncio.to_thread(Version.with_towers, uri))
        late = await ask(served, QUERIES[0])
        go_on.set()
        return [await early, late]

    answers = asyncio.run(change())
    assert [answer["index_version"] for answer in answers] == [old, new]
    assert [[hit["doc_id"] for hit in answer["results"]] for answer in answers] == [
        of_old[QUERIES[0]],
        of_new[QUERIES[0]],
    ]


def test_the_commands_change_a_running_service_and_back(run_dir, both, capsys):
    (old, of_old), (new, of_new) = map(expected, both)
    knobs = {"deployments": {"document_tower": {"num_replicas": 1}}}
    served = service(run_dir, **knobs)
    client = Client(api.build(served, ServeConfig.model_validate(knobs)))

    def state() -> tuple[Any, ...]:
        answer = client.search(query=QUERIES[0], k=10).json()
        widths = [
            len(
                client("POST", "/v1/embeddings", json={"model": name, "input": "bakoli"}).json()["data"][0][
                    "embedding"
                ]
            )
            for name in ("run", "run-document")
        ]
        widths.append(client("POST", "/encode", json={"queries": ["bakoli"]}).json()["dim"])
        widths.append(client("GET", "/info").json()["dim"])
        (active,) = [v for v in client("GET", "/admin/index").json()["versions"] if v["active"]]
        ids = [hit["doc_id"] for hit in answer["results"]]
        return answer["index_version"], ids, {*widths}, active["query_tower"]

    towers = [pipeline.locate(config, "dual_encoder").uri for config in both]
    first, other = (old, of_old[QUERIES[0]], {32}, towers[0]), (new, of_new[QUERIES[0]], {WIDTH}, towers[1])
    assert state() == first
    assert main(["migrate", "--run", run_dir, "--cut-over"]) == 0
    assert (
        f"active: {new}, {pipeline.locate(both[1], 'index').uri}\nbefore: {old}, " in capsys.readouterr().out
    )
    assert pipeline.load_run(run_dir) == both[1]  # for `search`, `ingest` and the next start
    assert state() == first
    client.wait(served.versions.follow())  # every gateway does this twice a second
    assert state() == other
    assert main(["migrate", "--run", run_dir, "--cut-over"]) == 0
    assert "active already" in capsys.readouterr().out
    assert main(["migrate", "--run", run_dir, "--roll-back"]) == 0
    client.wait(served.versions.follow())
    assert state() == first
    assert pipeline.load_run(run_dir) == both[0]
    answer = client("POST", "/admin/index/roll_back").json()
    assert (answer["active"], state()) == (new, other)
    # A vector of the other model does not fit.
    refused = client.search(vector=[0.1] * 32)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "vector")
    client.close()


def test_a_service_starts_with_the_pair_of_the_catalog(run_dir, both):
    cut_over.cut_over(run_dir, ServeConfig())
    pipeline.make_current(both[0])  # like a command that is killed between both files
    (new, of_new), served = expected(both[1]), service(run_dir)
    asyncio.run(served.versions.start())
    answer = asyncio.run(ask(served, QUERIES[1]))
    assert answer["index_version"] == new
    assert [hit["doc_id"] for hit in answer["results"]] == of_new[QUERIES[1]]
    cut_over.cut_over(run_dir, ServeConfig())  # the same command again
    assert pipeline.load_run(run_dir) == both[1]


def test_a_refused_change_of_the_model_changes_nothing(run_dir, both, tmp_path):
    file = Path(run_dir) / migration.MIGRATION_FILE
    state = migration.read(run_dir)

    def refused(match: str, **serve: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            cut_over.cut_over(run_dir, ServeConfig.model_validate(serve))
        assert not (Path(run_dir) / "serve" / CATALOG_FILE).exists()

    refused("does not receive writes for .*keep_documents", live={"folder": str(tmp_path / "live")})
    refused(r"escalation\.teacher is runs/old, of the previous model", escalation={"teacher": "runs/old"})
    tower = student(f"{tmp_path}/tower", dim=32)
    arms = [{"name": "own", "share": 1, "query_tower": tower.uri}]
    refused("the index has embeddings of dim 24, the query tower of 32: not a pair", split={"arms": arms})
    pipeline.make_current(both[0].model_copy(update={"rounds": 1, "nodes_wait_s": 1.0}))
    refused("is of another run than those that were compared")
    pipeline.make_current(both[0])
    migration._write(state.model_copy(update={"comparison": None}))
    refused("are not compared yet")
    file.unlink()
    refused("no other model was compared")


def test_the_number_of_shards_must_fit_the_searchers(both):
    served = [
        artifacts.of_run(config, ServeConfig(deployments={"gateway": {"num_replicas": 2}})) for config in both
    ]
    cut_over._require_same_shards(*served)
    more = SimpleNamespace(shards=range(3), gateway_searches=False)
    with pytest.raises(
        ConfigError, match=r"has 3 shards, the searchers of this service hold 2: .*index\.shards=2"
    ):
        cut_over._require_same_shards(served[0], more)


# --- towers of an index -----------------------------------------------------------------------------------


def test_towers_of_an_index_are_found_in_a_moved_run(both, tmp_path):
    before = both[0]
    index, tower = pipeline.locate(before, "index"), pipeline.locate(before, "dual_encoder")
    place = (tower.uri, "dual_encoder")
    assert towers_of(index) == PairedTowers(place, document=place)

    shutil.copytree(before.run_dir, tmp_path / "moved")
    moved_index = open_artifact(str(tmp_path / "moved" / "index" / index.uri.rsplit("/", 1)[1]), kind="index")
    parents = {
        kind: parent | {"uri": parent["uri"].replace(before.run_dir, "/gone")}
        for kind, parent in index.manifest.parents.items()
    }
    moved_index = replace(moved_index, manifest=replace(moved_index.manifest, parents=parents))
    towers = towers_of(moved_index)
    assert towers is not None
    assert towers.query[0] == str(tmp_path / "moved" / "adopt" / tower.uri.rsplit("/", 1)[1])
    shutil.rmtree(tmp_path / "moved" / "adopt")
    with pytest.raises(
        ArtifactError, match=r"made of the dual_encoder .*neither at /gone/adopt/.* nor at .*moved"
    ):
        towers_of(moved_index)
    # The service already has this tower, but not that of the other model.
    assert towers_of(moved_index, PairedTowers(place)) == PairedTowers(place)
    elsewhere = pipeline.locate(both[1], "dual_encoder")
    with pytest.raises(ArtifactError, match="made of the dual_encoder"):
        towers_of(moved_index, PairedTowers((elsewhere.uri, "dual_encoder")))


def test_an_index_of_a_student_records_its_teacher(both, tmp_path, query_tower):
    """Test lineages that no small run has, with parents set by hand."""
    index, dual_encoder = pipeline.locate(both[0], "index"), pipeline.locate(both[0], "dual_encoder")

    def index_with(**parents: Any) -> Any:
        more_parents = {kind: {"uri": one.uri, "digest": one.digest} for kind, one in parents.items()}
        embeddings = {"embeddings": index.manifest.parents["embeddings"]}
        return replace(index, manifest=replace(index.manifest, parents=embeddings | more_parents))

    towers = towers_of(index_with(student=query_tower))
    assert towers == PairedTowers(
        (query_tower.uri, "student"),
        teacher=(dual_encoder.uri, "dual_encoder"),
        document=(dual_encoder.uri, "dual_encoder"),
    )
    assert towers_of(index_with()) is None  # an index that was built without a tower


def test_a_catalog_of_an_earlier_release_gets_its_towers(tmp_path):
    towers = PairedTowers(("runs/tower", "student"), teacher=("runs/teacher", "dual_encoder"))
    first = Version("a", "runs/a", 10, 8, "", towers)
    (tmp_path / CATALOG_FILE).write_text(
        json.dumps({"versions": [{"name": "b", "uri": "runs/b", "documents": 10, "dim": 8, "created": ""}]})
    )
    catalog = Catalog(first, str(tmp_path))
    assert catalog.read()[0].towers == towers
    assert catalog.activate(Version("c", "runs/c", 10, 8, ""))[0].towers == towers
    other = Version("d", "runs/d", 10, 4, "", PairedTowers(("runs/other", "student")))
    assert catalog.activate(other)[0] == other  # of another width, with its own tower
    assert Catalog(first, str(tmp_path)).read() == (other, replace(first, name="c", uri="runs/c"))


def test_an_arm_with_its_own_tower_prevents_another_model(tmp_path):
    first = Version("a", "runs/a", 10, 8, "", PairedTowers(("runs/tower", "student")))
    catalog = Catalog(first, str(tmp_path), own_towers=("treated",))
    assert catalog.activate(replace(first, name="b"))[0].name == "b"
    other = replace(first, name="c", towers=PairedTowers(("runs/other", "student")))
    with pytest.raises(ConfigError, match="of another model than the query towers of the arms treated"):
        catalog.activate(other)
    assert catalog.read()[0].name == "b"


# --- towers that are held ---------------------------------------------------------------------------------


def test_versions_share_a_tower_and_old_ones_are_released(both, tmp_path, monkeypatch):
    versions = [Version.with_towers(pipeline.locate(config, "index").uri) for config in both]
    again = replace(versions[0], name="again", uri="runs/again")
    served = artifacts.find(AppArgs(run_dir=both[0].run_dir))
    catalog = replace(served.catalog, state=str(tmp_path), kept=1)
    holder = TowerVersions(catalog, "query", served.arms[0].encoder)
    monkeypatch.setattr(tower_versions, "RELEASE_AFTER_S", 60.0)  # longer than this test

    async def names() -> list[str]:
        assert await holder.ping()
        return sorted(holder._held)

    async def change() -> None:
        for version in (again, versions[1]):
            await holder.load(version)
            catalog.activate(version)
        assert await names() == sorted([again.name, versions[1].name])
        assert len(holder._opened) == 2
        await holder.call(again.name, "encode_many", ["bakoli"])  # from a gateway that has not changed yet
        await holder.load(versions[1])  # as one does once it is active
        assert await names() == sorted([again.name, versions[1].name])
        monkeypatch.setattr(tower_versions, "RELEASE_AFTER_S", 0.0)
        await holder.load(versions[1])
        assert holder._releasing is not None
        await holder._releasing
        assert await names() == [versions[1].name]
        assert len(holder._opened) == 1  # the first model is released
        await holder.load(replace(versions[1], name="third"))
        assert await names() == sorted([versions[1].name, "third"])
        assert len(holder._opened) == 1  # shared
        (query,) = await holder.call("third", "encode_many", ["bakoli"])
        assert query.embedding.shape == (1, WIDTH)
        assert await holder.form("third") == "torch"
        teachers = TowerVersions(catalog, "teacher")
        refused = await teachers.call(versions[1].name, "embed", ["bakoli"])
        assert "has no teacher tower" in refused.reason
        assert await teachers.ping()

    asyncio.run(change())
