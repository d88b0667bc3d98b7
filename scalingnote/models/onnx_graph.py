"""The torch side of an ONNX export: a query tower as a traceable module, its float32 graph, its references.

The attention mask is computed here, the same for every model family. The last layer of a BERT computes only
the first position, the only one that is read.
"""

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scalingnote.models.batch import collate, first_position
from scalingnote.models.prompt import QueryPrompt
from scalingnote.models.tower import Tower


def write_references(tower: Tower, folder: Path, queries: Sequence[str]) -> None:
    """Write the files beside the graph: settings, golden queries and the tower's embeddings of them.

    Args:
        tower: a query tower.
        folder: where to write ``onnx.json``, ``golden.json`` and ``golden.npy``.
        queries: golden queries. Their embeddings are computed in float32, one query at a time, so that they
            contain no effect of padding.
    """
    settings = {
        "dim": tower.dim,
        "max_length": tower.config.max_length,
        "causal": tower.causal,
        "pad": tower.special.pad,
        "end": tower.special.end,
        "first": tower.special.first,
    }
    assert isinstance(tower.prompt, QueryPrompt)
    rows = tower.prompt.rows(queries)
    with torch.inference_mode():
        expected = torch.cat([tower(collate([row], pad=tower.pad))[:, 0] for row in rows]).numpy()
    (folder / "onnx.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "golden.json").write_text(json.dumps(list(queries), indent=1, ensure_ascii=False) + "\n")
    np.save(folder / "golden.npy", expected, allow_pickle=False)


def write_float32_graph(tower: Tower, path: Path) -> None:
    """Trace a query tower into a float32 ONNX graph. Modules of `tower` are replaced: do not use it again.

    The older of torch's two exporters is used, which records one run of the model: 0.3 s for a tiny BERT and
    4 s for 4 layers of 768. The newer one took 37 s and 13 s and needs two more packages.
    """
    ids = torch.full((3, min(7, tower.config.max_length)), tower.special.pad)
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] // 2 :] = 0
    axes = {0: "rows", 1: "tokens"}
    with warnings.catch_warnings():
        # Deprecation of this exporter, and a warning for each Python number that becomes a constant.
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
        self._reduced = not self._causal and _is_bert(self.backbone)
        if self._reduced:
            layers: Any = self.backbone.encoder.layer
            layers[-1] = FirstPosition(layers[-1])

    def forward(
        self, ids: Int[Tensor, "rows tokens"], mask: Int[Tensor, "rows tokens"]
    ) -> Float[Tensor, "rows dim"]:
        """Return embeddings of rows that are padded on the right, not normalised."""
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
    """BERT's last layer for the first position alone: keys and values of all tokens, the rest of one.

    It returns exactly the layer's state at that position, for a sixth of the operations.
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
    """Return whether the layers have BERT's structure, whatever the family's name."""
    layers = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    own = getattr(getattr(layers[-1], "attention", None), "self", None)
    return hasattr(layers[-1], "feed_forward_chunk") and all(
        hasattr(own, name) for name in ("query", "key", "value", "attention_head_size")
    )
