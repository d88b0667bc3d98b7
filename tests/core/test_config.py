from pathlib import Path

import pytest

from scalingnote.core.config import Config, Resources, dump, identity, load, validate
from scalingnote.core.errors import ConfigError
from scalingnote.models.config import Pretrained, Scratch, TowerConfig
from scalingnote.models.flops import backbone_shape
from scalingnote.run.config import RunConfig
from scalingnote.run.stages import select
from scalingnote.train.config import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = Path(__file__).parents[2] / "scalingnote/train/distillation/recipes"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("quickstart/[!b]*.yaml")), ids=lambda p: p.stem)
def test_every_run_config_parses_with_every_method(path: Path):
    without_method = load(RunConfig, [path])
    methods = [load(RunConfig, [path, method]) for method in sorted(CONFIGS.glob("methods/*.yaml"))]
    assert {config.run_dir for config in methods} == {without_method.run_dir}
    assert {config.distill is None for config in methods} == {True, False}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("ablations/without_*.yaml")), ids=lambda p: p.stem)
def test_an_ablation_differs_from_scalingdual_in_its_prompt(path: Path):
    for run in sorted(CONFIGS.glob("quickstart/[!b]*.yaml")):
        full = load(RunConfig, [run, CONFIGS / "methods/scalingdual.yaml"]).train
        ablated = load(RunConfig, [run, path])
        assert ablated.evaluate.names.dual_encoder == path.stem
        document = full.document.model_copy(update={"prompt": ablated.train.document.prompt})
        assert ablated.train == full.model_copy(update={"document": document})
        assert _views(ablated.train.document) == _views(full.document) - 1


# The sections that each ablation of LightRetriever changes.
ABLATED = {
    "lightretriever-without-kl": {"align"},
    "lightretriever-binary": {"sparse"},
    "lightretriever-without-instruction": {"query"},
    "lightretriever-embedding-layer": {"query"},
    "lightretriever-light-both": {"document"},
    "lightretriever-light-documents": {"query", "document", "align"},
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("ablations/light*.yaml")), ids=lambda p: p.stem)
def test_an_ablation_of_lightretriever_changes_one_thing(path: Path):
    method = "lightretriever" if ABLATED[path.stem] <= {"align", "sparse"} else "lightretriever-dense"
    for run in sorted(CONFIGS.glob("quickstart/[!b]*.yaml")):
        before = load(RunConfig, [run, CONFIGS / f"methods/{method}.yaml"]).train
        ablated = load(RunConfig, [run, path])
        assert ablated.evaluate.names.dual_encoder == path.stem
        fields = TrainConfig.model_fields
        changed = {name for name in fields if getattr(before, name) != getattr(ablated.train, name)}
        assert changed == ABLATED[path.stem]


def test_lightretriever_has_the_published_numbers():
    config = load(RunConfig, [CONFIGS / "paper/lightretriever.yaml"])
    train, lora, optimizer = config.train, config.train.query_tower.lora, config.train.optimizer
    assert train.shares_backbone
    assert (lora.rank, lora.alpha, lora.dropout) == (16, 32, 0.1)
    assert (train.global_batch, config.collect.num_negatives, train.losses.temperature) == (128, 7, 0.02)
    assert (train.sparse.flops, train.sparse.flops_ramp, train.max_steps) == (1e-3, 4000, 12_000)
    assert (optimizer.peak_lr, optimizer.warmup, optimizer.floor) == (2e-5, 100, 0.1)
    assert (train.losses.bidirectional, train.losses.alpha) == (False, 0)
    assert len(train.mixture) == sum(map(len, train.query.instructions.values())) == 23
    assert len(train.query.tasks) == 15 + 8  # of BEIR, and of CMTEB


