"""A published embedding model as a tower: its own pooling, dense layers, normalisation and prompt.

    ids        [rows, tokens]        prefix and text, and what the tokenizer's post-processor adds
    hidden     [tokens, hidden]      backbone, packed where its family allows it
    pooled     [rows, width]         :mod:`scalingnote.models.pooling`
    embeddings [rows, 1, dim]        :mod:`scalingnote.models.head`; of length 1 where the model normalises

A saved tower is a sentence-transformers folder that says the same, with a ``tower.json`` beside it.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
from torch import Tensor, nn
from transformers import AutoTokenizer

from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.models import attention, export, head, native
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.head import Head, Normalise
from scalingnote.models.module_list import Role
from scalingnote.models.native import NativeModel
from scalingnote.models.pooling import pool, states_of
from scalingnote.models.prompt import TextDocuments, TextQueries
from scalingnote.models.tower import Tower

log = get_logger("models")


class NativeTower(Tower):
    """One side of a dual encoder, as it was published."""

    projection: Head  # type: ignore[assignment]
    prompt: TextQueries | TextDocuments

    def __init__(
        self,
        backbone: Backbone,
        config: TowerConfig,
        model: NativeModel,
        layers: Head,
        *,
        role: Role,
        adapter: str | None = None,
    ) -> None:
        """`config.max_length` is the number of tokens read; `model` is what the published files say.

        ConfigError when the backbone reads fewer tokens than that.
        """
        nn.Module.__init__(self)
        positions = backbone.max_positions
        if positions is not None and config.max_length > positions:
            raise ConfigError(
                f"the {role} tower has max_length={config.max_length}, but its backbone reads {positions} "
                "tokens: lower it"
            )
        self.backbone, self.sparse, self.projection = backbone.model, None, layers
        self.tokenizer, self.causal = backbone.tokenizer, backbone.causal
        self.config, self.native, self.role, self.dim = config, model, role, layers.dim
        self._adapter, self._max_positions = adapter or role, positions
        pad = self.tokenizer.pad_token_id
        self.pad = 0 if pad is None else int(pad)
        self.packs = attention.choose(backbone.model, config.attention)
        self.prompt = make_prompt(self.tokenizer, model, role, max_length=config.max_length)
        self._skip = 0 if model.include_prompt else prefix_length(self.tokenizer, model.prefix)

    def _read(self, batch: Batch, *, terms: bool) -> tuple[Tensor, Tensor | None]:
        assert not terms, "a published model has no sparse head"
        back: Tensor | slice = slice(None)
        if batch.packing is None or not self.packs:
            batch = batch.padded(self.pad)
        else:
            batch, back = batch.by_length()
        # Not without a mask, as for the towers of ScalingNote: a causal model may read what follows, too.
        kwargs = attention.arguments(self.backbone, batch, causal=False)
        if self.causal:
            kwargs["use_cache"] = False
        hidden = self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state
        pooled = pool(*states_of(hidden, batch), self.native.pooling, skip=self._skip)
        return self._project(pooled[:, None])[back], None

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder, which sentence-transformers reads as it read the published model.

        Adapters are worked into the weights, or kept, as those of :class:`Tower`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        source, adapted = self.config.backbone, self.config.lora is not None
        kept = source if adapted and not merge_adapters and isinstance(source, Pretrained) else None
        if adapted:
            from scalingnote.models import adapters  # late: peft is slow to import, and few need it
        if kept is not None:
            base = str(self.native.folder)
            adapters.save(self.backbone, folder, name=self._adapter, base=base)
        else:
            state = adapters.merged(self.backbone) if adapted else None
            self.backbone.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        export.write_native(
            folder, self.native, self.projection, role=self.role, max_length=self.config.max_length
        )
        facts = {
            "kind": "native",
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.native.prefix,
            "pooling": list(self.native.pooling),
            "normalised": any(isinstance(layer, Normalise) for layer in self.projection),
            "text": self.prompt.facts,
            "layers": None if kept is None else kept.layers,
            "sparse": None,
        }
        (folder / "tower.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def build(
    config: TowerConfig,
    *,
    role: Role,
    dim: int | None,
    seed: int = 0,
    backbone: Backbone | None = None,
    adapter: str | None = None,
) -> Tower:
    """The tower of a published model, ready to train; on `backbone` where one is given, which is its own.

    `dim` is the width that the other tower expects; None takes the model's. ConfigError when the model has
    another, when its files leave something open, or when it needs sentence-transformers to run.
    """
    model = native.of_config(config, role)
    if model.unknown:
        raise ConfigError(
            f"{model.unknown} of {model.source} is not known to scalingnote, so the model cannot be trained: "
            "the stage adopt encodes with it"
        )
    assert isinstance(config.backbone, Pretrained)
    backbone = backbone or _backbone(model, layers=config.backbone.layers)
    backbone.tokenizer = tokenizer_of(model)
    made = _head(config, model, hidden=backbone.hidden, dim=dim, seed=seed)
    if dim is not None and made.dim != dim:
        raise ConfigError(
            f"{model.source} gives embeddings of {made.dim} dimensions, but {dim} are wanted: set train.dim "
            f"to {made.dim}, or {role}.projection to random"
        )
    if config.lora is not None and adapter is None:
        from scalingnote.models import adapters  # late, as above

        adapters.add(backbone.model, config.lora, name=role, tokens=[], seed=seed)
        made.requires_grad_(config.projection == "random")
    return NativeTower(backbone, config, model, made, role=role, adapter=adapter)


def backbone_of(config: TowerConfig, role: Role) -> Backbone:
    """The transformer of a published model, for towers that share it. ConfigError as for :func:`build`."""
    assert isinstance(config.backbone, Pretrained)
    return _backbone(native.of_config(config, role), layers=config.backbone.layers)


def load(folder: Path, facts: dict[str, Any]) -> Tower:
    """Read a folder written by :meth:`NativeTower.save`; `facts` are its tower.json."""
    role: Role = facts["role"]
    model = native.read(folder, role)
    backbone = backbones.load(folder, layers=facts.get("layers"))
    backbone.causal, backbone.tokenizer = facts["causal"], tokenizer_of(model)
    config = TowerConfig(
        backbone=Pretrained(path=str(folder)), pooling="auto", max_length=facts["max_length"]
    )
    layers = head.read(model.steps, hidden=backbone.hidden * len(model.pooling), keep=model.truncate_dim)
    return NativeTower(backbone, config, model, layers, role=role).eval()


def published(folder: Path, role: Role) -> Tower:
    """One side of a published model, ready to encode; :func:`load` reads what we saved of one.

    Args:
        folder: a folder that sentence-transformers reads, of a Router or of one model for both roles.
        role: which texts the tower reads.

    Raises:
        ConfigError: as :func:`build`, and where nothing states how many tokens the model reads.
    """
    found = native.read(folder, role)
    config = TowerConfig(backbone=Pretrained(path=str(folder)), pooling="auto", max_length=longest(found))
    return build(config, role=role, dim=None).eval()


def prompt_of(config: TowerConfig, *, role: Role) -> TextQueries | TextDocuments:
    """How a tower of this config reads a text; no weights are loaded. ConfigError as for :func:`build`."""
    model = native.of_config(config, role)
    return make_prompt(tokenizer_of(model), model, role, max_length=config.max_length)


def longest(model: NativeModel) -> int:
    """Tokens that a published model reads of a text, by its files; ConfigError where none of them says."""
    shell = backbones.shell(model.folder)
    tokens = model.max_length or tokenizer_of(model).model_max_length
    tokens = min(tokens, shell.max_positions or tokens)
    if tokens > 1 << 24:  # transformers' number for "not stated"
        raise ConfigError(f"no file of {model.source} says how many tokens it reads: set max_length")
    return int(tokens)


def tokenizer_of(model: NativeModel) -> Any:
    """The tokenizer of a published model, post-processor included, as sentence-transformers loads it."""
    kind = {} if model.tokenizer_type is None else {"tokenizer_type": model.tokenizer_type}
    try:
        found = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False, **kind)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {str(model.folder)!r}: {error}") from None
    if not found.is_fast:
        raise ConfigError(f"{str(model.folder)!r} has no fast tokenizer (tokenizer.json): convert it first")
    raw: Tokenizer = found.backend_tokenizer
    if model.lower_case and "Lowercase(" not in repr(raw.normalizer):
        below = [] if raw.normalizer is None else [raw.normalizer]
        raw.normalizer = normalizers.Sequence([normalizers.Lowercase(), *below])
    return found


def make_prompt(
    tokenizer: Any, model: NativeModel, role: Role, *, max_length: int
) -> TextQueries | TextDocuments:
    """How a text of `role` is read with this tokenizer. ConfigError where the prefix fills `max_length`."""
    keeps = "left" if tokenizer.truncation_side == "right" else "right"
    kind: type[TextQueries] | type[TextDocuments] = TextQueries if role == "query" else TextDocuments
    return kind(
        tokenizer.backend_tokenizer,
        prefix=model.prefix,
        max_length=max_length,
        keeps=keeps,
        empty=tokenizer.pad_token_id or 0,
    )


def prefix_length(tokenizer: Any, prefix: str) -> int:
    """How many tokens pooling leaves out where it leaves the prefix out.

    Tokens of the prefix alone with those before it, as sentence-transformers counts them.
    """
    ids = tokenizer(prefix).input_ids if prefix else []
    return len(ids) - bool(ids and ids[-1] in tokenizer.all_special_ids)


def _backbone(model: NativeModel, *, layers: int | None) -> Backbone:
    if not any(model.folder.glob("*.safetensors")):
        raise ConfigError(
            f"{model.folder} has no safetensors: weights are read from nothing else, so convert them first"
        )
    return backbones.load(model.folder, layers=layers)


def _head(config: TowerConfig, model: NativeModel, *, hidden: int, dim: int | None, seed: int) -> Head:
    hidden *= len(model.pooling)
    if config.projection != "random":
        return head.read(model.steps, hidden=hidden, keep=model.truncate_dim)
    if dim is None:
        raise ConfigError("projection=random makes embeddings of any width: give dim")
    first = head.drawn(hidden, dim, seed=seed)
    return Head([first, *head.read(model.steps, hidden=dim)], hidden=hidden)
