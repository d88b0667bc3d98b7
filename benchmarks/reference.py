"""docs/reference: every knob, from the config classes, every command, from the parser, and every module.

python -m benchmarks.reference             write docs/reference
python -m benchmarks.reference --check     exit with 1 where a page differs from what would be written
"""

import argparse
import ast
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AwareDatetime
from pydantic.fields import FieldInfo

from scalingnote import cli
from scalingnote.config import Config
from scalingnote.distillation.config import ScreenConfig
from scalingnote.encode.config import IngestConfig
from scalingnote.experiment.config import ExperimentConfig
from scalingnote.run_config import RunConfig
from scalingnote.train.config import Schedule

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = ("knob", "default", "allowed", "what it does")
# Sections that repeat the knobs of another one: these are shown there only.
SHARED: Mapping[str, type[Config]] = {"cross_encoder": Schedule, "distill": Schedule}
# Commands with a config of their own.
APART: Mapping[str, type[Config]] = {
    "experiment": ExperimentConfig,
    "ingest": IngestConfig,
    "screen": ScreenConfig,
}
TOWERS = frozenset({"student", "document", "backbone"})


class Row(NamedTuple):
    """A line of a table."""

    place: str
    default: str
    allowed: str
    meaning: str


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    for path in stale():
        if options.check:
            raise SystemExit(f"{path} is stale: run `python -m benchmarks.reference`")
        path.parent.mkdir(exist_ok=True)
        path.write_text(PAGES[path](), encoding="utf-8")
        sys.stdout.write(f"{path}\n")


def stale() -> list[Path]:
    """Pages that differ from what the code gives."""
    return [
        path
        for path, content in PAGES.items()
        if not path.exists() or path.read_text(encoding="utf-8") != content()
    ]


def knobs_page() -> str:
    """Every knob of a run's config, one table per section."""
    parts = [
        "# Knobs",
        "Generated from the config classes by `python -m benchmarks.reference`; a test compares this page "
        "with them. Do not edit it.",
        "Each section below is a section of a run's YAML file; `--set section.knob=value` overrides a knob. "
        "`place(kind).knob` exists only where `place.kind` has that value (of a dataset: its `name`). "
        "`list[].knob` is a knob of each item of a list. A long default is cut and ends with `…`.",
    ]
    plain = {name: field for name, field in RunConfig.model_fields.items() if not _sections(field)}
    parts += ["## Top level", table(_rows(RunConfig, only=plain))]
    for name, field in RunConfig.model_fields.items():
        if name in plain:
            continue
        parts.append(f"## {name}")
        if field.description:
            parts.append(f"{field.description[0].upper()}{field.description[1:]}.")
        if name in SHARED:
            parts.append(
                f"Also has the knobs {_listed(SHARED[name].model_fields)} of [train](#train), except where a "
                "row below differs. Its towers have the knobs of `train.query` and `train.document`."
            )
        parts.append(table(section_rows(field, beside=SHARED.get(name))))
    for name, section in APART.items():
        parts += [f"## scalingnote {name}", "This command has its own config.", table(_rows(section))]
    return "\n\n".join(parts) + "\n"


def section_rows(field: FieldInfo, *, beside: type[Config] | None = None) -> Iterator[Row]:
    """Rows of a section of the run, without what it shares with the section `beside`."""
    default = field.get_default(call_default_factory=True)
    sections = _sections(field)
    if len(sections) > 1:
        key = "kind" if "kind" in sections[0].model_fields else "name"
        tags = [section.model_fields[key].default for section in sections]
        shown = _listed(tags)
        meaning = " ".join(f"{tag}: {_sentence(each)}" for tag, each in zip(tags, sections, strict=True))
        yield Row(key, _kind(default, key), shown, _escaped(meaning))
        yield from _merged(
            [(tag, _made(each, default)) for tag, each in zip(tags, sections, strict=True)], dot=False
        )
        return
    own = sections[0].__annotations__.keys()
    hidden = set() if beside is None else beside.model_fields.keys() - own | TOWERS
    yield from _rows(sections[0], hidden=hidden, made=default if type(default) is sections[0] else None)


