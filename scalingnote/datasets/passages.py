"""Long documents as passages that a model reads whole: rows of their own, in place of the document's.

    document ─► sentences ─► passages of at most `max_tokens`, between paragraphs where that can be

Every later stage sees rows and does not know of documents; a search groups its results
(:mod:`scalingnote.search.searcher`). Tokens are counted by the model's own tokenizer, which the data set
keeps (`passages/tokenizer.json`): documents that are written later are divided by the same one.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
from tokenizers import Tokenizer

from scalingnote.core.errors import ConfigError
from scalingnote.core.model_files import local_folder
from scalingnote.core.words import sentence_spans
from scalingnote.datasets.config import Passages
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import PASSAGE, passage_id

TOKENIZER = "passages/tokenizer.json"  # part of the data set
SHORT_SHARE = 0.25  # of a passage: a shorter one, such as a heading, does not end before a paragraph
TITLE_SHARE = 0.75  # of a passage at most: the content has the rest, however long the title is


class Passage(NamedTuple):
    """Start and end of a passage in the characters of its text."""

    start: int
    end: int


def settings(dataset: Artifact) -> Passages | None:
    """How a data set's documents were divided; None where its rows are documents."""
    found = dataset.manifest.config.get("passages")
    return None if found is None else Passages.model_validate(found)


def tokenizer_json(model: str) -> bytes:
    """The tokenizer of a model, or of a data set of passages given by its URI.

    ConfigError where the model has no tokenizer.json.
    """
    kept = fs.join(model, TOKENIZER)
    if "://" in model or fs.exists(kept):
        return fs.read_bytes(kept)
    folder = local_folder(model)
    places = [folder / "tokenizer.json", *sorted(folder.glob("*/tokenizer.json"))]
    if (path := next((place for place in places if place.is_file()), None)) is None:
        raise ConfigError(
            f"{model} has no tokenizer.json, which dataset.passages counts tokens by: name a model with one"
        )
    return path.read_bytes()


@dataclass(frozen=True)
class PassageSplitter:
    """Divides documents into passages. Threads may share one."""

    tokenizer: Tokenizer  # without limits
    max_tokens: int
    overlap: int

    @classmethod
    def load(cls, config: Passages, tokenizer: bytes) -> "PassageSplitter":
        """Make the splitter of settings and the bytes of a tokenizer.json."""
        loaded = Tokenizer.from_buffer(tokenizer)
        loaded.no_padding()
        loaded.no_truncation()
        return cls(loaded, config.max_tokens, config.overlap)

    @classmethod
    def of(cls, dataset: Artifact) -> "PassageSplitter | None":
        """The splitter that divided a data set's documents; None where its rows are documents."""
        config = settings(dataset)
        return None if config is None else cls.load(config, dataset.read_bytes(TOKENIZER))

    def divide(self, documents: pa.Table) -> pa.Table:
        """The passages of documents, in order: the same columns, and those of PASSAGE."""
        ids, titles, contents = (documents[name].to_pylist() for name in ("doc_id", "title", "content"))
        rows: list[int] = []
        numbers: list[int] = []
        found: list[Passage] = []
        for row, (title, content) in enumerate(zip(titles, contents, strict=True)):
            passages = self.split(content or "", title=title or "")
            rows += [row] * len(passages)
            numbers += range(1, len(passages) + 1)
            found += passages
        table = documents.take(pa.array(rows, pa.int64()))
        own: dict[str, Any] = {"document_id": table["doc_id"], "passage": pa.array(numbers, pa.int64())}
        own |= {
            name: pa.array([getattr(each, name) for each in found], pa.int64()) for name in Passage._fields
        }
        changed = {
            "doc_id": [passage_id(ids[row], number) for row, number in zip(rows, numbers, strict=True)],
            "content": [
                (contents[row] or "")[start:end] for row, (start, end) in zip(rows, found, strict=True)
            ],
        }
        for name, values in changed.items():
            place = table.column_names.index(name)
            table = table.set_column(place, table.schema.field(name), pa.array(values, pa.string()))
        for field in PASSAGE:
            table = table.append_column(field, own[field.name])
        return table

    def split(self, text: str, *, title: str = "") -> list[Passage]:
        """The passages of a text, in order; one that is empty for an empty text.

        A passage has whole sentences, as many as fit beside the title, which the model reads before each. It
        ends before a paragraph that does not fit in it whole, if it has a quarter of its tokens by then. A
        sentence that does not fit alone is divided between words, or between letters with their marks where
        there are no spaces. Spaces between passages are in none.
        """
        starts = self._token_starts(text)
        title_tokens = len(self.tokenizer.encode(title, add_special_tokens=False).ids) + 1 if title else 0
        # A token more: a text's first token may be divided otherwise than in the middle of the document.
        budget = max(self.max_tokens - 1 - title_tokens, int(self.max_tokens * (1 - TITLE_SHARE)))
        pieces = [
            piece
            for start, end in sentence_spans(text)
            for piece in _divide_sentence(text, starts, Passage(start, end), budget)
        ]
        return _pack(text, pieces, starts, budget=budget, overlap=self.overlap) or [Passage(0, 0)]

    def _token_starts(self, text: str) -> list[int]:
        """The first character of each token, ascending."""
        return [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]


