"""Queries as token counts, also after they are saved and loaded."""

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
    sparse_query = SparseQuery(tokenizer, max_length=8, weighting=weighting, leading_space=leading_space)
    rows = sparse_query.encode(QUERIES)
    assert len(rows.offsets) == len(QUERIES) + 1
    for i, query in enumerate(QUERIES):
        text = " " + query if leading_space and query else query
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:8]
        part = slice(rows.offsets[i], rows.offsets[i + 1])
        values = dict(zip(rows.terms[part].tolist(), rows.values[part].tolist(), strict=True))
        assert values == {t: float(ids.count(t)) if weighting == "counts" else 1.0 for t in ids}
        assert list(values) == sorted(values)


def test_a_leading_space_gives_the_first_word_its_inner_token(tokenizer: Tokenizer):
    assert needs_leading_space(tokenizer)
    inner_token = tokenizer.encode("torch stack", add_special_tokens=False).tokens[-1]
    tokens = [
        SparseQuery(tokenizer, max_length=8, weighting="counts", leading_space=space).tokens(["stack"])
        for space in (False, True)
    ]
    number = tokenizer.token_to_id(inner_token)
    assert [number in ids for (ids,) in tokens] == [False, True]
    assert not needs_leading_space(Tokenizer(WordLevel(WORDS, unk_token="[UNK]")))


def test_a_sparse_query_that_lowercased_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    SparseQuery(tokenizer, max_length=8, weighting="counts").save(tmp_path)
    settings = tmp_path / "sparse_query.json"
    facts = json.loads(settings.read_text())
    settings.write_text(json.dumps(facts | {"lowercase": False}))
    assert SparseQuery.load(tmp_path).length("torch") >= 1
    settings.write_text(json.dumps(facts | {"lowercase": True}))
    with pytest.raises(ArtifactError, match="lower-cased only queries"):
        SparseQuery.load(tmp_path)


def test_a_saved_sparse_query_encodes_the_same(tokenizer: Tokenizer, tmp_path: Path):
    sparse_query = SparseQuery(tokenizer, max_length=8, weighting="binary", leading_space=True)
    sparse_query.save(tmp_path)
    again = SparseQuery.load(tmp_path)
    assert again.tokens(QUERIES) == sparse_query.tokens(QUERIES)
    assert again.encode(QUERIES).values.tolist() == sparse_query.encode(QUERIES).values.tolist()
    assert again.vocabulary == tokenizer.get_vocab_size()
    with pytest.raises(ArtifactError, match="holds no sparse query"):
        SparseQuery.load(tmp_path / "nowhere")


def test_words_of_another_analyzer_version_are_refused(tmp_path: Path):
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    SparseQuery(tokenizer, max_length=8, weighting="counts", analysis="words").save(tmp_path)
    assert SparseQuery.load(tmp_path).tokens(["दिन दान दीन"]) == [[1, 0]]
    settings = tmp_path / "sparse_query.json"
    facts = json.loads(settings.read_text())
    assert facts.pop("analyzer") == 3
    assert facts.pop("language") == "none"
    settings.write_text(json.dumps(facts | {"analyzer": 2}))  # the format before words had a language
    assert SparseQuery.load(tmp_path).tokens(["दिन दान दीन"]) == [[1, 0]]
    settings.write_text(json.dumps(facts))  # the format of version 1
    with pytest.raises(ArtifactError, match=r"by version 1 of the analyzer.*build bm25 and index again"):
        SparseQuery.load(tmp_path)


def test_the_language_of_words_is_saved(tmp_path: Path):
    tokenizer = Tokenizer(WordLevel({"instal": 0, "[UNK]": 1}, unk_token="[UNK]"))
    SparseQuery(tokenizer, max_length=2, weighting="counts", analysis="words", language="english").save(
        tmp_path
    )
    loaded = SparseQuery.load(tmp_path)
    assert loaded.tokens(["how was it installed: installing", "the"]) == [
        [0, 0],
        [],
    ]  # stop words are not terms
    assert loaded.length("how was it installed: installing") == 2
