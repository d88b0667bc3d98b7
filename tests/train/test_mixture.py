"""Several data sets in one training: their rows stay apart, epochs and instructions are each set's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from stages import mapped_batches

import tiny
from in_process import without_ray
from scalingnote.evaluate.report import lineage
from scalingnote.models.config import Lora, TokenWiseConfig
from scalingnote.storage.artifact import Artifact
from scalingnote.train import job
from scalingnote.train.config import Batching, Losses, MixtureSet, Optimizer, TrainConfig
from scalingnote.train.data import Order, Store
from scalingnote.train.prepare import TrainingSet, prepare

BATCH, SMALL = 4, 24
INSTRUCTIONS = {"large": ("find: ", "search the web: "), "small": ("answer: ",)}
Sets = dict[str, TrainingSet]


def config(**knobs: Any) -> TrainConfig:
    query = TokenWiseConfig(max_length=16, instruction="query: ", instructions=INSTRUCTIONS)
    document = tiny.document_tower(tiny.CAUSAL).model_copy(update={"lora": Lora(rank=2)})
    return TrainConfig(
        query=query,
        document=document,
        dim=8,
        losses=Losses(matryoshka=(8,)),
        global_batch=BATCH,
        validation=None,
        mixture={"large": MixtureSet(), "small": MixtureSet(dataset="a", triplets="b", epochs=2.0)},
        batching=Batching(sources="homogeneous"),
        **knobs,
    )


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Two sets whose ids are the same, and whose texts differ in the first word."""
    folder = tmp_path_factory.mktemp("sets")

    def made(name: str, count: int) -> TrainingSet:
        dataset = tiny.dataset(f"{folder}/{name}/dataset", count=count)
        return TrainingSet(dataset, tiny.triplets(f"{folder}/{name}/triplets", dataset))

    return {"large": made("large", tiny.DOCUMENTS), "small": made("small", SMALL)}


@pytest.fixture(scope="module")
def prepared(sets: Sets, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("prepared"))
    return prepare(config(), **sets["large"]._asdict(), mixture=sets, folder=folder)


def trained(one: TrainingSet) -> list[dict[str, Any]]:
    return [row for row in one.triplets.table("triplets").to_pylist() if row["split"] == "train"]


def test_equal_ids_of_two_sets_name_two_documents(sets: Sets, prepared: Any):
    named = {
        name: {doc for row in one.triplets.table("triplets").to_pylist() for doc in documents(row)}
        for name, one in sets.items()
    }
    assert named["small"] < named["large"]
    assert prepared.documents == sum(map(len, named.values()))
    assert prepared.sizes == {name: len(trained(one)) for name, one in sets.items()}
    store = Store.open(prepared.store)
    rows = np.arange(len(store["train"]))
    numbers = store["train"].values("documents", rows)
    of_set = store["train"].values("set", rows)
    assert not set(numbers[of_set == 0].flat) & set(numbers[of_set == 1].flat)
    queries = store["train"].values("query", rows)
    assert not set(queries[of_set == 0].tolist()) & set(queries[of_set == 1].tolist())


def documents(row: dict[str, Any]) -> list[str]:
    return [row["positive"], *row["negatives"]]


def order(prepared: Any, *, homogeneous: bool = True) -> Order:
    batching = Batching(sources="homogeneous" if homogeneous else "mixed")
    return Order(config(), prepared.sizes, batching, config().set_epochs)


@pytest.mark.parametrize("homogeneous", [True, False])
def test_an_epoch_reads_each_set_as_often_as_it_says(prepared: Any, homogeneous: bool):
    made = order(prepared, homogeneous=homogeneous)
    rows = np.concatenate([made.batch(step) for step in range(made.steps_per_epoch)])
    counted = np.bincount(rows, minlength=sum(prepared.sizes.values()))
    large = prepared.sizes["large"]
    assert counted[:large].max() == 1
    assert counted[large:].min() >= 1
    expected = 2 * prepared.sizes["small"]
    assert expected - 2 * BATCH < counted[large:].sum() <= expected


def test_a_batch_is_of_one_set_behind_one_of_its_instructions(prepared: Any):
    store, made = Store.open(prepared.store), order(prepared)
    numbers = [config().query.instructions_of(name) for name in config().mixture]
    assert numbers == [(1, 2), (3,)]
    batches = mapped_batches(prepared.store, made, instructions=numbers, seed=1)
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    for step in range(made.steps_per_epoch):
        of_set = set(store["train"].values("set", made.batch(step)).tolist())
        assert len(of_set) == 1
        batch = batches(step)
        assert batch.queries.instruction == batches(step).queries.instruction  # of the step alone
        assert batch.queries.rows(0, 2).instruction == batch.queries.to_padded(0).instruction
        seen[of_set.pop()].add(batch.queries.instruction)
    assert seen == {0: {1, 2}, 1: {3}}


def test_a_table_for_each_set_is_read_behind_its_first_instruction(
    tmp_path: Path,
    sets: Sets,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    without_ray(monkeypatch)
    small = MixtureSet(dataset=sets["small"].dataset.uri, triplets=sets["small"].triplets.uri, epochs=2.0)
    made = config(max_steps=3, optimizer=Optimizer(peak_lr=1e-2), resources={"workers": 0})
    query = made.query.model_copy(update={"tasks": {"unknown": "guess: "}})
    made = made.model_copy(update={"query": query, "mixture": {"large": MixtureSet(), "small": small}})
    own = sets["large"]
    given = {"dataset": own.dataset.uri, "triplets": own.triplets.uri}
    towers = job.run(made, **given, output=str(tmp_path / "towers"))
    logged = "".join(capfd.readouterr()) + caplog.text  # the loggers propagate until they are configured
    assert "behind the instruction of the task unknown" in logged
    tables = {name: table(towers, f"query/tasks/{name}") for name in ("large", "small", "unknown")}
    tables["own"] = table(towers, "query")
    for name, values in tables.items():
        others = [other for key, other in tables.items() if key != name]
        assert not any(np.array_equal(values, other) for other in others), name
    parents = towers.manifest.parents
    assert parents["mixture/small/dataset"]["digest"] == sets["small"].dataset.digest
    assert "mixture/large/dataset" not in parents  # this run's own
    assert [one.uri for one in lineage([towers]) if one.kind == "dataset"] == [own.dataset.uri]


def table(towers: Artifact, folder: str) -> np.ndarray:
    return np.load(towers.directory(folder) / "table.npy")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"mixture": {"a": {}, "b": {}}}, "only one set can be that of this run"),
        ({"mixture": {"a": {"dataset": "x"}}}, "both dataset and triplets"),
        ({"query": {"kind": "token_wise", "instructions": {"b": ["x"]}}}, "b, which is not a set"),
        (
            {"mixture": {"b": {}}, "query": {"kind": "token_wise", "instructions": {"b": ["x"]}}},
            "batching.sources to homogeneous",
        ),
    ],
)
def test_what_cannot_be_mixed_is_told(knobs: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(knobs)
