"""What a killed compaction has finished, as the next one finds it: records in the draft of a version.

A crash of the machine takes what was not synced, in any order. So files count as finished while they are what
their record says, and a record that cannot be read was never written.
"""

import json
from collections.abc import Mapping
from typing import Any

from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Draft, Part


def finish(draft: Draft, record: str, files: Mapping[str, Part]) -> None:
    """Record files that were written, so that no later run writes them again."""
    note(draft, record, {name: vars(part) for name, part in files.items()})


def finished(draft: Draft, record: str) -> dict[str, Part] | None:
    """The files of a record; None where there is none, or one of them is not as it was."""
    found = noted(draft, record)
    if found is None:
        return None
    files = {name: Part(**part) for name, part in found.items()}
    paths = {draft.path(name): part.sha256 for name, part in files.items()}
    whole = all(fs.exists(path) and fs.checksum(path) == sha256 for path, sha256 in paths.items())
    return files if whole else None


def note(draft: Draft, name: str, value: Mapping[str, Any]) -> None:
    """Write down a value for later runs."""
    fs.write_bytes(draft.work(name), json.dumps(value).encode())


def noted(draft: Draft, name: str) -> dict[str, Any] | None:
    """The value; None where it was not noted, or a crash left the file without what was in it."""
    path = draft.work(name)
    try:
        found: dict[str, Any] | None = json.loads(fs.read_bytes(path)) if fs.exists(path) else None
    except ValueError:
        return None
    return found
