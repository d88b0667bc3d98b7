"""Rows set aside: every one is counted by reason, the first of each reason are kept for a look."""

from collections import Counter
from typing import Any

import pyarrow as pa

from scalingnote.storage.schema import REJECTED

SHOWN_CHARS = 200
KEPT_PER_REASON = 1000


class Quarantine:
    """Collects rejected rows and mended ones; both are counted, only the rejected are kept."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self._rows: list[dict[str, str]] = []
        self._kept: Counter[tuple[str, str]] = Counter()

    def reject(self, table: str, row: Any, reason: str) -> None:
        """Set a row aside."""
        self.rejected[f"{table}: {reason}"] += 1
        self._kept[table, reason] += 1
        if self._kept[table, reason] <= KEPT_PER_REASON:
            text = row if isinstance(row, str) else _shown(row)
            text = text[:SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()
            self._rows.append({"table": table, "row": text, "reason": reason})

    def mend(self, what: str) -> None:
        """Count a row that was kept after a repair."""
        self.mended[what] += 1

    def table(self) -> pa.Table:
        """The rejected rows, at most KEPT_PER_REASON of each reason, in the order they were met."""
        return pa.Table.from_pylist(self._rows, schema=REJECTED)


def _shown(row: dict[str, Any]) -> str:
    # A long value is cut before it is formatted: a row may hold a megabyte.
    short = {key: value[:SHOWN_CHARS] if isinstance(value, str) else value for key, value in row.items()}
    return repr(short)
