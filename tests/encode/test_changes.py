"""Changes since an earlier corpus equal those of a dictionary, for any slices, buckets and groups."""

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
    """Build embeddings in which a document's vector is its number, so that a copy shows its origin."""
    draft = Draft(str(uri), kind="embeddings", config=tiny.Nothing(), parents={})
    table = pa.Table.from_pylist(rows, schema=schema.DOCUMENTS)
    numbers = np.array([[float(row["doc_id"][1:])] * 4 for row in rows], np.float32)
    columns = [table["doc_id"], content_hashes(table), arrow.to_arrow(numbers)]
    vectors = pa.table(columns, schema=schema.embeddings(["summary"], 4))
    for number, start in enumerate(range(0, len(rows), rows_per_part)):
        draft.write_table(f"embeddings/part-{number:05d}.parquet", vectors.slice(start, rows_per_part))
    return draft.commit(counts={"documents": len(rows)})


@pytest.mark.parametrize(("rows_per_part", "buckets"), [(7, 1), (7, 4), (50, 3)])
def test_equal_documents_are_copied_and_changes_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_part: int, buckets: int
):
    monkeypatch.setattr(changes, "PARTS_PER_GROUP", 3)
    rows = tiny.document_rows(60)
    before, now = rows[:50], [dict(row) for row in reversed(rows[4:])]
    for row in now[10:20]:
        row["content"] += " and more"
    now[0]["title"], now[0]["content"] = "", now[0]["title"] + now[0]["content"]  # equal text, another field
    base = embeddings(tmp_path / "base", before, rows_per_part=11)
    source = encode_inputs.dataset(tmp_path / "now", now, rows_per_part=rows_per_part)
    folder, output = str(tmp_path / "work"), str(tmp_path / "out")
    for _ in range(2):  # a repeated step changes nothing
        for artifact, table in ((base, "embeddings"), (source, "documents")):
            for item in enumerate(slices(artifact, table, rows=13)):
                changes.scatter_hashes(item, artifact=artifact, table=table, folder=folder, buckets=buckets)
        comparisons = [changes.compare_bucket((b, b), folder=folder, output=output) for b in range(buckets)]
        groups = range(-(-len(source.table_parts("documents")) // 3))
        copy_count = sum(changes.write_copies((n, n), source=source, folder=folder) for n in groups)

    texts = {row["doc_id"]: [row[name] for name in ("title", "topic", "content")] for row in before}
    kinds = {}
    for row in now:
        old_fields = texts.get(row["doc_id"])
        same = old_fields == [row[name] for name in ("title", "topic", "content")]
        kinds[row["doc_id"]] = "same" if same else "added" if old_fields is None else "changed"
    kinds |= {row["doc_id"]: "deleted" for row in before[:4]}
    changes_found = pa.concat_tables(
        pa.parquet.read_table(Path(output, record["name"])) for record in comparisons
    ).to_pylist()
    assert {row["doc_id"]: row["change"] for row in changes_found} == {
        doc_id: kind for doc_id, kind in kinds.items() if kind != "same"
    }
    assert len(changes_found) == sum(
        record[kind] for record in comparisons for kind in ("added", "changed", "deleted")
    )
    assert copy_count == sum(kind == "same" for kind in kinds.values()) == 60 - 4 - 10 - 10

    for number, start in enumerate(range(0, len(now), rows_per_part)):
        part = now[start : start + rows_per_part]
        copies = changes.read_copies(f"documents/part-{number:05d}.parquet", folder=folder, base=base)
        assert [part[row]["doc_id"] for row in copies["row"].to_pylist()] == copies["doc_id"].to_pylist()
        assert copies["doc_id"].to_pylist() == [r["doc_id"] for r in part if kinds[r["doc_id"]] == "same"]
        values = arrow.to_numpy(copies["summary"])[:, 0].tolist()
        assert values == [float(doc_id[1:]) for doc_id in copies["doc_id"].to_pylist()]
