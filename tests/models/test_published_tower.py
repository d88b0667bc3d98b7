"""Published models encode like in sentence-transformers, also after they are saved as towers."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy import ndarray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import LayerNorm
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn

import families
from published import CONTENTS, PROMPTS, QUERIES, TEXTS, TITLES, edited, folder, settings_of
from scalingnote.core.errors import ConfigError
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, dual_encoder, published_model, published_tower
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora, Pretrained, Scratch, TowerConfig
from scalingnote.models.dual_encoder import DualEncoder, build_tower, load_tower
from scalingnote.models.prompt import DocumentPrompt, add_flagged_tokens, template_of
from scalingnote.models.published_tower import LibraryTower
from scalingnote.models.tower import Tower
from scalingnote.serve import towers
from scalingnote.train import tokens

CLOSE = 1e-5
BY_LIBRARY = {"max", "weighted mean", "two modes", "mean without its prompt"}  # kinds
DENSE = [(16, True, nn.Tanh()), (24, False, nn.Identity())]
KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls, prompts": {"pooling": "cls", "prompts": PROMPTS},
    "max": {"pooling": "max", "normalise": False},
    "weighted mean": {"pooling": "weightedmean"},
    "two modes": {"pooling": ["cls", "mean"]},
    "dense": {"dense": DENSE},
    "mean without its prompt": {"prompts": PROMPTS, "include_prompt": False},
    "last token": {"family": "qwen2", "pooling": "lasttoken", "prompts": PROMPTS},
    "last token, added": {"family": "qwen3", "pooling": "lasttoken", "end": "[MASK]"},
    "a decoder that reads both ways": {"family": "qwen2", "is_causal": False},
    "such a decoder with a window": {"family": "mistral", "is_causal": False},
    "lower case": {"lower_case": True, "max_length": None},
    "roberta": {"family": "roberta"},
    "mpnet": {"family": "mpnet"},
    "modernbert": {"family": "modernbert", "pooling": "cls"},
    "truncated": {"truncate_dim": 8},
}


def config(path: Path, **more: Any) -> TowerConfig:
    return TowerConfig(backbone=Pretrained(path=str(path)), pooling="auto", max_length=24, **more)


def build(path: Path, role: published_model.Role, **more: Any) -> Tower:
    length = published_tower.token_limit(published_model.read(path, role))
    return published_tower.build(
        config(path, **more).model_copy(update={"max_length": length}), role=role, dim=None
    )


def ours(tower: Any) -> ndarray:
    encoder = Encoder(tower, precision="float32", token_budget=64)
    if tower.role == "query":
        return encoder.encode_queries(QUERIES)
    columns = {"title": TITLES, "topic": ["not read"] * len(TITLES), "content": CONTENTS}
    return encoder.encode_documents(pa.table(columns))["summary"]


def theirs(path: Path, role: published_model.Role) -> ndarray:
    model = SentenceTransformer(str(path), device="cpu")
    return model.encode_query(QUERIES) if role == "query" else model.encode_document(TEXTS)


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_equal_those_of_sentence_transformers(
    kind: str, role: published_model.Role, tmp_path: Path
):
    path = folder(tmp_path, **KINDS[kind])
    expected = theirs(path, role)
    tower = load_tower(path, role)
    assert isinstance(tower, LibraryTower) == (kind in BY_LIBRARY)
    assert tower.views == (("query",) if role == "query" else ("summary",))
    np.testing.assert_allclose(ours(tower), expected, atol=CLOSE)
    tower.save(tmp_path / "saved")
    np.testing.assert_allclose(ours(load_tower(tmp_path / "saved")), expected, atol=CLOSE)
    np.testing.assert_allclose(theirs(tmp_path / "saved", role), expected, atol=CLOSE)
    if role == "document":  # the prompt is restored without the model
        facts = json.loads((tmp_path / "saved/tower.json").read_text())
        restored = DocumentPrompt.restore(facts, (tmp_path / "saved/tokenizer.json").read_text())
        fields = (TITLES, ["topic"] * len(TITLES), CONTENTS)
        assert restored.rows(*fields) == tower.prompt.rows(*fields)
        assert restored.width == 1


@pytest.mark.parametrize("pooling", ["mean", "max", "lasttoken"])
def test_a_tokenizer_that_pads_on_the_left_changes_nothing(tmp_path: Path, pooling: str):
    path = folder(tmp_path, "qwen2", pooling=pooling)
    expected = theirs(path, "query")
    edited(path / "tokenizer_config.json", padding_side="left")
    np.testing.assert_allclose(ours(load_tower(path, "query")), expected, atol=CLOSE)


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_a_text_is_cut_at_the_positions_after_the_pad(tmp_path: Path, family: str):
    path = folder(tmp_path, family, max_length=None)
    edited(path / "config.json", max_position_embeddings=34)
    weights = load_file(path / "model.safetensors")
    name = "embeddings.position_embeddings.weight"
    save_file(weights | {name: weights[name][:34].clone()}, path / "model.safetensors", {"format": "pt"})
    tower = build(path, "query")
    assert tower.config.max_length == 32
    actual = Encoder(tower, precision="float32").encode_queries(["word " * 80])
    library = SentenceTransformer(str(path), device="cpu")
    library.max_seq_length = 32
    np.testing.assert_allclose(actual, library.encode_query(["word " * 80]), atol=CLOSE)


def test_a_router_has_modules_for_each_role(tmp_path: Path):
    routes = {
        role: SentenceTransformer(str(folder(tmp_path / role, pooling=pooling)), device="cpu")
        for role, pooling in (("query", "cls"), ("document", "mean"))
    }
    router = Router.for_query_document(list(routes["query"])[:2], list(routes["document"])[:2])
    path = tmp_path / "router"
    SentenceTransformer(modules=[router, routes["query"][2]], device="cpu").save(
        str(path), create_model_card=False
    )
    for role in ("query", "document"):
        np.testing.assert_allclose(ours(build(path, role)), theirs(path, role), atol=CLOSE)


def test_an_unsupported_module_is_run_by_its_library(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = SentenceTransformer(str(folder(tmp_path, prompts=PROMPTS)), device="cpu")
    model.insert(2, LayerNorm(32))
    model.save(str(tmp_path / "odd"), create_model_card=False)
    odd = published_model.read(tmp_path / "odd", "document")
    assert (odd.pooling, odd.unknown) == ("mean", "LayerNorm")
    with pytest.raises(ConfigError, match="cannot be trained"):
        build(tmp_path / "odd", "document")
    with caplog.at_level(logging.WARNING, logger="scalingnote"):
        tower = load_tower(tmp_path / "odd", "document")
    assert "LayerNorm" in caplog.text
    np.testing.assert_allclose(ours(tower), theirs(tmp_path / "odd", "document"), atol=CLOSE)


def build_named(path: Path, pooling: str, **more: Any) -> Any:
    settings = TowerConfig(backbone=Pretrained(path=str(path)), pooling=pooling, max_length=24, **more)  # type: ignore[arg-type]
    return published_tower.build(settings, role="query", dim=None)


def test_a_config_overrides_the_files(tmp_path: Path):
    path = folder(tmp_path, dense=DENSE, prompts=PROMPTS)
    tower = build_named(path, "cls", projection="none", normalise=False, prefix="ask: ")
    assert tower.dim == 32
    model = SentenceTransformer(str(path), device="cpu")
    tokens = model.encode(["ask: tensors"], output_value="token_embeddings")[0]
    np.testing.assert_allclose(ours(tower)[-1], tokens[0].numpy(), atol=CLOSE)
    assert (
        published_model.read(folder(tmp_path / "max", pooling="max"), "query", pooling="cls").unknown is None
    )
    projected = published_tower.build(config(path, projection="random"), role="query", dim=12)
    assert ours(projected).shape == (len(QUERIES), 12)


def test_a_long_text_is_cut_like_its_complete_encoding(tmp_path: Path):
    prompt: Any = build(folder(tmp_path, max_length=12), "query").prompt
    tokenizer = prompt.tokenizer
    texts = ["word " * 400, "a" + " " * 400 + "b c d e f g h i j k l m", "x" * 900, "ab cd " * 3 + "y" * 900]
    for text, row in zip(texts, prompt.rows(texts), strict=True):
        assert row.ids == tokenizer.encode(text).ids
    assert prompt.rows(texts[:1]) == prompt.rows(texts)[:1]


def test_a_row_of_tokens_has_special_tokens_around_it(tmp_path: Path):
    prompt: Any = build(folder(tmp_path, prompts={"query": "find:"}), "query").prompt
    assert (
        prompt.row(prompt.tokenizer.encode(" word", add_special_tokens=False).ids)
        == prompt.rows([" word"])[0]
    )


def test_adapters_train_and_published_weights_do_not(tmp_path: Path):
    path = folder(tmp_path, dense=DENSE[:1])
    tower = build(path, "query", lora=Lora(rank=2))
    names = [name for name, parameter in tower.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    for name, parameter in tower.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.3
    expected = ours(tower)
    assert np.abs(expected - theirs(path, "query")).max() > 0.01
    for name, merge in (("merged", True), ("kept", False)):
        tower.save(tmp_path / name, merge_adapters=merge)
        np.testing.assert_allclose(ours(load_tower(tmp_path / name)), expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (
            lambda path: edited(path / "1_Pooling/config.json", pooling_mode="attention"),
            "pooling by attention of .* cannot be trained",
        ),
        (lambda path: (path / "1_Pooling/config.json").write_text("{}"), "states no pooling"),
        (lambda path: (path / "modules.json").write_text("{"), "is not JSON"),
        (
            lambda path: (path / "modules.json").write_text('[{"type": "x.Y", "path": ""}]'),
            r"begins with x\.Y",
        ),
        (lambda path: (path / "modules.json").write_text('[{"type": "x.Y", "path": "../up"}]'), "outside"),
        (
            lambda path: edited(settings_of(path), default_prompt_name="none"),
            "not one of its prompts",
        ),
        (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "no safetensors"),
        (lambda path: shutil.rmtree(path / "2_Dense"), "dense layer without"),
        (lambda path: shutil.rmtree(path / "1_Pooling"), "states no pooling"),
        (
            lambda path: edited(path / "2_Dense/config.json", activation_function="odd.Act"),
            "activation is odd",
        ),
        (lambda path: edited(path / "2_Dense/config.json", out_features=3), "does not hold the weights"),
        (lambda path: (path / "tokenizer.json").write_text("{"), "cannot load"),
    ],
)
def test_invalid_and_unsupported_files_are_refused(spoil: Any, complaint: str, tmp_path: Path):
    path = folder(tmp_path, dense=DENSE[:1], prompts=PROMPTS)
    spoil(path)
    with pytest.raises(ConfigError, match=complaint):
        build(path, "query")


def test_errors_name_the_setting(tmp_path: Path):
    path = folder(tmp_path)
    with pytest.raises(ConfigError, match="neither a folder nor a model"):
        published_model.read(tmp_path / "nowhere", "query")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not state how states are pooled: set pooling to one of cls"):
        published_model.read(tmp_path / "empty", "query")
    with pytest.raises(ConfigError, match=r"set document\.pooling to placeholders"):
        build_tower(config(path), role="document", dim=32, tokenizer_json=None, seed=0, sparse=True)
    with pytest.raises(ConfigError, match=r"32 dimensions, but 128 are configured: set train\.dim to 32"):
        published_tower.build(config(path), role="query", dim=128)
    with pytest.raises(ConfigError, match="lower it"):
        published_tower.build(config(path).model_copy(update={"max_length": 100}), role="query", dim=None)
    with pytest.raises(ConfigError, match="itself takes"):
        published_tower.build(config(path, prefix="word " * 40), role="query", dim=None)
    with pytest.raises(ConfigError, match=r"set query\.backbone\.kind to pretrained"):
        published_tower.model_of(TowerConfig(backbone=Scratch(), pooling="auto"), "query")
    with pytest.raises(ValueError, match="need a published model"):
        TowerConfig(prefix="query: ")


PLAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a decoder": ("qwen2", {}, "last"),
    "a decoder of another family": ("gemma", {}, "last"),
    "a decoder that reads both ways": ("qwen3", {"is_causal": False}, "mean"),
    "an encoder": ("bert", {}, "mean"),
    "an encoder with its own classifier's pooling": ("modernbert", {"classifier_pooling": "cls"}, "cls"),
    "one that names the mean": ("modernbert", {"classifier_pooling": "mean"}, "mean"),
}


@pytest.mark.parametrize(("family", "flags", "expected"), PLAIN.values(), ids=PLAIN)
def test_a_plain_transformer_has_the_usual_pooling(
    tmp_path: Path, family: str, flags: dict[str, Any], expected: str
):
    path = families.folder(tmp_path / "plain", family)
    edited(path / "config.json", **flags)
    assert published_model.read(path, "query").pooling == expected
    assert published_model.read(path, "query", pooling="cls").pooling == "cls"
    np.testing.assert_array_equal(ours(build_named(path, "auto")), ours(build_named(path, expected)))


def test_placeholders_in_an_embedding_model_log_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    warnings: list[str] = []
    monkeypatch.setattr(dual_encoder.log, "warning", lambda text, *values: warnings.append(text % values))
    for path, settings, expected in (
        (folder(tmp_path / "said"), {}, 1),
        (folder(tmp_path / "meant"), {"pooling": "placeholders"}, 0),
        (families.folder(tmp_path / "plain", "bert"), {}, 0),
    ):
        tower_config = TowerConfig(backbone=Pretrained(path=str(path)), max_length=24, **settings)
        build_tower(tower_config, role="query", dim=16, tokenizer_json=None, seed=0)
        assert len(warnings) == expected
        warnings.clear()


@pytest.mark.parametrize("kind", ["mean", "mean without its prompt", "last token"])
def test_another_prefix_shares_the_weights(tmp_path: Path, kind: str):
    path = folder(tmp_path, **KINDS[kind])
    tower = load_tower(path, "query")
    encoder = Encoder(tower, precision="float32", token_budget=64)
    before = encoder.encode_queries(QUERIES)
    other = encoder.with_prefix("Instruct: find. ")
    library = SentenceTransformer(str(path), device="cpu")
    expected = library.encode(QUERIES, prompt="Instruct: find. ")
    np.testing.assert_allclose(other.encode_queries(QUERIES), expected, atol=CLOSE)
    np.testing.assert_array_equal(encoder.encode_queries(QUERIES), before)
    assert other.tower.backbone is encoder.tower.backbone
    with pytest.raises(ConfigError, match="itself takes"):
        encoder.with_prefix("word " * 40)


def end_token_flagged(path: Path, **flags: Any) -> Path:
    """Make a decoder whose tokenizer.json adds only a first token and whose tokenizer_config has flags."""
    model_folder = folder(path, "mistral", pooling="lasttoken", prompts=PROMPTS)
    adds = {"first": "[CLS] $A", "both": "[CLS] $A [EOS]", "none": "$A"}[flags.pop("json", "first")]
    raw = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    special_tokens = [(token, raw.token_to_id(token)) for token in ("[CLS]", "[EOS]")]
    raw.post_processor = TemplateProcessing(single=adds, special_tokens=special_tokens)
    raw.save(str(model_folder / "tokenizer.json"))
    edited(model_folder / "tokenizer_config.json", bos_token="[CLS]", eos_token="[EOS]", **flags)
    return model_folder


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"add_eos_token": True}, "both"),
        ({"add_bos_token": True, "add_eos_token": True, "json": "none"}, "both"),
        ({"add_bos_token": True, "json": "none"}, "first"),
        ({"add_eos_token": False}, "first"),
        ({"add_eos_token": False, "json": "both"}, "both"),  # tokenizers of this class never read the flag
        ({"add_eos_token": True, "json": "both"}, "both"),
        ({}, "first"),
    ],
)
def test_the_tokenizer_flags_decide_on_special_tokens(tmp_path: Path, flags: dict[str, Any], expected: str):
    path, right = (end_token_flagged(tmp_path / n, **f) for n, f in (("a", flags), ("b", {"json": expected})))
    tower = build(path, "query")
    np.testing.assert_allclose(ours(tower), theirs(right, "query"), atol=CLOSE)
    long = tower.prompt.rows(["word " * 80])[0].ids
    special_ids = Tokenizer.from_file(str(right / "tokenizer.json")).encode("").ids
    assert len(long) == 24
    assert (
        [long[0], long[-1]][-len(special_ids) :] == special_ids
        if expected == "both"
        else long[0] == special_ids[0]
    )
    tower.save(tmp_path / "saved")
    np.testing.assert_allclose(ours(load_tower(tmp_path / "saved")), theirs(right, "query"), atol=CLOSE)
    np.testing.assert_allclose(theirs(tmp_path / "saved", "query"), theirs(right, "query"), atol=CLOSE)
    tokenizer = towers.tokenizer_of(path, "query")
    assert (
        tokenizer.encode("word").ids == Tokenizer.from_file(str(right / "tokenizer.json")).encode("word").ids
    )
    library = LibraryTower(published_model.read(path, "query"), role="query", max_length=24)
    library.save(tmp_path / "library")
    for each in (library, load_tower(tmp_path / "library")):
        np.testing.assert_allclose(ours(each), theirs(right, "query"), atol=CLOSE)
    # A backbone for training begins texts with the first token that its tokenizer adds.
    first = Tokenizer.from_file(str(right / "tokenizer.json")).token_to_id("[CLS]")
    assert backbone.load(path).special.first == first


def test_a_false_flag_removes_a_token_of_some_classes():
    raw = families.tokenizer().backend_tokenizer
    first, end = (raw.token_to_id(token) for token in ("[CLS]", "[EOS]"))
    for class_name, expected in (("LlamaTokenizerFast", [end]), ("TokenizersBackend", [first, end])):
        raw.post_processor = template_of(raw, [first], [end])
        settings = {"tokenizer_class": class_name, "add_bos_token": False, "add_eos_token": True}
        changes = add_flagged_tokens(raw, settings, first="[CLS]", end="[EOS]")
        assert raw.encode("").ids == expected
        assert raw.encode("", "").ids == expected * 2
        assert changes == ("[CLS] is added to no text" if expected == [end] else "")


PROMPT_SETS: dict[str, dict[str, Any]] = {
    "a document prompt that is empty, and a passage prompt": {
        "prompts": {"query": "q: ", "document": "", "passage": "p: "}
    },
    "only a passage prompt": {"prompts": {"query": "q: ", "passage": "p: "}},
    "a corpus prompt, and a document prompt that is null": {"prompts": {"document": None, "corpus": "c: "}},
    "only a query prompt": {"prompts": {"query": "q: "}},
    "a default prompt": {"prompts": {"query": "q: ", "other": "o: "}, "default_prompt_name": "other"},
    "prompts that end in spaces and lines": {"prompts": {"query": "find  ", "document": "text:\n "}},
    "none": {"prompts": {}},
}


@pytest.mark.parametrize("family", ["bert", "qwen2"])
@pytest.mark.parametrize("named", PROMPT_SETS)
def test_prompts_and_spaces_match_sentence_transformers(tmp_path: Path, named: str, family: str):
    path = folder(tmp_path, family, pooling="mean", prompts=PROMPTS)
    edited(settings_of(path), **PROMPT_SETS[named])
    texts = ["tensors", "  tensors", "tensors \n", "\ttwo  words ", " "]
    library = SentenceTransformer(str(path), device="cpu")
    queries, documents = (Encoder(build(path, role), precision="float32") for role in ("query", "document"))
    np.testing.assert_allclose(queries.encode_queries(texts), library.encode_query(texts), atol=CLOSE)
    nothing = [""] * len(texts)
    for titles, contents in ((nothing, texts), (texts, nothing)):
        table = pa.table({"title": titles, "topic": nothing, "content": contents})
        actual = documents.encode_documents(table)["summary"]
        np.testing.assert_allclose(actual, library.encode_document(texts), atol=CLOSE)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_training_starts_from_the_published_model(tmp_path: Path, lora: Lora | None):
    path = folder(tmp_path, prompts=PROMPTS, dense=DENSE[:1])
    encoder = dual_encoder.build(
        config(path, lora=lora), config(path, lora=lora), dim=16, tokenizers={}, seed=0
    ).eval()
    for role in ("query", "document"):
        side: Any = getattr(encoder, role)
        np.testing.assert_allclose(ours(side), theirs(path, role), atol=CLOSE)
        prompt: Any = tokens.build_prompt(config(path), role=role, tokenizer_json=None)
        texts = (TITLES, ["topic"] * len(TITLES), CONTENTS) if role == "document" else (QUERIES,)
        rows = prompt.rows(*texts)
        assert rows == side.prompt.rows(*texts)
        trainable = [p for p in side.parameters() if p.is_floating_point() and p.requires_grad] or [
            p.requires_grad_(True) for p in side.backbone.parameters()
        ]  # Encoder froze all weights
        side(collate(rows, pad=side.pad, packed=True))[:, 0, 0].sum().backward()
        assert any(parameter.grad is not None for parameter in trainable)
    encoder.save(tmp_path / "towers")
    loaded = DualEncoder.load(tmp_path / "towers")
    np.testing.assert_allclose(ours(loaded.document), theirs(path, "document"), atol=CLOSE)
