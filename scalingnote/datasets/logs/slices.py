"""The two steps that go through the log slice by slice: check its rows, then send them where they belong.

What a task holds is one slice. A hot document is named once by each slice, however often it was shown.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs import parts, split
from scalingnote.datasets.logs.checks import CHECKED, check
from scalingnote.datasets.logs.inputs import Slice
from scalingnote.datasets.logs.reading import read
from scalingnote.datasets.logs.tables import kinds
from scalingnote.datasets.logs.tally import Tally
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table
from scalingnote.storage.exchange import bucket_of, gather, scatter

IDS = pa.schema({"doc_id": pa.string()})


def check_slice(piece: Slice, *, config: Logs, work: str) -> dict[str, Any]:
    """Check the rows of a slice. Documents go to the bucket of their id; evidence is kept as it is, and the
    ids and texts it names go to their buckets.
    """
    tally = Tally()
    tables = read(piece, kinds=kinds(config, piece.table), tally=tally)
    checked = [check(rows, piece.table, config=config, tally=tally) for rows in tables]
    record = {"done": piece.size // 1000, "table": piece.table, "rows": sum(map(len, checked))}
    if record["rows"]:
        rows = pa.concat_tables(checked).combine_chunks()
        if piece.table in ("documents", "unpaired"):
            _send(rows, "doc_id", "documents", piece, config=config, work=work)
        else:
            _keep(rows, piece, config=config, work=work)
        if piece.table == "impressions":
            span = pc.min_max(rows["timestamp"].cast(pa.int64())).as_py()
            record |= {"first": span["min"], "last": span["max"]}
    return record | {"tally": tally.values()}


def route_slice(piece: Slice, *, config: Logs, work: str, windows: split.Windows) -> dict[str, Any]:
    """Leave out evidence about unknown documents; the rest goes to the bucket of its query.

    Impressions of the train window go as they are, those of the test window as counts of clicks.
    """
    tally = Tally()
    uri = fs.join(work, "checked", _name(piece))
    without_text = [field for field in CHECKED[piece.table] if field.name != "query"]
    rows = parts.read(uri) if fs.exists(uri) else pa.schema(without_text).empty_table()
    unknown = gather(fs.join(work, "unknown"), piece.number, schema=IDS)["doc_id"].combine_chunks()
    lost = np.asarray(pc.is_in(rows["doc_id"], value_set=unknown))
    tally.reject(piece.table, "unknown doc_id", rows, lost)
    known = rows.filter(pa.array(~lost))
    if piece.table != "impressions":
        _send(known, "query_id", piece.table, piece, config=config, work=work)
        return {"done": len(rows), "tally": tally.values()}
    learnt, tested = (split.inside(known["timestamp"], window) for window in (windows.train, windows.test))
    asked = split.asked(known.filter(tested), min_dwell_s=config.min_dwell_s)
    _send(known.filter(learnt), "query_id", "train", piece, config=config, work=work)
    _send(asked, "query_id", "asked", piece, config=config, work=work)
    tally.counts["test_impressions"] += pc.sum(tested).as_py() or 0
    outside = len(known) - (pc.sum(pc.or_(learnt, tested)).as_py() or 0)
    tally.left_out["impressions outside both windows"] += outside
    return {"done": len(rows), "tally": tally.values()}


def _keep(rows: pa.Table, piece: Slice, *, config: Logs, work: str) -> None:
    named = pa.table([rows["doc_id"].unique()], IDS)
    _send(named, "doc_id", "named", piece, config=config, work=work)
    if piece.table != "scores":
        # A judgement's text speaks for a query only where no impression does.
        texts = split.texts(rows, weight=int(piece.table == "impressions"))
        _send(texts, "query_id", "texts", piece, config=config, work=work)
    kept = [column for column in rows.column_names if column != "query"]
    write_table(fs.join(work, "checked", _name(piece)), rows.select(kept))


def _send(rows: pa.Table, key: str, target: str, piece: Slice, *, config: Logs, work: str) -> None:
    if len(rows):
        name = _name(piece).removesuffix(".parquet")
        scatter(rows, bucket_of(rows[key], config.parts), target=fs.join(work, target), name=name)


def _name(piece: Slice) -> str:
    return f"{piece.number:06d}.parquet"
