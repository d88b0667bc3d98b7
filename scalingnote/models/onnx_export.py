"""Export of a query tower as an ONNX graph, which :mod:`scalingnote.models.onnx` reads.

The attention mask is computed here, in the same way for every model family. The last layer of a BERT computes
only the first position, because no other is read.
"""

import json
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.model_files import write_json
from scalingnote.models.batch import collate, first_position
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.onnx import MAX_GRAPH_BYTES, MIN_COSINE, ONNX_FILES, OnnxForm, OnnxTower, require
from scalingnote.models.prompt import QueryPrompt
from scalingnote.models.tower import Tower

# They are tried in this order until the golden queries agree; each is slower or larger than the previous one.
# Signed weights need VNNI: without it, products are accumulated in 16 bits and may overflow. The table of
# token embeddings has one scale for all tokens, so an outlier reduces the precision of all.
_QUANTIZATIONS = (("QInt8", ("MatMul", "Gather")), ("QUInt8", ("MatMul", "Gather")), ("QUInt8", ("MatMul",)))
log = get_logger("models")


def export_graph(folder: Path, into: Path, *, queries: Sequence[str], form: OnnxForm = "onnx_int8") -> float:
    """Write the query tower at `folder` as a graph; no file is written if this fails.

    Graphs of another form in `into` are kept. `queries` should be real queries. Return the least cosine of
    the graph's and the tower's embeddings of them.

    Raises:
        ConfigError: a package is missing, there are no queries, the tower has no transformer or is too large,
            or the embeddings of the graph differ from the tower's.
    """
    require("onnx", "onnxruntime")
    if not queries:
        raise ConfigError("a graph is checked with real queries: pass some")
    facts = json.loads((folder / "tower.json").read_text())
    if facts.get("kind", "transformer") != "transformer" or facts["role"] != "query":
        raise ConfigError(
            f"{folder} holds no query tower with a transformer and a projection: export one that has them"
        )
    tower = load_tower(folder)
    size = sum(parameter.nbytes for parameter in tower.parameters())
    if size >= MAX_GRAPH_BYTES:
        raise ConfigError(
            f"{folder} has {size / 2**30:.1f} GiB of weights, an ONNX file at most 2: distil it first"
        )
    into.mkdir(parents=True, exist_ok=True)
    # Files are moved to `into` only after the check: it may contain a graph of another form.
    temporary = Path(tempfile.mkdtemp(prefix=".export-", dir=into))
    try:
        _write_references(tower, temporary, queries)
        for name in ("tokenizer.json", "tower.json"):
            shutil.copyfile(folder / name, temporary / name)
        _write_float32_graph(tower, temporary / ONNX_FILES["onnx"])
        least = _check(temporary, form) if form == "onnx" else _quantize_exactly(temporary)
        for path in sorted(temporary.iterdir()):
            path.replace(into / path.name)
    finally:
        shutil.rmtree(temporary)
    return least


def _quantize_exactly(folder: Path) -> float:
    """Replace the float32 graph by the fastest 8-bit graph that is exact enough.

    Raise ConfigError if none is.
    """
    for weights, operators in _QUANTIZATIONS:
        _quantize(folder, weights=weights, operators=operators)
        try:
            least = _check(folder, "onnx_int8")
        except ConfigError as error:
            log.info("8-bit %s of %s are not exact enough here", weights, " and ".join(operators))
            last_error = error
        else:
            (folder / ONNX_FILES["onnx"]).unlink()
            return least
    raise last_error


def _check(folder: Path, form: OnnxForm) -> float:
    """Return the least cosine of a graph; raise ConfigError if it is too low."""
    least = OnnxTower(folder, form).agreement()
    if least < MIN_COSINE:
        raise ConfigError(
            f"{form} gives a query another embedding than the tower, cosine {least:.4f}, less than "
            f"{MIN_COSINE}: it is not exported; use form onnx, or torch"
        )
    return least


