"""Tables of docs/training.md and distillation.md, made from the configs: `python tests/training_tables.py`.

They stand between ``<!-- name -->`` and ``<!-- /name -->``; a test compares them with what is made here.
"""

import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from scalingnote.config import Config, load
from scalingnote.cross_encoder.config import DualPooledConfig
from scalingnote.distillation.config import DistillConfig
from scalingnote.run_config import RunConfig
from scalingnote.scaling.config import Assumptions
from scalingnote.scaling.dry_run import estimate
from scalingnote.scaling.hardware import GIB
from scalingnote.train.config import Schedule, TrainConfig

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "configs/paper/scalingnote.yaml"
TOWERS = {"student", "document", "backbone"}
# (what, GPUs, overrides of the published run); batch 512 divides over all of them.
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("LoRA on a shared base, `ddp`", 8, ("strategy.kind=ddp", "query.lora.rank=16", "document.lora.rank=16")),
    ("all weights, `ddp`", 8, ("strategy.kind=ddp",)),
    ("all weights, ZeRO-1", 8, ("strategy.stage=1",)),
    ("all weights, ZeRO-2", 8, ("strategy.stage=2",)),
    ("all weights, ZeRO-3", 8, ()),
    ("all weights, `fsdp2`", 8, ("strategy.kind=fsdp2",)),
    ("`fsdp2`, offloaded", 8, ("strategy.kind=fsdp2", "strategy.offload=true")),
    ("ZeRO-3, 8-bit moments", 8, ("optimizer.kind=adamw_8bit",)),
    ("`fsdp2`, no checkpointing", 64, ("strategy.kind=fsdp2", "memory.gradient_checkpointing=false")),
    ("`fsdp2`", 64, ("strategy.kind=fsdp2",)),
    ("ZeRO-3", 64, ()),
    ("ZeRO-3, batch 65,536", 64, ("global_batch=65536",)),
    (
        "ZeRO-3, batch 65,536, GradCache",
        64,
        ("global_batch=65536", "memory.grad_cache={query_rows: 128, document_rows: 32}"),
    ),
)


def memory() -> str:
    """Memory of one H100 in the published run on other strategies, as the dry run counts it."""
    head = (
        "case",
        "GPUs",
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "activations",
        "scores",
        "together",
        "fits 79",
    )
    lines = [head, ("---", *["--:"] * (len(head) - 1))]
    for name, gpus, overrides in CASES:
        knobs = ["global_batch=512", *overrides, f"resources.workers={gpus}"]
        config = load(RunConfig, [PAPER], [f"train.{knob}" for knob in knobs])
        found = estimate(config.train, Assumptions())
        state = found.state
        sizes = (
            state.weights,
            state.gradients,
            state.optimizer,
            state.gathered,
            found.activations,
            found.scores,
        )
        cells = [f"{size / GIB:,.1f}" for size in (*sizes, found.memory)]
        lines.append((name, str(gpus), *cells, "yes" if found.fits else "no"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def knobs(model: Any, *, beside: Any = None) -> str:
    """Every knob of a section: name, default, what is allowed, what it does.

    Without towers, and what the section has from another, where these are in the table `beside`.
    """
    known = {} if beside is None else beside.model_fields.keys() - model.__annotations__.keys() | TOWERS
    rows = [
        ("knob", "default", "allowed", "what it does"),
        ("---", "---", "---", "---"),
        *_rows(model, "", known),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(
    model: Any, prefix: str, known: Container[str] = (), made: Config | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a section, with the defaults of the one that its owner has made, if it has."""
    for name, field in model.model_fields.items():
        if name in known:
            continue
        default = field.get_default(call_default_factory=True) if made is None else getattr(made, name)
        if name == "kind" and len(get_args(field.annotation)) == 1:
            continue
        if name == "document" and "query" in model.model_fields:
            continue  # a tower like the query's
        place = f"{prefix}{name}"
        sections = [kind for kind in _kinds(field.annotation) if hasattr(kind, "model_fields")]
        if not sections:
            yield (
                f"`{place}`",
                _default(field, default),
                _allowed(field),
                (field.description or "").replace("|", "\\|"),
            )
            continue
        tags = [section.model_fields["kind"].default for section in sections if len(sections) > 1]
        if tags:
            meaning = " ".join(
                f"{tag}: {_sentence(section)}" for tag, section in zip(tags, sections, strict=True)
            )
            allowed = ", ".join(f"`{tag}`" for tag in tags)
            yield f"`{place}.kind`", f"`{default.kind}`" if default else "`null`", allowed, meaning
            if default is None:
                continue  # a backbone of its own: knobs like the other towers'
        elif field.description or None in _kinds(field.annotation):
            yield (
                f"`{place}`",
                _default(field, default),
                "a section",
                field.description or "leave out to do without",
            )
        if name == "lora" and "query(" in prefix:
            continue
        for at, section in enumerate(sections):
            if place == "query" and tags[at] == "transformer":
                yield from _of_both(section, default, model.model_fields["document"].default)
                continue
            inside = f"{place}({tags[at]})." if tags else f"{place}."
            yield from _rows(section, inside, made=default if type(default) is section else None)


def _of_both(section: Any, query: Config, document: Config) -> Iterator[tuple[str, str, str, str]]:
    """What query and document tower may both be is shown once, with the defaults of both."""
    of_query, of_document = (_rows(section, "query/document.", made=tower) for tower in (query, document))
    for row, other in zip(of_query, of_document, strict=True):
        yield row if row == other else (row[0], f"{row[1]}, {other[1]}", *row[2:])


def _sentence(section: Any) -> str:
    return str(section.__doc__).strip().partition("\n")[0]


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
    shown = text if len(text) < 30 else "the paper's"
    return f"`{shown}`".replace("True", "true").replace("False", "false")


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
    names = {int: "whole number", float: "number", bool: "true, false", str: "text", None: "null"}
    return names.get(kind) or ("list" if get_origin(kind) is tuple else "mapping")


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/training.md": {"memory": memory, "knobs": partial(knobs, TrainConfig)},
    "docs/distillation.md": {
        "knobs": partial(knobs, DistillConfig, beside=Schedule),
        "cross-encoder knobs": partial(knobs, DualPooledConfig, beside=Schedule),
    },
}


def renewed(page: str) -> str:
    """The text of a page with its tables made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in PAGES[page].items():
        first, last = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(first)
        _, found, after = rest.partition(last)
        assert found, f"{page} has no place for {name}"
        text = before + first + table() + last + after
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), encoding="utf-8")
        sys.stdout.write(f"{page} renewed\n")
