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
    """Switch off the checks of arguments, as in production."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_a_follower_finds_documents_that_changed_their_shard(live: LiveIndex) -> None:
    """The follower remembers the shard in which the document was deleted; the restarted writer does not."""
    follower = LiveIndex(live.folder, follow=True)
    moved_id = next(name for name in SHARDS[0] if owners([name], [], shards=2) == [1])
    live.delete([moved_id])
    follower.refresh()
    live.close()
    live = LiveIndex(live.folder)
    live.upsert(table([moved_id], 1), NEW[:1])
    follower.refresh()
    (hits,) = LiveSearcher(follower).search(NEW[:1], k=1)
    assert [hit.document for hit in hits] == [follower.get(moved_id)] == table([moved_id], 1).to_pylist()
    vector = follower.vector(moved_id)
    assert vector is not None
    np.testing.assert_allclose(vector, NEW[0] / np.linalg.norm(NEW[0]), atol=1e-6)
    live.delete([moved_id])
    follower.refresh()
    assert (follower.get(moved_id), follower.vector(moved_id)) == (None, None)


def test_rejected_rows_have_their_position_in_the_request(live: LiveIndex) -> None:
    doc_ids = [f"n{i}" for i in range(8)] + [None, "n9", "", "n11"]
    documents = table([i or "" for i in doc_ids]).set_column(0, "doc_id", pa.array(doc_ids))
    assert set(owners([i for i in doc_ids if i], [], shards=2)) == {0, 1}
    results = live.upsert(documents, NEW[:12]).values()
    assert [row["row"] for result in results for row in result.rejected] == ["row 8", "row 10"]
    assert sum(result.rows for result in results) == 10


@pytest.mark.parametrize("wrong", [None, 7, ""])
def test_an_invalid_id_is_refused_before_any_deletion(
    live: LiveIndex, unchecked: None, wrong: object
) -> None:
    with pytest.raises(DataError, match=f"{wrong!r} is not a doc_id"):
        live.delete(["d1", "d30", wrong])
    assert len(live) == 40
    if wrong != "":
        with pytest.raises(DataError, match=f"{wrong} is not a doc_id"):
            live.get(wrong)


def test_a_search_reads_documents_of_columns_above_two_gib(
    live: LiveIndex, built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, version = live.shards[0].snapshot.base, opened(built)
    titles = pa.chunked_array([pa.array(["short", "x" * 2**28])] * 12 + [pa.array(["short"])])
    large = replace(base, documents=base.documents.set_column(1, "title", titles))
    assert version.quantizer
    monkeypatch.setattr(version, "shard", lambda _: large)
    live.shards[0] = LiveShard(version, 0, tmp_path / "large")
    live.upsert(table(["new"]), NEW[:1])
    query_vectors = np.stack([MATRIX[4], MATRIX[30], NEW[0]])
    answers = LiveSearcher(live).search(query_vectors, k=1)
    documents = [hit.document for (hit,) in answers]
    assert documents == [live.get(name) for name in ("d4", "d30", "new")]
    assert [document["title"] for document in documents] == ["short", "title 0 of d30", "title 0 of new"]
