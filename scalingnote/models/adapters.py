"""Low-rank adapters on a frozen backbone (LoRA, DoRA), through peft; and rows for new tokens that learn.

Two towers may stand on one backbone. They are then two trees of modules over the same frozen tensors,
each with an adapter of its own, so that no adapter is ever switched: not between the towers of a step, not
in the second pass of GradCache, not when a checkpointed layer is computed again in the backward pass.
"""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from scalingnote.errors import ConfigError
from scalingnote.models.config import Lora
from scalingnote.models.precision import lower

_WEIGHTS = "adapter_model.safetensors"


def twin(model: nn.Module) -> nn.Module:
    """A second tree of modules over the same tensors: the weights are held once.

    Under fsdp2 each tree has shards of its own: twice the frozen weights, divided by the ranks.
    """
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def add(model: nn.Module, lora: Lora, *, name: str, tokens: Sequence[int], seed: int) -> None:
    """Freeze `model` and put adapter `name` in it; the embeddings of `tokens` learn as well."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a fraction serves as well
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=targets,
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name=name)
    if tokens:
        table = model.get_input_embeddings()  # type: ignore[operator]
        model.set_input_embeddings(NewTokens(table, tokens))  # type: ignore[operator]


class NewTokens(nn.Module):
    """A frozen table of token embeddings with a few rows that learn.

    peft has the same (`trainable_token_indices`), but it copies the whole table in every forward pass:
    2 GB for a vocabulary of 152,000 and 3,584 hidden.
    """

    def __init__(self, table: nn.Embedding, tokens: Sequence[int]) -> None:
        super().__init__()
        self.table = table
        self.tokens: Int[Tensor, " new"]
        self.register_buffer("tokens", torch.tensor(tokens, device=table.weight.device), persistent=False)
        self.rows = nn.Parameter(table.weight.detach()[self.tokens].float())

    @property
    def weight(self) -> Float[Tensor, "vocabulary hidden"]:
        """The table with the new rows in it, a copy."""
        found = self.table.weight.detach().clone()
        found[self.tokens] = self.rows.detach().to(found.dtype)
        return found

    def forward(self, ids: Int[Tensor, "lines tokens"]) -> Float[Tensor, "lines tokens hidden"]:
        """Token embeddings."""
        embeddings: Tensor = self.table(ids)
        hits = ids[..., None] == self.tokens
        scale = getattr(self.table, "embed_scale", 1.0)  # Gemma's tables scale what they give
        rows = (hits.to(self.rows.dtype) @ self.rows) * scale
        return torch.where(hits.any(-1, keepdim=True), rows.to(embeddings.dtype), embeddings)


def lower_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold frozen linear weights in the format they are multiplied in: half the memory, no cast per call.

    For training under autocast to `dtype`; weights that learn, norms and embeddings stay as they are.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
            lower(layer, dtype)


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` holds an adapter."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The state of the backbone alone, adapters worked into its weights; the model stays as it is.

    One layer is merged at a time, in float32: an update is too small for half precision to keep.
    """
    state: dict[str, Tensor] = {}
    inside = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer: Any = copy.deepcopy(module)
            layer.float()
            layer.merge(safe_merge=True)
            tensors = layer.get_base_layer().state_dict()
        elif isinstance(module, NewTokens):
            tensors = {"weight": module.weight}
        else:
            continue
        inside.append(f"{name}.")
        state |= {f"{name}.{key}": value for key, value in tensors.items()}
    rest = {key: value for key, value in model.state_dict().items() if not key.startswith(tuple(inside))}
    return rest | state


def save(model: nn.Module, folder: Path, *, name: str, base: str) -> None:
    """Write adapter `name` as peft does, so that any tool finds it on top of the backbone at `base`."""
    settings: Any = copy.copy(model.peft_config[name])  # type: ignore[index]
    settings.base_model_name_or_path, settings.inference_mode = base, True
    weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    for path, module in model.named_modules():
        if isinstance(module, NewTokens):
            weights[f"{path}.token_adapter.trainable_tokens_delta"] = module.rows
            settings.trainable_token_indices = {path.rpartition(".")[2]: module.tokens.tolist()}
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    save_file(
        {f"base_model.model.{key}": value.detach().contiguous() for key, value in weights.items()},
        folder / _WEIGHTS,
        {"format": "pt"},
    )


def load_merged(model: nn.Module, path: str | Path) -> nn.Module:
    """`model` with the adapter at `path`, a folder or hub id that peft reads, worked into its weights.

    ConfigError where they are no safetensors: peft would read a pickle.
    """
    if cached_file(str(path), _WEIGHTS, _raise_exceptions_for_missing_entries=False) is None:
        raise ConfigError(f"{str(path)!r} has no {_WEIGHTS}: save the adapter anew, pickles are not read")
    with warnings.catch_warnings():
        # peft 0.21 still asks transformers 5.23 by the old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted: Any = PeftModel.from_pretrained(model, str(path))
    merged_model: nn.Module = adapted.merge_and_unload(safe_merge=True)
    return merged_model
