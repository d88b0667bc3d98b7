"""Configuration: frozen pydantic sections, read from YAML files that override each other, then `--set`.

A section defines the result of a stage and is stored in its artifact. Settings that cannot change the result
(:class:`ExecutionConfig`: workers, tracking) are not part of the artifact's identity.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scalingnote.core.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """A section of the configuration: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ExecutionConfig(Config):
    """A section that sets how a stage runs and not its results: not part of an artifact's identity."""


class Resources(ExecutionConfig):
    """The workers of a stage and the resources that each reserves."""

    workers: int | None = Field(
        None, ge=1, description="actors or tasks at a time; null: as many as the cluster has room for"
    )
    cpus_per_worker: float = Field(1.0, gt=0, description="CPU cores Ray reserves for each")
    gpus_per_worker: float = Field(0.0, ge=0, description="GPUs Ray reserves for each")
    memory_per_worker: float = Field(
        0.0,
        ge=0,
        description="GiB of memory Ray reserves for each; 0: what a stage computes from its input, or none",
    )

    def without_gpus(self) -> "Resources":
        """Return the same workers without GPUs, for steps that run no model."""
        return self.model_copy(update={"gpus_per_worker": 0.0})


class ElasticResources(Resources):
    """Workers with a number that may follow the number of nodes."""

    min_workers: int | None = Field(None, ge=1, description="workers that suffice to start")

    @model_validator(mode="after")
    def _can_start(self) -> "ElasticResources":
        if self.min_workers is not None and self.workers is not None and self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is above workers={self.workers}: lower it")
        return self


C = TypeVar("C", bound=Config)
PACKAGE = Path(__file__).parents[1]
CONFIG_PREFIX = "scalingnote:"


def load(
    model: type[C],
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, Any] = MappingProxyType({}),
) -> C:
    """Read YAML files from left to right, apply the overrides and validate the result.

    A later file overrides an earlier one; mappings are merged. A file may contain ``extends: other.yaml``, a
    path relative to itself, or ``extends: scalingnote:path.yaml``, a file of the package. ``FILE.yaml:NAME``
    is the file overridden by one of its `variants`; a variant may extend another one of the file.

    Args:
        model: class of the section.
        paths: of the files.
        overrides: ``a.b=value``, as for `--set`.
        base: values that the first file overrides.

    Raises:
        ConfigError: a file, an override or the result is not valid.
    """
    settings = dict(base)
    for path in paths:
        settings = merge(settings, _read(path))
    for override in overrides:
        key, equals_sign, value = override.partition("=")
        if not equals_sign or not key.strip():
            raise ConfigError(f"--set {override!r} is not of the form a.b=value")
        nested: Any = yaml.safe_load(value)
        for name in reversed(key.strip().split(".")):
            nested = {name: nested}
        settings = merge(settings, nested)
    return validate(model, settings, source=", ".join(str(path) for path in paths) or "--set")


def validate(model: type[C], values: Mapping[str, Any], *, source: str) -> C:
    """Validate the values of a section; ConfigError with each wrong key, its place and the nearest key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known_keys = _all_keys(model)
        lines = [_explain(dict(item), known_keys) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def dump(config: Config) -> dict[str, Any]:
    """Convert a section to plain JSON values."""
    return config.model_dump(mode="json")


def identity(config: Config) -> dict[str, Any]:
    """Return the values of a section that determine its artifact: all but each :class:`ExecutionConfig`."""
    values = dump(config)
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, ExecutionConfig):
            del values[name]
        elif isinstance(value, Config):
            values[name] = identity(value)
    return values


def file_of(path: str | Path) -> Path:
    """Return the file of ``FILE.yaml`` or ``FILE.yaml:NAME``."""
    return _split(path)[0]


def _split(path: str | Path) -> tuple[Path, str]:
    file, suffix, variant = str(path).rpartition(".yaml:")
    return (Path(file + ".yaml"), variant) if suffix else (Path(path), "")


def _read(path: str | Path) -> dict[str, Any]:
    """Read a file, the files that it extends and the variant in its path, and merge their values."""
    file, variant = _split(path)
    values = _parse(file)
    variants = values.pop("variants", {})
    base = values.pop("extends", None)
    if base:
        # The folder of the package differs between machines.
        inside = base.startswith(CONFIG_PREFIX)
        parent = PACKAGE / base.removeprefix(CONFIG_PREFIX) if inside else file.parent / base
        values = merge(_read(parent), values)
    # From the variant in the path to the one that extends no other.
    chain: list[dict[str, Any]] = []
    while variant:
        if variant not in variants:
            variant_names = ", ".join(variants) or "none"
            raise ConfigError(
                f"{file} has no variant {variant!r}, it has {variant_names}{did_you_mean(variant, variants)}"
            )
        chain.append(dict(variants[variant]))
        variant = chain[-1].pop("extends", "")
    for layer in reversed(chain):
        values = merge(values, layer)
    return values


def _parse(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        remedy = f": override a knob by --set {path}" if "=" in str(path) else ""
        raise ConfigError(f"no config file at {path}{remedy}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a config is a mapping of sections")
    return values


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings: values of `above` override those of `below`; sections are merged key by key."""
    combined = dict(below)
    for key, value in above.items():
        old = combined.get(key)
        # A section with another `kind` or `name` replaces the one below: its settings have another meaning.
        same_kind = (
            isinstance(old, dict)
            and isinstance(value, dict)
            and not any(tag in value and value[tag] != old.get(tag) for tag in ("kind", "name"))
        )
        combined[key] = merge(old, value) if same_kind else value  # type: ignore[arg-type]
    return combined


def _explain(item: dict[str, Any], known: Sequence[str]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        return f"{place}: {item['msg']} (found {item.get('input')!r})"
    # Of equal key names, the one in the section nearest to the wrong key comes first.
    sections = [*accumulate(place.split("."), "{}.{}".format)]
    near = sorted(known, key=lambda key: (-sum(key.startswith(f"{each}.") for each in sections), len(key)))
    by_name = {key.rpartition(".")[2]: key for key in reversed(near)}
    return f"unknown key {place!r}" + did_you_mean(str(item["loc"][-1]), by_name, places=by_name)


def _all_keys(model: type[BaseModel]) -> list[str]:
    """List the keys of a section and of all sections below it, as ``a.b``."""
    schema = model.model_json_schema()
    keys: list[str] = []
    waiting: list[tuple[str, Any, tuple[str, ...]]] = [("", schema, ())]
    while waiting:
        place, node, outer = waiting.pop()
        if not isinstance(node, dict):
            continue
        name = node.get("$ref", "").removeprefix("#/$defs/")
        if name and name not in outer:  # a section may contain sections of its own class
            waiting.append((place, schema["$defs"][name], (*outer, name)))
        for other in (*node.get("anyOf", ()), *node.get("oneOf", ()), node.get("items")):
            waiting.append((place, other, outer))
        waiting.append((f"{place}.NAME", node.get("additionalProperties"), outer))  # of a mapping
        for key, value in node.get("properties", {}).items():
            keys.append(f"{place}.{key}" if place else key)
            waiting.append((keys[-1], value, outer))
    return keys
