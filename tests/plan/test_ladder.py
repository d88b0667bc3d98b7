import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import load_file

import tiny
from in_process import without_ray
from scalingnote.cli import main as cli
from scalingnote.core.config import validate
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.models.config import LookupConfig, Lora, Scratch
from scalingnote.plan import ladder, laws
from scalingnote.plan.config import LadderConfig
from scalingnote.plan.laws import joint_law
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train import job as training
from scalingnote.train.config import TrainConfig, Validation
from scalingnote.train.data import Order

ROOT = Path(cli.__file__).parents[2]
BACKBONES = tuple(
    Scratch(layers=layers, hidden=hidden, heads=2, intermediate=32, vocabulary=400, max_positions=64)
    for layers, hidden in ((1, 16), (1, 32), (2, 32), (2, 48))
)
SIZES = LadderConfig(backbones=BACKBONES, pairs=(16, 24, 40, 64), seeds=(0,))
STAGE_ONE = validate(
    TrainConfig,
    {"global_batch": 8, "dim": 16, "losses": {"matryoshka": [16]}, "resources": {"workers": 0}}
    | {"validation": {"queries": 8, "documents": 32}},
    source="test",
).model_copy(update={"query": tiny.query_tower(), "document": tiny.document_tower()})


@pytest.fixture
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "DRAWS", 10)


def test_rungs_are_all_pairs_of_sizes_and_small_ones_are_nested():
    configs = ladder.rung_configs(SIZES, STAGE_ONE, rows=75)
    assert len({(str(one.document.backbone), one.epochs) for one in configs}) == len(configs) == 16
    assert all(one.query.backbone == one.document.backbone for one in configs)
    orders = [Order(one, {"click/one": 75}) for one in configs[:4]]
    rows_of_runs = [
        np.concatenate([order.batch(step) for step in range(order.steps)]).tolist() for order in orders
    ]
    assert [len(rows) for rows in rows_of_runs] == [16, 24, 40, 64]
    assert all(len(set(rows)) == len(rows) and set(rows) <= set(rows_of_runs[3]) for rows in rows_of_runs)


def test_wide_models_may_learn_more_slowly():
    first, *_, last = ladder.rung_configs(SIZES.model_copy(update={"lr_by_width": 0.5}), STAGE_ONE, rows=75)
    rates = [one.optimizer.peak_lr / STAGE_ONE.optimizer.peak_lr for one in (first, last)]
    assert rates == pytest.approx([1.0, (16 / 48) ** 0.5])


@pytest.mark.parametrize(
    ("sizes", "stage", "match"),
    [
        ({"pairs": (80,)}, {}, "8 to 72 once"),
        ({"pairs": (4,)}, {}, "8 to 72 once"),
        ({}, {"validation": None}, "train.validation"),
        ({}, {"validation": Validation(patience=3)}, "leave out train.validation.patience"),
        ({}, {"query": LookupConfig()}, "transformer"),
    ],
)
def test_an_impossible_rung_is_refused(sizes: dict[str, object], stage: dict[str, object], match: str):
    with pytest.raises(ConfigError, match=match):
        ladder.rung_configs(SIZES.model_copy(update=sizes), STAGE_ONE.model_copy(update=stage), rows=75)


def test_equal_sizes_are_one_run():
    sizes = {"pairs": (16, 41, 47), "seeds": (0, 0), "backbones": BACKBONES[:1] * 2}
    configs = ladder.rung_configs(SIZES.model_copy(update=sizes), STAGE_ONE, rows=75)
    assert [one.epochs for one in configs] == [2 / 9, 5 / 9]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    folder = tmp_path_factory.mktemp("ladder")
    dataset = tiny.dataset(str(folder / "dataset"))
    triplets = tiny.triplets(str(folder / "triplets"), dataset)
    few = SIZES.model_copy(update={"pairs": (16, 40, 64), "backbones": BACKBONES[:3]})
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return [
            training.run(one, dataset=dataset.uri, triplets=triplets.uri, output=str(folder / str(number)))
            for number, one in enumerate(ladder.rung_configs(few, STAGE_ONE, rows=75))
        ]


