"""A change of the model while documents are written: both pairs get every write, either can answer."""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_here import Client

from scalingnote.cli.main import main
from scalingnote.core.errors import ConfigError
from scalingnote.index.live import versions as live_versions
from scalingnote.run import migration, pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import AppArgs, LiveServe, ServeConfig
from scalingnote.serve import api, app, artifacts, cut_over
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.serve.service import Service
from scalingnote.serve.writer import Writer
from scalingnote.serve.writes import DocumentEncoder
from scalingnote.storage.artifact import open_artifact
from two_models import WIDTH, restored

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def run_dir(compared: Path) -> Iterator[str]:
    """Yield a run with live writes and another, compared model; the writes of a test are removed after it."""
    live = LiveServe(folder=str(compared / "live"), delta=True, keep_documents=True)
    with restored(compared, without="live") as folder:
        state = migration.read(folder)
        for name in ("before", "after"):
            config = getattr(state, name)
            live_config = config.serve.model_copy(update={"live": live})
            state = state.model_copy(update={name: config.model_copy(update={"serve": live_config})})
        migration._write(state)
        pipeline.make_current(state.before)
        yield folder


@pytest.fixture
def both(run_dir: str) -> tuple[RunConfig, RunConfig]:
    state = migration.read(run_dir)
    return state.before, state.after


def rows_of(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"doc_id": i, "title": f"title {i}", "topic": "new", "content": text} for i, text in texts.items()
    ]


class Running:
    """The service of a run, in this process: gateway, document encoder, writer."""

    def __init__(self, run_dir: str) -> None:
        served = artifacts.find(AppArgs(run_dir=run_dir))
        assert isinstance(served, artifacts.ServedArtifacts)
        assert isinstance(served.catalog, LiveCatalog)
        assert served.config.live is not None
        self.catalog = served.catalog
        self.encoder = DocumentEncoder(self.catalog, True)
        handle = LocalHandle(self.encoder)
        self.writer = Writer(self.catalog, served.config.live, handle)
        parts = Deployed(served.arms, self.catalog, document_encoder=handle, writer=LocalHandle(self.writer))
        self.service = Service(app.load_own_parts(parts, served.config).for_gateway(), served.config)
        self.client = Client(api.build(self.service, served.config))

    def fill(self) -> None:
        """Run the filling that a health check starts, and wait for its end."""

        async def fill() -> None:
            await self.writer.follow_pairs()
            if self.writer._filling is not None:
                await self.writer._filling

        self.client.wait(fill())

    def change(self) -> None:
        """Read the catalog, as every gateway does twice a second."""
        self.client.wait(self.service.versions.follow())

    def write(self, **texts: str) -> None:
        answer = self.client("POST", "/documents", json={"documents": rows_of(texts)})
        assert (answer.status_code, answer.json()["rejected"]) == (200, [])

    def delete(self, *doc_ids: str) -> None:
        assert self.client("POST", "/documents/delete", json={"doc_ids": doc_ids}).status_code == 200

    def documents(self, doc_ids: Any) -> dict[str, str]:
        """Return the snippets of the documents of the active version that have these ids."""
        answers = {doc_id: self.client("GET", f"/documents/{doc_id}") for doc_id in doc_ids}
        return {i: answer.json()["snippet"] for i, answer in answers.items() if answer.status_code == 200}

    def found(self) -> tuple[str, list[str]]:
        """Return the active version and the ids of all its documents, by a search."""
        nlist = self.service.versions.content(self.service.versions.active.name).layout.nlist
        answer = self.client.search(query="bakoli menura", k=100, nprobe=nlist).json()
        return answer["index_version"], sorted(hit["doc_id"] for hit in answer["results"])

    def vectors(self, index: str, **texts: str) -> bool:
        """Return whether the delta of an index has the vectors of its own model for documents."""
        expected = self.client.wait(self.encoder.encode(rows_of(texts), index))[index].vectors
        live = self.writer._indexes[index]
        return all(
            np.allclose(live.vector(i), row, atol=2e-3) for i, row in zip(texts, expected, strict=True)
        )

    def close(self) -> None:
        self.client.close()
        self.writer.close()


@pytest.fixture
def running(run_dir: str) -> Iterator[Running]:
    service = Running(run_dir)
    yield service
    service.close()


def uris(both: tuple[RunConfig, RunConfig]) -> tuple[str, str]:
    old, new = (pipeline.locate(config, "index").uri for config in both)
    return old, new


