"""What is done to a part, whatever it holds: it is read, encoded and committed, and this is recorded."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from scalingnote.encode.tally import Cost
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table

Record = dict[str, Any]
Rejected = list[dict[str, str]]


@dataclass(frozen=True)
class Encoded:
    """A part as it is written, and what it took."""

    table: pa.Table
    cost: Cost = field(default_factory=Cost)
    rejected: Rejected = field(default_factory=list)


Encode = Callable[[str, Any], Encoded]  # a part's name and what was read of it


@dataclass(frozen=True)
class Steps:
    """What is done to a part. `read` runs anywhere; `encoder` is made once in each worker."""

    read: Callable[[str], Any]
    encoder: Callable[..., Encode]


def nothing(_: str) -> None:
    """The first step, where whoever encodes also reads: it knows what it needs."""


def commit_part(name: str, encoded: Encoded, timed: dict[str, float], *, output: str, work: str) -> str:
    """Write a part, and only then record it; the record as JSON."""
    part = write_table(fs.join(output, name), encoded.table)
    record: Record = {"name": name, "part": asdict(part), "rejected": encoded.rejected}
    record |= asdict(encoded.cost) | timed
    text = json.dumps(record)
    fs.write_bytes(fs.join(work, record_name(name)), text.encode())
    return text


def recorded(work: str, names: set[str]) -> dict[str, Record]:
    """Records that are there: many in the file of a wave that ended, each in its own of one that did not."""
    files = [fs.join(work, name) for name in fs.list_files(work) if name.endswith(".json")]
    found = [json.loads(fs.read_bytes(uri)) for uri in files]
    records = [record for entry in found for record in (entry if isinstance(entry, list) else [entry])]
    return {record["name"]: record for record in records if record["name"] in names}


def close_wave(work: str, wave: dict[str, Record]) -> None:
    """One file for all records of a wave: a run of a hundred thousand parts reads few when it resumes."""
    if wave:
        name = record_name(min(wave)).replace(".json", "-wave.json")
        fs.write_bytes(fs.join(work, name), json.dumps(list(wave.values())).encode())
        for part in wave:
            fs.delete(fs.join(work, record_name(part)))


def record_name(name: str) -> str:
    """Where the record of a part lies in the work directory."""
    return name.replace("/", "-") + ".json"
