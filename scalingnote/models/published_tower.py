"""Published embedding models as towers, with their pooling, dense layers, normalisation and prompt.

    ids        [rows, tokens]        prefix and text, and the special tokens of the tokenizer's post-processor
    hidden     [tokens, hidden]      backbone, packed if the model family allows it
    pooled     [rows, width]         heads.pool
    embeddings [rows, 1, dim]        heads.Head; of length 1 if the model normalises

PublishedTower runs and trains a model with this package. LibraryTower runs a model with settings that this
package does not implement through sentence-transformers; it only encodes. A saved PublishedTower is a
sentence-transformers folder with the same settings and a ``tower.json``.
"""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoTokenizer

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.model_files import write_json
from scalingnote.models import backbone as backbones
from scalingnote.models import library_export, published_model
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.heads import Dense, Head, Normalise, pool, read_head
from scalingnote.models.prompt import TextDocuments, TextQueries, lowercase
from scalingnote.models.published_model import PublishedModel, Role, dense_settings
from scalingnote.models.tower import Tower
from scalingnote.models.weights import add_adapter, read_in

log = get_logger("models")


class PublishedTower(Tower):
    """A published model as a query or document tower that this package runs and trains."""

    kind = "native"
    projection: Head  # type: ignore[assignment]
    prompt: TextQueries | TextDocuments

    def __init__(
        self, backbone: Backbone, config: TowerConfig, model: PublishedModel, layers: Head, *, role: Role
    ) -> None:
        """Make a tower; `layers` are those of `model` after pooling."""
        prompt = make_prompt(backbone.tokenizer, model, role, max_length=config.max_length)
        super().__init__(backbone, config, prompt, layers, role=role)
        self.native, self.base_path = model, str(model.folder)
        self.pad = self.tokenizer.pad_token_id or 0

    def forward(self, batch: Batch) -> Tensor:
        """Return float32 embeddings of padded or packed rows, [rows, 1, dim]."""
        batch, order = batch.for_model(pad=self.pad, packed=self.packs)
        # The mask is needed, unlike in our own causal towers: some published decoders attend both ways.
        states = batch.flatten(self._hidden_states(batch, masked=True))
        pooled = pool(states, batch.row_lengths, self.native.pooling)
        return self.projection(pooled[:, None])[order]  # type: ignore[no-any-return]

    def _save_files(self, folder: Path, *, whole: bool) -> None:
        """Write the files with which sentence-transformers reads the folder like the published model."""
        self.tokenizer.save_pretrained(folder)
        library_export.write_published(
            folder, self.native, self.projection, role=self.role, max_length=self.config.max_length
        )

    def _facts(self, *, layers: int | None) -> dict[str, Any]:
        return {
            "prompt": self.native.prefix,
            "pooling": [self.native.pooling],
            "normalised": any(isinstance(layer, Normalise) for layer in self.projection),
            "text": self.prompt.facts,
            "layers": layers,
            "sparse": None,
        }


def build(
    config: TowerConfig,
    *,
    role: Role,
    dim: int | None,
    seed: int = 0,
    backbone: Backbone | None = None,
    dtype: torch.dtype = torch.float32,
) -> PublishedTower:
    """Build the tower of a published model, whose settings `config` overrides, ready to train.

    See :func:`scalingnote.models.dual_encoder.build_tower` for the arguments; a `dim` of None is the model's
    width. `dtype` is that of the weights of a backbone that is loaded here.

    Raises:
        ConfigError: the model's width is not `dim`, a setting is missing, or only sentence-transformers can
            run the model.
    """
    model = model_of(config, role)
    if model.unknown:
        raise ConfigError(
            f"{model.unknown} of {model.source} is not supported by scalingnote, so the model cannot be "
            "trained: use the stage adopt, which encodes with it"
        )
    backbone = backbone or backbone_of(config, model, dtype=dtype)
    backbone.tokenizer = tokenizer_of(model)
    backbone.check_length(config.max_length, role=role)
    layers = _head(config, model, hidden=backbone.hidden, dim=dim, seed=seed)
    if dim is not None and layers.dim != dim:
        raise ConfigError(
            f"{model.source} gives embeddings of {layers.dim} dimensions, but {dim} are configured: set "
            f"train.dim to {layers.dim}, or {role}.projection to random"
        )
    if config.lora is not None:
        add_adapter(backbone.model, config.lora, name=role, tokens=[], seed=seed)
        layers.requires_grad_(config.projection == "random")
    return PublishedTower(backbone, config, model, layers, role=role)


