"""Resumable parts: each is processed once over all runs of a stage, however often the driver is killed.

A part has a name. Its results are in files named after it, so a part that is processed twice replaces its
files, and its record, JSON values, is written last: a run after a kill reads the records that it finds and
processes the other parts.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from scalingnote.core.errors import PartsFailedError
from scalingnote.core.log import Progress, get_logger
from scalingnote.core.parts import Executor, PartStage
from scalingnote.storage import filesystem as fs

SUFFIX = ".json"
NamedPart = tuple[str, Any]  # its name and the part as the stage knows it


def run_parts(
    stage: PartStage | Callable[[Any], Any],
    parts: Mapping[str, Any],
    *,
    folder: str,
    executor: Executor,
    section: str,
    unit: str,
    rows: Mapping[str, int] | None = None,
    max_failed: int = 0,
    report: Callable[[Any], object] | None = None,
    underway: Callable[[], int] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Process every part that has no record yet.

    Args:
        stage: gives the record of a part, which is JSON values.
        parts: by their names, in which a ``/`` becomes ``-`` in the name of the record's file.
        folder: of the records.
        executor: processes the parts.
        section: name of the logger.
        unit: name of what progress lines count.
        rows: name -> number of rows of each part, which progress counts; None: it counts parts.
        max_failed: parts that may be set aside because they fail at every try, if others do not.
        report: gets the record of each part that this run processes; returns a note for the progress line.
        underway: rows that this run has processed, with those of unfinished parts.

    Returns:
        The records of all parts, in the order of `parts`; and the parts that were set aside, with the reason.

    Raises:
        PartsFailedError: after all other parts, if more than `max_failed` parts or all of them failed.
        ScalingNoteError: raised by the stage.
    """
    texts = _read_records(folder, parts)
    todo = [(name, part) for name, part in parts.items() if name not in texts]
    if todo and texts:
        get_logger(section).info("resuming: %d of %d %s are done", len(texts), len(parts), unit)
    sizes = dict.fromkeys(parts, 1) if rows is None else rows
    left, total = sum(sizes[name] for name, _ in todo), sum(sizes[name] for name in parts)
    failed: dict[str, str] = {}
    with Progress(section, total=total, done=total - left, unit=unit, underway=underway) as progress:
        try:
            for name, text in executor(_record(stage, folder), todo) if todo else ():
                texts[name] = text
                progress.advance(sizes[name], note=report(json.loads(text)) if report else "")
        except PartsFailedError as error:
            failed = {todo[number][0]: reason for number, reason in error.reasons.items()}
            if len(failed) > max_failed or not texts:
                raise
    return {name: json.loads(texts.pop(name)) for name in parts if name not in failed}, failed


def _record(
    stage: PartStage | Callable[[Any], Any], folder: str
) -> PartStage | Callable[[NamedPart], tuple[str, str]]:
    """The same stage on named parts, which also writes the record of each."""
    if not isinstance(stage, PartStage):
        return partial(_process, task=stage, folder=folder)
    return replace(
        stage, read=partial(_read, read=stage.read), write=partial(_write, write=stage.write, folder=folder)
    )


def _process(part: NamedPart, *, task: Callable[[Any], Any], folder: str) -> tuple[str, str]:
    return part[0], _write_record(folder, part[0], task(part[1]))


def _read(part: NamedPart, *, read: Callable[[Any], Any]) -> Any:
    return read(part[1])


def _write(part: NamedPart, result: Any, *, write: Callable[[Any, Any], Any], folder: str) -> tuple[str, str]:
    return part[0], _write_record(folder, part[0], write(part[1], result))


def _write_record(folder: str, name: str, record: Any) -> str:
    text = json.dumps(record)
    fs.write_bytes(fs.join(folder, _file_of(name)), text.encode())
    return text


def _read_records(folder: str, parts: Mapping[str, Any]) -> dict[str, str | bytes]:
    """The records of parts as text, by name."""
    present = set(fs.list_files(folder))
    names = [name for name in parts if _file_of(name) in present]
    files = fs.map_files(lambda name: fs.read_bytes(fs.join(folder, _file_of(name))), names)
    return dict(zip(names, files, strict=True))


def _file_of(name: str) -> str:
    return name.replace("/", "-") + SUFFIX
