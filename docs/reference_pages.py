"""Every knob (from the config classes), every command (from the parser) and every module, as Markdown pages.

    python docs/reference_pages.py knobs       print a page: knobs, cli or modules

The site of `make docs` has them below reference/ (docs/hooks.py).
"""

import argparse
import ast
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AwareDatetime
from pydantic.fields import FieldInfo

from scalingnote.cli import main as cli
from scalingnote.core.config import Config
from scalingnote.encode.config import IngestConfig
from scalingnote.evaluate.experiment.config import ExperimentConfig
from scalingnote.run.config import RunConfig
from scalingnote.train.distillation.config import ScreenConfig

PACKAGE = Path(__file__).resolve().parents[1] / "scalingnote"
HEAD = ("knob", "default", "allowed", "what it does")
# Commands with a config of their own.
APART: Mapping[str, type[Config]] = {
    "experiment": ExperimentConfig,
    "ingest": IngestConfig,
    "screen": ScreenConfig,
}


class Row(NamedTuple):
    """A line of a table."""

    place: str
    default: str
    allowed: str
    meaning: str


def main() -> None:
    """Print a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", choices=[name.removesuffix(".md") for name in PAGES])
    sys.stdout.write(PAGES[f"{parser.parse_args().page}.md"]())


def knobs_page() -> str:
    """Return every option of a run's config, one table per section."""
    parts = [
        "# Knobs",
        "Each section below is a section of a run's YAML file; `--set section.knob=value` overrides a knob. "
        "`place(kind).knob` exists only if `place.kind` has that value (of a dataset: its `name`). "
        "`list[].knob` is a knob of each item of a list. A long default is cut and ends with `…`.",
    ]
    plain = {name: field for name, field in RunConfig.model_fields.items() if not _sections(field)}
    top = [row for name, field in plain.items() for row in _field_rows(name, field, _made(field))]
    parts += ["## Top level", table(top)]
    for name in [name for name in RunConfig.model_fields if name not in plain]:
        parts += [f"## {name}", table(section_rows(name))]
    for name, section in APART.items():
        parts += [f"## scalingnote {name}", "This command has its own config.", table(_rows(section))]
    return "\n\n".join(parts) + "\n"


def section_rows(name: str) -> list[Row]:
    """Return the rows of a section of a run, with places below that section."""
    field = RunConfig.model_fields[name]
    rows = _field_rows(name, field, _made(field))
    return [row._replace(place=row.place.removeprefix(f"{name}.").removeprefix(name) or name) for row in rows]


def table(rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table."""
    shown = (row._replace(place=f"`{row.place}`") for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * 4, *shown))


def _rows(section: Any, made: Config | None = None) -> Iterator[Row]:
    """Yield the rows of a section; its defaults are those of `made`, if given."""
    for name, field in section.model_fields.items():
        if name in ("kind", "name") and len(get_args(field.annotation)) == 1:
            continue
        yield from _field_rows(name, field, _made(field) if made is None else getattr(made, name))


def _field_rows(name: str, field: FieldInfo, default: Any) -> Iterator[Row]:
    """Yield the row of an option, then those of the sections that it is or holds.

    A row that all kinds of a section share with the same default has no kind in its place.
    """
    sections = _sections(field)
    if not sections:
        yield Row(name, _default(field, default), _allowed(field), _escaped(field.description or ""))
        for item in (item for kind in _kinds(field.annotation) for item in _items(kind)):
            yield from (row._replace(place=f"{name}[].{row.place}") for row in _rows(item))
        return
    if len(sections) == 1:
        if field.description or None in _kinds(field.annotation):
            meaning = _escaped(field.description or "null: without it")
            yield Row(name, _default(field, default), "a section", meaning)
        made = default if type(default) is sections[0] else None
        yield from (row._replace(place=f"{name}.{row.place}") for row in _rows(sections[0], made))
        return
    key = "kind" if "kind" in sections[0].model_fields else "name"
    tags = [section.model_fields[key].default for section in sections]
    meaning = " ".join(f"{tag}: {_sentence(each)}" for tag, each in zip(tags, sections, strict=True))
    yield Row(f"{name}.{key}", _kind(default, key), _listed(tags), _escaped(meaning))
    owners: dict[Row, list[str]] = {}
    for tag, section in zip(tags, sections, strict=True):
        for row in _rows(section, default if type(default) is section else None):
            owners.setdefault(row, []).append(tag)
    for row, found in owners.items():
        missing = [tag for tag in tags if tag not in found]
        who = ", ".join(found) if len(found) <= len(missing) else "all but " + ", ".join(missing)
        mark = f"({who})" if missing else ""
        yield row._replace(place=f"{name}{mark}.{row.place}")


def _made(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _sections(field: FieldInfo) -> list[Any]:
    return [kind for kind in _kinds(field.annotation) if hasattr(kind, "model_fields")]


def _items(kind: Any) -> list[Any]:
    """Sections that a list or a mapping holds."""
    held = [item for part in get_args(kind) for item in _kinds(part)]
    return [item for item in held if hasattr(item, "model_fields")]


def _kinds(annotation: Any) -> list[Any]:
    """Members of a union, whatever it is wrapped in."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [None if annotation is type(None) else annotation]


def _default(field: FieldInfo, value: Any) -> str:
    if field.is_required():
        return "required"
    if isinstance(value, Config):
        return "on"
    text = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    shown = " ".join(text.split()).replace("|", "\\|")
    if len(shown) > 30:
        shown = f"{shown[:27]}…"
    return f"`{shown}`".replace("True", "true").replace("False", "false") if shown else "empty"


def _kind(value: Any, key: str) -> str:
    if value is None:
        return "`null`"
    return f"`{getattr(value, key)}`" if isinstance(value, Config) else "required"


def _allowed(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(part, key):g}"
        for part in field.metadata
        for key, sign in signs.items()
        if getattr(part, key, None) is not None
    ]
    return ", ".join([*dict.fromkeys(_word(kind) for kind in _kinds(field.annotation)), *bounds])


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    names = {
        int: "whole number",
        float: "number",
        bool: "true, false",
        str: "text",
        AwareDatetime: "time with zone",
        None: "null",
    }
    return names.get(kind) or ("list" if get_origin(kind) is tuple else "mapping")


