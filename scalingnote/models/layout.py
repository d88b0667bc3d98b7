"""A row as one text, and tokenizers that add to it what our prompts add.

Our prompts tokenise each piece of a template by itself. A document is written as one text by
:func:`layout`, with BOUNDARY where pieces must not grow together; it ends with the template's last field.
What follows that field stands in the tokenizer's post-processor: truncation then cuts content, and never
the prompt.
"""

from itertools import pairwise

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from scalingnote.models.prompt import FIELDS, PLACEHOLDERS, DocumentPrompt, Row, SpecialTokens, plain, split

BOUNDARY = "␞"  # U+241E; no control character: some tokenizers drop those before they split


def separate(tokenizer: Tokenizer) -> None:
    """Have BOUNDARY split text, unread, into pieces that are tokenised as if each stood alone."""
    before, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    if BOUNDARY in repr(before):
        return
    # Word marks are put before a text: then before every piece of one, unless it is empty.
    if isinstance(before, pre_tokenizers.Metaspace) and before.prepend_scheme == "first":
        before.prepend_scheme = "always"
    if "Prepend(" in repr(normalizer):
        mark = normalizers.Replace(Regex(f"{BOUNDARY}(?=[^{BOUNDARY}])"), f"{BOUNDARY}▁")
        tokenizer.normalizer = normalizers.Sequence([normalizer, mark])
    cut = pre_tokenizers.Split(BOUNDARY, "removed")
    tokenizer.pre_tokenizer = cut if before is None else pre_tokenizers.Sequence([cut, before])


def layout(template: str, *, causal: bool) -> str:
    """How a document is written as one text: a template for `str.format` of title, topic and content."""
    pieces, _ = _halves(template, causal=causal)
    text = "".join(pieces[:1])
    for left, right in pairwise(pieces):
        # A placeholder is a token of its own and needs nothing around it.
        grow = (left in FIELDS or right in FIELDS) and not {left, right} & PLACEHOLDERS.keys()
        text += (BOUNDARY if grow else "") + right
    return text


def indexed(template: str) -> str:
    """The placeholder of the view that is indexed: the summary, or the last one where there is none."""
    found = [piece for piece in split(template) if piece in PLACEHOLDERS]
    return "[EMB]" if "[EMB]" in found else found[-1]


def unseen(prompt: DocumentPrompt) -> int:
    """Tokens of a causal prompt behind the indexed view's position: of no effect on it, and left out."""
    (row,) = prompt.rows([""], [""], [""])
    assert isinstance(row, Row)
    view = "summary" if "summary" in prompt.views else prompt.views[-1]
    return len(row.ids) - 1 - row.positions[prompt.views.index(view)]


def tokenizer_for(
    template: str | None,
    tokenizer: PreTrainedTokenizerFast,
    special: SpecialTokens,
    *,
    causal: bool,
    max_length: int,
) -> PreTrainedTokenizerFast:
    """A copy that adds to a query (no template), or to a document in its :func:`layout`, what prompts add."""
    raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    before = [] if special.first is None else [special.first]
    after: list[int] = []
    if template is not None:
        for piece in _halves(template, causal=causal)[1]:
            after += raw.encode(plain(piece), add_special_tokens=False).ids
    if special.end is not None and (template is None or not causal):
        after.append(special.end)
    added = {name: ids for name, ids in (("before", before), ("after", after)) if ids}
    raw.post_processor = processors.TemplateProcessing(
        single=[name for name in ("before", "$A", "after") if name == "$A" or name in added],
        special_tokens=[
            {"id": name, "ids": ids, "tokens": [raw.id_to_token(id) for id in ids]}
            for name, ids in added.items()
        ],
    )
    names = {key: token for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        **{**names, "pad_token": raw.id_to_token(special.pad)},
        padding_side="right",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    )


def agrees(
    tokenizer: PreTrainedTokenizerFast, prompt: DocumentPrompt, template: str, *, causal: bool
) -> bool:
    """Whether documents written by :func:`layout` are read as `prompt` reads them; tried on a few."""
    fields = (["A title, 5 words long", "", "x"], ["topic", "", " y "], ["content. " * 99, "Content", ""])
    texts = [
        layout(template, causal=causal).format(title=title, topic=topic, content=content)
        for title, topic, content in zip(*fields, strict=True)
    ]
    for row, ids in zip(prompt.rows(*fields), tokenizer(texts, truncation=True).input_ids, strict=True):
        if not isinstance(row, Row) or (row.ids[: len(ids)] if causal else row.ids) != ids:
            return False
    return True


def _halves(template: str, *, causal: bool) -> tuple[list[str], list[str]]:
    """Pieces up to the last field, and those after it, as far as the indexed view sees them."""
    pieces = split(template)
    if causal:
        pieces = pieces[: pieces.index(indexed(template))]
    end = max((i + 1 for i, piece in enumerate(pieces) if piece in FIELDS), default=0)
    return pieces[:end], pieces[end:]