@pytest.mark.parametrize(("name", "peak_lr"), [("msmarco", 2.8e-5), ("nq", 1e-5)])
def test_embeddistill_has_the_published_numbers(name: str, peak_lr: float):
    file = CONFIGS / f"paper/embeddistill-{name}.yaml"
    config = load(RunConfig, [file])
    distill, losses = config.distill, config.distill.losses
    assert (config.adopt.similarity, config.collect.num_negatives) == ("dot", 0)
    assert (distill.global_batch, distill.optimizer.peak_lr, distill.student.pooling) == (128, peak_lr, "cls")
    assert (losses.qkd, losses.one_hot, losses.scores, losses.query_matching) == (0, 1, 1, 1)
    if name == "msmarco":
        mini = load(RunConfig, [f"{file}:mini-generation"])
        generation = mini.collect.query_generation
        assert mini.distill.losses.query_matching == 5
        assert (generation.sigmas, generation.mask_fraction) == ((0.1, 0.2), 0.1)
        direct = load(RunConfig, [f"{file}:direct"]).distill
        assert (direct.document.pooling, direct.losses.scores, direct.losses.query_matching) == ("cls", 0, 0)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("paper/[!le]*.yaml")), ids=lambda p: p.stem)
def test_a_paper_config_has_the_published_numbers(path: Path):
    config = load(RunConfig, [path])
    train = config.train
    assert (train.global_batch, train.epochs, train.optimizer.peak_lr, train.dim) == (480, 1, 3e-6, 128)
    assert (train.strategy.kind, train.precision) == (
        "ddp" if path.stem == "twinbert" else "fsdp2",
        "bfloat16",
    )
    assert (train.losses.margin, train.losses.alpha, train.losses.matryoshka) == (0.2, 0.5, (16, 32, 64, 128))
    assert _views(train.document) == (2 if path.stem.startswith("without") else 3)
    small, llm = TABLE_8["RED BERT-4L"], TABLE_8["Qwen2.5 7B"]
    towers = {"twinbert": (small, TABLE_8["zh BERT-12L"]), "scalingdoc": (small, llm)}
    if not path.stem.startswith("scalingdual"):
        shapes = tuple(map(_size, (train.query.backbone, train.document.backbone)))
        assert shapes == towers.get(path.stem, (llm, llm))
    if config.distill is not None:
        distill, student = config.distill, config.distill.student.backbone
        assert (distill.global_batch, distill.epochs, distill.optimizer.peak_lr) == (40_000, 100, 3e-4)
        layers = {"scalingnote-1l": 1, "scalingnote-12l": 12}.get(path.stem, 4)
        assert _size(student) == (layers, *small[1:])


# Layers, attention heads, vocabulary, widths of states and of the feed-forward part.
TABLE_8 = {
    "RED BERT-4L": (4, 12, 84_522, 768, 3072),
    "zh BERT-12L": (12, 12, 21_128, 768, 3072),
    "Qwen2.5 7B": (28, 28, 152_064, 3584, 18_944),
}


def _size(backbone: Pretrained | Scratch) -> tuple[int, ...]:
    shape = backbone_shape(backbone)
    vocabulary = backbone.vocabulary if isinstance(backbone, Scratch) else shape.vocabulary
    return shape.layers, shape.heads, vocabulary, shape.hidden, shape.intermediate


def _views(tower: TowerConfig) -> int:
    return sum(view in tower.prompt for view in ("[TITLE_QUERY]", "[CONTENT_QUERY]", "[EMB]"))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_that_start_from_tokens_embed_them(path: Path):
    overrides = ["distill.student.backbone.path=model"] if path.stem == "model" else []
    config = load(RunConfig, [CONFIGS / "quickstart/python_docs.yaml", path], overrides)
    assert config.distill is not None
    assert config.teacher.tokens == config.distill.reads_tokens == path.stem.startswith(("table", "static"))


@pytest.mark.parametrize(
    ("settings", "prefixes"),
    [
        ([], (16, 32, 64, 128)),
        (["dim=256"], (16, 32, 64, 128, 256)),
        (["dim=64"], (16, 32, 64)),
        (["dim=96"], (16, 32, 64, 96)),
        (["losses.matryoshka=[128, 32]"], (128, 32)),
        (["losses.matryoshka=[]"], (128,)),
    ],
)
def test_losses_always_include_the_full_embedding(settings: list[str], prefixes: tuple[int, ...]):
    config = load(TrainConfig, [], settings)
    assert config.losses.matryoshka == prefixes
    assert validate(TrainConfig, dump(config), source="the artifact") == config


