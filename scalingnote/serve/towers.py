"""Towers that embed texts for clients: the query side, the document side, and their tokens."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray
from tokenizers import Tokenizer, decoders

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.model_files import read_json
from scalingnote.models import published_model
from scalingnote.models.prompt import add_flagged_tokens, without_limits
from scalingnote.models.published_model import Role
from scalingnote.serve.concurrency import WorkerThread
from scalingnote.storage.artifact import open_artifact
from scalingnote.storage.schema import INDEXED_VIEW

FOLDER = "folder"  # in place of an artifact's kind: the tower is in a folder that is not an artifact
TEXTS_PER_TURN = 64  # embedded at once: other requests get the thread between two turns
MAX_INLINE_TEXTS = 32  # looked up in the event loop: under a millisecond
OWN_IDS = (
    "Token ids must be of the model's own tokenizer (POST /tokenize). Some clients of OpenAI send ids of "
    "OpenAI's tokenizers: configure them to send texts (LangChain: check_embedding_ctx_length=False)"
)
Side = Literal["left", "right"]  # the side that is read of a text that is longer than the model reads
Location = tuple[str, str]  # URI and kind of an artifact, or a folder and FOLDER
HEALTH_TEXT = "is this tower healthy"  # encoded by health checks
EDGE = 8  # tokens at either end of a text that may differ, if it was cut within a word
T = TypeVar("T")


@dataclass(frozen=True)
class Embedded:
    """Embeddings of texts as the tower computes them, and the number of tokens of all texts."""

    vectors: Float32[ndarray, "texts dim"]  # not normalised
    tokens: int
    cut_texts: int  # texts that are longer than the tower reads
    lost_tokens: int  # tokens of these texts that it has not read

    @classmethod
    def of(cls, vectors: Float32[ndarray, "texts dim"], lengths: Sequence[int], most: int) -> "Embedded":
        """Return the embeddings of texts with these numbers of tokens; the tower reads `most` of a text."""
        lost_counts = [length - most for length in lengths if length > most]
        return cls(vectors, sum(lengths), len(lost_counts), sum(lost_counts))


@dataclass(frozen=True)
class Refused:
    """The reason why a call is refused. It is returned, not raised, because Ray would wrap an exception."""

    reason: str
    too_long: bool = False
    temporary: bool = False  # whether a later attempt may succeed


@dataclass(frozen=True)
class TextEncoder:
    """The functions of a tower: embeddings, not normalised, of texts and of token ids."""

    encode: Callable[[Sequence[str]], ndarray]
    encode_ids: Callable[[Sequence[Sequence[int]]], ndarray] | None  # None: the texts of the ids are encoded
    max_tokens: int  # tokens of a text that are read, special ones not counted


def require_finite(vectors: ndarray) -> None:
    """Raise ValueError for an embedding with a value that is not finite; a broken device computes these."""
    if not np.isfinite(vectors).all():
        raise ValueError("the tower computes embeddings with values that are not finite")


class TextTower:
    """A tower that embeds and tokenizes texts for clients.

    Args:
        folder: of the tower.
        role: the side, which says which texts it reads.
        encoder: of the tower.
        inline: whether few texts are encoded in the event loop, not in the thread.
    """

    def __init__(
        self,
        folder: Path,
        role: Role,
        encoder: TextEncoder,
        *,
        inline: bool = False,
    ) -> None:
        self._tokenizer = tokenizer_of(folder, role)
        if isinstance(self._tokenizer.decoder, decoders.WordPiece):  # by default it joins "do not" to "don't"
            self._tokenizer.decoder = decoders.WordPiece(self._tokenizer.decoder.prefix, cleanup=False)
        added_tokens = self._tokenizer.get_added_tokens_decoder().items()
        self._special = {
            token for token, facts in added_tokens if facts.special and "unk" not in facts.content.lower()
        }
        self._encoder, self._inline = encoder, inline
        self._thread = WorkerThread("texts")

    async def embed(
        self, texts: Sequence[str], *, truncate: bool = True, keeps: Side | None = None
    ) -> Embedded | Refused:
        """Compute embeddings of texts, and count the tokens of all texts.

        Args:
            texts: to embed.
            truncate: whether long texts are cut; False: they are refused.
            keeps: the side of a long text that is read; None: the side that the tower was trained for.
        """
        encode: Callable[[Any], ndarray] = self._encoder.encode
        rows: Sequence[Any] = texts
        inline = self._inline and len(texts) <= MAX_INLINE_TEXTS
        lengths = self._lengths(texts) if inline else await asyncio.to_thread(self._lengths, texts)
        if not truncate and (refused := too_long(lengths, self._encoder.max_tokens)):
            return refused
        if keeps is not None and max(lengths) > self._encoder.max_tokens:
            encode, rows = await asyncio.to_thread(self._keep, texts, keeps)
        if inline:
            return Embedded.of(_vectors(encode, rows), lengths, self._encoder.max_tokens)
        return await self._in_parts(encode, rows, lengths)

    async def embed_ids(self, rows: Sequence[Sequence[int]]) -> Embedded | Refused:
        """Compute embeddings of texts from their token ids; refused if the ids are of another tokenizer."""
        size = self._tokenizer.get_vocab_size()
        if any(not 0 <= token < size for row in rows for token in row):
            return Refused(f"a token id is not below {size}, the size of this model's vocabulary. {OWN_IDS}")
        rows = [self._bare(row) for row in rows]
        texts = self._tokenizer.decode_batch(rows, skip_special_tokens=False)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for number, (row, again) in enumerate(zip(rows, encodings, strict=True)):
            if not _tokenizes_to(row, again.ids):
                return Refused(f"this model's tokenizer has no text with the ids of text {number}. {OWN_IDS}")
        by_ids, lengths = self._encoder.encode_ids, [*map(len, rows)]
        if by_ids is None:
            return await self._in_parts(self._encoder.encode, texts, lengths)
        return await self._in_parts(by_ids, rows, lengths)

    async def tokenize(self, texts: Sequence[str], *, special: bool) -> list[list[dict[str, Any]]]:
        """Tokenize texts, with or without special tokens, in the form of TEI's ``/tokenize``."""
        return [
            [
                {"id": token, "text": text, "special": bool(is_special), "start": start, "stop": stop}
                for token, text, is_special, (start, stop) in zip(
                    each.ids, each.tokens, each.special_tokens_mask, each.offsets, strict=True
                )
            ]
            for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        ]

    async def ping(self) -> bool:
        """Return True, which shows that the event loop runs."""
        return True

    async def check_health(self) -> None:
        """Raise an error if a text cannot be encoded or the thread hangs. Ray Serve calls this."""
        await self._thread.check(lambda: require_finite(self._encode_anew([HEALTH_TEXT])))

    def _encode_anew(self, texts: Sequence[str]) -> ndarray:
        return self._encoder.encode(texts)

    async def _in_parts(
        self, encode: Callable[[Any], ndarray], texts: Sequence[Any], lengths: Sequence[int]
    ) -> Embedded | Refused:
        """Compute embeddings in the thread; refused if the encoder raises DataError for a text."""
        try:
            parts = [
                await self._thread.run(partial(_vectors, encode, texts[first : first + TEXTS_PER_TURN]))
                for first in range(0, len(texts), TEXTS_PER_TURN)
            ]
        except DataError as error:
            return Refused(str(error))
        return Embedded.of(np.concatenate(parts), lengths, self._encoder.max_tokens)

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(row.ids) for row in rows]

    def _keep(
        self, texts: Sequence[str], keeps: Side
    ) -> tuple[Callable[[Any], ndarray], list[list[int]] | list[str]]:
        """Return an encoder and its inputs: token ids, or pieces of the texts if the tower takes no ids."""
        by_ids = self._encoder.encode_ids
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        if by_ids is not None:
            return by_ids, [_side(each.ids, self._encoder.max_tokens, keeps) for each in encodings]
        pairs = zip(texts, encodings, strict=True)
        return self._encoder.encode, [self._piece(text, each.offsets, keeps) for text, each in pairs]

    def _piece(self, text: str, offsets: list[tuple[int, int]], keeps: Side) -> str:
        """Return one side of a text, with as many tokens as the tower reads.

        A piece that begins within a word may have more tokens than the text has there. It is then shortened.
        """
        most = self._encoder.max_tokens
        if len(offsets) <= most:
            return text
        for size in range(most, 0, -1):
            side = _side(offsets, size, keeps)
            piece = text[side[0][0] : side[-1][1]]
            if self._lengths([piece])[0] <= most:
                return piece
        return ""

    def _bare(self, row: Sequence[int]) -> list[int]:
        """Return a row without special tokens at its ends."""
        start, stop = 0, len(row)
        while start < stop and row[start] in self._special:
            start += 1
        while stop > start and row[stop - 1] in self._special:
            stop -= 1
        return list(row[start:stop])


