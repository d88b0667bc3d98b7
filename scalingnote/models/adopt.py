"""The adopt stage: a published embedding model becomes a dual encoder, without training.

    hub id or folder -> query/, document/: towers that encode as sentence-transformers does

Both towers are written with their weights, so that later stages need neither the hub nor the folder.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.model_files import local_folder
from scalingnote.models import published_model, published_tower
from scalingnote.models.config import AdoptConfig, Pretrained, TowerConfig
from scalingnote.models.published_model import Role
from scalingnote.models.published_tower import LibraryTower, PublishedTower
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft

log = get_logger("adopt")
ROLES: tuple[Role, ...] = ("query", "document")


def run(config: AdoptConfig, *, output: str) -> Artifact:
    """Build a `dual_encoder` from a published model; its manifest records the sha256 of the model's weights.

    Raises:
        ConfigError: a setting is missing in the files, the weights have another sha256 than configured, or
            the models of a pair differ in the dimensions or the similarity of their embeddings.
    """
    draft = Draft(output, kind="dual_encoder", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.discard_parts()  # the model at the path may have changed since an interrupted run
    folder = local_folder(config.path)
    checksum = weight_checksums(folder).get("model.safetensors")
    if config.weights_sha256 not in (None, checksum):
        raise ConfigError(
            f"{folder}/model.safetensors has sha256 {checksum}, not {config.weights_sha256}: "
            "fetch the model again, or leave adopt.weights_sha256 out to take these weights"
        )
    dims, similarities, parameters, weights = {}, {}, 0, {}
    for role in ROLES:
        path, tower = model_path(config, role), open_tower(config, role)
        weights[role] = weight_checksums(local_folder(path))
        dims[role], similarities[role] = tower.dim, tower.native.similarity
        parameters += sum(parameter.numel() for parameter in tower.parameters())
        facts = role, path, tower.dim, tower.config.max_length, tower.native.similarity
        log.info("%s: %s, %d dimensions, %d tokens, compared by %s", *facts)
        with tempfile.TemporaryDirectory() as temporary:
            tower.save(Path(temporary))
            draft.upload(temporary, role)
    if dims["query"] != dims["document"]:
        raise ConfigError(
            f"{config.query_path} gives embeddings of {dims['query']} dimensions and {config.path} of "
            f"{dims['document']}: the models of a pair must have the same dimensions"
        )
    if similarities["query"] != similarities["document"]:
        raise ConfigError(
            f"{config.query_path} compares embeddings by {similarities['query']} and {config.path} by "
            f"{similarities['document']}: set adopt.similarity to the one that the pair was trained with"
        )
    return draft.commit(
        counts={"dimensions": dims["document"], "parameters": parameters},
        weights_sha256=weights,
        similarity=similarities["document"],
    )


def open_tower(
    config: AdoptConfig, role: Role, *, dtype: torch.dtype = torch.float32
) -> PublishedTower | LibraryTower:
    """Load the tower of a published model for texts of a role, its backbone in `dtype`.

    Its `native.similarity` is a Similarity. Raise ConfigError if a setting is neither in the files nor in the
    config, if the config overrides a setting of a model that only sentence-transformers can run, or if search
    does not implement the similarity.
    """
    of_query = role == "query"
    prefix = config.query_prefix if of_query else config.document_prefix
    settings = TowerConfig(
        backbone=Pretrained(path=model_path(config, role)),
        pooling=config.pooling,
        normalise=config.normalise,
        prefix=prefix,
    )
    model = published_tower.model_of(settings, role)
    unread = published_model.unread_prompt(model.source)
    if role == "document" and prefix is None and unread is not None:
        log.warning(
            "%s has a prompt named %s, which encode_document of sentence-transformers does not read: "
            "documents get none; set adopt.document_prefix=%r if the model was trained with it",
            model.source,
            *unread,
        )
    similarity = config.similarity or published_model.searched_similarity(
        model.similarity, unit=model.unit, source=model.source
    )
    length = config.query_max_length if of_query else config.document_max_length
    tower = published_tower.open_published(settings, role, max_length=length, dtype=dtype)
    tower.native = replace(tower.native, similarity=similarity)
    return tower


def model_path(config: AdoptConfig, role: Role) -> str:
    """Return the hub id or folder of the model that encodes texts of this role."""
    return config.query_path or config.path if role == "query" else config.path


def weight_checksums(folder: Path) -> dict[str, str]:
    """Compute the sha256 of the safetensors files in a model's folder, by relative path."""
    paths = sorted(folder.rglob("*.safetensors"))
    return {path.relative_to(folder).as_posix(): fs.checksum(str(path)) for path in paths}
