import numpy as np

from benchmarks import distillation, reproduce
from benchmarks.trial import Outcome, Side

QUERIES = 200


def outcomes(trials: list[reproduce.Trial], share: dict[str, float]) -> list[Outcome]:
    """Trials whose first queries succeed, `share` of them by the method's name."""
    made = []
    for trial in trials:
        name = trial.method.split("/")[1]
        success = (np.arange(QUERIES) < share[name] * QUERIES).astype(float)
        measures = dict.fromkeys(reproduce.RECALLS, float(success.mean())) | {"AUC-relevance": 0.8}
        if name in reproduce.STUDENTS:
            measures |= {"distance train": 0.1, "distance validation": 0.2}
        made.append(Outcome(trial, {name: Side(measures, success, 100.0)}))
    return made


def test_the_large_size_is_the_trials_of_the_distillation_benchmark():
    for method in ("scalingdual", "scalingnote-2l", "embeddistill-inherit"):
        ours = reproduce.trial("medquad", "large", method, 1, steps=None, knobs=())
        assert ours == distillation.trial("medquad", "scratch", method, 1)
    small = reproduce.trial("medquad", "small", "scalingdual", 1, steps=None, knobs=())
    assert small.steps == 100 // 4
    assert reproduce.trial("medquad", "large", "without_summary", 0, steps=9, knobs=()).method.startswith(
        "ablations/"
    )


def test_stars_stand_where_a_t_test_finds_a_difference():
    share = dict.fromkeys(
        (*reproduce.BY_SIZE, *reproduce.STUDENTS, *reproduce.PROMPTS, *reproduce.LADDER), 0.5
    )
    share |= {"scalingdoc": 0.6, "scalingnote-2l": 0.7, "scalingdual": 0.71, "without_summary": 0.705}
    wanted = {
        ("medquad", size): [
            reproduce.trial("medquad", size, method, seed, steps=None, knobs=())
            for method in reproduce.methods(size)
            for seed in range(2)
            if method != "lightretriever"
        ]
        for size in reproduce.SIZES
    }
    found = reproduce.by_size(wanted, outcomes([one for some in wanted.values() for one in some], share))
    rows = {(row["size"], row["method"]): row["R@50"] for row in reproduce.table_4(found)}
    assert len(rows) == 3 * len(reproduce.BY_SIZE)
    assert rows["large", "scalingnote-2l"] == "0.700*"
    assert rows["small", "scalingdoc"] == "0.600"
    prompts = {row["prompt"]: row["R@50"] for row in reproduce.table_5(found)}
    assert prompts["without_summary"] == "0.705"  # one query of 200 is no difference
    assert prompts["without_title_loss"].endswith("*")
    assert [row["distance, train"] for row in reproduce.table_6(found)] == ["0.100"] * 3 + ["-"]
    assert len(reproduce.table_3(found)) == 3
    assert [row["student"] for row in reproduce.table_ladder(found)] == list(reproduce.LADDER)
    told = reproduce.metrics(found)
    assert (
        told["datasets_scalingdual_over_scalingdoc"] == told["datasets_of_scalingdual_over_scalingdoc"] == 1
    )
    assert told["datasets_matching_helps"] == 0
    assert "datasets_hybrid_over_dense" not in told
