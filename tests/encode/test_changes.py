"""What changed since an earlier corpus: a dictionary's answer, however slices, buckets and groups cut it."""

from pathlib import Path

import encode_inputs
import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.encode import documents as changes
from scalingnote.encode.documents import content_hashes
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.shuffle import slices


def embeddings(uri: Path, rows: list[dict[str, str]], *, rows_per_part: int) -> Artifact:
    """A document's vector is its number, so that a copy shows where it came from."""
    draft = Draft(str(uri), kind="embeddings", config=tiny.Nothing(), parents={})
    table = pa.Table.from_pylist(rows, schema=schema.DOCUMENTS)
    numbers = np.array([[float(row["doc_id"][1:])] * 4 for row in rows], np.float32)
    columns = [table["doc_id"], content_hashes(table), arrow.to_arrow(numbers)]
    made = pa.table(columns, schema=schema.embeddings(["summary"], 4))
    for number, start in enumerate(range(0, len(rows), rows_per_part)):
        draft.write_table(f"embeddings/part-{number:05d}.parquet", made.slice(start, rows_per_part))
    return draft.commit(counts={"documents": len(rows)})


@pytest.mark.parametrize(("rows_per_part", "buckets"), [(7, 1), (7, 4), (50, 3)])
def test_what_is_the_same_is_copied_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_part: int, buckets: int
):
    monkeypatch.setattr(changes, "PARTS_PER_GROUP", 3)
    rows = tiny.document_rows(60)
    before, now = rows[:50], [dict(row) for row in reversed(rows[4:])]
    for row in now[10:20]:
        row["content"] += " and more"
    now[0]["title"], now[0]["content"] = "", now[0]["title"] + now[0]["content"]  # the same text elsewhere
    base = embeddings(tmp_path / "base", before, rows_per_part=11)
    source = encode_inputs.dataset(tmp_path / "now", now, rows_per_part=rows_per_part)
    folder, output = str(tmp_path / "work"), str(tmp_path / "out")
    for _ in range(2):  # whatever is done again changes nothing
        for artifact, table in ((base, "embeddings"), (source, "documents")):
            for item in enumerate(slices(artifact, table, rows=13)):
                changes.scatter_hashes(item, artifact=artifact, table=table, folder=folder, buckets=buckets)
        settled = [changes.compare_bucket((b, b), folder=folder, output=output) for b in range(buckets)]
        groups = range(-(-len(source.table_parts("documents")) // 3))
        copied = sum(changes.write_copies((n, n), source=source, folder=folder) for n in groups)

    texts = {row["doc_id"]: [row[name] for name in ("title", "topic", "content")] for row in before}
    kinds = {}
    for row in now:
        known = texts.get(row["doc_id"])
        same = known == [row[name] for name in ("title", "topic", "content")]
        kinds[row["doc_id"]] = "same" if same else "added" if known is None else "changed"
    kinds |= {row["doc_id"]: "deleted" for row in before[:4]}
    found = pa.concat_tables(
        pa.parquet.read_table(Path(output, record["name"])) for record in settled
    ).to_pylist()
    assert {row["doc_id"]: row["change"] for row in found} == {
        doc_id: kind for doc_id, kind in kinds.items() if kind != "same"
    }
    assert len(found) == sum(record[kind] for record in settled for kind in ("added", "changed", "deleted"))
    assert copied == sum(kind == "same" for kind in kinds.values()) == 60 - 4 - 10 - 10

    for number, start in enumerate(range(0, len(now), rows_per_part)):
        part = now[start : start + rows_per_part]
        got = changes.read_copies(f"documents/part-{number:05d}.parquet", folder=folder, base=base)
        assert [part[row]["doc_id"] for row in got["row"].to_pylist()] == got["doc_id"].to_pylist()
        assert got["doc_id"].to_pylist() == [r["doc_id"] for r in part if kinds[r["doc_id"]] == "same"]
        values = arrow.to_numpy(got["summary"])[:, 0].tolist()
        assert values == [float(doc_id[1:]) for doc_id in got["doc_id"].to_pylist()]