def test_both_models_get_every_write_and_either_can_answer(running, run_dir, both, capsys):
    old, new = uris(both)
    version, ids = running.found()
    assert version == "0"
    running.write(early="bakoli", **{ids[0]: "another text"})
    running.delete(ids[1])
    running.write(twice="first")
    cut_over.add_writes(migration.read(run_dir))
    with pytest.raises(ConfigError, match="does not have every write yet"):
        cut_over.cut_over(run_dir, ServeConfig())
    running.write(twice="second", meanwhile="menura")  # goes to both, before the earlier writes are filled
    running.fill()
    expected = sorted({*ids, "early", "twice", "meanwhile"} - {ids[1]})
    assert running.found() == ("0", expected)
    assert main(["migrate", "--run", run_dir, "--cut-over"]) == 0
    assert f"before: 0, {old}" in capsys.readouterr().out
    assert running.found() == ("0", expected)
    running.change()
    name = f"{running.catalog.pairs()[0].mark}-0"
    assert running.found() == (name, expected)
    texts = {"early": "bakoli", "twice": "second", "meanwhile": "menura", ids[0]: "another text"}
    assert running.documents([*texts, ids[1]]) == texts
    assert running.vectors(new, **texts)
    assert running.vectors(old, **texts)

    running.write(late="tavezo", twice="third")
    running.delete("early", ids[2])
    assert main(["migrate", "--run", run_dir, "--roll-back"]) == 0
    running.change()
    version, ids_after = running.found()
    assert (version, ids_after) == ("0", sorted({*expected, "late"} - {"early", ids[2]}))
    assert running.documents(["late", "twice", "early"]) == {"late": "tavezo", "twice": "third"}


def test_a_version_of_the_new_model_folds_and_restarts(running, run_dir, both, capsys):
    running.write(early="bakoli")
    cut_over.add_writes(migration.read(run_dir))
    running.fill()
    cut_over.cut_over(run_dir, ServeConfig())
    running.change()
    assert running.client("POST", "/admin/index/compact").status_code == 200
    mark = running.catalog.pairs()[0].mark
    version, all_ids = running.found()
    assert version == f"{mark}-1"
    assert main(["migrate", "--run", run_dir, "--finish"]) == 0
    assert f"no longer needed: {run_dir}/live" in capsys.readouterr().out
    running.write(late="tavezo")
    assert [*running.writer._indexes] == [uris(both)[1]]
    with pytest.raises(ConfigError, match="does not receive writes"):
        cut_over.roll_back(run_dir, ServeConfig())
    with pytest.raises(ConfigError, match="nothing to finish"):
        cut_over.finish(run_dir, ServeConfig())
    running.writer.close()
    again = Running(run_dir)
    try:
        assert again.found() == (f"{mark}-1", sorted([*all_ids, "late"]))
        # Change to the first model and back: neither keeps the writes from before it ended.
        for model, text in ((both[0], "changed"), (both[1], "changed again")):
            again.write(early=text)
            index = pipeline.locate(model, "index").uri
            again.catalog.add(artifacts.of_run(model, ServeConfig()).catalog.first)
            again.fill()
            again.client.wait(again.service.versions.activate(again.catalog.version_of(index)))
            assert again.documents(["early"]) == {"early": text}
            assert again.found()[1] == sorted([*all_ids, "late"])
            assert len(again.catalog.end_others()) == 1
    finally:
        again.close()


def test_filling_continues_after_an_interruption(running, run_dir, both, monkeypatch):
    texts = {f"w{n}": f"text number {n}" for n in range(150)}
    running.write(**texts)
    running.write(w3="changed")
    running.delete("w4")
    cut_over.add_writes(migration.read(run_dir))
    encode, encoded_ids, remaining_calls = DocumentEncoder.encode, list[str](), [1]

    async def encode_some(self: DocumentEncoder, documents: Any, only: str | None = None) -> Any:
        if only is not None and not remaining_calls.pop():
            raise OSError("a replica died")
        if only is not None:
            remaining_calls.append(0 if len(remaining_calls) == 0 and len(encoded_ids) == 0 else 1)
            encoded_ids.extend(row["doc_id"] for row in documents)
        return await encode(self, documents, only)

    monkeypatch.setattr(DocumentEncoder, "encode", encode_some)
    monkeypatch.setattr("scalingnote.serve.writer.FILL_AGAIN_S", 0.0)
    running.fill()
    first = len(encoded_ids)
    assert 0 < first < 149
    assert not running.catalog.pairs()[1].filled
    remaining_calls[:] = [1]
    running.writer.close()
    again = Running(run_dir)  # like after a kill
    try:
        again.fill()
        assert sorted(encoded_ids) == sorted(texts.keys() - {"w4"})  # no document is encoded twice
        assert again.catalog.pairs()[1].filled
        expected = texts | {"w3": "changed"}
        del expected["w4"]
        assert again.vectors(uris(both)[1], **{i: expected[i] for i in ("w0", "w3", "w149")})
    finally:
        again.close()


