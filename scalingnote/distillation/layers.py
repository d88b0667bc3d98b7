"""A student cut from its teacher: some of its layers, all else as it is, as a checkpoint of their own.

The teacher's job does not know which layers a student will want, and a copy of a 7B teacher beside its
embeddings would weigh 28 GB. So nothing is copied there: the layers are read from the safetensors of the
teacher's own artifact, tensor by tensor, once, and no model is built.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scalingnote.errors import ConfigError

_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?)\.(\d+)\.")
_TAKEN_ALONG = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "projection.safetensors",
    "tower.json",
)


def cut(teacher: Path, target: Path, *, layers: Sequence[int] | int) -> tuple[int, ...]:
    """Write a folder like the query tower `teacher` with these of its layers, or so many; returns which.

    A published model keeps its pooling, dense layers and prompts. ConfigError when the teacher has no such
    layers, or its folder no whole model.
    """
    settings: dict[str, Any] = json.loads((teacher / "config.json").read_text()) if _whole(teacher) else {}
    if not settings:
        raise ConfigError(f"{teacher} holds an adapter, not a model: train with merge_adapters=true")
    has = int(settings["num_hidden_layers"])
    chosen = spread(layers, of=has) if isinstance(layers, int) else tuple(layers)
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= layer < has for layer in chosen):
        raise ConfigError(f"teacher_layers {list(chosen)}: the teacher has layers 0 to {has - 1}, each once")
    target.mkdir(parents=True, exist_ok=True)
    # What a config lists per layer (kinds of attention, say) is cut with them.
    of_layers = {
        name: [value[layer] for layer in chosen]
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == has and name.startswith("layer")
    }
    settings |= {"num_hidden_layers": len(chosen), **of_layers}
    (target / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    save_file(_tensors(teacher, chosen), target / "model.safetensors", metadata={"format": "pt"})
    if is_published(teacher):
        shutil.copytree(
            teacher,
            target,
            dirs_exist_ok=True,
            ignore=lambda folder, names: _replaced(teacher, folder, names),
        )
        return chosen
    for name in _TAKEN_ALONG:
        if (teacher / name).exists():
            shutil.copyfile(teacher / name, target / name)
    return chosen


def is_published(folder: Path) -> bool:
    """Whether a tower's folder is a published model, with pooling and dense layers of its own."""
    return (folder / "modules.json").exists() and not (folder / "projection.safetensors").exists()


def _replaced(teacher: Path, folder: str, names: list[str]) -> list[str]:
    """Files that :func:`cut` writes itself."""
    if Path(folder) != teacher:
        return []
    return [name for name in names if name == "config.json" or name.startswith("model")]


def spread(layers: int, *, of: int) -> tuple[int, ...]:
    """So many layers at equal distances, the last one included."""
    if layers > of:
        raise ConfigError(f"the student asks for {layers} layers, its teacher has {of}")
    return tuple(round((number + 1) * of / layers) - 1 for number in range(layers))


def _whole(folder: Path) -> bool:
    return (folder / "config.json").exists() and any(folder.glob("model*.safetensors"))


def _tensors(teacher: Path, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Tensors by the names they have in the student."""
    number = {layer: place for place, layer in enumerate(chosen)}
    out: dict[str, Tensor] = {}
    for path in sorted(teacher.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                found = _LAYER.search(name)
                if found is None:
                    out[name] = file.get_tensor(name)
                elif int(found[3]) in number:
                    at = number[int(found[3])]
                    out[name[: found.start(3)] + str(at) + name[found.end(3) :]] = file.get_tensor(name)
    return out