def test_a_row_has_parameters_pairs_and_operations(trained: list[Artifact]):
    for artifact in trained[::4]:
        row = ladder.rung_row(artifact)
        weights = load_file(Path(artifact.file("document/model.safetensors")))
        beside_tables = [w.numel() for name, w in weights.items() if "embed_tokens" not in name]
        assert row["parameters"] == sum(beside_tables)
        assert row["examples"] == artifact.counts["steps"] * STAGE_ONE.global_batch
        assert 6 * row["parameters"] < row["operations"] / row["tokens"] < 20 * row["parameters"]


def by_hand(uri: Path, *, lora: Lora | None = None, **counts: int) -> Artifact:
    """Write the artifact of ten pairs: a query of 4 tokens, two documents of 10, three views of each."""
    towers = {
        name: getattr(STAGE_ONE, name).model_copy(update={"backbone": BACKBONES[0], "lora": lora})
        for name in ("query", "document")
    }
    draft = Draft(str(uri), kind="dual_encoder", config=STAGE_ONE.model_copy(update=towers), parents={})
    draft.write_json("document/tower.json", {"views": ["title", "content", "summary"]})
    draft.write_json("validation.json", [{"step": 2, "contrastive_entropy": 1.0}])
    return draft.commit(counts={"pairs": 10, "query_tokens": 40, "document_tokens": 200, **counts})