def model_of(config: TowerConfig, role: Role) -> PublishedModel:
    """Return the settings of a tower: those of its config, else those of the model's files.

    Raise ConfigError like :func:`scalingnote.models.published_model.read`, and if the backbone is not
    pretrained.
    """
    if config.backbone.kind != "pretrained":
        raise ConfigError(
            f"{role}.pooling={config.pooling!r} is for a published model: set {role}.backbone.kind to "
            "pretrained, or leave pooling at placeholders"
        )
    assert config.pooling != "placeholders"
    model = published_model.read(config.backbone.path, role, pooling=config.pooling)
    steps = model.steps
    if config.projection != "auto":
        steps = tuple(step for step in steps if step is None)
    if config.normalise is not None:
        steps = tuple(step for step in steps if step is not None) + (None,) * config.normalise
    prefix = model.prefix if config.prefix is None else config.prefix
    return replace(model, steps=steps, prefix=prefix)


def open_published(
    config: TowerConfig, role: Role, *, max_length: int | None = None, dtype: torch.dtype = torch.float32
) -> "PublishedTower | LibraryTower":
    """Load one role of a published model, ready to encode; sentence-transformers runs it if necessary.

    It reads `max_length` tokens, or with None the number that its files state; `dtype` is that of the
    backbone's weights. Raise ConfigError like :func:`build`, if no file states a length, or if `config`
    overrides a setting of a model that only sentence-transformers can run.
    """
    model = model_of(config, role)
    length = max_length or token_limit(model)
    if not model.unknown:
        config = config.model_copy(update={"max_length": length})
        return build(config, role=role, dim=None, dtype=dtype).eval()
    if config.pooling != "auto" or config.normalise is not None:
        raise ConfigError(
            f"{model.unknown} of {model.source} is not supported by scalingnote, and sentence-transformers "
            "encodes as the model's files state: leave adopt.pooling and adopt.normalise out"
        )
    return LibraryTower(model, role=role, max_length=length, dtype=dtype).eval()


def with_prefix(tower: Tower, prefix: str) -> Tower:
    """Return a published tower that puts `prefix` before every text; it shares the weights of `tower`.

    Raise ConfigError if the tower is not that of a published model, or if the prefix by itself is as long as
    the tower's maximum.
    """
    if not isinstance(tower, PublishedTower | LibraryTower):
        raise ConfigError(
            "this tower reads no prefix: use the tower of a published model, or the tables of query.tasks "
            "(token_wise), which have an instruction for each task"
        )
    prefixed = copy.copy(tower)
    prefixed.native = replace(tower.native, prefix=prefix)
    prefixed.prompt = make_prompt(
        tower.tokenizer, prefixed.native, tower.role, max_length=tower.config.max_length
    )
    if isinstance(prefixed, LibraryTower):
        prefixed.skip = prefix_length(tower.tokenizer, prefix)
    return prefixed


def prompt_of(config: TowerConfig, *, role: Role) -> TextQueries | TextDocuments:
    """Return the prompt of a tower of this config without weights; raise ConfigError like :func:`build`."""
    model = model_of(config, role)
    return make_prompt(tokenizer_of(model), model, role, max_length=config.max_length)


def token_limit(model: PublishedModel) -> int:
    """Return the maximum tokens of a text for a published model; raise ConfigError if no file states it."""
    shell = backbones.shell(model.folder)
    tokens = model.max_length or tokenizer_of(model).model_max_length
    tokens = min(tokens, shell.max_positions or tokens)
    if tokens > 1 << 24:  # transformers' number for "not stated"
        raise ConfigError(f"no file of {model.source} states how many tokens it reads: set max_length")
    return int(tokens)