def table(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table."""
    shown = (row._replace(place=f"`{row.place}`") for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * 4, *shown))


def _rows(
    model: Any, *, hidden: Iterable[str] = (), only: Iterable[str] | None = None, made: Config | None = None
) -> Iterator[Row]:
    """Rows of a section, with the defaults of the one that its owner has made, if it has."""
    for name, field in model.model_fields.items():
        if name in hidden or (only is not None and name not in only):
            continue
        if name in ("kind", "name") and len(get_args(field.annotation)) == 1:
            continue
        if name == "document" and "share_base" in model.model_fields:
            continue  # a tower like the query's
        default = field.get_default(call_default_factory=True) if made is None else getattr(made, name)
        yield from _field_rows(model, name, field, default)


def _field_rows(model: Any, name: str, field: FieldInfo, default: Any) -> Iterator[Row]:
    """The row of a knob; of a section, the rows of its knobs."""
    sections = _sections(field)
    if not sections:
        yield Row(name, _default(field, default), _allowed(field), _escaped(field.description or ""))
        items = [item for kind in _kinds(field.annotation) for item in _items(kind)]
        yield from _inside(f"{name}[]", [(item, list(_rows(item))) for item in items])
        return
    if len(sections) > 1:
        tags = [section.model_fields["kind"].default for section in sections]
        meaning = " ".join(f"{tag}: {_sentence(each)}" for tag, each in zip(tags, sections, strict=True))
        yield Row(f"{name}.kind", _kind(default, "kind"), _listed(tags), _escaped(meaning))
        if name == "backbone" and default is None:
            return  # of its own: knobs like the other towers'
    elif field.description or None in _kinds(field.annotation):
        meaning = _escaped(field.description or "null: without it")
        yield Row(name, _default(field, default), "a section", meaning)
    found = []
    for section in sections:
        if name == "query" and "share_base" in model.model_fields and section is type(default):
            document = model.model_fields["document"].default
            yield from _of_both(_made(section, default), _made(section, document))
        else:
            found.append((section, _made(section, default)))
    yield from _inside(name, found, alone=len(sections) == 1)


def _made(section: Any, default: Any) -> list[Row]:
    return list(_rows(section, made=default if type(default) is section else None))


def _inside(name: str, found: Sequence[tuple[Any, list[Row]]], *, alone: bool = True) -> Iterator[Row]:
    """Rows of the sections that `name` may be."""
    if len(found) == 1 and alone:
        yield from (row._replace(place=f"{name}.{row.place}") for row in found[0][1])
        return
    variants = [(section.model_fields["kind"].default, rows) for section, rows in found]
    yield from (row._replace(place=f"{name}{row.place}") for row in _merged(variants))


def _merged(variants: Sequence[tuple[str, list[Row]]], *, dot: bool = True) -> Iterator[Row]:
    """Rows of several kinds of a section; what some of them share is one row that names them."""
    owners: dict[Row, list[str]] = {}
    for tag, rows in variants:
        for row in rows:
            owners.setdefault(row, []).append(tag)
    for row, tags in owners.items():
        missing = [tag for tag, _ in variants if tag not in tags]
        who = ", ".join(tags) if len(tags) <= len(missing) else "all but " + ", ".join(missing)
        mark = f"({who})." if missing else "." if dot else ""
        yield row._replace(place=f"{mark}{row.place}")


def _of_both(query: Sequence[Row], document: Sequence[Row]) -> Iterator[Row]:
    """What query and document tower may both be is shown once, with the defaults of both."""
    for row, other in zip(query, document, strict=True):
        default = row.default if row == other else f"{row.default}, {other.default}"
        yield row._replace(place=f"query/document.{row.place}", default=default)


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
        "Generated from the parser by `python -m benchmarks.reference`; a test compares this page with it. "
        "Do not edit it.",
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
        "Generated from the docstrings by `python -m benchmarks.reference`; a test compares this page "
        "with them. Do not edit it. [architecture.md](../architecture.md) explains the packages.",
    ]
    package = DOCS.parent / "scalingnote"
    folders = [path.parent for path in sorted(package.rglob("__init__.py"))]
    for folder in folders:
        parts.append(f"## {folder.relative_to(DOCS.parent)}/")
        parts.append(_summary(folder / "__init__.py"))
        modules = [path for path in sorted(folder.glob("*.py")) if "_pb2" not in path.name]
        rows = [f"| `{path.name}` | {_summary(path)} |" for path in modules if path.name != "__init__.py"]
        parts.append("\n".join(["| module | contents |", "| :-- | :-- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _summary(path: Path) -> str:
    """First line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|")


PAGES: Mapping[Path, Callable[[], str]] = {
    DOCS / "reference/knobs.md": knobs_page,
    DOCS / "reference/cli.md": commands_page,
    DOCS / "reference/modules.md": modules_page,
}


if __name__ == "__main__":
    main()
