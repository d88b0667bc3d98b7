"""Prompts, from text to token rows: documents with placeholders, queries with their special tokens.

A row contains the positions of the states that become embeddings. A causal model predicts a placeholder from
the state *before* it: that position is pooled, and the row ends before the last placeholder. A bidirectional
model fills a placeholder in place: the state *at* it is pooled (ScalingNote, section 3.2).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.core.words import CHARACTERS_PER_TOKEN, checked_texts, cut_characters

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy import ndarray

    from scalingnote.core.array_types import Shaped

PLACEHOLDERS = {"[TITLE_QUERY]": "title", "[CONTENT_QUERY]": "content", "[EMB]": "summary"}
TEXT_PLACEHOLDERS = ("{title}", "{topic}", "{content}")
BOUNDARY = "␞"  # U+241E; not a control character: some tokenizers drop those before they split a text
_PIECE = re.compile(r"(\{title\}|\{topic\}|\{content\}|\[TITLE_QUERY\]|\[CONTENT_QUERY\]|\[EMB\])")
# A tighter cut than that of `cut_characters`, for prompts that tokenize a text again if the cut leaves too
# few tokens.
_USUAL_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True)
class TokenRow:
    """Token ids of one input and the positions whose hidden states are pooled, one per view.

    A document prompt with `spans` adds six positions: start and stop of title, topic and content.
    """

    ids: list[int]
    positions: list[int]
    lost: int = field(default=0, compare=False)  # approximate number of tokens of the text that are not read


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that a tower adds around text; None if its tokenizer has no such token."""

    pad: int
    end: int | None
    first: int | None