def tokenizer_of(model: PublishedModel) -> Any:
    """Load the tokenizer of a published model with its post-processor, like sentence-transformers.

    Unlike there, the flags add_bos_token and add_eos_token of tokenizer_config.json are applied.
    """
    kind = {} if model.tokenizer_type is None else {"tokenizer_type": model.tokenizer_type}
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False, **kind)
        backbones.as_flagged(tokenizer, model.folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {str(model.folder)!r}: {error}") from None
    if not tokenizer.is_fast:
        raise ConfigError(f"{str(model.folder)!r} has no fast tokenizer (tokenizer.json): convert it first")
    raw: Tokenizer = tokenizer.backend_tokenizer
    if model.lower_case and "Lowercase(" not in repr(raw.normalizer):
        lowercase(raw)
    return tokenizer


def make_prompt(
    tokenizer: Any, model: PublishedModel, role: Role, *, max_length: int
) -> TextQueries | TextDocuments:
    """Return the prompt of `role` for a tokenizer; raise ConfigError if the prefix fills `max_length`."""
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
    """Count the tokens that pooling skips if it skips the prefix.

    As in sentence-transformers, they are the tokens of the prefix as a text, without the special token at its
    end.
    """
    ids = tokenizer(prefix).input_ids if prefix else []
    return len(ids) - bool(ids and ids[-1] in tokenizer.all_special_ids)


def backbone_of(
    config: TowerConfig, model: PublishedModel, *, dtype: torch.dtype = torch.float32
) -> Backbone:
    """Load the transformer of a published model; raise ConfigError if its weights are not in safetensors."""
    assert isinstance(config.backbone, Pretrained)
    if not any(model.folder.glob("*.safetensors")):
        raise ConfigError(
            f"{model.folder} has no safetensors: convert its weights first, other formats are not read"
        )
    return backbones.load(model.folder, layers=config.backbone.layers, dtype=dtype)


def _head(config: TowerConfig, model: PublishedModel, *, hidden: int, dim: int | None, seed: int) -> Head:
    if config.projection != "random":
        return read_head(model.steps, hidden=hidden, keep=model.truncate_dim)
    if dim is None:
        raise ConfigError("projection=random makes embeddings of any width: set dim")
    first = Dense(dense_settings(hidden, dim))
    first.draw(seed)
    return Head([first, *read_head(model.steps, hidden=dim)], hidden=hidden)


class LibraryTower(Tower):
    """A published model as a query or document tower that sentence-transformers runs; it is not trained."""

    kind = "sentence_transformers"
    prompt: TextQueries | TextDocuments

    def __init__(
        self,
        model: PublishedModel,
        *,
        role: Role,
        max_length: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load `model` with its transformer in `dtype`; texts are read up to `max_length` tokens.

        Raise ConfigError if the library cannot load it.
        """
        nn.Module.__init__(self)
        self.library: Any = read_in(dtype, functools.partial(_library, model))
        first = self.library[0]
        transformer = (first.sub_modules[role] if hasattr(first, "sub_modules") else self.library)[0]
        transformer.register_forward_hook(_float_states)
        self.backbone = transformer.model
        self.tokenizer, self.native, self.role = tokenizer_of(model), model, role
        post_processor = self.tokenizer.backend_tokenizer.post_processor
        # The saved model then adds the same special tokens.
        transformer.tokenizer.backend_tokenizer.post_processor = post_processor
        self.config = TowerConfig(
            backbone=Pretrained(path=str(model.source)), pooling="auto", max_length=max_length
        )
        self.sparse, self.packs, self.causal = None, False, False
        self.pad = self.tokenizer.pad_token_id or 0
        self.prompt = make_prompt(self.tokenizer, model, role, max_length=max_length)
        self.skip = prefix_length(self.tokenizer, model.prefix)
        with torch.inference_mode():
            row = torch.tensor([self.prompt.row([]).ids or [self.pad]])
            self.dim = int(self._embed(row, torch.ones_like(row)).shape[1])

    def forward(self, batch: Batch) -> Tensor:
        """Return float32 embeddings of padded or packed rows, [rows, 1, dim]."""
        batch = batch.to_padded(self.pad)
        assert batch.mask is not None
        return self._embed(batch.ids, batch.mask)[:, None].float()

    def _embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        features: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "modality": "text"}
        if self.skip:
            features["prompt_length"] = self.skip
        embeddings: Tensor = self.library(features, task=self.role)["sentence_embedding"]
        return embeddings[:, : self.native.truncate_dim]  # None keeps all dimensions

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the model with sentence-transformers; both roles get this role's prompt."""
        folder.mkdir(parents=True, exist_ok=True)
        self.library.similarity_fn_name = self.native.similarity
        self.library.prompts = {"query": self.native.prefix, "document": self.native.prefix}
        self.library.default_prompt_name = self.role if self.native.prefix else None
        self.library.save(str(folder), create_model_card=False)
        facts = {
            "kind": self.kind,
            "role": self.role,
            "dim": self.dim,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.native.prefix,
            "unknown": self.native.unknown,
            "text": self.prompt.facts,
            "sparse": None,
        }
        write_json(folder / "tower.json", facts)
        if not (folder / "tokenizer.json").exists():
            self.tokenizer.save_pretrained(folder)  # of a Router, only the modules' folders have one


def _float_states(_: nn.Module, __: Any, features: dict[str, Any]) -> dict[str, Any]:
    """Convert floating-point outputs of the transformer to float32, the dtype of the layers after it."""
    return {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in features.items()
    }


def _library(model: PublishedModel, dtype: torch.dtype) -> Any:
    from sentence_transformers import SentenceTransformer  # late: takes seconds, and few models need it

    if model.unknown:
        log.warning(
            "%s of %s is not supported by scalingnote; sentence-transformers encodes, without packing",
            model.unknown,
            model.source,
        )
    try:
        return SentenceTransformer(
            str(model.source),
            device="cpu",
            trust_remote_code=False,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        ).eval()
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"sentence-transformers cannot load {str(model.source)!r}: {error}") from None
