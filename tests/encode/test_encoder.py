import copy
import logging
from itertools import chain
from pathlib import Path

import encode_inputs
import jaxtyping
import numpy as np
import pyarrow as pa
import pytest
import torch

import published
import tiny
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.encode.encoder import Encoder, by_tokens
from scalingnote.models.batch import Batch, collate
from scalingnote.models.tower import Tower
from scalingnote.storage import arrow


@pytest.fixture(scope="module")
def document() -> Tower:
    return encode_inputs.tower()


@pytest.mark.parametrize("packed", [False, True])
def test_batches_have_every_row_once_within_the_budget(packed: bool):
    lengths = [3, 50, 7, 7, 1, 120, 0, 9]
    batches = [[lengths[i] for i in batch] for batch in by_tokens(lengths, budget=60, packed=packed)]
    assert sorted(chain.from_iterable(batches)) == sorted(lengths)
    for batch in batches:
        assert len(batch) == 1 or (sum(batch) if packed else len(batch) * max(batch)) <= 60
    assert not packed or batches == [[120], [50, 9], [7, 7, 3, 1, 0]]  # packed batches have no pads


def test_sorting_by_length_keeps_the_order_of_results(document: Tower):
    table = pa.Table.from_pylist(tiny.document_rows(20))
    encoded = Encoder(document, token_budget=100).encode_documents(table)
    fields = [table[name].to_pylist() for name in ("title", "topic", "content")]
    with torch.inference_mode():
        for i, row in enumerate(document.prompt.rows(*fields)):
            single = document(collate([row], pad=document.pad))[0]
            for v, view in enumerate(document.views):
                np.testing.assert_allclose(encoded[view][i], single[v].numpy(), atol=1e-5)


@pytest.mark.parametrize("most", [40, 5])
def test_a_batch_that_is_too_large_for_the_gpu_is_halved(
    most: int, document: Tower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    table = pa.Table.from_pylist(tiny.document_rows(20))
    encoder, token_counts = Encoder(document, token_budget=1024), []
    expected = encoder.encode_documents(table)["summary"]
    forward = type(document).__call__

    def of_small_batches(tower: Tower, batch: Batch) -> torch.Tensor:
        token_counts.append(batch.ids.numel())
        if batch.ids.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(tower, batch)

    monkeypatch.setattr(type(document), "__call__", of_small_batches)
    monkeypatch.setattr(logging.getLogger("scalingnote"), "propagate", True)
    if most < 10:  # not even one row fits
        with pytest.raises(torch.OutOfMemoryError):
            encoder.encode_documents(table)
        return
    np.testing.assert_allclose(encoder.encode_documents(table)["summary"], expected, atol=1e-6)
    assert max(token_counts[len(token_counts) // 2 :]) <= most  # no later batch is tried at the full size
    assert "the GPU has too little memory for" in caplog.text


def test_half_precision_rounds_weights_but_not_rotary_tables(document: Tower):
    half = copy.deepcopy(document)
    table = pa.Table.from_pylist(tiny.document_rows(4))
    expected = Encoder(document, precision="float32").encode_documents(table)["summary"]
    embeddings = Encoder(half, precision="bfloat16").encode_documents(table)["summary"]
    assert {parameter.dtype for parameter in half.backbone.parameters()} == {torch.bfloat16}
    before, after = (tower.backbone.rotary_emb.inv_freq for tower in (document, half))
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    cosines = (arrow.l2_normalize(embeddings) * arrow.l2_normalize(expected)).sum(1)
    assert cosines.min() > 0.999


def test_an_invalid_row_is_set_aside_with_its_reason(document: Tower):
    rows = tiny.document_rows(3)
    rows[1]["title"] = "word " * 200
    table = pa.Table.from_pylist(rows)
    views, problems = Encoder(document).encode_rows(table)
    assert len(views["summary"]) == 2
    assert list(problems) == [1]
    assert "shorten the title" in problems[1]
    with pytest.raises(DataError, match="document row 1"):
        Encoder(document).encode_documents(table)
    assert Encoder(document).encode_documents(table.slice(3))["summary"].shape == (0, 16)
    with pytest.raises(ConfigError, match="cannot encode queries"):
        Encoder(document).encode_queries(["x"])


def test_null_is_an_empty_text_and_a_number_is_an_error(document: Tower, monkeypatch: pytest.MonkeyPatch):
    rows = [{"title": "ba", "topic": "", "content": "ko li"}, {"title": "", "topic": "", "content": ""}]
    nulls = [rows[0] | {"topic": None}, dict.fromkeys(rows[1])]
    encoder = Encoder(document)
    expected = encoder.encode_documents(pa.Table.from_pylist(rows))["summary"]
    embeddings = encoder.encode_documents(pa.Table.from_pylist(nulls))["summary"]
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it checks annotations only in tests
    with pytest.raises(DataError, match="the title of document 1 is 7 of type int"):
        encoder.encode_documents(pa.table({"title": [None, 7], "topic": ["", ""], "content": ["", ""]}))


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen3"])
def test_embeddings_do_not_depend_on_the_default_dtype(family: str, tmp_path: Path):
    """While another thread builds a model, the entire process has another default dtype."""
    encoder = Encoder.load(published.folder(tmp_path, family), "query")
    expected = encoder.encode_queries(published.QUERIES)
    torch.set_default_dtype(torch.bfloat16)
    try:
        np.testing.assert_array_equal(encoder.encode_queries(published.QUERIES), expected)
    finally:
        torch.set_default_dtype(torch.float32)
