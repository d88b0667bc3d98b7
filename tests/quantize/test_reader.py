from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.quantize import kmeans, naming, semantic_id
from scalingnote.quantize.semantic_id import SemanticIds
from scalingnote.storage import schema
from scalingnote.storage.artifact import Draft, write_table
from synthetic_corpus import Settings, vectors

LEVELS, SIZE, DIM = 3, 7, 12
SIZES = [300, 150, 250]


@pytest.fixture(scope="module")
def rows() -> list[tuple[tuple[int, ...], int, str]]:
    """Return a list that `ids` fills with codes, suffix and document, sorted: the expected answers."""
    return []


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory, rows: list) -> SemanticIds:
    matrix = vectors(sum(SIZES), DIM)
    codebooks = kmeans.fit(matrix[:400], levels=LEVELS, codes=SIZE, seed=0)
    codes = kmeans.encode_nearest(matrix, codebooks)
    draft = Draft(f"{tmp_path_factory.mktemp('reader')}", kind="semantic_ids", config=Settings(), parents={})
    parts = [f"codes/part-{i:05d}.parquet" for i in range(len(SIZES))]
    for part, end, size in zip(parts, np.cumsum(SIZES), SIZES, strict=True):
        names = pa.chunked_array([[f"d{i}" for i in range(end - size, end)]])
        energy, sampled = np.zeros((size, LEVELS), np.float32), np.zeros(size, bool)
        write_table(draft.work(part), naming.coded_table(names, codes[end - size : end], energy, sampled))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naming, "ROWS", 120)  # several files
        naming.sort(draft, parts, SIZES, levels=LEVELS, size=SIZE, earlier=None, each=map)
    draft.write_bytes("codebooks.safetensors", save({"codebooks": codebooks}))
    artifact = draft.commit(counts={})
    assert len(artifact.names("by_code/")) > 3
    doc_ids = [f"d{i}" for i in range(sum(SIZES))]
    suffixes = semantic_id.suffixes(pa.array(doc_ids)).tolist()
    rows += sorted(zip(map(tuple, codes.tolist()), suffixes, doc_ids, strict=True))
    return SemanticIds.open(artifact.uri)


def test_documents_and_children_of_every_prefix(ids: SemanticIds, rows: list) -> None:
    for length in range(LEVELS + 1):
        for prefix in product(range(SIZE), repeat=length):
            under = [row for row in rows if row[0][:length] == prefix]
            table = ids.documents(prefix)
            assert table["doc_id"].to_pylist() == [doc_id for _, _, doc_id in under]
            assert table["semantic_id"].to_pylist() == [
                "-".join(map(str, (*codes, suffix))) for codes, suffix, _ in under
            ]
            assert ids.count(prefix) == len(under)
            if length < LEVELS:
                assert ids.children(prefix) == Counter(codes[length] for codes, _, _ in under)
    everything = ids.documents(())
    for limit in (0, 1, 130, 700, 900):
        assert ids.documents((), limit=limit).equals(everything.slice(0, limit))


def test_look_up_of_documents_by_id_and_ids_by_document(ids: SemanticIds, rows: list) -> None:
    doc_id_of = {f"{'-'.join(map(str, codes))}-{suffix}": doc_id for codes, suffix, doc_id in rows}
    assert {text: ids.doc_id(text) for text in doc_id_of} == doc_id_of
    id_of = {doc_id: text for text, doc_id in doc_id_of.items()}
    assert ids.of([f"d{i}" for i in range(len(rows))]) == id_of
    assert ids.of(["d3", "no such", "d600"]) == {"d3": id_of["d3"], "d600": id_of["d600"]}
    assert ids.of([]) == {}
    (codes, suffix, _), *_ = rows
    assert ids.doc_id(f"{'-'.join(map(str, codes))}-{suffix + 500}") is None