def test_a_document_that_one_model_rejects_is_in_no_pair(running, run_dir, both, monkeypatch):
    _, ids = running.found()
    cut_over.add_writes(migration.read(run_dir))
    running.fill()
    encode = DocumentEncoder.encode

    async def reject(self: DocumentEncoder, documents: Any, only: str | None = None) -> Any:
        rows_of_pairs = await encode(self, documents, only)
        for (index, rows), bad in zip([*rows_of_pairs.items()], ("a", ids[0]), strict=True):
            vectors = rows.vectors.copy()
            vectors[[i for i, row in enumerate(rows.documents["doc_id"].to_pylist()) if row == bad]] = 0
            rows_of_pairs[index] = rows._replace(vectors=vectors)
        return rows_of_pairs

    monkeypatch.setattr(DocumentEncoder, "encode", reject)
    rows = [{"doc_id": i, "title": "", "topic": "new", "content": "bakoli"} for i in ("a", "b", ids[0])]
    answer = running.client("POST", "/documents", json={"documents": rows}).json()
    assert [row["doc_id"] for row in answer["rejected"]] == ["a"]
    cut_over.cut_over(run_dir, ServeConfig())
    running.change()
    assert running.found()[1] == sorted({*ids, "b"} - {ids[0]})


def test_a_live_index_without_a_delta_keeps_its_towers(run_dir, both):
    live = LiveServe(folder=f"{run_dir}/live")
    config = both[0].model_copy(update={"serve": both[0].serve.model_copy(update={"live": live})})
    pipeline.make_current(config)
    running = Running(run_dir)
    try:
        version, ids = running.found()
        assert version == "0"
        running.write(early="bakoli")
        assert running.client("POST", "/admin/index/compact").status_code == 200
        assert running.found() == ("1", sorted([*ids, "early"]))
        towers = {each["query_tower"] for each in running.client("GET", "/admin/index").json()["versions"]}
        assert towers == {pipeline.locate(config, "dual_encoder").uri}
    finally:
        running.close()


def test_a_migration_without_kept_documents_is_refused(run_dir, both):
    folder = Path(run_dir) / "live"
    running = Running(run_dir)
    live = running.writer.active
    live._config = live._config.model_copy(update={"keep_documents": False})
    running.write(early="bakoli")
    running.close()
    assert not (folder / "pairs.json").exists()
    with pytest.raises(ConfigError, match=r"record 1 of .*shard-00000 has no complete documents"):
        cut_over.require_kept_writes(migration.read(run_dir))


def test_a_pair_is_added_once_and_the_active_one_stays(run_dir, both, tmp_path):
    old, new = uris(both)
    catalog = LiveCatalog(str(tmp_path), LivePair(old), delta=True)
    old_mark = open_artifact(old, kind="index").digest[:8]
    catalog.add(LivePair(new))
    catalog.set_filled(new)
    catalog.add(LivePair(new))  # a second time: it stays filled
    assert [(each.index, each.filled) for each in catalog.pairs()] == [(old, True), (new, True)]
    active = catalog.activate(catalog.version_of(new))[0]  # also if both have the same towers
    assert (active.uri, active.dim) == (new, WIDTH)
    assert [each.index for each in catalog.pairs()] == [new, old]
    assert catalog.place("0") == (str(tmp_path), 0)
    mark = catalog.pairs()[0].mark
    assert catalog.place(f"{mark}-7") == (f"{tmp_path}/pairs/{mark}", 7)
    assert live_versions.read_register(f"{tmp_path}/pairs/{mark}").delta
    assert catalog.end_others() == (str(tmp_path),)
    catalog.add(LivePair(old))
    assert catalog.pairs()[1].mark.endswith(".2")
    assert catalog.end_others() == (f"{tmp_path}/pairs/{old_mark}.2",)
    catalog.add(LivePair(old))  # its earlier folder lacks later writes
    assert catalog.pairs()[1].mark.endswith(".3")
    catalog.end_others()
    with pytest.raises(ConfigError, match="another model replaced it"):
        catalog.place("0")


def test_a_write_without_rows_of_a_new_pair_is_repeated(running, run_dir, both, monkeypatch):
    encode, calls = DocumentEncoder.encode, count()

    async def encode_before(self: DocumentEncoder, documents: Any, only: str | None = None) -> Any:
        rows_of_pairs = await encode(self, documents, only)
        if not next(calls):  # like a pair that is added while the documents are encoded
            cut_over.add_writes(migration.read(run_dir))
        return rows_of_pairs

    monkeypatch.setattr(DocumentEncoder, "encode", encode_before)
    running.write(early="bakoli")
    assert next(calls) == 2
    assert running.writer._filler.index == uris(both)[1]
    assert running.vectors(uris(both)[1], early="bakoli")