class QueryPrompt:
    """Queries as rows ``first text end``, pooled at the end token if causal, else at the first token.

    Most causal models have no first token.
    """

    views = ("query",)
    takes_ids = True  # the row of a text equals the row of its token ids

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens, *, max_length: int, causal: bool):
        if causal and special.end is None:
            raise ConfigError("a causal query tower needs a tokenizer with an end-of-sequence token")
        if not causal and special.first is None:
            raise ConfigError("a bidirectional query tower needs a tokenizer with a [CLS] token")
        self.tokenizer = tokenizer
        self._head = [] if special.first is None else [special.first]
        self._tail = [] if special.end is None else [special.end]
        self.max_tokens = max_length - len(self._head) - len(self._tail)  # tokens of a query that are read
        self._causal = causal

    def rows(self, queries: Sequence[str]) -> list[TokenRow]:
        """Return one row per query; a long query is truncated before its end token."""
        return [self.row(self.cut(ids)) for ids in tokenize(self.tokenizer, queries, self.max_tokens)]

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a query that are read."""
        return ids[: self.max_tokens]

    def row(self, ids: Sequence[int]) -> TokenRow:
        """Return the row of a query with these tokens."""
        row = [*self._head, *ids, *self._tail]
        return TokenRow(row, [len(row) - 1 if self._causal else 0])


class DocumentPrompt:
    """Documents as rows of a template with literals, fields and placeholders (ScalingNote, section 3.2)."""

    takes_ids = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: SpecialTokens,
        *,
        template: str,
        max_length: int,
        causal: bool,
        max_positions: int | None = None,
        spans: bool = False,
    ):
        """Make the prompt of a tower.

        Args:
            tokenizer: tokenizer without padding and truncation, with the placeholders in its vocabulary.
            special: ids around a document.
            template: text with {title}, {topic}, {content} and the keys of :data:`PLACEHOLDERS`.
            max_length: maximum tokens of a row; a long title may exceed it, because titles are not truncated.
            causal: whether placeholders are predicted from the state before them.
            max_positions: rows longer than this are errors.
            spans: whether rows contain the spans of the fields, which a sparse head needs.

        Raises:
            ConfigError: the template has no placeholder, or it fills `max_length` by itself.
        """
        self.tokenizer, self._max_length, self._causal = tokenizer, max_length, causal
        self._max_positions, self._spans = max_positions, spans
        pieces = [plain(piece) for piece in split(template)]
        self.views = tuple(PLACEHOLDERS[piece] for piece in pieces if piece in PLACEHOLDERS)
        if not self.views:
            raise ConfigError(f"the document prompt has none of {list(PLACEHOLDERS)}: {template!r}")
        if causal:
            last = max(i for i, piece in enumerate(pieces) if piece in PLACEHOLDERS)
            pieces = pieces[: last + 1]
        self._pieces: list[str | list[int]] = []
        for piece in pieces:
            if piece in TEXT_PLACEHOLDERS:
                self._pieces.append(piece[1:-1])
            elif piece in PLACEHOLDERS:
                number = tokenizer.token_to_id(piece)
                if number is None:
                    raise ConfigError(f"the tokenizer has no token {piece}: build the tower, which adds it")
                self._pieces.append([number])
            else:
                self._pieces.append(tokenizer.encode(piece, add_special_tokens=False).ids)
        self._placeholders = [piece in PLACEHOLDERS for piece in pieces]
        self._head = [special.first] if special.first is not None else []
        self._tail = [special.end] if not causal and special.end is not None else []
        fixed = sum(len(piece) for piece in self._pieces if isinstance(piece, list))
        self._fixed = fixed + len(self._head) + len(self._tail) - int(causal)
        # Maximum tokens of the content of a document without title and topic.
        self.max_tokens = max_length - self._fixed
        if self._fixed >= max_length:
            raise ConfigError(
                f"the document prompt itself takes {self._fixed} of max_length={max_length} tokens: "
                "raise max_length or shorten the prompt"
            )

    @classmethod
    def restore(cls, facts: Mapping[str, Any], tokenizer_json: str) -> "DocumentPrompt":
        """Return a saved tower's prompt from its ``tower.json`` and ``tokenizer.json``, without torch."""
        if "text" in facts:  # of a published model
            return TextDocuments(Tokenizer.from_str(tokenizer_json), **facts["text"])
        if "tokens" in facts:
            return TokenDocuments(Tokenizer.from_str(tokenizer_json), **facts["tokens"])
        if "special" not in facts:
            raise ArtifactError(
                "this tower was saved by an earlier version: re-run the stage that trained it"
            )
        return cls(
            without_limits(Tokenizer.from_str(tokenizer_json)),
            SpecialTokens(**facts["special"]),
            template=facts["prompt"],
            max_length=facts["max_length"],
            causal=facts["causal"],
            max_positions=facts["max_positions"],
            spans=facts["sparse"] is not None,
        )

    @property
    def width(self) -> int:
        """Number of positions of a row."""
        return len(self.views) + 2 * len(TEXT_PLACEHOLDERS) * self._spans

    def rows(
        self, titles: Sequence[str], topics: Sequence[str], contents: Sequence[str]
    ) -> list[TokenRow | DataError]:
        """Return one row per document, or a DataError for a document that exceeds the model's positions.

        Content is truncated first, then topic; title and placeholders are not truncated.
        """
        max_tokens = self._max_length
        fields = {"title": titles, "topic": topics, "content": contents}
        # A field that is not in the template takes no tokens away from the others.
        texts_of_fields = [
            texts if name in self._pieces else [""] * len(texts) for name, texts in fields.items()
        ]
        columns = [tokenize(self.tokenizer, texts, max_tokens) for texts in texts_of_fields]
        unread_counts = [
            sum(_unseen(text, ids, max_tokens) for text, ids in zip(texts, each, strict=True))
            for texts, each in zip(
                zip(*texts_of_fields, strict=True), zip(*columns, strict=True), strict=True
            )
        ]
        title, topic, content = columns
        return [self._row(*row) for row in zip(title, topic, content, unread_counts, strict=True)]

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are read of the content of a document without title and topic."""
        return ids[: self.max_tokens]

    def row(self, ids: Sequence[int]) -> TokenRow | DataError:
        """Return the row of a document that has only a content with these tokens."""
        return self._row([], [], list(ids))

    def _row(
        self, title: list[int], topic: list[int], content: list[int], lost: int = 0
    ) -> TokenRow | DataError:
        spare = max(self._max_length - self._fixed - len(title), 0)
        lost += max(len(topic) + len(content) - spare, 0)
        topic = topic[:spare]
        fields = {"title": title, "topic": topic, "content": content[: spare - len(topic)]}
        ids: list[int] = list(self._head)
        positions = []
        spans = {name[1:-1]: (0, 0) for name in TEXT_PLACEHOLDERS}
        for piece, placeholder in zip(self._pieces, self._placeholders, strict=True):
            if placeholder:
                positions.append(max(len(ids) - 1, 0) if self._causal else len(ids))
            if isinstance(piece, str):
                spans[piece] = (len(ids), len(ids) + len(fields[piece]))
            ids.extend(fields[piece] if isinstance(piece, str) else piece)
        if self._causal:
            ids.pop()  # the last placeholder is predicted, not read
        ids.extend(self._tail)
        if self._max_positions is not None and len(ids) > self._max_positions:
            return DataError(
                f"title takes {len(title)} tokens, the model reads {self._max_positions}: shorten the title"
            )
        return TokenRow(ids, positions + [at for span in spans.values() for at in span] * self._spans, lost)


class TokenDocuments(DocumentPrompt):
    """Documents as the tokens of ``title topic content``, without special tokens."""

    views, width = ("summary",), 1

    def __init__(self, tokenizer: Tokenizer, *, max_length: int) -> None:
        self.tokenizer, self._max_length = without_limits(tokenizer), max_length

    def rows(
        self, titles: Sequence[str], topics: Sequence[str], contents: Sequence[str]
    ) -> list[TokenRow | DataError]:
        """Return one row per document; long ones are cut. The position of a row is not used."""
        texts = [" ".join(filter(None, fields)) for fields in zip(titles, topics, contents, strict=True)]
        rows = tokenize(self.tokenizer, texts, self._max_length)
        most = self._max_length
        return [
            TokenRow(ids[:most], [0], max(len(ids) - most, 0) + _unseen(text, ids, most))
            for text, ids in zip(texts, rows, strict=True)
        ]


class TextPrompt:
    """Texts of a published model: a prefix, the text, and the special tokens of the post-processor.

    A long text is truncated, but its special tokens are kept, as in sentence-transformers.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prefix: str, max_length: int, keeps: str = "left", empty: int = 0
    ) -> None:
        """Make a prompt with a copy of `tokenizer` and its post-processor.

        `keeps` is the side of a long text that is read, "left" or "right"; `empty` is the only token of a row
        that would have none, such as that of an empty text without special tokens. Raise ConfigError if the
        prefix by itself fills `max_length`.
        """
        self.tokenizer = without_limits(Tokenizer.from_str(tokenizer.to_str()))
        self._prefix, self._max_length, self._keeps, self._empty = prefix, max_length, keeps, empty
        # Arguments that restore this prompt.
        self.facts = {"prefix": prefix, "max_length": max_length, "keeps": keeps, "empty": empty}
        self._head, self._tail = special_around(self.tokenizer)
        fixed = len(self.tokenizer.encode(prefix).ids)
        if fixed >= max_length:
            raise ConfigError(
                f"the prefix {prefix!r} itself takes {fixed} of {max_length} tokens: raise max_length or "
                "shorten the prefix"
            )
        self.max_tokens = max_length - fixed  # maximum tokens of a text
        self.takes_ids = not prefix  # the last token of a prefix may end inside the text
        direction = "right" if keeps == "left" else "left"
        self.tokenizer.enable_truncation(max_length, direction=direction)

    def texts(self, texts: Sequence[str]) -> list[TokenRow]:
        """Return one row per text. The position of a row is not used: pooling reads all its states."""
        full_texts = [self._prefix + text for text in texts]
        pieces = [self._shorten(text) for text in full_texts]
        encodings = _encodings(self.tokenizer, pieces, special=True)
        for i, text in enumerate(full_texts):
            # A cut text of long words may have too few tokens: the complete text is then tokenized.
            if len(pieces[i]) < len(text) and len(encodings[i].ids) < self._max_length:
                pieces[i], encodings[i] = text, self.tokenizer.encode(text)
        unread_counts = map(self._count_lost, full_texts, pieces, encodings)
        return [
            TokenRow(encoding.ids or [self._empty], [0], unread)
            for encoding, unread in zip(encodings, unread_counts, strict=True)
        ]

    def _count_lost(self, text: str, piece: str, encoding: Encoding) -> int:
        """Estimate the number of tokens of `text` that are not read, if only `piece` of it was tokenized."""
        special = len(self._head) + len(self._tail)
        more = sum(len(rest.ids) - special for rest in encoding.overflowing)
        return more + round((len(encoding.ids) - special + more) * (len(text) / max(len(piece), 1) - 1))

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are read of a text."""
        return ids[: self.max_tokens] if self._keeps == "left" else ids[max(len(ids) - self.max_tokens, 0) :]

    def row(self, ids: Sequence[int]) -> TokenRow:
        """Return the row of a text with these tokens."""
        prefix = self.tokenizer.encode(self._prefix, add_special_tokens=False).ids
        return TokenRow([*self._head, *prefix, *ids, *self._tail] or [self._empty], [0])

    def _shorten(self, text: str) -> str:
        """Cut a long text at a space, because a row cannot hold all of its tokens."""
        longest = self._max_length * _USUAL_CHARACTERS_PER_TOKEN
        if self._keeps != "left" or len(text) <= longest:
            return text
        end = text.rfind(" ", 0, longest)
        return text[:end] if end > 0 else text


class TextQueries(TextPrompt, QueryPrompt):
    """Queries of a published model."""

    def rows(self, queries: Sequence[str]) -> list[TokenRow]:
        """Return one row per query."""
        return self.texts(queries)


class TextDocuments(TextPrompt, DocumentPrompt):
    """Documents of a published model as ``title content``, as in BEIR; the topic is not read.

    As in sentence-transformers, spaces at the ends of a text are kept: some tokenizers make tokens of them.
    """

    views, width = ("summary",), 1

    def rows(
        self, titles: Sequence[str], topics: Sequence[str], contents: Sequence[str]
    ) -> list[TokenRow | DataError]:
        """Return one row per document; long documents are truncated, so there are no errors."""
        texts = [" ".join(filter(None, fields)) for fields in zip(titles, contents, strict=True)]
        return [*self.texts(texts)]


def document_fields(documents: "pa.Table") -> list[list[str]]:
    """Return titles, topics and contents of a table; null becomes "".

    Raise DataError if a value is not a text.
    """
    return [
        checked_texts(
            ("" if text is None else text for text in documents[name].to_pylist()),
            name=f"the {name} of document",
        )
        for name in ("title", "topic", "content")
    ]


def split(template: str) -> list[str]:
    """Split a template into literals (braces still doubled), fields and placeholders, in order."""
    return [piece for piece in _PIECE.split(template) if piece]


def plain(piece: str) -> str:
    """Return the text of a literal: doubled braces become single ones."""
    return piece.replace("{{", "{").replace("}}", "}")


# Tokenizers that added or left out the two tokens as their flags stated, in transformers 4.
_FLAGGED = re.compile("(Llama|CodeLlama|Gemma|Cohere|GPTNeoX)Tokenizer(Fast)?")


def add_flagged_tokens(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    *,
    first: str | None,
    end: str | None,
    removes: bool | None = None,
) -> str:
    """Make `tokenizer` add the first and the end token as its flags state; return the changes in words.

    Models were trained as the flags add_bos_token and add_eos_token state, but transformers 5 does not read
    them if there is a tokenizer.json. A flag that is true is always applied. One that is false removes a
    token if the tokenizer's class applied it in transformers 4.

    Args:
        tokenizer: content of tokenizer.json; its post-processor is replaced if the flags differ from it.
        settings: content of tokenizer_config.json.
        first: the beginning-of-sequence token; None if there is none.
        end: the end-of-sequence token.
        removes: whether a flag that is false removes a token; None: as in the tokenizer's class.
    """
    before, after = special_around(tokenizer)
    if removes is None:
        removes = _FLAGGED.fullmatch(str(settings.get("tokenizer_class"))) is not None
    changes = []
    for flag, token, ids in (("add_bos_token", first, before), ("add_eos_token", end, after)):
        number = None if token is None else tokenizer.token_to_id(token)
        if number is None or settings.get(flag) is None:
            continue
        if settings[flag] and number not in ids:
            ids.insert(0 if ids is before else len(ids), number)
            changes.append(f"{token} is added to every text")
        elif not settings[flag] and number in ids and removes:
            ids.remove(number)
            changes.append(f"{token} is added to no text")
    if changes:
        tokenizer.post_processor = template_of(tokenizer, before, after)
    return ", ".join(changes)


def special_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the post-processor adds before and after a text, found by encoding "a"."""
    ids = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    start = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
    return ids[:start], ids[start + len(bare) :]


