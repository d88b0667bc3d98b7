"""Towers that embed texts for clients: the query side, the document side, and the tokens that they read."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.errors import ConfigError, DataError
from scalingnote.models import published_model
from scalingnote.models.published_model import Role
from scalingnote.storage.artifact import open_artifact

FOLDER = "folder"  # in place of an artifact's kind: the tower lies in a folder that is no artifact
VIEW = "summary"  # the embedding of a document that is searched
MAX_TEXTS = 64  # embedded in one go: other requests get the thread between two of these
MAX_INLINE_TEXTS = 32  # looked up in the event loop: under a millisecond
Location = tuple[str, str]  # URI and kind of an artifact, or a folder and FOLDER
T = TypeVar("T")


@dataclass(frozen=True)
class Embedded:
    """Embeddings of texts as the tower gives them, and the number of tokens of all texts."""

    vectors: Float32[ndarray, "texts dim"]  # not normalised
    tokens: int


@dataclass(frozen=True)
class Refused:
    """Why a call is refused. It is returned, not raised, because Ray would wrap an exception."""

    reason: str
    temporary: bool = False  # whether a later attempt may succeed


class TextTower:
    """A tower that embeds and tokenizes texts for clients.

    Args:
        folder: of the tower.
        role: which texts it reads.
        encode: embeddings of texts, not normalised.
        inline: few texts are encoded in the event loop.
    """

    def __init__(
        self,
        folder: Path,
        role: Role,
        encode: Callable[[Sequence[str]], ndarray],
        *,
        inline: bool = False,
    ) -> None:
        self._tokenizer = tokenizer_of(folder, role)
        self._encode, self._inline = encode, inline
        self._thread = ThreadPoolExecutor(1, "texts")

    async def embed(self, texts: Sequence[str]) -> Embedded | Refused:
        """Embeddings of texts, and how many tokens they have together."""
        if self._inline and len(texts) <= MAX_INLINE_TEXTS:
            return Embedded(self._vectors(texts), self._count(texts))
        try:
            parts = [
                await self._in_thread(partial(self._vectors, texts[first : first + MAX_TEXTS]))
                for first in range(0, len(texts), MAX_TEXTS)
            ]
        except DataError as error:
            return Refused(str(error))
        return Embedded(np.concatenate(parts), await asyncio.to_thread(self._count, texts))

    async def decode(self, rows: Sequence[Sequence[int]]) -> list[str] | Refused:
        """The texts of token ids; special tokens are left out."""
        size = self._tokenizer.get_vocab_size()
        if any(not 0 <= token < size for row in rows for token in row):
            return Refused(f"a token id is not below {size}, the size of this tower's own vocabulary")
        return self._tokenizer.decode_batch([[*row] for row in rows])

    async def tokenize(self, texts: Sequence[str], *, special: bool) -> list[list[dict[str, Any]]]:
        """The tokens of each text, with and without special ones, as TEI's ``/tokenize`` gives them."""
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
        """Answers while the event loop runs."""
        return True

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _vectors(self, texts: Sequence[str]) -> Float32[ndarray, "texts dim"]:
        return np.asarray(self._encode(texts), np.float32)

    def _count(self, texts: Sequence[str]) -> int:
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return sum(len(row.ids) for row in rows)


class DocumentTower(TextTower):
    """The document side of a run or of a published model."""

    def __init__(self, location: Location) -> None:
        folder = folder_of(location, "document")
        super().__init__(folder, "document", document_encoder(folder))
        self._encode(["warm up"])  # the first pass is the slowest


def document_encoder(folder: Path) -> Callable[[Sequence[str]], ndarray]:
    """A function that embeds documents, not normalised: the texts are contents without title and topic."""
    if _is_table_for_both(folder):
        from scalingnote.encode.query_encoder import QueryEncoder

        return QueryEncoder.load(folder).encode_queries
    from scalingnote.encode.encoder import Encoder
    from scalingnote.models import published_tower

    saved = (folder / "tower.json").exists()
    encoder = Encoder.load(folder) if saved else Encoder(published_tower.open_published(folder, "document"))

    def encode(texts: Sequence[str]) -> ndarray:
        nothing = [""] * len(texts)
        table = pa.table({"title": nothing, "topic": nothing, "content": list(texts)})
        return encoder.encode_documents(table)[VIEW]

    return encode


def _is_table_for_both(folder: Path) -> bool:
    """Whether a published folder is one lookup table for queries and documents."""
    if (folder / "tower.json").exists():
        return False
    modules = published_model.read_modules(folder, "document")
    if not modules or modules != published_model.read_modules(folder, "query"):
        return False
    return modules[0].name in published_model.TABLES


def folder_of(location: Location, role: Role) -> Path:
    """The local folder of one side of an artifact, or the folder itself where it is none."""
    uri, kind = location
    return Path(uri) if kind == FOLDER else open_artifact(uri, kind=kind).directory(role)


def sides(folder: Path) -> dict[Role, Path]:
    """The towers in a folder: of sentence-transformers, of ours, or one with the folders query and document.

    Raises:
        ConfigError: it holds none.
    """
    if (folder / "tower.json").exists():
        return {published_model.read_json(folder / "tower.json")["role"]: folder}
    if (folder / "modules.json").exists():
        return {"query": folder, "document": folder}
    roles: tuple[Role, ...] = ("query", "document")
    found = {role: folder / role for role in roles if (folder / role).is_dir()}
    if not found:
        raise ConfigError(
            f"{folder} holds no tower: name a folder that `scalingnote distill` or `scalingnote publish` "
            "wrote, or one that sentence-transformers reads (modules.json)"
        )
    return found


def tokenizer_of(folder: Path, role: Role) -> Tokenizer:
    """The tokenizer of one side of a tower's folder, without padding and truncation.

    Raises:
        ConfigError: it has no tokenizer.json.
    """
    modules = None if (folder / "tower.json").exists() else published_model.read_modules(folder, role)
    places = [module.folder for module in modules[:1]] if modules else []
    if modules and modules[0].name == published_model.REFERENCED_MODEL:
        places = [published_model.read(folder, role).folder]
    for place in (*places, folder):
        if (file := place / "tokenizer.json").exists():
            tokenizer: Tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
    raise ConfigError(f"{folder} has no tokenizer.json of its {role} side: convert its tokenizer first")
