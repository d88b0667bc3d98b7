"""Queries as token counts, and back from disk."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scalingnote.core.errors import ArtifactError
from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.sparse_query import SparseQuery, needs_leading_space

WORDS = {"दान": 0, "दिन": 1, "[UNK]": 2}
QUERIES = ["torch torch stack", "", "Torch", "stack " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(train_tokenizer(["torch stack Torch"] * 9, vocabulary=300))


@pytest.mark.parametrize("weighting", ["counts", "binary"])
@pytest.mark.parametrize("leading_space", [False, True])
def test_a_row_holds_each_term_once_with_its_count(tokenizer: Tokenizer, weighting: str, leading_space: bool):
    made = SparseQuery(tokenizer, max_length=8, weighting=weighting, leading_space=leading_space)
    rows = made.encode(QUERIES)
    assert len(rows.offsets) == len(QUERIES) + 1
    for i, query in enumerate(QUERIES):
        text = " " + query if leading_space and query else query
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:8]
        part = slice(rows.offsets[i], rows.offsets[i + 1])
        found = dict(zip(rows.terms[part].tolist(), rows.values[part].tolist(), strict=True))
        assert found == {t: float(ids.count(t)) if weighting == "counts" else 1.0 for t in ids}
        assert list(found) == sorted(found)


def test_a_space_ahead_makes_a_first_word_what_it_is_within_a_text(tokenizer: Tokenizer):
    assert needs_leading_space(tokenizer)
    within = tokenizer.encode("torch stack", add_special_tokens=False).tokens[-1]
    found = [
        SparseQuery(tokenizer, max_length=8, weighting="counts", leading_space=space).tokens(["stack"])
        for space in (False, True)
    ]
    number = tokenizer.token_to_id(within)
    assert [number in ids for (ids,) in found] == [False, True]
    assert not needs_leading_space(Tokenizer(WordLevel(WORDS, unk_token="[UNK]")))


def test_what_lowercased_queries_only_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    SparseQuery(tokenizer, max_length=8, weighting="counts").save(tmp_path)
    settings = tmp_path / "sparse_query.json"
    facts = json.loads(settings.read_text())
    settings.write_text(json.dumps(facts | {"lowercase": False}))
    assert SparseQuery.load(tmp_path).length("torch") >= 1
    settings.write_text(json.dumps(facts | {"lowercase": True}))
    with pytest.raises(ArtifactError, match="lower-cased only queries"):
        SparseQuery.load(tmp_path)


def test_what_is_saved_reads_alike(tokenizer: Tokenizer, tmp_path: Path):
    made = SparseQuery(tokenizer, max_length=8, weighting="binary", leading_space=True)
    made.save(tmp_path)
    again = SparseQuery.load(tmp_path)
    assert again.tokens(QUERIES) == made.tokens(QUERIES)
    assert again.encode(QUERIES).values.tolist() == made.encode(QUERIES).values.tolist()
    assert again.vocabulary == tokenizer.get_vocab_size()
    with pytest.raises(ArtifactError, match="holds no sparse query"):
        SparseQuery.load(tmp_path / "nowhere")


def test_words_split_by_another_version_of_the_analyzer_are_refused(tmp_path: Path):
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    SparseQuery(tokenizer, max_length=8, weighting="counts", analysis="words").save(tmp_path)
    assert SparseQuery.load(tmp_path).tokens(["दिन दान दीन"]) == [[1, 0]]
    settings = tmp_path / "sparse_query.json"
    facts = json.loads(settings.read_text())
    assert facts.pop("analyzer") == 3
    assert facts.pop("language") == "none"
    settings.write_text(json.dumps(facts | {"analyzer": 2}))  # as it was written before words had a language
    assert SparseQuery.load(tmp_path).tokens(["दिन दान दीन"]) == [[1, 0]]
    settings.write_text(json.dumps(facts))  # as earlier ones were written
    with pytest.raises(ArtifactError, match=r"by version 1 of the analyzer.*build bm25 and index again"):
        SparseQuery.load(tmp_path)


def test_words_have_the_language_that_was_saved(tmp_path: Path):
    tokenizer = Tokenizer(WordLevel({"instal": 0, "[UNK]": 1}, unk_token="[UNK]"))
    SparseQuery(tokenizer, max_length=2, weighting="counts", analysis="words", language="english").save(
        tmp_path
    )
    saved = SparseQuery.load(tmp_path)
    assert saved.tokens(["how was it installed: installing", "the"]) == [
        [0, 0],
        [],
    ]  # stop words are no terms
    assert saved.length("how was it installed: installing") == 2
