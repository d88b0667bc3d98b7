"""The adopt stage: a published embedding model becomes a dual encoder, without training.

    hub id or folder -> query/, document/: towers that encode as sentence-transformers does

Both towers are written with their weights, so that later stages need neither the hub nor the folder.
"""

import tempfile
from pathlib import Path

from scalingnote.adopt.config import AdoptConfig
from scalingnote.adopt.towers import model_path, open_tower, weight_checksums
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.models import published_model
from scalingnote.models.published_model import Role
from scalingnote.storage.artifact import Artifact, Draft

log = get_logger("adopt")
ROLES: tuple[Role, ...] = ("query", "document")


def run(config: AdoptConfig, *, output: str) -> Artifact:
    """Build a `dual_encoder` from a published model; its manifest holds the sha256 of the model's weights.

    Args:
        config: the model, or the pair of models.
        output: URI of the artifact.

    Raises:
        ConfigError: a setting is missing in the files, the weights have another sha256 than configured, or
            the models of a pair give embeddings of different dimensions.
    """
    draft = Draft(output, kind="dual_encoder", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.afresh()  # the model at the path may have changed since an interrupted run
    _check_weights(config)
    dims, parameters, weights = {}, 0, {}
    for role in ROLES:
        path, tower = model_path(config, role), open_tower(config, role)
        weights[role] = weight_checksums(published_model.local_folder(path))
        dims[role] = tower.dim
        parameters += sum(parameter.numel() for parameter in tower.parameters())
        log.info("%s: %s, %d dimensions, %d tokens", role, path, tower.dim, tower.config.max_length)
        with tempfile.TemporaryDirectory() as folder:
            tower.save(Path(folder))
            draft.upload(folder, role)
    if dims["query"] != dims["document"]:
        raise ConfigError(
            f"{config.query_path} gives embeddings of {dims['query']} dimensions and {config.path} of "
            f"{dims['document']}: the models of a pair must have the same dimensions"
        )
    return draft.commit(
        counts={"dimensions": dims["document"], "parameters": parameters}, weights_sha256=weights
    )


def _check_weights(config: AdoptConfig) -> None:
    folder = published_model.local_folder(config.path)
    checksum = weight_checksums(folder).get("model.safetensors")
    if config.weights_sha256 not in (None, checksum):
        raise ConfigError(
            f"{folder}/model.safetensors has sha256 {checksum}, not {config.weights_sha256}: "
            "fetch the model again, or leave adopt.weights_sha256 out to take these weights"
        )
