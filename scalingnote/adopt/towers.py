"""Towers of published embedding models, as sentence-transformers encodes with them."""

import hashlib
from pathlib import Path

from scalingnote.adopt.config import AdoptConfig
from scalingnote.errors import ConfigError
from scalingnote.models import published_tower
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.published_model import Role
from scalingnote.models.published_tower import LibraryTower
from scalingnote.models.tower import Tower

_BLOCK_BYTES = 1 << 24  # hashed at once


def open_tower(config: AdoptConfig, role: Role) -> Tower:
    """One tower of a published model, in float32.

    Args:
        config: the model, and settings that its files leave open.
        role: query or document.

    Raises:
        ConfigError: a setting is neither in the files nor in the config, or the config overrides a setting of
            a model that only sentence-transformers can encode with.
    """
    prefix, length = (
        (config.query_prefix, config.query_max_length)
        if role == "query"
        else (config.document_prefix, config.document_max_length)
    )
    settings = TowerConfig(
        backbone=Pretrained(path=model_path(config, role)),
        pooling=config.pooling,
        normalise=config.normalise,
        prefix=prefix,
    )
    model = published_tower.model_of(settings, role)
    length = length or published_tower.token_limit(model)
    if not model.unknown:
        settings = settings.model_copy(update={"max_length": length})
        return published_tower.build(settings, role=role, dim=None).eval()
    if config.pooling != "auto" or config.normalise is not None:
        raise ConfigError(
            f"{model.unknown} of {model.source} is not known to scalingnote, and sentence-transformers "
            "encodes as the model's files say: leave adopt.pooling and adopt.normalise out"
        )
    return LibraryTower(model, role=role, max_length=length).eval()


def model_path(config: AdoptConfig, role: Role) -> str:
    """Hub id or folder of the model that encodes texts of this role."""
    return config.query_path or config.path if role == "query" else config.path


def weight_checksums(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of the safetensors files in a model's folder."""
    checksums = {}
    for path in sorted(folder.rglob("*.safetensors")):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        checksums[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return checksums
