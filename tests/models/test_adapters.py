"""Adapters: trainable and shared weights; merging, saving and recomputation do not change embeddings."""

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


def build(path: Path, lora: Lora = LORA) -> DualEncoder:
    configs = {role: families.tower_config(path, role=role, lora=lora) for role in ("query", "document")}
    towers = dual_encoder.build(**configs, dim=16, tokenizers={}, seed=0)
    stir(towers)
    return towers


def stir(module: nn.Module) -> None:
    """Move trainable weights away from their start, at which an adapter has no effect."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def batches(towers: DualEncoder) -> dict[str, Batch]:
    assert isinstance(towers.document.prompt, DocumentPrompt)
    rows = {
        "query": towers.query.prompt.rows(QUERIES),
        "document": towers.document.prompt.rows(*families.DOCUMENTS),
    }
    return {name: collate(rows[name], pad=towers.query.pad, packed=True) for name in rows}


def loss_of(embeddings: dict[str, Tensor]) -> Tensor:
    queries, documents = embeddings["query"][:, 0], embeddings["document"].mean(1)
    return (queries @ documents.T).logsumexp(0).sum()


def gradients(towers: DualEncoder, loss: Tensor) -> dict[str, Tensor]:
    towers.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in towers.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=["qwen2", "bert"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.folder(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture(params=KINDS)
def lora(request: pytest.FixtureRequest) -> Lora:
    return KINDS[request.param]


def test_two_towers_share_a_base_and_train_only_adapters(path: Path):
    towers = build(path)
    frozen = {
        role: {
            name: p for name, p in getattr(towers, role).backbone.named_parameters() if not p.requires_grad
        }
        for role in ("query", "document")
    }
    ids = {role: {id(p) for p in parameters.values()} for role, parameters in frozen.items()}
    assert ids["query"] == ids["document"]
    trainable = {name for name, p in towers.named_parameters() if p.requires_grad}
    assert all(".lora_" in name or name.endswith(("projection.weight", ".rows")) for name in trainable)
    assert {name.split(".")[0] for name in trainable} == {"query", "document"}
    before = {name: p.detach().clone() for name, p in towers.named_parameters()}
    optimizer = torch.optim.SGD([p for p in towers.parameters() if p.requires_grad], lr=1.0)
    gradients(towers, loss_of({name: towers.encode(name, rows) for name, rows in batches(towers).items()}))
    optimizer.step()
    changed = {name for name, p in towers.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trainable


def test_a_shared_base_equals_two_bases(path: Path, lora: Lora, monkeypatch: pytest.MonkeyPatch):
    shared = build(path, lora)
    monkeypatch.setattr(dual_encoder, "_have_one_base", lambda *_: False)
    separate = build(path, lora)
    results = {}
    for key, towers in (("shared", shared), ("separate", separate)):
        embeddings = {name: towers.encode(name, rows) for name, rows in batches(towers).items()}
        results[key] = embeddings, gradients(towers, loss_of(embeddings))
    for name, embedding in results["separate"][0].items():
        torch.testing.assert_close(results["shared"][0][name], embedding)
    assert results["shared"][1].keys() == results["separate"][1].keys()
    for name, gradient in results["separate"][1].items():
        torch.testing.assert_close(results["shared"][1][name], gradient, msg=name)


def test_chunked_and_recomputed_passes_give_the_same_gradients(path: Path, lora: Lora):
    """Follow GradCache: a pass without a graph, then towers in chunks, with layers recomputed."""
    towers = build(path, lora)
    rows = batches(towers)
    plain = gradients(towers, loss_of({name: towers.encode(name, part) for name, part in rows.items()}))
    towers.train()
    for role in (towers.query, towers.document):
        role.backbone.activation_checkpointing_enable()
    with torch.no_grad():
        leaves = {name: towers.encode(name, part).requires_grad_() for name, part in rows.items()}
    loss_of(leaves).backward()
    towers.zero_grad()
    surrogates = []
    for start in (0, 2):
        for name in ("query", "document"):
            part = towers.encode(name, rows[name].rows(start, start + 2))
            surrogates.append((part * leaves[name].grad[start : start + 2]).sum())
    sum(surrogates).backward()
    for name, parameter in towers.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("merge", [True, False])
def test_saved_towers_encode_the_same_with_adapters(path: Path, lora: Lora, merge: bool, tmp_path: Path):
    towers = build(path, lora).eval()
    weights = {name: p.clone() for name, p in towers.named_parameters()}
    towers.save(tmp_path, merge_adapters=merge)
    assert all(torch.equal(p, weights[name]) for name, p in towers.named_parameters())
    assert (tmp_path / "query" / "adapter_config.json").exists() is not merge
    if merge:  # BERT's pooler is not saved, because it is not used
        _, report = AutoModel.from_pretrained(tmp_path / "document", output_loading_info=True)
        assert not {name for name in report["missing_keys"] if not name.startswith("pooler.")}
        assert not report["unexpected_keys"]
    again = DualEncoder.load(tmp_path)
    assert not any(isinstance(module, BaseTunerLayer) for module in again.modules())
    rows = batches(towers)
    for name, part in rows.items():
        torch.testing.assert_close(again.encode(name, part), towers.encode(name, part), atol=1e-4, rtol=1e-4)
    assert again.document.prompt.rows(*families.DOCUMENTS) == towers.document.prompt.rows(*families.DOCUMENTS)


def check_saved(tower: Tower, folder: Path) -> None:
    """Save a document tower, with its adapter not merged if possible, and compare the loaded one."""
    stir(tower.eval())
    tower.save(folder, merge_adapters=False)
    rows = collate(tower.prompt.rows(*families.DOCUMENTS), pad=tower.pad)
    torch.testing.assert_close(load_tower(folder)(rows), tower(rows), atol=1e-4, rtol=1e-4)


def test_a_saved_adapter_keeps_its_number_of_layers(path: Path, tmp_path: Path):
    config = families.tower_config(path, role="document", lora=LORA)
    shallow, loaded_config = (
        config.model_copy(update={"backbone": Pretrained(path=str(place), layers=1)})
        for place in (path, tmp_path)
    )
    build_one = functools.partial(
        dual_encoder.build_tower, role="document", dim=16, tokenizer_json=None, seed=0
    )
    check_saved(build_one(shallow), tmp_path)
    assert build_one(loaded_config).backbone.config.num_hidden_layers == 1


def test_adapters_on_a_scratch_backbone_are_merged(tmp_path: Path):
    check_saved(families.scratch_tower(tiny.CAUSAL, "document", lora=LORA), tmp_path)


def test_new_tokens_train_in_a_frozen_table():
    table = nn.Embedding(9, 4)
    table.requires_grad_(False)
    new_tokens = weights.NewTokens(table, [3, 8])
    ids = torch.tensor([[1, 3, 8, 8]])
    torch.testing.assert_close(new_tokens(ids), table(ids))
    with torch.no_grad():
        new_tokens.rows += 1
    expected = table(ids) + torch.tensor([0.0, 1, 1, 1])[:, None]
    torch.testing.assert_close(new_tokens(ids), expected)
    torch.testing.assert_close(nn.functional.embedding(ids, new_tokens.weight), expected)
    new_tokens(ids).sum().backward()
    assert new_tokens.rows.grad.tolist() == [[1.0] * 4, [2.0] * 4]


def test_frozen_weights_in_half_precision_train_and_merge(path: Path):
    towers = build(path)
    rows = batches(towers)
    exact = towers.encode("document", rows["document"])
    weights.lower_frozen(towers, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = towers.encode("document", rows["document"])
    half.sum().backward()
    assert (half - exact).norm() / exact.norm() < 0.1
    assert all(p.dtype == torch.float32 for p in towers.parameters() if p.requires_grad)
    state = weights.merged_state(towers.document.backbone)
    assert all(value.dtype == torch.float32 for name, value in state.items() if ".q_proj." in name)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path):
    path = families.folder(tmp_path, "qwen2")
    config = AutoModel.from_pretrained(path).config
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    config.save_pretrained(path)
    with pytest.raises(backbone.ConfigError, match="lacks 12 weights"):
        backbone.load(path)
