"""Checkpoints: weights, optimizer state and step in one safetensors file, written atomically.

The newest readable file is the state of the run; there is nothing else to lose or to disagree with it.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from scalingnote.storage import filesystem as fs


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one run below a URI that every rank can read."""

    uri: str
    keep: int

    def save(
        self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, notes: list[dict[str, Any]]
    ) -> None:
        """Write step's state, then drop all but the newest `keep`."""
        tensors = {f"model.{name}": value for name, value in _unaliased(module).items()}
        groups = optimizer.state_dict()
        for index, state in groups["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        fs.write_bytes(
            fs.join(self.uri, f"step-{step:09d}.safetensors"),
            save({k: v.detach().contiguous() for k, v in tensors.items()}, {"notes": json.dumps(notes)}),
        )
        for name in self._names()[: -self.keep]:
            fs.delete(fs.join(self.uri, name))

    def restore(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, list[dict[str, Any]]]:
        """Load the newest state into both; returns its step and notes, or (0, []) when there is none."""
        names = self._names()
        if not names:
            return 0, []
        data = fs.read_bytes(fs.join(self.uri, names[-1]))
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        aliases = _unaliased(module)
        module.load_state_dict({name: tensors[f"model.{name}"] for name in aliases}, strict=False)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        step = int(names[-1].removeprefix("step-").removesuffix(".safetensors"))
        return step, json.loads(header["__metadata__"]["notes"])

    def _names(self) -> list[str]:
        return [name for name in fs.list_files(self.uri) if name.endswith(".safetensors")]


def _unaliased(module: nn.Module) -> dict[str, Tensor]:
    """State without tied weights twice: safetensors stores each tensor once."""
    seen: set[int] = set()
    kept = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            kept[name] = value
    return kept
