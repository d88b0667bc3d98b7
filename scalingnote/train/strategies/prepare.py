"""What is done to a module before it is spread over ranks, and the parts of it that are spread."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scalingnote.models.cross_encoder import CrossEncoder
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Tower
from scalingnote.train.config import Memory


def prepare(module: nn.Module, memory: Memory) -> nn.Module:
    """Switch on what `memory` asks for, in place."""
    if memory.gradient_checkpointing:
        for model in module.modules():
            if isinstance(model, PreTrainedModel):
                # The reentrant kind cannot see a model that is used twice in one step.
                model.activation_checkpointing_enable({"use_reentrant": False})
                model.config.use_cache = False
    if memory.compile:
        for backbone in backbones(module):
            for layer in layers(backbone):
                # Layers are alike: one compilation serves all. Lengths differ from batch to batch.
                layer.compile(dynamic=True)
    return module


def backbones(module: nn.Module) -> list[nn.Module]:
    """The transformers inside, each once, though two towers may share one."""
    kinds = Tower | TokenWise | CrossEncoder
    towers = [tower for tower in module.modules() if isinstance(tower, kinds)]
    return list({id(tower.backbone): tower.backbone for tower in towers}.values())


def layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: the members of its outermost lists of modules."""
    if isinstance(backbone, nn.ModuleList):
        return list(backbone)
    return [layer for child in backbone.children() for layer in layers(child)]


def tied_heads(module: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Sparse heads without weights of their own, each with the input table it reads instead."""
    towers = [tower for tower in module.modules() if isinstance(tower, Tower) and tower.sparse]
    return [(t.sparse, t.input_table) for t in towers if t.sparse is not None and t.sparse.own is None]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn, each once, by name. What is frozen is rebuilt from config, never stored."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Matrix products in `dtype`; nothing changes for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def surrogate(embeddings: Tensor, gradients: Tensor) -> Tensor:
    """A scalar whose gradient with regard to `embeddings` is `gradients`."""
    return (embeddings.float() * gradients).sum()