def template_of(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> Any:
    """Return a post-processor that adds tokens before and after a text, and around both texts of a pair."""
    ids_by_name = {name: list(ids) for name, ids in (("before", before), ("after", after)) if ids}
    single = [name for name in ("before", "$A", "after") if name == "$A" or name in ids_by_name]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *("$B:1" if name == "$A" else f"{name}:1" for name in single)],
        special_tokens=[
            {"id": name, "ids": ids, "tokens": [tokenizer.id_to_token(id) for id in ids]}
            for name, ids in ids_by_name.items()
        ],
    )


def without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Turn off padding and truncation of `tokenizer`, and return it."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def split_at_boundary(tokenizer: Tokenizer) -> None:
    """Make `tokenizer` split text at BOUNDARY, remove it, and tokenize each piece as a separate text."""
    pre_tokenizer, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    if BOUNDARY in repr(pre_tokenizer):
        return
    # Tokenizers that mark the start of a text must mark the start of every piece that is not empty.
    if isinstance(pre_tokenizer, pre_tokenizers.Metaspace) and pre_tokenizer.prepend_scheme == "first":
        pre_tokenizer.prepend_scheme = "always"
    if "Prepend(" in repr(normalizer):
        mark = normalizers.Replace(Regex(f"{BOUNDARY}(?=[^{BOUNDARY}])"), f"{BOUNDARY}▁")
        tokenizer.normalizer = normalizers.Sequence([normalizer, mark])
    split_first = pre_tokenizers.Split(BOUNDARY, "removed")
    others = [] if pre_tokenizer is None else [pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_first, *others]) if others else split_first


