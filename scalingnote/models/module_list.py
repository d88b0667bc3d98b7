"""The modules that a sentence-transformers folder lists, in order. Reads JSON alone: no weights, no torch.

modules.json         the modules every text passes
router_config.json   the modules of each role, where the first one is a Router
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scalingnote.errors import ConfigError

Role = Literal["query", "document"]
ROUTERS = ("Router", "Asym")
STATIC_EMBEDDING = "StaticEmbedding"
# Classes of scalingnote.models.library_modules, as modules.json and router_config.json name them.
LOOKUP_TABLE = "scalingnote.models.library_modules.LookupTable"
REFERENCED_MODEL = "scalingnote.models.library_modules.ReferencedModel"
TABLES = (STATIC_EMBEDDING, LOOKUP_TABLE)  # first modules that need no transformer


@dataclass(frozen=True)
class Module:
    """One module of a folder."""

    type: str  # the dotted path of its class
    folder: Path  # where its config and weights lie
    kwargs: tuple[str, ...] = ()  # arguments of `encode` that are passed to it

    @property
    def name(self) -> str:
        """A class of sentence-transformers by its name alone, another by its dotted path."""
        return self.type.rpartition(".")[2] if self.type.startswith("sentence_transformers.") else self.type


def read(folder: Path, role: Role) -> list[Module] | None:
    """The modules that texts of `role` pass.

    Args:
        folder: a local folder of a model.
        role: chooses the route where the first module is a Router.

    Returns:
        None where `folder` has no modules.json.

    Raises:
        ConfigError: a file is not as sentence-transformers writes it, or the Router has no route for `role`.
    """
    listed = read_json(folder / "modules.json")
    if listed is None:
        return None
    modules = [_module(folder, each) for each in listed]
    if modules and modules[0].name in ROUTERS:
        return [*_route(modules[0].folder, role), *modules[1:]]
    return modules


def prompt_of(folder: Path, role: Role) -> str:
    """The text before every query or document; empty where none of the prompts has the role's name.

    Documents are also called passage or corpus. The default prompt is of neither role: sentence-transformers
    does not use it in `encode_query` and `encode_document` either. ConfigError when the default is no prompt.
    """
    settings = settings_of(folder)
    prompts: Mapping[str, str | None] = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name is {default!r}, which is "
            f"none of its prompts ({', '.join(prompts) or 'it has none'})"
        )
    names = ("query",) if role == "query" else ("document", "passage", "corpus")
    return next((prompts[name] or "" for name in names if prompts.get(name)), "")


def settings_of(folder: Path) -> Mapping[str, Any]:
    """The content of config_sentence_transformers.json; empty where it is not there."""
    return read_json(folder / "config_sentence_transformers.json") or {}


def read_json(path: Path) -> Any:
    """The content of a file; None where it is not there. ConfigError where it is no JSON."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def _module(folder: Path, listed: Mapping[str, Any]) -> Module:
    try:
        kwargs: Sequence[str] = listed.get("kwargs") or ()
        return Module(listed["type"], _inside(folder, listed["path"]), tuple(kwargs))
    except KeyError as error:
        raise ConfigError(f"{folder / 'modules.json'}: a module has no {error}") from None


def _inside(folder: Path, name: str) -> Path:
    found = (folder / name).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / 'modules.json'} names {name!r}, which is outside of its folder")
    return folder / name if name else folder


def _route(place: Path, role: Role) -> list[Module]:
    """The modules of a Router for `role`, or for its default route where it has none of that name."""
    facts = read_json(place / "router_config.json") or read_json(place / "config.json")
    if facts is None or not {"types", "structure"} <= facts.keys():
        raise ConfigError(f"{place} holds a Router without router_config.json: fetch the whole model again")
    structure, parameters = facts["structure"], facts.get("parameters", {})
    route = role if role in structure else parameters.get("default_route")
    mapped = {
        key: name for key, name in (parameters.get("route_mappings") or {}).items() if f"'{role}'" in key
    }
    if mapped or route not in structure:
        raise ConfigError(
            f"{place / 'router_config.json'} has no route named {role!r} (routes: {', '.join(structure)}): "
            "adopt a folder of one role by query_path and path"
        )
    return [Module(facts["types"][name], _inside(place, name)) for name in structure[route]]
