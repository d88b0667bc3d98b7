"""Long documents as passages that a model reads uncut: separate rows, instead of the document's row.

    document ─► sentences ─► passages of at most `max_tokens`, between paragraphs if possible

Later stages process rows, without documents; a search groups its results
(:mod:`scalingnote.search.searcher`). The model's own tokenizer counts the tokens. The data set stores it
(`passages/tokenizer.json`), so that documents that are written later are divided in the same way.
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
TITLE_SHARE = 0.75  # maximum of a passage: the content has the rest, for any length of the title


class Passage(NamedTuple):
    """Start and end of a passage in the characters of its text."""

    start: int
    end: int


def settings(dataset: Artifact) -> Passages | None:
    """Return how a data set's documents were divided; None if its rows are documents."""
    values = dataset.manifest.config.get("passages")
    return None if values is None else Passages.model_validate(values)


def tokenizer_json(model: str) -> bytes:
    """Read the tokenizer of a model, or of a data set of passages by its URI.

    ConfigError if the model has no tokenizer.json.
    """
    stored_file = fs.join(model, TOKENIZER)
    if "://" in model or fs.exists(stored_file):
        return fs.read_bytes(stored_file)
    folder = local_folder(model)
    places = [folder / "tokenizer.json", *sorted(folder.glob("*/tokenizer.json"))]
    if (path := next((place for place in places if place.is_file()), None)) is None:
        raise ConfigError(
            f"{model} has no tokenizer.json, with which dataset.passages counts tokens: set a model with one"
        )
    return path.read_bytes()


@dataclass(frozen=True)
class PassageSplitter:
    """Splitter of documents into passages. Threads may share one."""

    tokenizer: Tokenizer  # without limits
    max_tokens: int
    overlap: int

    @classmethod
    def load(cls, config: Passages, tokenizer: bytes) -> "PassageSplitter":
        """Build a splitter from settings and the bytes of a tokenizer.json."""
        loaded = Tokenizer.from_buffer(tokenizer)
        loaded.no_padding()
        loaded.no_truncation()
        return cls(loaded, config.max_tokens, config.overlap)

    @classmethod
    def of(cls, dataset: Artifact) -> "PassageSplitter | None":
        """Load the splitter that divided a data set's documents; None if its rows are documents."""
        config = settings(dataset)
        return None if config is None else cls.load(config, dataset.read_bytes(TOKENIZER))

    def divide(self, documents: pa.Table) -> pa.Table:
        """Divide documents into passages, in order, with the same columns and those of PASSAGE."""
        ids, titles, contents = (documents[name].to_pylist() for name in ("doc_id", "title", "content"))
        rows: list[int] = []
        numbers: list[int] = []
        all_passages: list[Passage] = []
        for row, (title, content) in enumerate(zip(titles, contents, strict=True)):
            passages = self.split(content or "", title=title or "")
            rows += [row] * len(passages)
            numbers += range(1, len(passages) + 1)
            all_passages += passages
        table = documents.take(pa.array(rows, pa.int64()))
        passage_columns: dict[str, Any] = {
            "document_id": table["doc_id"],
            "passage": pa.array(numbers, pa.int64()),
        }
        passage_columns |= {
            name: pa.array([getattr(each, name) for each in all_passages], pa.int64())
            for name in Passage._fields
        }
        changed = {
            "doc_id": [passage_id(ids[row], number) for row, number in zip(rows, numbers, strict=True)],
            "content": [
                (contents[row] or "")[start:end] for row, (start, end) in zip(rows, all_passages, strict=True)
            ],
        }
        for name, values in changed.items():
            place = table.column_names.index(name)
            table = table.set_column(place, table.schema.field(name), pa.array(values, pa.string()))
        for field in PASSAGE:
            table = table.append_column(field, passage_columns[field.name])
        return table

    def split(self, text: str, *, title: str = "") -> list[Passage]:
        """Divide a text into passages, in order; an empty text is one empty passage.

        A passage has complete sentences, as many as fit together with the title, which the model reads before
        each passage. It ends before a paragraph that does not fit in it completely, if it already has a
        quarter of its tokens. A sentence that does not fit by itself is divided between words, or between
        letters with their marks if there are no spaces. Spaces between passages are in no passage.
        """
        starts = self._token_starts(text)
        title_tokens = len(self.tokenizer.encode(title, add_special_tokens=False).ids) + 1 if title else 0
        # One token less: the tokens at the start of a passage may differ from those inside the document.
        budget = max(self.max_tokens - 1 - title_tokens, int(self.max_tokens * (1 - TITLE_SHARE)))
        pieces = [
            piece
            for start, end in sentence_spans(text)
            for piece in _divide_sentence(text, starts, Passage(start, end), budget)
        ]
        return _pack(text, pieces, starts, budget=budget, overlap=self.overlap) or [Passage(0, 0)]

    def _token_starts(self, text: str) -> list[int]:
        """Return the first character of each token, ascending."""
        return [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]


def _tokens(starts: Sequence[int], piece: Passage) -> int:
    return bisect_left(starts, piece.end) - bisect_left(starts, piece.start)


def _divide_sentence(text: str, starts: Sequence[int], sentence: Passage, budget: int) -> list[Passage]:
    """Divide a sentence into pieces of at most `budget` tokens."""
    pieces, start = [], sentence.start
    while _tokens(starts, Passage(start, sentence.end)) > budget:
        first = bisect_left(starts, start)
        # At a space in the later half, else before a letter; a token of many letters is not divided.
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
    """Join as many pieces as fit into each passage.

    A paragraph that does not fit after the pieces before it begins a passage, unless the previous passage
    would be short. Any other passage repeats the last pieces of the previous one, up to `overlap` tokens.
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
    """Map the first piece of each paragraph, except the first one, to its last; empty lines separate them."""
    begins = [
        number
        for number, (before, piece) in enumerate(pairwise(pieces), start=1)
        if text.count("\n", before.end, piece.start) > 1
    ]
    return {begin: end - 1 for begin, end in pairwise([*begins, len(pieces)])}