def _tokens(starts: Sequence[int], piece: Passage) -> int:
    return bisect_left(starts, piece.end) - bisect_left(starts, piece.start)


def _divide_sentence(text: str, starts: Sequence[int], sentence: Passage, budget: int) -> list[Passage]:
    """A sentence in pieces of at most `budget` tokens."""
    pieces, start = [], sentence.start
    while _tokens(starts, Passage(start, sentence.end)) > budget:
        first = bisect_left(starts, start)
        # At a space in the later half, else where a letter begins; a token of many letters is not divided.
        places = [place for place in starts[first + 1 : first + budget + 1] if place > start]
        later = places[len(places) // 2 :]
        spaced = [place for place in later if text[place - 1].isspace() or text[place].isspace()]
        letters = [place for place in places if not unicodedata.category(text[place]).startswith("M")]
        stop = next(reversed(spaced or letters), None)
        if stop is None:  # one letter of many tokens
            stop = next((place for place in starts[first:] if place > start), sentence.end)
        pieces.append(Passage(start, start + len(text[start:stop].rstrip())))
        start = stop
        while start < sentence.end and text[start].isspace():
            start += 1
    return [*pieces, Passage(start, sentence.end)] if start < sentence.end else pieces


def _pack(
    text: str, pieces: Sequence[Passage], starts: Sequence[int], *, budget: int, overlap: int
) -> list[Passage]:
    """Passages of as many pieces as fit.

    A paragraph that does not fit beside what is before it begins a passage, unless that would be short. Any
    other passage begins with the last pieces of the one before, if asked.
    """
    ends = _paragraph_ends(text, pieces)
    passages: list[Passage] = []
    first = 0  # piece that the current passage begins with

    def size(begin: int, last: int) -> int:
        return _tokens(starts, Passage(pieces[begin].start, pieces[last].end))

    for number in range(1, len(pieces)):
        last = number - 1
        if number in ends and size(first, ends[number]) > budget and size(first, last) > SHORT_SHARE * budget:
            begin = number
        elif size(first, number) > budget:
            begin = number
            while begin > first + 1 and size(begin - 1, last) <= overlap:
                begin -= 1
            while begin < number and size(begin, number) > budget:
                begin += 1
        else:
            continue
        passages.append(Passage(pieces[first].start, pieces[last].end))
        first = begin
    return [*passages, Passage(pieces[first].start, pieces[-1].end)] if pieces else []


def _paragraph_ends(text: str, pieces: Sequence[Passage]) -> dict[int, int]:
    """The last piece of each paragraph but the first, by its first one; an empty line is between two."""
    begins = [
        number
        for number, (before, piece) in enumerate(pairwise(pieces), start=1)
        if text.count("\n", before.end, piece.start) > 1
    ]
    return {begin: end - 1 for begin, end in pairwise([*begins, len(pieces)])}
