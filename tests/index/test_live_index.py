from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy as np
import pyarrow as pa
import pytest

from live_shards import DIM, opened, table
from scalingnote.core.errors import DataError
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.live_shard import LiveShard, owners
from scalingnote.search.live_searcher import LiveSearcher
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

MATRIX, NEW = vectors(40, DIM), vectors(20, DIM, seed=7)
SHARDS = [{f"d{i}": MATRIX[i] for i in range(25)}, {f"d{i}": MATRIX[i] for i in range(25, 40)}]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments go unchecked, as in production."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_a_follower_finds_a_document_that_moved_to_another_shard(live: LiveIndex) -> None:
    """It still knows the document in the shard where it was deleted; the writer, started again, does not."""
    follower = LiveIndex(live.folder, follow=True)
    moved = next(name for name in SHARDS[0] if owners([name], [], shards=2) == [1])
    live.delete([moved])
    follower.refresh()
    live.close()
    live = LiveIndex(live.folder)
    live.upsert(table([moved], 1), NEW[:1])
    follower.refresh()
    (found,) = LiveSearcher(follower).search(NEW[:1], k=1)
    assert [hit.document for hit in found] == [follower.get(moved)] == table([moved], 1).to_pylist()
    kept = follower.vector(moved)
    assert kept is not None
    np.testing.assert_allclose(kept, NEW[0] / np.linalg.norm(NEW[0]), atol=1e-6)
    live.delete([moved])
    follower.refresh()
    assert (follower.get(moved), follower.vector(moved)) == (None, None)


def test_rows_set_aside_are_named_by_their_place_in_what_was_sent(live: LiveIndex) -> None:
    doc_ids = [f"n{i}" for i in range(8)] + [None, "n9", "", "n11"]
    documents = table([i or "" for i in doc_ids]).set_column(0, "doc_id", pa.array(doc_ids))
    assert set(owners([i for i in doc_ids if i], [], shards=2)) == {0, 1}
    told = live.upsert(documents, NEW[:12]).values()
    assert [row["row"] for written in told for row in written.rejected] == ["row 8", "row 10"]
    assert sum(written.rows for written in told) == 10


@pytest.mark.parametrize("wrong", [None, 7, ""])
def test_what_is_no_id_is_refused_before_anything_is_deleted(
    live: LiveIndex, unchecked: None, wrong: object
) -> None:
    with pytest.raises(DataError, match=f"{wrong!r} is not a doc_id"):
        live.delete(["d1", "d30", wrong])
    assert len(live) == 40
    if wrong != "":
        with pytest.raises(DataError, match=f"{wrong} is not a doc_id"):
            live.get(wrong)


def test_a_search_finds_documents_in_more_text_than_a_column_of_one_chunk_holds(
    live: LiveIndex, built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, version = live.shards[0].snapshot.base, opened(built)
    titles = pa.chunked_array([pa.array(["short", "x" * 2**28])] * 12 + [pa.array(["short"])])
    large = replace(base, documents=base.documents.set_column(1, "title", titles))
    assert version.quantizer
    monkeypatch.setattr(version, "shard", lambda _: large)
    live.shards[0] = LiveShard(version, 0, tmp_path / "large")
    live.upsert(table(["new"]), NEW[:1])
    asked = np.stack([MATRIX[4], MATRIX[30], NEW[0]])
    found = LiveSearcher(live).search(asked, k=1)
    documents = [hit.document for (hit,) in found]
    assert documents == [live.get(name) for name in ("d4", "d30", "new")]
    assert [document["title"] for document in documents] == ["short", "title 0 of d30", "title 0 of new"]