def _quantize(folder: Path, *, weights: str, operators: Sequence[str]) -> None:
    """Write the graph with 8-bit weights and a scale per column.

    The graph is not optimised first: fused operators would lose the types of their weights.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)  # onnxruntime writes advice to the root logger
    try:
        quantize_dynamic(
            folder / ONNX_FILES["onnx"],
            folder / ONNX_FILES["onnx_int8"],
            op_types_to_quantize=list(operators),
            per_channel=True,
            weight_type=QuantType[weights],
        )
    finally:
        logging.disable(logging.NOTSET)


def _write_references(tower: Tower, folder: Path, queries: Sequence[str]) -> None:
    """Write ``onnx.json``, and golden queries with the tower's embeddings of them.

    The embeddings are computed in float32, one query at a time, so that padding has no effect on them.
    """
    settings = {
        "dim": tower.dim,
        "max_length": tower.config.max_length,
        "causal": tower.causal,
        **asdict(tower.special),
    }
    assert isinstance(tower.prompt, QueryPrompt)
    rows = tower.prompt.rows(queries)
    with torch.inference_mode():
        embeddings = torch.cat([tower(collate([row], pad=tower.pad))[:, 0] for row in rows]).numpy()
    write_json(folder / "onnx.json", settings)
    write_json(folder / "golden.json", list(queries))
    np.save(folder / "golden.npy", embeddings, allow_pickle=False)


def _write_float32_graph(tower: Tower, path: Path) -> None:
    """Trace a query tower into a float32 ONNX graph. Modules of `tower` are replaced: do not use it again.

    The older of torch's two exporters is used, which records one run of the model: it takes 0.3 s for a tiny
    BERT and 4 s for 4 layers of 768. The newer one took 37 s and 13 s and needs two more packages.
    """
    ids = torch.full((3, min(7, tower.config.max_length)), tower.special.pad)
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] // 2 :] = 0
    axes = {0: "rows", 1: "tokens"}
    with warnings.catch_warnings():
        # The exporter warns of its deprecation and of each Python number that becomes a constant.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            QueryGraph(tower).eval(),
            (ids, mask),
            str(path),
            input_names=["ids", "mask"],
            output_names=["embeddings"],
            dynamic_axes={"ids": axes, "mask": axes, "embeddings": {0: "rows"}},
            opset_version=17,
            dynamo=False,
        )


class QueryGraph(nn.Module):
    """A query tower as a function of tensors: ids, mask -> embeddings. It modifies the tower's modules."""

    backbone: Any

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.backbone = tower.backbone
        self.projection, self._causal = tower.projection, tower.causal
        self.backbone.set_attn_implementation("eager")
        settings: Any = self.backbone.config
        self._by_layer = "sliding_attention" in (getattr(settings, "layer_types", None) or ())
        self._window: int | None = getattr(settings, "sliding_window", None)
        self._shift = first_position(self.backbone)
        if not self._causal and _is_bert(self.backbone):
            layers: Any = self.backbone.encoder.layer
            layers[-1] = FirstPosition(layers[-1])

    def forward(
        self, ids: Int[Tensor, "rows tokens"], mask: Int[Tensor, "rows tokens"]
    ) -> Float[Tensor, "rows dim"]:
        """Return embeddings, not normalised, of rows that are padded on the right."""
        masks: Any = self._mask(mask, self._window)
        if self._by_layer:
            masks = {"full_attention": self._mask(mask, None), "sliding_attention": masks}
        more: dict[str, Any] = {"use_cache": False} if self._causal else {}
        if self._shift:
            more["position_ids"] = torch.arange(ids.shape[1])[None] + self._shift
        hidden = self.backbone(input_ids=ids, attention_mask=masks, **more).last_hidden_state
        if not self._causal:
            return self.projection(hidden[:, 0])  # type: ignore[no-any-return]
        last = mask.sum(1) - 1
        return self.projection(hidden[torch.arange(hidden.shape[0]), last])  # type: ignore[no-any-return]

    def _mask(
        self, mask: Int[Tensor, "rows tokens"], window: int | None
    ) -> Float[Tensor, "rows 1 queries tokens"]:
        """Return the mask that is added to attention scores: 0 for visible tokens, else -10,000."""
        allowed = mask.bool()[:, None, None, :]
        at = torch.arange(mask.shape[1])
        back = at[:, None] - at[None, :]
        if self._causal:
            allowed = allowed & (back >= 0)
        if window is not None:
            allowed = allowed & (back < window if self._causal else back.abs() <= window)
        # Not the most negative float: quantization scales by the largest magnitude.
        return torch.zeros(allowed.shape).masked_fill(~allowed, -1e4)


class FirstPosition(nn.Module):
    """BERT's last layer for only the first position: keys and values of all tokens, the rest of one.

    The state at that position is exactly the layer's, for a sixth of the operations.
    """

    layer: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: Float[Tensor, "rows tokens hidden"], mask: Tensor, *_: Any, **__: Any
    ) -> Float[Tensor, "rows 1 hidden"]:
        """Return the state of the first position after this layer."""
        attention, first = self.layer.attention.self, hidden[:, :1]
        width = attention.attention_head_size

        def heads(states: Tensor) -> Tensor:
            split: Tensor = states.unflatten(-1, (-1, width)).transpose(1, 2)
            return split

        scores = heads(attention.query(first)) @ heads(attention.key(hidden)).transpose(2, 3)
        shares = (scores / math.sqrt(width) + mask).softmax(-1)
        context = (shares @ heads(attention.value(hidden))).transpose(1, 2).flatten(2)
        state: Tensor = self.layer.feed_forward_chunk(self.layer.attention.output(context, first))
        return state


def _is_bert(backbone: nn.Module) -> bool:
    """Return whether the layers have BERT's structure, under any family name."""
    layers = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    self_attention = getattr(getattr(layers[-1], "attention", None), "self", None)
    return hasattr(layers[-1], "feed_forward_chunk") and all(
        hasattr(self_attention, name) for name in ("query", "key", "value", "attention_head_size")
    )
