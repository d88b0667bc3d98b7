"""Saved towers are folders that sentence-transformers loads, with the same embeddings."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import families
import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.models import dual_encoder, library_export
from scalingnote.models.config import PAPER_PROMPT, Lora
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.prompt import PLACEHOLDERS, DocumentPrompt, SpecialTokens, split_at_boundary

QUERIES = ["join tensors", "", "word " * 40, "don't [MASK] _this_ 12"]
ROWS = {
    "title": ["torch stack", "", "don't {break}", "a"],
    "topic": ["torch function", "topic", "", ""],
    "content": ["joins tensors along a new axis", "", "more than it can hold " * 20, "[TITLE_QUERY] said"],
}
PROMPTS = {
    "paper": PAPER_PROMPT,
    "short": tiny.SHORT_PROMPT,
    "summary first": "{{x}} {title}{topic}: {content} end [EMB] [TITLE_QUERY] more",
    "no summary": "{topic} [TITLE_QUERY] {content} [CONTENT_QUERY]",
}


def save(path: Path, family: str, role: str, **more: object) -> Path:
    base = families.folder(path / "base", family, positions=400 if more else 64)
    config = families.tower_config(base, role=role).model_copy(update=more)
    dual_encoder.build_tower(config, role=role, dim=16, tokenizer_json=None, seed=0).save(path / role)
    return path / role


def texts(folder: Path) -> list[str]:
    facts = json.loads((folder / "tower.json").read_text())
    layout = library_export.document_layout(facts["prompt"], causal=facts["causal"])
    return [layout.format(**row) for row in pa.table(ROWS).to_pylist()]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_queries_are_encoded_the_same(family: str, tmp_path: Path):
    folder = save(tmp_path, family, "query")
    ours = Encoder.load(folder, precision="float32").encode_queries(QUERIES)
    model = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(model.encode(QUERIES), ours, atol=1e-4)
    np.testing.assert_allclose(model.encode_query(QUERIES), ours, atol=1e-4)
    assert model.similarity_fn_name == "cosine"


@pytest.mark.parametrize("family", families.FAMILIES)
def test_documents_are_encoded_the_same(family: str, tmp_path: Path):
    folder = save(tmp_path, family, "document")
    encoder = Encoder.load(folder, precision="float32")
    model = SentenceTransformer(str(folder), device="cpu")
    ours = encoder.encode_documents(pa.table(ROWS))["summary"]
    np.testing.assert_allclose(model.encode(texts(folder)), ours, atol=1e-4)
    # A plain text is the content of a document without title.
    contents = ROWS["content"][:3]
    ours = encoder.encode_documents(pa.table({"title": [""] * 3, "topic": [""] * 3, "content": contents}))
    np.testing.assert_allclose(model.encode_document(contents), ours["summary"], atol=1e-4)
    # The prompt is restored without the model.
    facts = json.loads((folder / "tower.json").read_text())
    restored = DocumentPrompt.restore(facts, (folder / "tokenizer.json").read_text())
    fields = [ROWS[name] for name in ("title", "topic", "content")]
    fields[0] = [*fields[0][:3], "too long a title " * 99]
    rows = [restored.rows(*fields), load_tower(folder).prompt.rows(*fields)]
    assert rows[0][:3] == rows[1][:3]
    assert str(rows[0][3]) == str(rows[1][3])  # an error, if positions are limited


@pytest.mark.parametrize("family", ["qwen2", "bert"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_indexed_view_of_any_prompt_is_exported(family: str, prompt: str, tmp_path: Path):
    folder = save(tmp_path, family, "document", prompt=PROMPTS[prompt], max_length=290)
    encoder = Encoder.load(folder, precision="float32")
    ours = encoder.encode_documents(pa.table(ROWS).slice(0, 2))
    view = "summary" if "summary" in encoder.views else encoder.views[-1]
    actual = SentenceTransformer(str(folder), device="cpu").encode(texts(folder)[:2])
    np.testing.assert_allclose(actual, ours[view], atol=1e-4)


def test_only_merged_towers_are_exported(tmp_path: Path):
    tower = families.tower(families.folder(tmp_path / "base", "qwen2"), "document", lora=Lora(rank=2))
    for name, parameter in tower.named_parameters():
        if "lora_B" in name or name.endswith(".rows"):
            parameter.data += 0.3
    folder = tmp_path / "tower"
    tower.save(folder)
    ours = Encoder.load(folder, precision="float32").encode_documents(pa.table(ROWS))["summary"]
    actual = SentenceTransformer(str(folder), device="cpu").encode(texts(folder))
    np.testing.assert_allclose(actual, ours, atol=1e-4)
    tower.save(tmp_path / "kept", merge_adapters=False)
    assert not (tmp_path / "kept" / "modules.json").exists()


def sentencepiece_like(scheme: str) -> Tokenizer:
    """Make a tokenizer that marks words by its normalizer (Llama 2) or its pre-tokenizer (XLM-R, T5)."""
    letters = "abcdefghijklmnopqrstuvwxyz'{}:.,"
    tokens = ["<unk>", "<s>", "</s>", "▁", *letters, "▁t", "▁a", "at", "▁'", "':"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "t"), ("▁", "a"), ("a", "t"), ("▁", "'"), ("'", ":")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *PLACEHOLDERS])
    return tokenizer


def agrees(raw: Tokenizer, *, causal: bool, first: int | None) -> bool:
    """Return whether an exported document gets the same tokens as from the prompt."""
    special = SpecialTokens(pad=0, end=2, first=first)
    prompt = DocumentPrompt(raw, special, template=PAPER_PROMPT, max_length=300, causal=causal)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="<s>")
    exported_tokenizer = library_export.export_tokenizer(
        PAPER_PROMPT, tokenizer, special, causal=causal, max_length=300
    )
    return library_export.layout_agrees(exported_tokenizer, prompt, PAPER_PROMPT, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scheme", ["prepend", "first", "always", "never"])
def test_tokenizers_that_mark_words_agree_with_the_prompt(scheme: str, causal: bool):
    raw = sentencepiece_like(scheme)
    split_at_boundary(raw)
    split_at_boundary(raw)
    assert agrees(raw, causal=causal, first=1)


def test_a_tokenizer_that_joins_pieces_is_detected():
    assert not agrees(sentencepiece_like("prepend"), causal=True, first=None)  # it does not split at BOUNDARY