def test_later_files_override_and_another_kind_replaces(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        "dim: 64\nlosses: {matryoshka: [64]}\nquery: {backbone: {kind: scratch, layers: 1}}"
    )
    (tmp_path / "over.yaml").write_text(
        "extends: base.yaml\ndim: 96\nquery: {backbone: {kind: pretrained, path: some/model}}"
    )
    config = load(TrainConfig, [tmp_path / "over.yaml"], ["losses.alpha=0.25"])
    assert (config.dim, config.losses.matryoshka, config.losses.alpha) == (96, (64, 96), 0.25)
    assert config.query.backbone.kind == "pretrained"


class Inner(Config):
    size: int = 1
    resources: Resources = Resources()


class Outer(Config):
    inner: Inner = Inner()
    resources: Resources = Resources()


WRONG: list[tuple[str | None, list[str], str]] = [
    ("a: [", [], "is not YAML"),
    ("- 1", [], "holds a list"),
    (None, [], "no config file at .*c.yaml"),
    ("", ["global_bach=3"], r"unknown key 'global_bach'; did you mean 'global_batch'\?"),
    ("", ["optimizer.peak_lr=-1"], r"optimizer\.peak_lr: .*greater than 0 \(found -1\)"),
    ("", ["global_batch=33"], "does not divide over 2 workers"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), WRONG)
def test_a_config_error_has_the_place_and_the_value(
    tmp_path: Path, text: str | None, overrides: list[str], message: str
):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, [tmp_path / "c.yaml"], overrides)
    with pytest.raises(ConfigError, match="no config file at dim=8: override a knob by --set dim=8"):
        load(TrainConfig, ["dim=8"], [])


def test_a_lookup_student_needs_the_teachers_tokens():
    quickstart, lookup = CONFIGS / "quickstart/python_docs.yaml", "distill.student={kind: lookup}"
    with pytest.raises(ConfigError, match=r"leave teacher\.tokens at true"):
        load(RunConfig, [quickstart], [lookup, "teacher.tokens=false"])
    load(RunConfig, [quickstart], [lookup, "teacher.tokens=false", "distill.tokenizer=own"])


def test_resources_are_not_part_of_the_identity():
    wide = Outer(inner=Inner(resources=Resources(workers=9)), resources=Resources(workers=9))
    assert identity(wide) == identity(Outer()) == {"inner": {"size": 1}}
    assert identity(Outer(inner=Inner(size=2))) != identity(Outer())


def test_stages_are_chosen_by_name():
    config = load(RunConfig, [CONFIGS / "quickstart/python_docs.yaml"])
    assert [s.name for s in select(config, start="encode", until="index")] == ["encode", "quantize", "index"]
    assert [s.name for s in select(config, only="train")] == ["train"]
    without = load(RunConfig, [CONFIGS / "quickstart/python_docs.yaml", CONFIGS / "methods/twinbert.yaml"])
    assert {"teacher", "distill"}.isdisjoint(stage.name for stage in select(without))
    with pytest.raises(ConfigError, match=r"no stage 'quantise'.*did you mean 'quantize'\?"):
        select(config, only="quantise")


def test_a_variant_overrides_its_file_and_extends_another(tmp_path: Path):
    file = tmp_path / "method.yaml"
    file.write_text(
        "distill: {epochs: 3}\nvariants:\n  longer: {distill: {epochs: 5}}\n"
        "  seeded: {extends: longer, distill: {seed: 7}}\n"
    )
    quickstart = CONFIGS / "quickstart/python_docs.yaml"
    distill = load(RunConfig, [quickstart, f"{file}:seeded"]).distill
    assert distill is not None
    assert (distill.epochs, distill.seed) == (5, 7)
    without_method = load(RunConfig, [quickstart, file]).distill
    assert without_method is not None
    assert without_method.epochs == 3
    with pytest.raises(ConfigError, match=r"no variant 'seded', it has longer, seeded; .* mean 'seeded'"):
        load(RunConfig, [quickstart, f"{file}:seded"])