def lowercase(tokenizer: Tokenizer) -> None:
    """Make `tokenizer` lower-case texts before all other steps."""
    others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Return the tokens of each text, at least the first `max_tokens`, without special tokens."""
    pieces = [cut_characters(text, max_tokens) for text in texts]
    rows = [encoding.ids for encoding in _encodings(tokenizer, pieces, special=False)]
    # White space and words of hundreds of characters give fewer tokens than the cut expects.
    for number, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
        if len(rows[number]) < max_tokens and len(piece) < len(text):
            rows[number] = tokenizer.encode(text, add_special_tokens=False).ids
    return rows


def _encodings(tokenizer: Tokenizer, texts: list[str], *, special: bool) -> list[Encoding]:
    if len(texts) == 1:
        # A batch releases the GIL: if another thread searches, a single query would wait for it.
        return [tokenizer.encode(texts[0], add_special_tokens=special)]
    return list(tokenizer.encode_batch_fast(texts, add_special_tokens=special))


def _unseen(text: str, ids: Sequence[int], max_tokens: int) -> int:
    """Estimate the tokens of a text after the cut of :func:`cut_characters` by those before the cut."""
    if len(ids) < max_tokens:  # :func:`tokenize` has read the complete text
        return 0
    read_characters = max_tokens * CHARACTERS_PER_TOKEN
    return round(len(ids) * max(len(text) - read_characters, 0) / read_characters)


# --- token rows as Arrow columns: pyarrow and numpy are imported late, the query path does not need them ----


def token_columns(rows: Iterable[Sequence[TokenRow]], *, views: int) -> "dict[str, pa.Array]":
    """Return columns ``ids`` and ``positions`` of blocks of token rows with `views` positions each."""
    import numpy as np
    import pyarrow as pa

    ids, positions, lengths = [np.empty(0, np.int32)], [np.empty(0, np.int32)], [0]
    for block in rows:
        lengths += [len(row.ids) for row in block]
        ids.append(np.array([token for row in block for token in row.ids], dtype=np.int32))
        positions.append(np.array([at for row in block for at in row.positions], dtype=np.int32))
    return {
        "ids": list_column(np.concatenate(ids), list(accumulate(lengths))),
        "positions": pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(positions)), views),
    }


def list_column(values: "Shaped[ndarray, ' values']", offsets: Sequence[int]) -> "pa.Array":
    """Return a column of lists; list i has values offsets[i] to offsets[i + 1].

    Offsets have 64 bits: a large part with long documents can have more than 2^31 tokens.
    """
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def indexed_view(views: Sequence[str]) -> str:
    """Return the view of a tower that is indexed: that of [EMB] if there is one, else the last."""
    view = PLACEHOLDERS["[EMB]"]
    return view if view in views else views[-1]
