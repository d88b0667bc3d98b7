"""What became of the rows that are not in the artifact: counted by reason, a few of them kept for a look.

Every task tallies its own slice or bucket; the tallies are added up in whatever order they arrive, and the
sum is the same.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.datasets.logs import values
from scalingnote.datasets.quarantine import SHOWN_CHARS
from scalingnote.storage.schema import REJECTED

EXAMPLES = 100  # kept of each reason, those that come first in the input


class Tally:
    """Counts of one task, or the sum of many. As plain JSON values it travels from the workers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        # (table, reason) -> (number of the task, number of the row in it, the row)
        self._examples: defaultdict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)

    def reject(self, table: str, reason: str, rows: pa.Table, which: Bool[ndarray, " rows"]) -> None:
        """Set `which` of `rows` aside."""
        found = np.flatnonzero(which)
        if len(found):
            first = values.rows(rows.take(pa.array(found[:EXAMPLES])))
            self.reject_lines(table, reason, map(_shown, first), count=len(found))

    def reject_lines(self, table: str, reason: str, lines: Iterable[str], *, count: int = 1) -> None:
        """Set `count` rows aside, of which `lines` are the first."""
        self.rejected[f"{table}: {reason}"] += count
        kept = self._examples[table, reason]
        for line in lines:
            if len(kept) < EXAMPLES:
                text = line[:SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()
                kept.append((0, len(kept), text))

    def add(self, values: dict[str, Any], *, number: int) -> None:
        """Add the tally of task `number`, as :meth:`values` gave it."""
        for name in ("counts", "mended", "left_out", "rejected"):
            getattr(self, name).update(values[name])
        for table, reason, rows in values["examples"]:
            kept = self._examples[table, reason]
            kept += [(number, place, row) for place, row in enumerate(rows)]
            kept.sort()
            del kept[EXAMPLES:]

    def values(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "counts": dict(self.counts),
            "mended": dict(self.mended),
            "left_out": dict(self.left_out),
            "rejected": dict(self.rejected),
            "examples": [
                [table, reason, [row for *_, row in rows]]
                for (table, reason), rows in sorted(self._examples.items())
            ],
        }

    def table(self) -> pa.Table:
        """REJECTED: at most EXAMPLES rows of each reason."""
        rows = [
            {"table": table, "row": row, "reason": reason}
            for (table, reason), kept in sorted(self._examples.items())
            for *_, row in kept
        ]
        return pa.Table.from_pylist(rows, schema=REJECTED)


def _shown(row: dict[str, Any]) -> str:
    # A long value is cut before it is formatted: a row may hold a megabyte.
    return repr({k: v[:SHOWN_CHARS] if isinstance(v, str) else v for k, v in row.items()})