# 2,560 weights in a layer, 16 wide; the forward and the backward pass are 1 + 2 times a matrix product.
QUERY = 3 * (2 * 4 * 2560 + 4 * 4**2 * 16 // 2 + 2 * 16 * 16)
DOCUMENT = 3 * (2 * 10 * 2560 + 4 * 10**2 * 16 // 2 + 2 * 3 * 16 * 16)
# An adapter of rank 2 has 544 weights; frozen weights need no gradients.
ADAPTED = (3 * 2 * 4 * 544 - 2 * 4 * 2560) + 2 * (3 * 2 * 10 * 544 - 2 * 10 * 2560)


@pytest.mark.parametrize(("lora", "more"), [(None, 0), (Lora(rank=2), ADAPTED)])
def test_operations_are_counted_per_document(tmp_path: Path, lora: Lora | None, more: int):
    row = ladder.rung_row(by_hand(tmp_path, lora=lora, documents_per_pair=2))
    assert row["operations"] == 10 * (QUERY + 2 * DOCUMENT + more)


def test_a_run_without_a_count_of_documents_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"an earlier version, .* train it again"):
        ladder.rung_row(by_hand(tmp_path))


@pytest.mark.usefixtures("_few_draws")
def test_the_laws_of_a_ladder_become_an_artifact(trained: list[Artifact], tmp_path: Path):
    artifact = ladder.build(SIZES, trained, output=str(tmp_path))
    table, report = artifact.table("ladder"), artifact.read_json("report.json")
    assert sorted(table["examples"].to_pylist()) == sorted([16, 40, 64] * 3)
    assert set(report["laws"]) == {"joint"}  # three sizes are too few for a law of one size
    assert set(report["laws"]["joint"]["constants"]) == {"a", "b", "alpha", "beta", "delta"}
    assert [split["operations"] for split in report["splits"]] == pytest.approx(
        [times * max(table["operations"].to_pylist()) for times in (1, 10, 100)]
    )
    text = Path(artifact.file("report.md")).read_text()
    assert "L(N, D)" in text
    assert report["laws"]["joint"]["degrees_of_freedom"] == 4
    assert re.search(r"9 runs, R² = .* degrees of freedom: 4", text)
    assert report["laws"]["joint"]["seed_scatter"] is None
    assert "more sizes are needed, at least 4 model sizes" in text
    assert Path(artifact.file("joint.png")).read_bytes().startswith(b"\x89PNG")
    again = ladder.build(SIZES, trained, output=str(tmp_path))
    assert again.uri == artifact.uri


def planted(models: tuple[float, ...]) -> pa.Table:
    """Build the table of a ladder with four amounts of data and the entropies of a law."""
    return ladder.rung_table(
        [
            {"parameters": int(n), "examples": int(d), "tokens": int(100 * d), "operations": 600.0 * n * d}
            | {
                "contrastive_entropy": joint_law(
                    n, d, a=3e5, b=2e3, alpha=0.12 * 0.77, beta=0.77, delta=0.108
                )
            }
            | {"seed": 0, "seconds": 1.0, "artifact": f"{n}-{d}"}
            for n in models
            for d in (1e3, 1e4, 1e5, 1e6)
        ]
    )


@pytest.mark.usefixtures("_few_draws")
def test_each_seed_of_a_size_is_a_run():
    assert LadderConfig().seeds == (0, 1, 2)
    configs = ladder.rung_configs(SIZES.model_copy(update={"seeds": (0, 1, 2)}), STAGE_ONE, rows=75)
    assert len({(str(one.document.backbone), one.epochs, one.seed) for one in configs}) == 48
    rows = [
        row | {"seed": seed, "contrastive_entropy": row["contrastive_entropy"] * math.exp(error)}
        for row in planted((1e6, 1e7, 1e8)).to_pylist()
        for seed, error in enumerate((-0.01, 0.0, 0.01))
    ]
    table = ladder.rung_table(rows)
    report = ladder.law_report(table, ladder.fit_laws(table))
    joint = report["laws"]["joint"]
    assert (joint["runs"], joint["degrees_of_freedom"]) == (36, 31)
    # Within each of 12 sizes: squares of 0.01, 0 and 0.01 over 24 degrees of freedom.
    assert joint["seed_scatter"] == pytest.approx(0.01)
    assert joint["scatter"] == pytest.approx(0.01, rel=0.2)
    assert "between seeds of a size 0.010" in ladder.report_text(table, report)


@pytest.mark.usefixtures("_few_draws")
def test_each_law_is_fitted_to_its_rungs():
    table = planted((1e6, 1e7, 1e8, 1e9))
    fits = ladder.fit_laws(table)
    assert set(fits) == {"size", "data", "joint"}
    assert set(fits["size"].runs.data) == {10**6}
    assert set(fits["data"].runs.parameters) == {10**9}
    report = ladder.law_report(table, fits)
    budget = 600.0 * 10**9 * 10**6
    assert [split["operations"] for split in report["splits"]] == pytest.approx(
        [budget, 10 * budget, 100 * budget]
    )
    best = fits["joint"].split(10 * budget, per_parameter=600.0)
    assert report["splits"][1]["entropy"] == [*best["entropy"]]
    single_size = ladder.law_report(planted((1e9,)), ladder.fit_laws(planted((1e9,))))
    assert ([*single_size["laws"]], single_size["splits"]) == (["data"], [])


def test_the_committed_laws_fit_the_committed_runs():
    result = json.loads((ROOT / "docs/results/ladder.json").read_text(encoding="utf-8"))
    rows = [
        {"parameters": run["parameters"], "examples": run["pairs"], "tokens": 0, "seed": 0, "artifact": ""}
        | {"contrastive_entropy": run["contrastive entropy"], "operations": float(run["operations"])}
        | {"seconds": float(run["seconds"])}
        for run in result["table"]
    ]
    fits = ladder.fit_laws(ladder.rung_table(rows))
    page = (ROOT / "docs/guides/scaling.md").read_text(encoding="utf-8")
    for kind, name in (("size", "model size"), ("data", "data"), ("joint", "both")):
        committed = result["laws"][kind]
        assert committed["degrees_of_freedom"] == fits[kind].freedom
        alpha = fits[kind].constants()["alpha"]
        # Entropies are committed with four decimals. The ends of an interval with few degrees of freedom
        # depend on the processor's rounding: one was 1.28 on one machine and 1.09 on another.
        value, *ends = committed["constants"]["alpha"]
        assert value == pytest.approx(alpha.value, rel=0.05)
        assert ends == pytest.approx([alpha.low, alpha.high], rel=0.2)
        interval = "{:.2f} ({:.2f} to {:.2f})".format(*committed["constants"]["alpha"])
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} | "))
        assert f"| {interval} | {committed['r2']:.3f} | {fits[kind].freedom} |" in line


def test_a_ladder_needs_a_single_round():
    config = validate(RunConfig, {"dataset": {"name": "python_docs"}, "rounds": 2}, source="test")
    with pytest.raises(ConfigError, match="a single round"):
        pipeline.ladder(config)
