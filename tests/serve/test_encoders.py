"""Where queries are encoded: a table in the gateway's event loop, a transformer in replicas, by batches."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pair import DIM, student

import tiny
from scalingnote import ray_internals
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.models import lookup
from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.config import LookupConfig
from scalingnote.search.query_path import Query, QueryPath
from scalingnote.serve import app, artifacts
from scalingnote.serve.replicas import ArmEncoder, QueryPathParts
from scalingnote.serve_config import AppArgs, Escalation, Limits, ServeConfig
from scalingnote.storage.artifact import Artifact, Draft

TEXTS = [row["content"] for row in tiny.document_rows()]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A lookup table of the index's dimension."""
    draft = Draft(
        f"{tmp_path_factory.mktemp('table')}/table", kind="student", config=tiny.Nothing(), parents={}
    )
    learnt = train_tokenizer(TEXTS, vocabulary=tiny.CAUSAL.vocabulary)
    lookup.build(LookupConfig(), dim=DIM, tokenizer_json=learnt, seed=0).save(Path(draft.path("query")))
    return draft.commit(counts={})


def parts(index: Artifact, tower: Artifact, **knobs: Any) -> set[str]:
    """Names of the deployments of a service."""
    args = {"index": index.uri, "query_tower": tower.uri, "serve": knobs}
    application = app.bind(artifacts.find(AppArgs.model_validate(args)))
    return {deployment.name for deployment in ray_internals.serve_deployments(application)}


def test_a_table_has_no_replicas_and_a_transformer_has(
    index: Artifact, query_tower: Artifact, table: Artifact, tmp_path: Path
):
    assert parts(index, table) == {"Gateway"}
    assert parts(index, query_tower) == {"Gateway", "QueryEncoder-default"}
    # Only what is uncertain goes to another process: the table stays where it is.
    teacher = student(f"{tmp_path}/teacher", seed=1)
    assert parts(index, table, escalation={"teacher": teacher.uri}) == {"Gateway", "QueryTeacher"}


def test_a_table_encodes_in_the_event_loop(table: Artifact):
    encoder = ArmEncoder(QueryPathParts((table.uri, "student")))
    threads: list[threading.Thread] = []
    path = encoder._path

    def watched(queries: Sequence[str]) -> list[Query]:
        threads.append(threading.current_thread())
        return path(queries)

    encoder._path = watched  # type: ignore[assignment]
    found = asyncio.run(encoder.encode("bakoli"))
    assert found.embedding.shape == (1, DIM)
    assert threads == [threading.main_thread()]


def test_a_transformer_encodes_what_arrived_during_its_last_batch_together(
    query_tower: Artifact, monkeypatch: pytest.MonkeyPatch
):
    encoder = ArmEncoder(QueryPathParts((query_tower.uri, "student")), 3)
    batches: list[int] = []
    entered, go_on = threading.Event(), threading.Event()
    encode = QueryEncoder.encode_queries

    def held(self: QueryEncoder, queries: Sequence[str]) -> Any:
        batches.append(len(queries))
        entered.set()
        go_on.wait(10)
        return encode(self, queries)

    monkeypatch.setattr(QueryEncoder, "encode_queries", held)

    async def crowd() -> list[Query]:
        first = asyncio.create_task(encoder.encode(TEXTS[0]))
        await asyncio.to_thread(entered.wait, 10)
        others = [asyncio.create_task(encoder.encode(text)) for text in TEXTS[1:6]]
        await asyncio.sleep(0)
        go_on.set()
        return [await first, *await asyncio.gather(*others)]

    found = asyncio.run(crowd())
    assert batches == [1, 3, 2]
    path = QueryPath(QueryEncoder.load(query_tower.directory("query")))
    for each, text in zip(found, TEXTS, strict=False):
        assert each.embedding[0] == pytest.approx(path([text])[0].embedding[0], abs=1e-5)


def test_a_slow_teacher_may_not_hold_every_request_of_a_gateway():
    with pytest.raises(ValueError, match=r"escalation\.in_flight is 32, limits\.in_flight 32"):
        ServeConfig(escalation=Escalation(), limits=Limits(in_flight=32))