def _sentence(section: Any) -> str:
    return str(section.__doc__).strip().partition("\n")[0]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def commands_page() -> str:
    """Every command, its arguments and its options."""
    parser = cli._parser()
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    said = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    parts = [
        "# Commands",
        "Exit codes: 0 done, 1 a check failed, 2 wrong input, 130 interrupted. `SCALINGNOTE_DEBUG=1` shows "
        "tracebacks.",
        "| command | what it does |\n| --- | --- |\n"
        + "\n".join(f"| [`{name}`](#scalingnote-{name}) | {_escaped(text)} |" for name, text in said.items()),
    ]
    for name, command in commands.choices.items():
        rows = [
            _argument(action)
            for action in command.complete()._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        lines = [
            "| argument | meaning |",
            "| --- | --- |",
            *(f"| `{form}` | {text} |" for form, text in rows),
        ]
        parts += [f"## scalingnote {name}", f"{said[name][:1].upper()}{said[name][1:]}.", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _argument(action: argparse.Action) -> tuple[str, str]:
    """An argument as it is written, and its help."""
    value = action.metavar or (None if action.choices is None else "|".join(map(str, action.choices)))
    value = str(value or action.dest.upper())
    if action.nargs in ("+", "*"):
        value += "..."
    form = value if not action.option_strings else ", ".join(action.option_strings)
    if action.option_strings and action.nargs != 0:
        form += f" {value}"
    text = (action.help or "") % vars(action)
    needed = " (required)" if action.required and action.option_strings else ""
    return _escaped(form), _escaped(text) + needed


def modules_page() -> str:
    """Every module of the package with the first line of its docstring, one table per folder."""
    parts = [
        "# Modules",
        "[architecture.md](../architecture.md) explains the packages.",
    ]
    folders = [path.parent for path in sorted(PACKAGE.rglob("__init__.py"))]
    for folder in folders:
        parts.append(f"## {folder.relative_to(PACKAGE.parent)}/")
        parts.append(_summary(folder / "__init__.py"))
        modules = [path for path in sorted(folder.glob("*.py")) if "_pb2" not in path.name]
        rows = [f"| `{path.name}` | {_summary(path)} |" for path in modules if path.name != "__init__.py"]
        parts.append("\n".join(["| module | contents |", "| :-- | :-- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _summary(path: Path) -> str:
    """First line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|")


PAGES: Mapping[str, Callable[[], str]] = {
    "knobs.md": knobs_page,
    "cli.md": commands_page,
    "modules.md": modules_page,
}


if __name__ == "__main__":
    main()
