"""Every form of a query tower computes the tower's embeddings, for one query and for many."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import encode_inputs
import jaxtyping
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import tiny
from scalingnote.cli import main as cli
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.encode import exports, query_encoder
from scalingnote.encode.config import ExportConfig
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.lookup import _WIDENED_SCALE, LookupEncoder, _widen
from scalingnote.encode.query_encoder import QueryCache, QueryEncoder
from scalingnote.models import lookup, onnx, onnx_export
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup import LookupStart, LookupTower
from scalingnote.models.lookup_onnx import INPUT
from scalingnote.models.lookup_table import frequent_features, read_table
from scalingnote.storage.artifact import Artifact, Draft

TEXTS = [row["content"] for row in tiny.document_rows()]
LEARNT = encode_inputs.learnt()
QUERIES = [*(" ".join(text.split()[:4]) for text in TEXTS[:20]), "", "word " * 40, "ba", "ba"]


def table(folder: Path, *, storage: str = "float32", features: bool = False, **knobs: object) -> LookupTower:
    """Save a lookup tower with random values, so that all its options have an effect."""
    config = LookupConfig(max_length=16, storage=storage, **knobs)
    start = LookupStart(feature_keys()) if features else None
    tower = lookup.build(config, dim=8, tokenizer_json=LEARNT, seed=0, start=start)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in tower.parameters():
            value.normal_(0, 0.3, generator=generator)
    tower.save(folder)
    return LookupTower.load(folder)


def feature_keys() -> np.ndarray:
    tokenizer = Tokenizer.from_str(LEARNT)
    texts = [tokenizer.encode(query, add_special_tokens=False).ids for query in QUERIES]
    return frequent_features(texts, tokens=tokenizer.get_vocab_size(), bigrams=9, ends=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a transformer in all forms in one folder."""
    path = tmp_path_factory.mktemp("forms")
    encode_inputs.tower(role="query").save(path)
    for form in ("onnx", "onnx_int8"):
        onnx_export.export_graph(path, path.parent / form, queries=QUERIES, form=form)
        for file in (path.parent / form).iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    return path


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"weighting": "learned"},
        {"attention": True},
        {"attention": True, "weighting": "learned"},
        {"features": True, "weighting": "learned"},
    ],
    ids=str,
)
def test_a_table_computes_the_embeddings_of_its_tower(storage: str, knobs: dict, tmp_path: Path):
    tower = table(tmp_path, storage=storage, **knobs)
    rows = tower.prompt.rows(QUERIES)
    with torch.inference_mode():
        expected = tower(collate(rows, pad=tower.pad, packed=True))[:, 0].numpy()
    encoder = LookupEncoder(tmp_path)
    np.testing.assert_allclose(encoder.encode(QUERIES), expected, atol=1e-5)
    np.testing.assert_allclose([encoder.encode([query])[0] for query in QUERIES], expected, atol=1e-5)


@pytest.mark.parametrize("size", [30_000.0, 1e-3])
def test_batches_of_large_float16_rows_equal_single_queries(size: float, tmp_path: Path):
    tower = table(tmp_path, storage="float16")
    with torch.no_grad():
        tower.table.copy_(size * tower.table.sign())
    tower.save(tmp_path)
    encoder = LookupEncoder(tmp_path)
    queries = ["ba " * tokens for tokens in range(1, 17)]
    single = np.concatenate([encoder.encode([query]) for query in queries])
    np.testing.assert_allclose(encoder.encode(queries), single, rtol=1e-5, atol=1e-6 * size)


def test_all_finite_float16_values_are_widened_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    widened = _widen(bits.view(np.int16)[None])[0] * _WIDENED_SCALE
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(widened[finite], halves[finite].astype(np.float32))


HEAVY = ("torch", "transformers", "onnxruntime", "pydantic", "scipy", "numba", "pyarrow")


@pytest.mark.parametrize(
    "knobs", [{}, {"attention": True}, {"features": True, "weighting": "learned"}], ids=str
)
def test_a_table_needs_only_numpy_and_its_tokenizer(knobs: dict, tmp_path: Path):
    table(tmp_path, storage="float16", **knobs)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from scalingnote.encode.query_encoder import QueryEncoder\n"
        f"made = QueryEncoder(Path({str(tmp_path)!r}))\n"
        "shapes = [made.encode_queries(['ba ko'] * many).shape for many in (1, 2, 100)]\n"
        f"print(made.form, shapes, sorted(set({HEAVY}) & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "lookup [(1, 8), (2, 8), (100, 8)] []"


