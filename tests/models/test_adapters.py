"""Adapters: what learns, what is shared, and that merging, keeping and recomputing change nothing."""

import functools
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModel

import families
import tiny
from scalingnote.models import backbone, dual_encoder, weights
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import Lora, Pretrained
from scalingnote.models.dual_encoder import DualEncoder, load_tower
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.tower import Tower

QUERIES = ["join tensors", "numpy arrays of words", ""]
LORA = Lora(rank=4, alpha=8.0)
KINDS = {"lora": LORA, "dora": LORA.model_copy(update={"dora": True})}


def build(path: Path, lora: Lora = LORA, *, share_base: bool = True) -> DualEncoder:
    configs = {role: families.tower_config(path, role=role, lora=lora) for role in ("query", "document")}
    made = dual_encoder.build(**configs, dim=16, tokenizers={}, seed=0, share_base=share_base)
    stir(made)
    return made


def stir(made: nn.Module) -> None:
    """Move what learns off its start, where an adapter does nothing."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def batches(made: DualEncoder) -> dict[str, Batch]:
    assert isinstance(made.document.prompt, DocumentPrompt)
    rows = {
        "query": made.query.prompt.rows(QUERIES),
        "document": made.document.prompt.rows(*families.DOCUMENTS),
    }
    return {name: collate(rows[name], pad=made.query.pad, packed=True) for name in rows}


def loss_of(embeddings: dict[str, Tensor]) -> Tensor:
    queries, documents = embeddings["query"][:, 0], embeddings["document"].mean(1)
    return (queries @ documents.T).logsumexp(0).sum()


def gradients(made: DualEncoder, loss: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=["qwen2", "bert"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.folder(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture(params=KINDS)
def lora(request: pytest.FixtureRequest) -> Lora:
    return KINDS[request.param]


def test_two_towers_hold_one_base_and_learn_their_adapters_alone(path: Path):
    made = build(path)
    frozen = {
        role: {name: p for name, p in getattr(made, role).backbone.named_parameters() if not p.requires_grad}
        for role in ("query", "document")
    }
    ids = {role: {id(p) for p in found.values()} for role, found in frozen.items()}
    assert ids["query"] == ids["document"]
    learning = {name for name, p in made.named_parameters() if p.requires_grad}
    assert all(".lora_" in name or name.endswith(("projection.weight", ".rows")) for name in learning)
    assert {name.split(".")[0] for name in learning} == {"query", "document"}
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=1.0)
    gradients(made, loss_of({name: made.encode(name, rows) for name, rows in batches(made).items()}))
    optimizer.step()
    moved = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert moved == learning


def test_a_shared_base_gives_what_two_bases_give(path: Path, lora: Lora):
    shared, apart = build(path, lora), build(path, lora, share_base=False)
    found = {}
    for key, made in (("shared", shared), ("apart", apart)):
        embeddings = {name: made.encode(name, rows) for name, rows in batches(made).items()}
        found[key] = embeddings, gradients(made, loss_of(embeddings))
    for name, embedding in found["apart"][0].items():
        torch.testing.assert_close(found["shared"][0][name], embedding)
    assert found["shared"][1].keys() == found["apart"][1].keys()
    for name, gradient in found["apart"][1].items():
        torch.testing.assert_close(found["shared"][1][name], gradient, msg=name)


def test_chunked_and_recomputed_passes_give_the_same_gradients(path: Path, lora: Lora):
    """The order of GradCache: no graph first, then towers and chunks in any order, layers recomputed."""
    made = build(path, lora)
    rows = batches(made)
    plain = gradients(made, loss_of({name: made.encode(name, part) for name, part in rows.items()}))
    made.train()
    for role in (made.query, made.document):
        role.backbone.activation_checkpointing_enable()
    with torch.no_grad():
        leaves = {name: made.encode(name, part).requires_grad_() for name, part in rows.items()}
    loss_of(leaves).backward()
    made.zero_grad()
    surrogates = []
    for start in (0, 2):
        for name in ("query", "document"):
            part = made.encode(name, rows[name].rows(start, start + 2))
            surrogates.append((part * leaves[name].grad[start : start + 2]).sum())
    sum(surrogates).backward()
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("merge", [True, False])
def test_saved_towers_encode_the_same_with_adapters_merged_or_kept(
    path: Path, lora: Lora, merge: bool, tmp_path: Path
):
    made = build(path, lora).eval()
    weights = {name: p.clone() for name, p in made.named_parameters()}
    made.save(tmp_path, merge_adapters=merge)
    assert all(torch.equal(p, weights[name]) for name, p in made.named_parameters())
    assert (tmp_path / "query" / "adapter_config.json").exists() is not merge
    if merge:  # BERT's pooler is not saved: nothing reads it
        _, report = AutoModel.from_pretrained(tmp_path / "document", output_loading_info=True)
        assert not {name for name in report["missing_keys"] if not name.startswith("pooler.")}
        assert not report["unexpected_keys"]
    again = DualEncoder.load(tmp_path)
    assert not any(isinstance(module, BaseTunerLayer) for module in again.modules())
    rows = batches(made)
    for name, part in rows.items():
        torch.testing.assert_close(again.encode(name, part), made.encode(name, part), atol=1e-4, rtol=1e-4)
    assert again.document.prompt.rows(*families.DOCUMENTS) == made.document.prompt.rows(*families.DOCUMENTS)


def check_saved(made: Tower, folder: Path) -> None:
    """Save a document tower with its adapter kept, if it can be, and compare."""
    stir(made.eval())
    made.save(folder, merge_adapters=False)
    rows = collate(made.prompt.rows(*families.DOCUMENTS), pad=made.pad)
    torch.testing.assert_close(load_tower(folder)(rows), made(rows), atol=1e-4, rtol=1e-4)


def test_a_kept_adapter_is_a_backbone_with_its_layers_cut_as_they_were(path: Path, tmp_path: Path):
    config = families.tower_config(path, role="document", lora=LORA)
    cut, kept = (
        config.model_copy(update={"backbone": Pretrained(path=str(place), layers=1)})
        for place in (path, tmp_path)
    )
    built = functools.partial(dual_encoder.build_tower, role="document", dim=16, tokenizer_json=None, seed=0)
    check_saved(built(cut), tmp_path)
    assert built(kept).backbone.config.num_hidden_layers == 1


def test_a_scratch_backbone_lies_nowhere_else_and_is_merged(tmp_path: Path):
    check_saved(families.scratch_tower(tiny.CAUSAL, "document", lora=LORA), tmp_path)


def test_new_tokens_learn_in_a_table_that_does_not():
    table = nn.Embedding(9, 4)
    table.requires_grad_(False)
    made = weights.NewTokens(table, [3, 8])
    ids = torch.tensor([[1, 3, 8, 8]])
    torch.testing.assert_close(made(ids), table(ids))
    with torch.no_grad():
        made.rows += 1
    expected = table(ids) + torch.tensor([0.0, 1, 1, 1])[:, None]
    torch.testing.assert_close(made(ids), expected)
    torch.testing.assert_close(nn.functional.embedding(ids, made.weight), expected)
    made(ids).sum().backward()
    assert made.rows.grad.tolist() == [[1.0] * 4, [2.0] * 4]


def test_frozen_weights_in_half_precision_train_and_merge(path: Path):
    made = build(path)
    rows = batches(made)
    exact = made.encode("document", rows["document"])
    weights.lower_frozen(made, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = made.encode("document", rows["document"])
    half.sum().backward()
    assert (half - exact).norm() / exact.norm() < 0.1
    assert all(p.dtype == torch.float32 for p in made.parameters() if p.requires_grad)
    state = weights.merged_state(made.document.backbone)
    assert all(value.dtype == torch.float32 for name, value in state.items() if ".q_proj." in name)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path):
    path = families.folder(tmp_path, "qwen2")
    config = AutoModel.from_pretrained(path).config
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    config.save_pretrained(path)
    with pytest.raises(backbone.ConfigError, match="lacks 12 weights"):
        backbone.load(path)
