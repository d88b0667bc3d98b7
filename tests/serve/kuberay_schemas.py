"""Schemas of KubeRay's resources, which the manifests are checked against.

    python tests/serve/kuberay_schemas.py CHECKOUT

writes kuberay_schemas.json.gz from a git checkout of https://github.com/ray-project/kuberay: the schema of
ray.io/v1 of each custom resource definition (helm-chart/kuberay-operator/crds at VERSION), without
descriptions. KubeRay is copyright of its authors, under the Apache License, Version 2.0, like this project.
"""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

VERSION = "v1.5.1"  # the first with `authOptions`, and the oldest that docs/guides/operations.md names
CRDS = "helm-chart/kuberay-operator/crds"
FILE = Path(__file__).with_suffix(".json.gz")


def faults(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the errors of a manifest by the schema of its kind, also the fields that Kubernetes drops."""
    schemas: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))["schemas"]
    for error in Draft202012Validator(schemas[manifest["kind"]]).iter_errors(manifest):
        yield f"{error.json_path}: {error.message}"


def _write(checkout: str) -> None:
    schemas = {}
    for kind in ("rayclusters", "rayjobs", "rayservices"):
        command = ["git", "-C", checkout, "show", f"{VERSION}:{CRDS}/ray.io_{kind}.yaml"]
        definition = yaml.safe_load(subprocess.check_output(command))["spec"]
        (version,) = (each for each in definition["versions"] if each["name"] == "v1")
        schemas[definition["names"]["kind"]] = _closed(version["schema"]["openAPIV3Schema"])
    notice = f"KubeRay {VERSION}, {CRDS}, without descriptions; Apache License 2.0"
    text = json.dumps({"notice": notice, "schemas": schemas}, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def _closed(schema: Any) -> Any:
    """Return the schema without descriptions, which allows only its own fields."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: _closed(value) for name, value in schema.items() if name not in ("description", "properties")
    }
    if "properties" in schema:  # its names are fields, and a field may be named "description"
        closed["properties"] = {field: _closed(each) for field, each in schema["properties"].items()}
    if "properties" in closed and not closed.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


if __name__ == "__main__":
    _write(*sys.argv[1:])