@pytest.mark.parametrize("form", ["torch", "compiled", "onnx", "onnx_int8"])
def test_every_form_of_a_transformer_has_its_embeddings(form: str, folder: Path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)  # it takes a minute
    expected = Encoder.load(folder, precision="float32").encode_queries(QUERIES)
    encoder = QueryEncoder(folder, form, threads=1, precision="float32")
    assert (encoder.form, encoder.dim) == (form, 16)
    exact = 0.999 if form == "onnx_int8" else 0.99999
    assert cosines(encoder.encode_queries(QUERIES), expected).min() > exact
    assert cosines(encoder.encode_queries(QUERIES[:1]), expected[:1]).min() > exact


@pytest.mark.parametrize("form", ["torch", "onnx_int8", "lookup"])
def test_errors_name_invalid_queries_and_surrogates_are_replaced(
    form: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it checks annotations only in tests
    if form == "lookup":
        table(tmp_path)
    encoder = QueryEncoder(tmp_path if form == "lookup" else folder, form)
    assert encoder.encode_queries([]).shape == (0, encoder.dim)
    np.testing.assert_array_equal(
        encoder.encode_queries(["cut \ud83d", "ba"]), encoder.encode_queries(["cut \ufffd", "ba"])
    )
    for wrong in (None, float("nan"), 7, b"ba"):
        with pytest.raises(DataError, match=f"query 1 is {wrong!r} of type"):
            encoder.encode_queries(["ba", wrong])
    with pytest.raises(DataError, match="'ba ko' of type str is not a list"):
        encoder.encode_queries("ba ko")


def test_auto_loads_the_fastest_available_form(folder: Path, tmp_path: Path, monkeypatch):
    assert QueryEncoder(folder).form == "onnx_int8"
    table(tmp_path)
    assert QueryEncoder(tmp_path).form == "lookup"
    assert query_encoder.choose(["torch", "compiled"]) == "torch"
    assert query_encoder.choose(["onnx"]) == "onnx"
    monkeypatch.setattr(query_encoder, "_has_gpu", lambda: True)
    assert QueryEncoder(folder).form == "torch"


def test_the_error_of_a_missing_form_lists_the_available_ones(folder: Path, tmp_path: Path):
    with pytest.raises(ArtifactError, match="as 'lookup', only as onnx, onnx_int8, torch, compiled"):
        QueryEncoder(folder, "lookup")
    with pytest.raises(ArtifactError, match="is not a tower"):
        QueryEncoder(tmp_path)
    encode_inputs.tower().save(tmp_path)
    with pytest.raises(ConfigError, match="a document tower: it cannot encode queries"):
        QueryEncoder(tmp_path)


class Counting:
    """Encodes a query as its length, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, queries) -> np.ndarray:
        self.calls.append(list(queries))
        return np.array([[len(query), 0.5] for query in queries], np.float32)


def test_a_cache_computes_once_and_evicts_the_oldest():
    encode = Counting()
    cache = QueryCache(encode, 3)
    np.testing.assert_array_equal(cache.encode(["a", "bb", "a"])[:, 0], [1, 2, 1])
    np.testing.assert_array_equal(cache.encode(["bb", "ccc", "a"])[:, 0], [2, 3, 1])
    assert encode.calls == [["a", "bb"], ["ccc"]]
    assert (cache.hits, cache.misses) == (2, 4)
    for query in ("dddd", "a", "bb"):  # "bb" is the least recently used when "dddd" is added
        cache.encode([query])
    assert encode.calls[2:] == [["dddd"], ["bb"]]
    assert cache.encode(["1", "22", "333", "4444"]).shape == (4, 2)  # more than its size


def test_a_cache_hit_is_the_computed_vector(folder: Path):
    encoder = QueryEncoder(folder, "onnx_int8", threads=1, cache=10)
    first = encoder.encode_queries(QUERIES[:3])
    np.testing.assert_array_equal(encoder.encode_queries(QUERIES[:3][::-1]), first[::-1])
    assert encoder.cache is not None
    assert encoder.cache.hits == 3


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    tower = encode_inputs.tower(role="query")
    return encode_inputs.towers(tmp_path_factory.mktemp("student") / "student", tower, kind="student")


def test_an_export_is_a_separate_artifact(student: Artifact, tmp_path: Path):
    run_dir = str(tmp_path / "run")
    assert exports.find(student, "auto", run_dir).digest == student.digest
    with pytest.raises(ArtifactError, match=r"scalingnote export --run .* --form onnx_int8"):
        exports.find(student, "onnx_int8", run_dir)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    export = exports.build(ExportConfig(), tower=student, dataset=dataset, run_dir=run_dir)
    assert export.manifest.info["least_cosine"] > onnx.MIN_COSINE
    assert export.counts["golden"] == tiny.DOCUMENTS < exports.GOLDEN_QUERIES  # all of them
    for form in ("auto", "onnx_int8"):
        loaded = exports.find(student, form, run_dir)
        assert (loaded.digest, loaded.manifest.kind) == (export.digest, "query_encoder")
        assert QueryEncoder(loaded.directory("query"), form).form == "onnx_int8"
    assert exports.find(student, "torch", run_dir).digest == student.digest
    repeated = exports.build(ExportConfig(), tower=student, dataset=dataset, run_dir=run_dir)
    assert repeated.digest == export.digest


def session_of(folder: Path) -> Callable[[str], np.ndarray]:
    """Open an exported table like another runtime: tokenizer.json, then the graph."""
    graph = pytest.importorskip("onnxruntime").InferenceSession(folder / "model.onnx")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: graph.run(None, {INPUT: np.array(tokenizer.encode(text).ids, np.int64)})[0]


@pytest.mark.parametrize("features", [False, True])
def test_a_table_is_exported_but_the_table_itself_is_served(features: bool, tmp_path: Path):
    run_dir, dataset = str(tmp_path / "run"), tiny.dataset(str(tmp_path / "dataset"))
    draft = Draft(str(tmp_path / "artifact"), kind="student", config=tiny.Nothing(), parents={})
    table(tmp_path / "artifact" / "query", features=features)
    student = draft.commit(counts={})
    with pytest.raises(ConfigError, match="is a table, which has no 8-bit products: --form onnx"):
        exports.build(ExportConfig(), tower=student, dataset=dataset, run_dir=run_dir)
    export = exports.build(ExportConfig(form="onnx"), tower=student, dataset=dataset, run_dir=run_dir)
    assert export.manifest.info["least_cosine"] > 1 - 1e-6
    encode = session_of(Path(export.directory("query")))
    for query in QUERIES:
        (expected,) = QueryEncoder(student.directory("query")).encode(query)
        np.testing.assert_allclose(encode(query), expected, atol=1e-5)
    for form in ("auto", "onnx"):
        assert exports.find(student, form, run_dir).digest == student.digest


@pytest.mark.parametrize("features", [False, True])
def test_the_export_of_a_folder_is_checked_by_its_own_tokens(features: bool, tmp_path: Path, monkeypatch):
    table(tmp_path / "table", features=features)
    into = tmp_path / "web"
    assert cli.main(["export", "--model", str(tmp_path / "table"), "--to", str(into)]) == 0
    for wrong in (["--form", "onnx_int8"], ["towers"]):
        assert cli.main(["export", *wrong, "--model", str(tmp_path / "table"), "--to", str(into)]) == 2
    golden = json.loads((into / "golden.json").read_text())
    assert len({*golden}) > 32
    expected = QueryEncoder(tmp_path / "table").encode(golden)
    np.testing.assert_allclose(np.load(into / "golden.npy"), expected, atol=1e-6)
    encode = session_of(into)
    np.testing.assert_allclose([*map(encode, golden)], expected, atol=1e-5)
    if features:  # otherwise the check would have no pairs
        keys = {*feature_keys().tolist()}
        split = Tokenizer.from_file(str(into / "tokenizer.json"))
        ids = [split.encode(query).ids for query in golden]
        tokens = split.get_vocab_size()
        assert sum(a * tokens + b in keys for row in ids for a, b in pairwise(row)) > len(golden)
    other = tmp_path / "other"
    short = replace(read_table(tmp_path / "table"), max_length=2)
    monkeypatch.setattr(exports, "read_table", lambda _: short)
    with pytest.raises(ConfigError, match="and the table compute different embeddings"):
        exports.export_lookup(tmp_path / "table", other)
    assert not [*other.iterdir()]