def too_long(lengths: Sequence[int], most: int) -> Refused | None:
    """Return why a model that reads `most` tokens refuses texts with these numbers; None: all fit."""
    longest = max(lengths)
    if longest <= most:
        return None
    number = lengths.index(longest)
    return Refused(
        f"text {number} must have at most {most} tokens, it has {longest}: shorten it, or send truncate: "
        "true without truncation_direction",
        too_long=True,
    )


def _side(values: list[T], most: int, keeps: Side) -> list[T]:
    """Return at most `most` of the first values, or of the last ones."""
    return values[:most] if keeps == "left" else values[-most:]


def _vectors(encode: Callable[[Any], ndarray], texts: Sequence[Any]) -> Float32[ndarray, "texts dim"]:
    return np.asarray(encode(texts), np.float32)


def _tokenizes_to(row: Sequence[int], again: list[int]) -> bool:
    """Return whether token ids are those of a text: tokenized again it has the same ids, but for cut words.

    Most ids of another tokenizer are also ids of this one, but they give a text with other tokens. Up to EDGE
    tokens at either end may differ, and at most an eighth of the text.
    """
    if row == again:
        return True
    edge = min(EDGE, len(row) // 8)
    inner = row[edge : len(row) - edge]
    return edge > 0 and any(again[at : at + len(inner)] == inner for at in range(2 * EDGE + 1))


class DocumentTower(TextTower):
    """The document side of a run or of a published model."""

    def __init__(self, location: Location) -> None:
        folder = folder_of(location, "document")
        super().__init__(folder, "document", document_encoder(folder))
        self._encoder.encode(["warm up"])  # the first pass is the slowest


def document_encoder(folder: Path) -> TextEncoder:
    """Load the encoder of documents. Texts are contents, without title and topic."""
    if _is_table_for_both(folder):
        from scalingnote.encode.query_encoder import QueryEncoder

        table = QueryEncoder(folder)
        return TextEncoder(table.encode_queries, table.encode_ids, table.max_tokens)
    from scalingnote.encode.encoder import Encoder

    encoder = Encoder.load(folder, "document")

    def encode(texts: Sequence[str]) -> ndarray:
        empty = [""] * len(texts)
        table = pa.table({"title": empty, "topic": empty, "content": list(texts)})
        return encoder.encode_documents(table)[INDEXED_VIEW]

    def encode_ids(rows: Sequence[Sequence[int]]) -> ndarray:
        return encoder.encode_token_ids(rows)[:, encoder.views.index(INDEXED_VIEW)]

    prompt = encoder.tower.prompt
    return TextEncoder(encode, encode_ids if prompt.takes_ids else None, prompt.max_tokens)


def _is_table_for_both(folder: Path) -> bool:
    """Return whether a published folder is one lookup table for queries and documents."""
    if (folder / "tower.json").exists():
        return False
    modules = published_model.read_modules(folder, "document")
    if not modules or modules != published_model.read_modules(folder, "query"):
        return False
    return modules[0].name in published_model.TABLES


def folder_of(location: Location, part: str) -> Path:
    """Return the local folder of a part of an artifact, for example one side, or the folder itself."""
    uri, kind = location
    return Path(uri) if kind == FOLDER else open_artifact(uri, kind=kind).directory(part)


def sides(folder: Path) -> dict[Role, Path]:
    """Find the towers in a folder of sentence-transformers or of ours, or in its folders query and document.

    Raises:
        ConfigError: the folder has no tower.
    """
    if (folder / "tower.json").exists():
        return {read_json(folder / "tower.json")["role"]: folder}
    if (folder / "modules.json").exists():
        return {"query": folder, "document": folder}
    roles: tuple[Role, ...] = ("query", "document")
    folders = {role: folder / role for role in roles if (folder / role).is_dir()}
    if not folders:
        raise ConfigError(
            f"{folder} holds no tower: name a folder of `scalingnote distill` or of `scalingnote export "
            "towers`, or one that sentence-transformers reads (modules.json)"
        )
    return folders


def tokenizer_of(folder: Path, role: Role) -> Tokenizer:
    """Load the tokenizer of one side of a tower's folder, without padding and truncation.

    Raises:
        ConfigError: the side has no tokenizer.json.
    """
    modules = None if (folder / "tower.json").exists() else published_model.read_modules(folder, role)
    places = [module.folder for module in modules[:1]] if modules else []
    if modules and modules[0].name == published_model.REFERENCED_MODEL:
        places = [published_model.read(folder, role).folder]
    for place in (*places, folder):
        if (file := place / "tokenizer.json").exists():
            tokenizer = Tokenizer.from_file(str(file))
            settings = read_json(place / "tokenizer_config.json") or {}
            ends = {name: _content(settings.get(f"{name}_token")) for name in ("bos", "eos")}
            add_flagged_tokens(tokenizer, settings, first=ends["bos"], end=ends["eos"])
            return without_limits(tokenizer)
    raise ConfigError(f"{folder} has no tokenizer.json of its {role} side: convert its tokenizer first")


def _content(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, which may be a string or a dict of settings."""
    return token.get("content") if isinstance(token, dict) else token
