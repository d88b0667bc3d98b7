"""Query towers of every kind: one way to build them, one way to read them from a folder."""

import json
from pathlib import Path

from scalingnote.errors import ArtifactError
from scalingnote.models import lookup, token_wise, tower
from scalingnote.models.backbone import Backbone
from scalingnote.models.config import LookupConfig, TokenWiseConfig, TowerConfig
from scalingnote.models.lookup import LookupTower
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Tower


def build(
    config: TowerConfig | LookupConfig | TokenWiseConfig,
    *,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None = None,
    adapter: str | None = None,
) -> Tower | LookupTower | TokenWise:
    """A query tower ready to train, of whatever kind `config` is.

    `backbone`, where one is given, is that of a tower that has one, and brings `adapter` if that has a name.
    ConfigError when what the kind needs is not there.
    """
    match config:
        case LookupConfig():
            return lookup.build(config, dim=dim, tokenizer_json=tokenizer_json, seed=seed)
        case TokenWiseConfig():
            return token_wise.build(
                config,
                dim=dim,
                tokenizer_json=tokenizer_json,
                seed=seed,
                backbone=backbone,
                adapter=adapter,
            )
        case TowerConfig():
            return tower.build(
                config,
                role="query",
                dim=dim,
                tokenizer_json=tokenizer_json,
                seed=seed,
                backbone=backbone,
                adapter=adapter,
            )


def load(folder: Path) -> Tower | LookupTower:
    """Read a saved query tower, of whatever kind it is; ArtifactError when the folder holds none."""
    try:
        facts = json.loads((folder / "tower.json").read_text())
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} is not a tower: {error.filename} is missing") from None
    return LookupTower.load(folder) if facts.get("kind") == "lookup" else Tower.load(folder)
