import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core.errors import ArtifactError
from scalingnote.index import shard


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_shards_are_equal_ranges_of_the_corpus_in_order(rows: list[int], shards: int) -> None:
    parts = [f"part-{number}" for number in range(len(rows))]
    assignment = shard.assign(parts, rows, shards=shards)
    rows_in_order = [
        (piece.part, row)
        for pieces in assignment
        for piece in pieces
        for row in range(piece.start, piece.stop)
    ]
    assert rows_in_order == [
        (part, row) for part, count in zip(parts, rows, strict=True) for row in range(count)
    ]
    sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in assignment]
    assert len(sizes) == shards
    assert max(sizes) - min(sizes) <= 1


DOCUMENTS = pa.table(
    {
        "doc_id": ["a", "b", "c"],
        "title": ["A", "B", None],
        "topic": ["x", "y", "z"],
        "content": ["one\n\n two   three", "深度学习 模型", None],
    },
    schema=pa.schema({name: pa.string() for name in ("doc_id", "title", "topic", "content")}),
)
SEMANTIC_IDS = pa.table({"doc_id": ["c", "a", "b"], "semantic_id": ["3-0", "1-0", "2-0"]})


def test_document_rows_have_the_order_of_the_embeddings() -> None:
    rows = shard.document_rows(
        pa.chunked_array([["c", "a"]]), documents=DOCUMENTS, semantic_ids=SEMANTIC_IDS, snippet_chars=7
    )
    assert rows.to_pylist() == [
        {"doc_id": "c", "title": "", "topic": "z", "snippet": "", "semantic_id": "3-0"},
        {"doc_id": "a", "title": "A", "topic": "x", "snippet": "one two", "semantic_id": "1-0"},
    ]
    chinese = shard.document_rows(
        pa.chunked_array([["b"]]), documents=DOCUMENTS, semantic_ids=SEMANTIC_IDS, snippet_chars=3
    )
    assert chinese["snippet"].to_pylist() == ["深度学"]
    with pytest.raises(ArtifactError, match=r"first 'b', have no semantic ID"):
        shard.document_rows(
            pa.chunked_array([["b"]]), documents=DOCUMENTS, semantic_ids=SEMANTIC_IDS[:2], snippet_chars=5
        )
