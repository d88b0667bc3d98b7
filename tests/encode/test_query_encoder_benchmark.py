"""The benchmark of the forms of query towers runs completely at a tiny size."""

import json
import sys

import pytest

import tiny
from benchmarks import query_encoder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("report") / "report.json"
    texts = [row["content"] for row in tiny.document_rows()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_encoder, "_data", lambda: (texts, [text[:20] for text in texts]))
        patch.setattr(query_encoder, "run_isolated", lambda work, *args: work(*args))
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            patch.setenv(name, "1")  # restored afterwards
        sizes = ["--layers", "1", "--hidden", "64", "--rounds", "1", "--threads", "1", "--batches", "1", "64"]
        patch.setattr(sys, "argv", ["query_encoder", *sizes, "--json", str(path)])
        query_encoder.main()
    return json.loads(path.read_text())


def test_every_form_is_measured_in_every_batch_size(report: dict):
    forms = [row["form"] for row in report["measurements"] if row["batch"] == 1]
    assert len(forms) == 7
    assert [row["form"] for row in report["measurements"]] == forms * 2
    assert all(row["queries/s"] > 0 for row in report["measurements"])


def test_metrics_are_ratios_and_cosines(report: dict):
    metrics = report["metrics"]
    assert metrics["lookup_b1_over_torch_fp32"] > 1
    assert metrics["onnx_int8_b1_over_torch_fp32"] > 0
    assert metrics["lookup_b64_over_tokenize"] > 0
    assert metrics["cosine_lookup"] > 0.999
    assert metrics["cosine_sentence_transformers"] > 0.99999
