import pytest
from tokenizers import Tokenizer

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.models import backbone
from scalingnote.models.config import PAPER_PROMPT
from scalingnote.models.prompt import PLACEHOLDERS, DocumentPrompt, QueryPrompt, SpecialTokens, TokenRow

ENCODER = SpecialTokens(pad=0, end=5, first=2)
DECODER = SpecialTokens(pad=0, end=5, first=None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(
        backbone.train_tokenizer(["join a sequence of tensors"] * 9, vocabulary=300)
    )
    tokenizer.add_special_tokens(list(PLACEHOLDERS))
    return tokenizer


def prompt(tokenizer: Tokenizer, *, causal: bool, max_length: int = 400, **more: object) -> DocumentPrompt:
    special = DECODER if causal else ENCODER
    return DocumentPrompt(
        tokenizer, special, template=PAPER_PROMPT, max_length=max_length, causal=causal, **more
    )


def one(prompt: DocumentPrompt, *fields: str) -> TokenRow:
    (row,) = prompt.rows(*([field] for field in fields))
    assert isinstance(row, TokenRow)
    return row


def test_a_bidirectional_tower_pools_at_the_placeholders(tokenizer: Tokenizer):
    row = one(prompt(tokenizer, causal=False), "title", "topic", "content")
    assert [tokenizer.id_to_token(row.ids[p]) for p in row.positions] == list(PLACEHOLDERS)
    assert (row.ids[0], row.ids[-1]) == (ENCODER.first, ENCODER.end)


def test_a_causal_tower_pools_before_the_placeholders(tokenizer: Tokenizer):
    row = one(prompt(tokenizer, causal=True), "title", "topic", "content")
    following = [tokenizer.id_to_token(row.ids[p + 1]) for p in row.positions[:2]]
    assert following == ["[TITLE_QUERY]", "[CONTENT_QUERY]"]
    assert row.positions[2] == len(row.ids) - 1
    assert tokenizer.token_to_id("[EMB]") not in row.ids


def test_the_prompt_reads_as_the_paper_prints_it(tokenizer: Tokenizer):
    row = one(prompt(tokenizer, causal=True), "T", "P", "C")
    # Section 3.2, in two lines.
    assert tokenizer.decode(row.ids, skip_special_tokens=False) == (
        "Document: {'title': T}. Predict a query term: \"[TITLE_QUERY]\".\n"
        "Document: {'topic': P, 'content': C}. Predict a query term: \"[CONTENT_QUERY]\", combine the "
        'predicted query terms, and compress the above content into one word: "'
    )


def test_content_is_cut_before_topic_and_the_title_never(tokenizer: Tokenizer):
    title, topic, content = "title words", "topic words", "x y z " * 50
    uncut = one(prompt(tokenizer, causal=True), title, topic, "")
    text = {}
    for room in (len(uncut.ids) + 10, len(uncut.ids) - 3):
        row = one(prompt(tokenizer, causal=True, max_length=room), title, topic, content)
        assert len(row.ids) <= room
        text[room] = tokenizer.decode(row.ids)
        assert title in text[room]
    longer, shorter = text.values()
    assert topic in longer
    assert topic not in shorter
    assert "x y" in longer
    assert "x y" not in shorter


def test_a_title_longer_than_the_model_allows_is_a_data_error(tokenizer: Tokenizer):
    limited = prompt(tokenizer, causal=True, max_positions=300)
    good, bad = limited.rows(["short", "word " * 400], ["", ""], ["", ""])
    assert isinstance(good, TokenRow)
    assert isinstance(bad, DataError)
    assert "shorten the title" in str(bad)


def test_a_prompt_longer_than_max_length_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ConfigError, match="raise max_length or shorten the prompt"):
        prompt(tokenizer, causal=True, max_length=20)


def test_queries_keep_their_end_token(tokenizer: Tokenizer):
    causal = QueryPrompt(tokenizer, DECODER, max_length=6, causal=True)
    long, empty = causal.rows(["join a sequence of tensors, all of them", ""])
    assert len(long.ids) == 6
    assert (long.ids[-1], long.positions) == (DECODER.end, [5])
    assert (empty.ids, empty.positions) == ([DECODER.end], [0])
    encoder = QueryPrompt(tokenizer, ENCODER, max_length=6, causal=False)
    (row,) = encoder.rows(["join a sequence of tensors, all of them"])
    assert (row.ids[0], row.ids[-1], row.positions, len(row.ids)) == (ENCODER.first, ENCODER.end, [0], 6)


def test_a_decoder_may_have_a_first_token(tokenizer: Tokenizer):
    special = SpecialTokens(pad=0, end=5, first=2)
    query = QueryPrompt(tokenizer, special, max_length=6, causal=True)
    (row,) = query.rows(["join a sequence of tensors, all of them"])
    assert (row.ids[0], row.ids[-1], row.positions, len(row.ids)) == (2, 5, [5], 6)
    template = "{title} [TITLE_QUERY] {content} [EMB]"
    document = DocumentPrompt(tokenizer, special, template=template, max_length=40, causal=True)
    document_row = one(document, "title", "", "content")
    assert document_row.ids[0] == 2
    assert tokenizer.id_to_token(document_row.ids[document_row.positions[0] + 1]) == "[TITLE_QUERY]"
    assert document_row.positions[1] == len(document_row.ids) - 1
