from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AlbertConfig,
    AutoModel,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LongformerConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
)

import families
import tiny
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import attention_arguments, collate
from scalingnote.models.config import Pretrained, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.prompt import PLACEHOLDERS, TokenRow
from scalingnote.train.config import Losses, TrainConfig
from scalingnote.train.tokens import build_prompt

DOCUMENTS = (["torch stack", "numpy"], ["torch function", ""], ["joins tensors along a new axis", "arrays"])


def test_a_causal_view_ignores_what_follows_it():
    tower = families.scratch_tower(tiny.CAUSAL, "document")
    rows = tower.prompt.rows(["same title"] * 2, ["one", "two"], ["first content", "another"])
    embeddings = tower(collate(rows, pad=tower.pad))
    torch.testing.assert_close(embeddings[0, 0], embeddings[1, 0])  # the title view reads only the title
    assert not torch.allclose(embeddings[0, 2], embeddings[1, 2])


def test_the_pooled_state_predicts_the_placeholder():
    tower = families.scratch_tower(tiny.CAUSAL, "document")
    (row,) = tower.prompt.rows(["a title"], ["topic"], ["content"])
    emb = tower.tokenizer.convert_tokens_to_ids("[EMB]")
    fed = collate([TokenRow([*row.ids, emb], row.positions)], pad=tower.pad)
    torch.testing.assert_close(tower(fed), tower(collate([row], pad=tower.pad)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("scratch", [tiny.CAUSAL, tiny.BIDIRECTIONAL])
def test_a_saved_tower_encodes_the_same(tmp_path: Path, scratch: Scratch, role: str):
    tower = families.scratch_tower(scratch, role)
    tower.save(tmp_path / "tower")
    again = load_tower(tmp_path / "tower")
    fields = (["join tensors"],) if role == "query" else DOCUMENTS
    rows = tower.prompt.rows(*fields)
    assert again.prompt.rows(*fields) == rows
    torch.testing.assert_close(again(collate(rows, pad=again.pad)), tower(collate(rows, pad=tower.pad)))


def test_towers_with_equal_seeds_start_from_equal_backbones():
    query = families.scratch_tower(tiny.CAUSAL, "query")
    document = families.scratch_tower(tiny.CAUSAL, "document")
    for left, right in zip(query.backbone.parameters(), document.backbone.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["qwen2-sliding", "qwen3", "modernbert", "bert"])
def test_a_tower_with_fewer_layers_is_saved_and_loaded(tmp_path: Path, family: str):
    path = families.folder(tmp_path / "base", family)
    config = families.tower_config(path, role="document")
    config = config.model_copy(update={"backbone": Pretrained(path=str(path), layers=1)})
    tower = dual_encoder.build_tower(config, role="document", dim=16, tokenizer_json=None, seed=0).eval()
    tower.save(tmp_path / "tower")
    again = load_tower(tmp_path / "tower")
    assert again.backbone.config.num_hidden_layers == 1
    batch = collate(tower.prompt.rows(*DOCUMENTS), pad=tower.pad)
    torch.testing.assert_close(again(batch), tower(batch))


@pytest.mark.parametrize(
    "settings",
    [
        DistilBertConfig(dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ],
    ids=["distilbert", "gpt2"],
)
def test_layers_are_removed_in_every_family(settings: PreTrainedConfig, tmp_path: Path):
    _checkpoint(settings, tmp_path / "base")
    full, shallow = (backbone.load(tmp_path / "base", layers=layers).model.eval() for layers in (None, 1))
    shallow.save_pretrained(tmp_path / "cut")
    families.tokenizer().save_pretrained(tmp_path / "cut")
    again = backbone.load(tmp_path / "cut").model.eval()
    ids = torch.tensor([[7, 8, 9]])
    states = full(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    one = shallow(ids, output_hidden_states=True).hidden_states
    assert len(one) == 2
    if settings.model_type == "distilbert":  # GPT-2 has a norm after its last layer
        torch.testing.assert_close(one[1], states[1])
    torch.testing.assert_close(again(ids).last_hidden_state, shallow(ids).last_hidden_state)


def test_layers_that_cannot_be_removed_are_refused(tmp_path: Path):
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    _checkpoint(AlbertConfig(embedding_size=16, max_position_embeddings=64, **size), tmp_path)
    with pytest.raises(ConfigError, match=r"layers of albert cannot be removed: leave backbone\.layers out"):
        backbone.load(tmp_path, layers=1)


def _checkpoint(settings: PreTrainedConfig, path: Path) -> None:
    tokenizer = families.tokenizer()
    settings.vocab_size, settings.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    settings.bos_token_id, settings.eos_token_id = tokenizer.cls_token_id, tokenizer.eos_token_id
    AutoModel.from_config(settings).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_tower_cannot_read_more_than_its_backbone(role: str):
    assert families.scratch_tower(tiny.CAUSAL, role, max_length=64)
    with pytest.raises(
        ConfigError, match=f"the {role} tower has max_length=65, but its backbone reads 64 tok"
    ):
        families.scratch_tower(tiny.CAUSAL, role, max_length=65)


@pytest.mark.parametrize("family", ["qwen2", "bert"])
def test_placeholders_start_as_copies_of_the_pooled_token(tmp_path: Path, family: str) -> None:
    pooled_at = "[CLS]" if family == "bert" else "[EOS]"

    def rows(path: Path) -> tuple[torch.Tensor, torch.Tensor, backbone.Backbone]:
        base = backbone.build(Pretrained(path=str(path)), tokenizer_json=None, seed=0)
        table = base.model.get_input_embeddings().weight.detach()
        places = base.tokenizer.convert_tokens_to_ids([*PLACEHOLDERS, pooled_at])
        return table[places[:-1]], table[places[-1]], base

    placeholders, pooled, base = rows(families.folder(tmp_path / "fresh", family))
    assert torch.equal(placeholders, pooled.expand_as(placeholders))
    with torch.no_grad():
        base.model.get_input_embeddings().weight[-1] += 1.0
    base.model.save_pretrained(tmp_path / "trained")
    base.tokenizer.save_pretrained(tmp_path / "trained")
    # The placeholders of a checkpoint have been trained.
    placeholders[-1] += 1.0
    torch.testing.assert_close(rows(tmp_path / "trained")[0], placeholders, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "bert"])
def test_square_projections_start_as_the_identity(tmp_path: Path, family: str):
    folder = families.folder(tmp_path / "base", family)  # 32 wide

    def start(role: str, dim: int, **more: Any) -> torch.Tensor:
        tower = families.tower(folder, role, dim=dim, seed=3, **more)
        assert tower.projection.weight.requires_grad == (more.get("projection") != "none")
        return tower.projection.weight.detach()

    for role in ("query", "document"):
        torch.testing.assert_close(start(role, 32), torch.eye(32))
        torch.testing.assert_close(start(role, 32, projection="none"), torch.eye(32))
        assert (start(role, 32, projection="random") - torch.eye(32)).abs().max() > 0.1
        torch.testing.assert_close(start(role, 16), start(role, 16, projection="random"))
        with pytest.raises(ConfigError, match=r"set train\.dim to 32, found 16"):
            start(role, 16, projection="none")


def test_both_towers_start_from_the_same_projection(tmp_path: Path):
    folder = families.folder(tmp_path / "base", "qwen2")
    document = families.tower_config(folder, role="document", projection="none")
    config = TrainConfig(query=TokenWiseConfig(), document=document, dim=32, losses=Losses(matryoshka=(32,)))
    encoder = dual_encoder.build(
        config.query_tower,
        document,
        dim=32,
        tokenizers={},
        seed=0,
        share_backbone=config.shares_backbone,
    )
    for side in (encoder.query, encoder.document):
        torch.testing.assert_close(side.projection.weight, torch.eye(32))
        assert not side.projection.weight.requires_grad


def test_loading_a_missing_tower_fails(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot load a backbone"):
        backbone.load(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="is not a tower"):
        load_tower(tmp_path)


def test_a_saved_tokenizer_splits_words_as_in_training(tmp_path: Path):
    texts = ["torch_stack 1999 don't", "numpy.linalg_norm 2024", "a_b 1234 c_d 56"] * 9
    tokenizer_json = backbone.train_tokenizer(texts, vocabulary=400)
    config = tiny.query_tower()
    tower = dual_encoder.build_tower(config, role="query", dim=16, tokenizer_json=tokenizer_json, seed=0)
    tower.save(tmp_path / "tower")
    again = load_tower(tmp_path / "tower")
    assert again.prompt.rows(texts) == tower.prompt.rows(texts)
    encoding = again.tokenizer.backend_tokenizer.encode(texts[0], add_special_tokens=False)
    assert encoding.tokens == Tokenizer.from_str(tokenizer_json).encode(texts[0]).tokens


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("bos", ["always", "never"])
def test_the_config_decides_on_the_first_token_of_a_decoder(tmp_path: Path, family: str, bos: str):
    path = families.folder(tmp_path / "base", family)
    base = Pretrained(path=str(path), bos=bos, lowercase=True)
    for role in ("query", "document"):
        config = families.tower_config(path, role=role).model_copy(update={"backbone": base})
        tower = dual_encoder.build_tower(config, role=role, dim=16, tokenizer_json=None, seed=0)
        tower.save(tmp_path / role)
        prompt = build_prompt(config, role=role, tokenizer_json=None)
        first = tower.tokenizer.convert_tokens_to_ids(tower.tokenizer.bos_token)
        rows = []
        for each in (tower.prompt, load_tower(tmp_path / role).prompt, prompt):
            texts = ["Some WORDS"], ["some words"]
            both_cases = [
                each.rows(text) if role == "query" else each.rows(text, [""], [""]) for text in texts
            ]
            assert both_cases[0] == both_cases[1]
            rows += both_cases
        assert all(row == rows[0] for row in rows)
        assert (rows[0][0].ids[0] == first) == (bos == "always")


def test_an_encoder_refuses_settings_of_its_first_token(tmp_path: Path):
    path = families.folder(tmp_path / "base", "bert")
    with pytest.raises(ConfigError, match=r"bos=always is for decoders"):
        backbone.build(Pretrained(path=str(path), bos="always"), tokenizer_json=None, seed=0)
    with pytest.raises(ValueError, match="reads a published model as it is: leave lowercase and bos"):
        TowerConfig(backbone=Pretrained(path=str(path), lowercase=True), pooling="auto")


def test_a_shell_has_the_sizes_of_its_backbone(tmp_path: Path):
    path = families.folder(tmp_path / "base", "roberta")
    shell, full = backbone.shell(path), backbone.load(path)
    assert (shell.hidden, shell.max_positions, shell.causal) == (full.hidden, full.max_positions, False)
    assert all(parameter.is_meta for parameter in shell.model.parameters())


# Longest rows of families: positions of some start after the pad token's id, 1. Then further settings.
COUNTED: dict[Any, tuple[int, dict[str, Any]]] = {
    RobertaConfig: (32, {}),
    MPNetConfig: (32, {}),
    LongformerConfig: (32, {"attention_window": 8}),
    BertConfig: (34, {}),
    DistilBertConfig: (34, {}),
}


@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.model_type)
def test_the_longest_row_uses_all_positions_of_the_family(kind: Any):
    longest, more = COUNTED[kind]
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    settings = kind(vocab_size=64, max_position_embeddings=34, pad_token_id=1, **size, **more)
    model = AutoModel.from_config(settings).eval()
    assert backbone.Backbone(model, families.tokenizer(), causal=False).max_positions == longest
    rows = [
        TokenRow([5 + token % 50 for token in range(length)], [0]) for length in (longest, longest - 7, 1)
    ]
    batch = collate(rows, pad=1)
    assert batch.mask is not None
    expected = model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
    actual = model(input_ids=batch.ids, **attention_arguments(model, batch, causal=False)).last_hidden_state
    torch.testing.assert_close(actual[batch.mask.bool()], expected[batch.mask.bool()], atol=1e-5, rtol=1e-5)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))