@pytest.mark.parametrize("metric", ["l2", "inner_product"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_nearest_prefixes_are_those_of_brute_force(
    ids: SemanticIds, rows: list, metric: str, level: int
) -> None:
    prefixes = Counter(codes[:level] for codes, _, _ in rows)
    decoded = kmeans.decode(np.array(list(prefixes)), ids.codebooks).astype(np.float64)
    queries = vectors(20, DIM, seed=7)
    scores = queries @ decoded.T
    if metric == "l2":
        scores = -np.square(queries[:, None].astype(np.float64) - decoded).sum(axis=2)
    exact = ids.nearest(queries, level=level, n=5, metric=metric, width=None)
    beam = ids.nearest(queries, level=level, n=5, metric=metric, width=12)
    agree = 0
    for row, near, near_by_beam in zip(scores, exact, beam, strict=True):
        np.testing.assert_allclose([one.score for one in near], np.sort(row)[::-1][:5], atol=1e-5)
        of = dict(zip(prefixes, row, strict=True))
        np.testing.assert_allclose([one.score for one in near], [of[one.prefix] for one in near], atol=1e-5)
        assert [one.documents for one in near] == [prefixes[one.prefix] for one in near]
        agree += len({one.prefix for one in near} & {one.prefix for one in near_by_beam})
    assert agree >= 0.9 * 5 * len(queries)
    (every,) = ids.nearest(queries[:1], level=level, n=1000, metric=metric, width=None)
    assert {one.prefix for one in every} == {*prefixes}


def test_invalid_prefixes_ids_and_artifacts_are_refused(ids: SemanticIds, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\[1, 7\] is not a prefix: pass at most 3 codes, each 0 to 6"):
        ids.documents([1, 7])
    with pytest.raises(DataError, match=r"at most 2 codes"):
        ids.children([0, 0, 0])
    with pytest.raises(DataError, match=r"'1-2' is not a semantic ID of 3 codes and a suffix"):
        ids.doc_id("1-2")
    assert (semantic_id.parse_prefix("1-2"), semantic_id.parse_prefix("")) == ([1, 2], [])
    with pytest.raises(DataError, match=r"'1-x' is not a sequence of codes"):
        semantic_id.parse_prefix("1-x")
    with pytest.raises(ConfigError, match=r"level=4"):
        ids.nearest(vectors(1, DIM), level=4)
    with pytest.raises(ConfigError, match=r"8 dimensions, the codebooks 12"):
        ids.nearest(vectors(1, 8), level=1)
    old = Draft(str(tmp_path), kind="semantic_ids", config=Settings(), parents={})
    old.write_bytes("codebooks.safetensors", save({"codebooks": ids.codebooks}))
    with pytest.raises(ArtifactError, match="re-run quantize"):
        SemanticIds.open(old.commit(counts={}).uri)


@given(st.lists(st.text(max_size=5), unique=True, max_size=60), st.integers(0, 60))
def test_a_suffix_depends_only_on_the_document(doc_ids: list[str], cut: int) -> None:
    suffixes = semantic_id.suffixes(pa.array(doc_ids, pa.string()))
    assert (suffixes >= 0).all()
    assert len(set(suffixes.tolist())) == len(doc_ids)
    parts = pa.chunked_array([doc_ids[cut:], doc_ids[:cut]], pa.string())
    assert semantic_id.suffixes(parts).tolist() == [*suffixes[cut:].tolist(), *suffixes[:cut].tolist()]
    assert semantic_id.suffixes(pa.array(["d17"])).tolist() == [4527695071737464907]  # on every machine


def test_the_table_has_the_columns_of_the_schema() -> None:
    codes = np.array([[3, 1], [2, 5]], np.int32)
    table = semantic_id.to_table(pa.chunked_array([["a", "b"]]), codes, np.array([0, 4]))
    assert table.schema.equals(schema.semantic_ids(2))
    assert table.to_pylist()[1] == {"doc_id": "b", "codes": [2, 5], "suffix": 4, "semantic_id": "2-5-4"}
