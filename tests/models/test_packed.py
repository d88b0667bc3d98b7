"""Packed rows, padded rows and single rows give the same embeddings in every family."""

from typing import Any

import pytest
import torch
from torch import Tensor

import families
import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.models import batch
from scalingnote.models.batch import Batch, collate
from scalingnote.models.prompt import TokenRow
from scalingnote.models.tower import Tower


@pytest.fixture(scope="module", params=families.FAMILIES)
def document(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    path = families.folder(tmp_path_factory.mktemp(request.param), request.param, padding_side="left")
    return families.tower(path, "document")


def rows_of(tower: Tower) -> list[TokenRow]:
    return tower.prompt.rows(*families.DOCUMENTS)


def gradients(tower: Tower, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    tower.zero_grad()
    embeddings = tower(batch)
    weights = torch.linspace(-1, 1, embeddings.numel()).view_as(embeddings)
    (embeddings * weights).sum().backward()
    return embeddings.detach(), {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}


def test_packed_and_padded_rows_give_equal_gradients(document: Tower):
    assert document.packs
    rows = rows_of(document)
    padded, slow = gradients(document, collate(rows, pad=document.pad))
    packed, fast = gradients(document, collate(rows, pad=document.pad, packed=True))
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    assert fast.keys() == slow.keys()
    largest = max(gradient.abs().max() for gradient in slow.values())
    for name, gradient in slow.items():
        torch.testing.assert_close(fast[name] / largest, gradient / largest, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_and_a_single_row_give_equal_embeddings(document: Tower, packed: bool):
    assert document.tokenizer.padding_side == "left"
    rows = rows_of(document)
    together = document(collate(rows, pad=document.pad, packed=packed))
    for row, embeddings in zip(rows, together, strict=True):
        ids = torch.tensor([row.ids])
        hidden = document.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        single = document.projection(hidden[0, row.positions])
        torch.testing.assert_close(embeddings, single, atol=1e-5, rtol=1e-5)


def test_packed_rows_keep_their_embeddings_in_bfloat16(document: Tower):
    rows = rows_of(document)
    exact = document(collate(rows, pad=document.pad))
    with torch.autocast("cpu", torch.bfloat16):
        padded = document(collate(rows, pad=document.pad))
        packed = document(collate(rows, pad=document.pad, packed=True))
    assert packed.dtype == padded.dtype == torch.float32
    noise = (padded - exact).norm() / exact.norm()
    assert (packed - exact).norm() / exact.norm() < 2 * noise + 1e-3


def test_no_mask_of_the_complete_line_is_built(document: Tower, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a [total, total] mask")

    monkeypatch.setitem(batch.AttentionMaskInterface._global_mapping, batch.ATTENTION_NAME, refuse)
    document(collate(rows_of(document), pad=document.pad, packed=True))


def test_rows_of_equal_length_are_not_packed_on_a_cpu(document: Tower):
    first, *_ = rows_of(document)
    mirrored = TokenRow(first.ids[::-1], first.positions)
    together = collate([first, mirrored], pad=document.pad, packed=True)
    model_batch, order = together.for_model(pad=document.pad, packed=True)
    assert model_batch.packing is None
    assert model_batch.ids.tolist() == [first.ids, mirrored.ids]
    assert torch.equal(torch.arange(2)[order], torch.arange(2))
    single = [document(collate([row], pad=document.pad)) for row in (first, mirrored)]
    torch.testing.assert_close(document(together), torch.cat(single), atol=1e-5, rtol=1e-5)


def test_a_tower_without_packing_pads_the_rows():
    tower = families.scratch_tower(tiny.CAUSAL, "document", attention="eager")
    assert not tower.packs
    rows = rows_of(tower)
    packed = tower(collate(rows, pad=tower.pad, packed=True))
    torch.testing.assert_close(packed, tower(collate(rows, pad=tower.pad)), atol=0, rtol=0)


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    from_offsets: Tensor,
    to_offsets: Tensor,
    longest_from: int,
    longest_to: int,
    *,
    window_size: tuple[int, int],
    scale: float,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what torch documents of `varlen_attn`: rows by offsets, a window (back, ahead), -1 for no bound."""
    assert from_offsets.dtype == to_offsets.dtype == torch.int32
    assert longest_from == longest_to == int(from_offsets.diff().max())
    assert query.is_contiguous()
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    assert key.shape == query.shape
    outs = []
    for start, stop in zip(from_offsets[:-1].tolist(), from_offsets[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        ahead = torch.arange(stop - start)[None, :] - torch.arange(stop - start)[:, None]
        back, forth = (len(ahead) if bound == -1 else bound for bound in window_size)
        scores = (q @ k.mT * scale).masked_fill((ahead < -back) | (ahead > forth), -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("knows_groups", [True, False])
def test_the_gpu_kernel_receives_its_documented_arguments(
    knows_groups: bool, document: Tower, monkeypatch: pytest.MonkeyPatch
):
    def without_groups(*arguments: Any, window_size: tuple[int, int], scale: float) -> Tensor:  # torch 2.11
        return varlen_reference(*arguments, window_size=window_size, scale=scale)

    rows = collate(rows_of(document), pad=document.pad, packed=True)
    expected = document(rows)
    monkeypatch.setattr(batch, "_half_precision", lambda query: torch.float32)
    monkeypatch.setattr(batch, "VARLEN_KNOWS_GROUPS", knows_groups)
    monkeypatch.setattr(batch, "varlen_attn", varlen_reference if knows_groups else without_groups)
    torch.testing.assert_close(document(rows), expected, atol=1e-5, rtol=1e-5)


def test_flash_attention_that_is_not_installed_is_refused(document: Tower):
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and the package flash-attn"):
        batch.choose_attention(document.backbone, "flash_attention_2")
