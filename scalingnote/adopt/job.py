"""Adopt: a published embedding model becomes a dual encoder, without training.

    hub id or folder -> query/, document/: towers that encode as sentence-transformers does

Both towers are written whole, so that what comes after needs neither the hub nor the folder.
"""

import hashlib
import tempfile
from pathlib import Path

from scalingnote.adopt.config import AdoptConfig
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.models import native, native_tower
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.library_tower import LibraryTower
from scalingnote.models.module_list import Role
from scalingnote.models.tower import Tower
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft

log = get_logger("adopt")
_BLOCK = 1 << 24  # bytes hashed at once
ROLES: tuple[Role, ...] = ("query", "document")


def run(config: AdoptConfig, *, output: str) -> Artifact:
    """The published model as a dual encoder at `output`; the manifest names its weights by their sha256.

    ConfigError when the files of a model leave something open, or when the models of a pair give embeddings
    of different widths.
    """
    draft = Draft(output, kind="dual_encoder", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.afresh()  # another model may lie at the path since
    _check_weights(config)
    dims, parameters, weights = {}, 0, {}
    for role in ROLES:
        made = tower(config, role)
        weights[role] = weights_of(native.local_folder(path_of(config, role)))
        dims[role] = made.dim
        parameters += sum(parameter.numel() for parameter in made.parameters())
        log.info(
            "%s: %s, %d dimensions, %d tokens", role, path_of(config, role), made.dim, made.config.max_length
        )
        with tempfile.TemporaryDirectory() as folder:
            made.save(Path(folder))
            fs.upload(folder, draft.path(role))
    if dims["query"] != dims["document"]:
        raise ConfigError(
            f"{config.query_path} gives embeddings of {dims['query']} dimensions and {config.path} of "
            f"{dims['document']}: a pair has one space"
        )
    return draft.commit(
        counts={"dimensions": dims["document"], "parameters": parameters}, weights_sha256=weights
    )


def _check_weights(config: AdoptConfig) -> None:
    folder = native.local_folder(config.path)
    found = weights_of(folder).get("model.safetensors")
    if config.weights_sha256 not in (None, found):
        raise ConfigError(
            f"{folder}/model.safetensors has sha256 {found}, not {config.weights_sha256}: "
            "fetch the model again, or leave adopt.weights_sha256 out to take these weights"
        )


def tower(config: AdoptConfig, role: Role) -> Tower:
    """One side of the published model, in float32. ConfigError where its files leave something open."""
    prefix, length = (
        (config.query_prefix, config.query_max_length)
        if role == "query"
        else (config.document_prefix, config.document_max_length)
    )
    settings = TowerConfig(
        backbone=Pretrained(path=path_of(config, role)),
        pooling=config.pooling,
        normalise=config.normalise,
        prefix=prefix,
    )
    model = native.of_config(settings, role)
    length = length or native_tower.longest(model)
    if not model.unknown:
        return native_tower.build(
            settings.model_copy(update={"max_length": length}), role=role, dim=None
        ).eval()
    if config.pooling != "auto" or config.normalise is not None:
        raise ConfigError(
            f"{model.unknown} of {model.source} is not known to scalingnote, and sentence-transformers "
            "encodes as the model's files say: leave adopt.pooling and adopt.normalise out"
        )
    return LibraryTower(model, role=role, max_length=length).eval()


def path_of(config: AdoptConfig, role: Role) -> str:
    """Hub id or folder of the model that reads this role's texts."""
    return config.query_path or config.path if role == "query" else config.path


def weights_of(folder: Path) -> dict[str, str]:
    """The sha256 of each file of weights in a model's folder, by its path there."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found
