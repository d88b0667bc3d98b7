"""Several data sets in one training: their rows stay separate; each set has its epochs and instructions."""

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


def config(**settings: Any) -> TrainConfig:
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
        **settings,
    )


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Two sets that have equal ids, and texts that differ in the first word."""
    folder = tmp_path_factory.mktemp("sets")

    def build(name: str, count: int) -> TrainingSet:
        dataset = tiny.dataset(f"{folder}/{name}/dataset", count=count)
        return TrainingSet(dataset, tiny.triplets(f"{folder}/{name}/triplets", dataset))

    return {"large": build("large", tiny.DOCUMENTS), "small": build("small", SMALL)}


@pytest.fixture(scope="module")
def prepared(sets: Sets, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("prepared"))
    return prepare(config(), **sets["large"]._asdict(), mixture=sets, folder=folder)


def training_rows(data: TrainingSet) -> list[dict[str, Any]]:
    return [row for row in data.triplets.table("triplets").to_pylist() if row["split"] == "train"]


def test_equal_ids_of_two_sets_name_two_documents(sets: Sets, prepared: Any):
    doc_ids = {
        name: {doc for row in data.triplets.table("triplets").to_pylist() for doc in documents(row)}
        for name, data in sets.items()
    }
    assert doc_ids["small"] < doc_ids["large"]
    assert prepared.documents == sum(map(len, doc_ids.values()))
    assert prepared.sizes == {name: len(training_rows(data)) for name, data in sets.items()}
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
def test_an_epoch_reads_each_set_by_its_configured_epochs(prepared: Any, homogeneous: bool):
    epoch_order = order(prepared, homogeneous=homogeneous)
    rows = np.concatenate([epoch_order.batch(step) for step in range(epoch_order.steps_per_epoch)])
    counts = np.bincount(rows, minlength=sum(prepared.sizes.values()))
    large = prepared.sizes["large"]
    assert counts[:large].max() == 1
    assert counts[large:].min() >= 1
    expected = 2 * prepared.sizes["small"]
    assert expected - 2 * BATCH < counts[large:].sum() <= expected


def test_a_batch_has_one_set_and_one_of_its_instructions(prepared: Any):
    store, batch_order = Store.open(prepared.store), order(prepared)
    numbers = [config().query.instructions_of(name) for name in config().mixture]
    assert numbers == [(1, 2), (3,)]
    batches = mapped_batches(prepared.store, batch_order, instructions=numbers, seed=1)
    instructions: dict[int, set[int]] = {0: set(), 1: set()}
    for step in range(batch_order.steps_per_epoch):
        of_set = set(store["train"].values("set", batch_order.batch(step)).tolist())
        assert len(of_set) == 1
        batch = batches(step)
        assert batch.queries.instruction == batches(step).queries.instruction  # depends only on the step
        assert batch.queries.rows(0, 2).instruction == batch.queries.to_padded(0).instruction
        instructions[of_set.pop()].add(batch.queries.instruction)
    assert instructions == {0: {1, 2}, 1: {3}}


def test_each_set_has_a_table_with_its_first_instruction(
    tmp_path: Path,
    sets: Sets,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    without_ray(monkeypatch)
    small = MixtureSet(dataset=sets["small"].dataset.uri, triplets=sets["small"].triplets.uri, epochs=2.0)
    settings = config(max_steps=3, optimizer=Optimizer(peak_lr=1e-2), resources={"workers": 0})
    query = settings.query.model_copy(update={"tasks": {"unknown": "guess: "}})
    settings = settings.model_copy(
        update={"query": query, "mixture": {"large": MixtureSet(), "small": small}}
    )
    run_set = sets["large"]
    uris = {"dataset": run_set.dataset.uri, "triplets": run_set.triplets.uri}
    towers = job.run(settings, **uris, output=str(tmp_path / "towers"))
    output = "".join(capfd.readouterr()) + caplog.text  # the loggers propagate until they are configured
    assert "behind the instruction of the task unknown" in output
    tables = {name: table(towers, f"query/tasks/{name}") for name in ("large", "small", "unknown")}
    tables["own"] = table(towers, "query")
    for name, values in tables.items():
        others = [other for key, other in tables.items() if key != name]
        assert not any(np.array_equal(values, other) for other in others), name
    parents = towers.manifest.parents
    assert parents["mixture/small/dataset"]["digest"] == sets["small"].dataset.digest
    assert "mixture/large/dataset" not in parents  # it is that of this run
    assert [artifact.uri for artifact in lineage([towers]) if artifact.kind == "dataset"] == [
        run_set.dataset.uri
    ]


def table(towers: Artifact, folder: str) -> np.ndarray:
    return np.load(towers.directory(folder) / "table.npy")


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_invalid_mixtures_raise_errors(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)
