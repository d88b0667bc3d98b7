"""Graphs give the embeddings of their towers, or are refused."""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import families
import tiny
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.encode.encoder import Encoder
from scalingnote.models import dual_encoder, onnx, onnx_export
from scalingnote.models.config import LookupConfig
from scalingnote.models.onnx import OnnxTower

QUERIES = ["join tensors", "", "word " * 40, "don't [MASK] _this_ 12", "ba ko li", "nu", "ta ve zo ba ko ra"]
# One of each kind: positions that count from the pad, windows in some layers or all, and none of these.
KINDS = ("bert", "roberta", "modernbert", "llama", "mistral", "qwen2-sliding")


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save query towers from scratch with bidirectional and with causal attention."""
    folder = tmp_path_factory.mktemp("towers")
    for name, scratch in (("bert", tiny.BIDIRECTIONAL), ("qwen2", tiny.CAUSAL)):
        families.scratch_tower(scratch, "query").save(folder / name)
    return folder


@pytest.fixture(scope="module")
def graph(towers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("graph")
    onnx_export.export_graph(towers / "bert", into, queries=QUERIES, form="onnx")
    return into


@pytest.mark.parametrize("family", KINDS)
def test_a_graph_gives_the_embeddings_of_its_tower(family: str, tmp_path: Path):
    tower = families.tower(families.folder(tmp_path / "base", family), "query")
    tower.save(tmp_path / "query")
    expected = Encoder(tower, precision="float32").encode_queries(QUERIES)
    least = onnx_export.export_graph(tmp_path / "query", tmp_path / "graph", queries=QUERIES, form="onnx")
    assert least > 0.99999
    graph_tower = OnnxTower.load(tmp_path / "graph", "onnx", threads=1)
    np.testing.assert_allclose(graph_tower.encode(QUERIES), expected, atol=1e-4)
    single = [graph_tower.encode([query])[0] for query in QUERIES]
    np.testing.assert_allclose(single, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "qwen2"])
def test_8_bit_products_are_exact_enough(name: str, towers: Path, tmp_path: Path):
    worst = onnx_export.export_graph(towers / name, tmp_path, queries=QUERIES, form="onnx_int8")
    assert onnx.MIN_COSINE <= worst < 1
    assert not (tmp_path / "model.onnx").exists()
    expected = Encoder.load(towers / name, precision="float32").encode_queries(QUERIES)
    actual = OnnxTower.load(tmp_path, "onnx_int8", threads=1).encode(QUERIES)
    cosines = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() == pytest.approx(worst, abs=1e-3)


def test_many_queries_are_batched_and_keep_their_order(graph: Path, monkeypatch):
    graph_tower = OnnxTower.load(graph, "onnx", threads=1)
    expected = graph_tower.encode(QUERIES * 3)
    monkeypatch.setattr(onnx, "_MAX_BATCH_TOKENS", 24)
    np.testing.assert_allclose(graph_tower.encode(QUERIES * 3), expected, atol=1e-5)


def test_pads_on_the_left_are_refused(graph: Path):
    graph_tower = OnnxTower.load(graph, "onnx", threads=1)
    for mask in ([[0, 1, 1]], [[1, 0, 1]], [[0, 0, 0]]):
        with pytest.raises(ValueError, match="right"):
            graph_tower.run(np.ones((1, 3), np.int64), np.array(mask))


@pytest.mark.parametrize("form", ["onnx", "onnx_int8"])
def test_a_graph_that_is_not_exact_enough_is_not_written(form, towers: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(onnx_export, "MIN_COSINE", 1.1)
    with pytest.raises(ConfigError, match="not exported"):
        onnx_export.export_graph(towers / "bert", tmp_path, queries=QUERIES, form=form)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_other_forms_unchanged(towers: Path, tmp_path: Path, monkeypatch):
    onnx_export.export_graph(towers / "bert", tmp_path, queries=QUERIES, form="onnx")
    with monkeypatch.context() as strict:
        strict.setattr(onnx_export, "MIN_COSINE", 1.1)
        with pytest.raises(ConfigError, match="not exported"):
            onnx_export.export_graph(towers / "bert", tmp_path, queries=["another query"], form="onnx_int8")
    assert OnnxTower.load(tmp_path, "onnx", threads=1).agreement() > 0.99999
    onnx_export.export_graph(towers / "bert", tmp_path, queries=QUERIES, form="onnx_int8")
    for form in onnx.ONNX_FILES:
        OnnxTower.load(tmp_path, form, threads=1)
    other_files = {"tower.json", "tokenizer.json", "onnx.json", "golden.json", "golden.npy"}
    assert {path.name for path in tmp_path.iterdir()} == {*onnx.ONNX_FILES.values(), *other_files}
    facts = json.loads((tmp_path / "onnx.json").read_text())
    assert set(facts) == {"dim", "max_length", "causal", "pad", "end", "first"}
    assert json.loads((tmp_path / "golden.json").read_text()) == QUERIES


def test_a_graph_with_wrong_golden_embeddings_is_refused(graph: Path, tmp_path: Path):
    for file in graph.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    golden = np.load(tmp_path / "golden.npy")
    np.save(tmp_path / "golden.npy", np.roll(golden, 1, axis=0))
    with pytest.raises(ArtifactError, match=r"model\.onnx gives a golden query another embedding"):
        OnnxTower.load(tmp_path, "onnx", threads=1)
    (tmp_path / "golden.npy").unlink()
    with pytest.raises(ArtifactError, match=r"golden\.npy is missing"):
        OnnxTower.load(tmp_path, "onnx", threads=1)
    with pytest.raises(ArtifactError, match="scalingnote export"):  # which writes the missing form
        OnnxTower.load(graph, "onnx_int8", threads=1)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_error_names_the_extra(package: str, towers: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}: install scalingnote\[onnx\]"):
        onnx_export.export_graph(towers / "bert", tmp_path, queries=QUERIES)


def test_towers_without_a_graph_are_refused(towers: Path, tmp_path: Path, monkeypatch):
    lookup = dual_encoder.build_query_tower(LookupConfig(), dim=8, tokenizer_json=families.LEARNT, seed=0)
    lookup.save(tmp_path / "lookup")
    with pytest.raises(ConfigError, match="export one that has them"):
        onnx_export.export_graph(tmp_path / "lookup", tmp_path / "graph", queries=QUERIES)
    with pytest.raises(ConfigError, match="pass some"):
        onnx_export.export_graph(towers / "bert", tmp_path / "graph", queries=[])
    monkeypatch.setattr(onnx_export, "MAX_GRAPH_BYTES", 1000)
    with pytest.raises(ConfigError, match="an ONNX file at most 2"):
        onnx_export.export_graph(towers / "bert", tmp_path / "graph", queries=QUERIES)
    assert not (tmp_path / "graph").exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the test needs /proc/self/maps")
def test_new_memory_is_backed_by_huge_pages(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, int, int]] = []

    class Library:
        @staticmethod
        def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
            calls.append((start.value or 0, size.value, advice))
            return -1  # an error, which is ignored

    monkeypatch.setattr(onnx.ctypes, "CDLL", lambda name: Library)
    before = onnx._memory_ranges()
    array = np.ones(1 << 25, np.uint8)  # above all thresholds of the allocator, so it is a separate range
    onnx._use_huge_pages(before)
    page = onnx._HUGE_PAGE
    assert {advice for *_, advice in calls} == {14, 25}
    assert all(start % page == size % page == 0 for start, size, _ in calls)
    sizes = [size for start, size, _ in calls if start <= array.ctypes.data + page < start + size]
    assert sizes
    assert max(sizes) >= array.nbytes - 2 * page
