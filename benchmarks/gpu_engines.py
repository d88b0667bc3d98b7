"""Engines of the stage `encode` on one GPU: each loads and runs the same saved tower.

Each gets the same token rows and makes its batches, including copies to the GPU. vLLM is measured if it is
installed; it comes last, because it reserves the remaining memory of the GPU.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_towers import (
    TINY,
    Figures,
    document_rows,
    forget,
    llm,
    peak_rate,
    random_tower,
    timed,
    tokens,
)
from scalingnote.encode import engines
from scalingnote.encode.encoder import Encoder
from scalingnote.models import flops, published_model
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.flops import Shape
from scalingnote.models.published_tower import LibraryTower
from scalingnote.train.engine import layers

BUDGET = 32_768  # tokens of a forward pass
ROWS = 1024
OURS = "own"


def measure_all(shape: Shape, device: torch.device, *, seconds: float) -> list[Figures]:
    """Measure each engine: tokens a second, MFU, and the rate over sentence-transformers'."""
    rows = document_rows(shape, 32 if shape is TINY else ROWS, 0)
    operations = sum(flops.forward(shape, tokens=float(len(row.ids))) for row in rows)
    peak, figures_by_engine = peak_rate(device), []
    with TemporaryDirectory() as name:
        folder = Path(name)
        random_tower(llm(shape, device), role="document").save(folder)
        facts = json.loads((folder / "tower.json").read_text())
        for engine, make in _makers(folder, facts, device).items():
            forget(device)
            encoder = make()
            figures = timed(lambda _, encoder=encoder: encoder.encode_with_cost(rows), device, seconds)  # type: ignore[misc]
            rate = figures["steps"] / figures["seconds"]
            figures_by_engine.append(
                {"engine": engine, "tokens/s": rate * tokens(rows), "MFU": rate * operations / peak}
            )
            del encoder
    theirs = next(row["tokens/s"] for row in figures_by_engine if row["engine"] == "sentence-transformers")
    return [row | {"over sentence-transformers": row["tokens/s"] / theirs} for row in figures_by_engine]


def metrics(rows: list[Figures]) -> dict[str, float]:
    """Return tokens a second and MFU of each engine, and our rate over each other engine's."""
    by_engine = {row["engine"].replace(" ", "_").replace("-", "_"): row for row in rows}
    rates = {f"engine_{name}_tokens_per_s": row["tokens/s"] for name, row in by_engine.items()}
    utilisation = {f"engine_{name}_mfu": row["MFU"] for name, row in by_engine.items()}
    ours = by_engine[OURS]["tokens/s"]
    over = {
        f"engine_own_over_{name}": ours / row["tokens/s"] for name, row in by_engine.items() if name != OURS
    }
    return rates | utilisation | over


def _makers(folder: Path, facts: dict[str, Any], device: torch.device) -> dict[str, Callable[[], Any]]:
    def own(*, compiled: bool = False) -> Encoder:
        encoder = Encoder(load_tower(folder), token_budget=BUDGET, device=device)
        if compiled:
            for layer in layers(encoder.tower.backbone):
                layer.compile(dynamic=True)
        return encoder

    def model() -> published_model.PublishedModel:
        return published_model.read(folder, "document")

    def library() -> engines.OneView:
        tower = LibraryTower(model(), role="document", max_length=facts["max_length"])
        return engines.OneView(Encoder(tower, token_budget=BUDGET, device=device), facts)

    makers: dict[str, Callable[[], Any]] = {OURS: own, "sentence-transformers": library}
    if device.type != "cuda":
        return makers
    makers["own compiled"] = lambda: own(compiled=True)
    if importlib.util.find_spec("vllm"):
        makers["vllm"] = lambda: engines.OneView(engines.VllmEngine(model(), gpus=1), facts)
    return makers
