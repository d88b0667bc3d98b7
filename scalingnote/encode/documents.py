"""A part of documents: how it is read, on any CPU, and how it is encoded, in a worker."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.encode import changes
from scalingnote.encode.config import EncodeConfig
from scalingnote.encode.steps import Encoded, Rejected
from scalingnote.encode.tokens import COLUMNS, content_hashes, tokenise
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.token_rows import from_columns
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, vectors
from scalingnote.storage.artifact import Artifact, open_artifact

if TYPE_CHECKING:
    from scalingnote.encode.encoder import Encoder


@dataclass(frozen=True)
class Reader:
    """What makes the encoder of an artifact's documents, and the prompt that they are read with."""

    encoder: Callable[[Artifact, int], Any]
    prompt: Callable[[Artifact], DocumentPrompt]


def document_tower(towers: Artifact, token_budget: int) -> "Encoder":
    """The encoder of an artifact's document tower."""
    from scalingnote.encode.encoder import Encoder

    return Encoder.load(towers.directory("document"), token_budget=token_budget)


def document_prompt(towers: Artifact) -> DocumentPrompt:
    """The prompt of an artifact's document tower; its weights are not fetched."""
    tokenizer = fs.read_bytes(towers.file("document/tokenizer.json")).decode()
    return DocumentPrompt.restore(towers.read_json("document/tower.json"), tokenizer)


TOWER = Reader(document_tower, document_prompt)


def read_documents(
    name: str, *, source: Artifact, towers: Artifact, reader: Reader, base: Artifact | None, folder: str
) -> tuple[pa.Table, pa.Table | None, Rejected]:
    """Token rows of what is to be encoded, embeddings that are copied, and what cannot be read."""
    documents = source.table(name.replace("embeddings/", "documents/", 1), COLUMNS)
    documents = documents.append_column(schema.CONTENT_HASH, content_hashes(documents))
    documents = documents.append_column("row", pa.array(np.arange(len(documents), dtype=np.int32)))
    copied = None
    if base is not None:
        number = [embeddings_part(part) for part in source.table_parts("documents")].index(name)
        copied = changes.copied(number, folder=folder, base=base)
        same = pc.is_in(documents["row"], value_set=copied["row"].combine_chunks())
        documents = documents.filter(pc.invert(same))
    tokens, rejected = tokenise(documents, _prompt(reader, towers.uri, towers.manifest.kind))
    return tokens, copied, rejected


@functools.cache
def _prompt(reader: Reader, uri: str, kind: str) -> DocumentPrompt:
    return reader.prompt(open_artifact(uri, kind=kind))


class DocumentParts:
    """Encodes documents, in a worker."""

    def __init__(self, *, config: EncodeConfig, towers: Artifact, reader: Reader) -> None:
        self._views: list[str] = list(config.views)
        self._dtype = config.dtype
        self._encoder = reader.encoder(towers, config.token_budget)
        self._encoder.top_k = config.top_k
        self.peak: float = self._encoder.peak()

    def __call__(self, _: str, given: tuple[pa.Table, pa.Table | None, Rejected]) -> Encoded:
        """The embeddings of a part; copied ones in their places."""
        tokens, copied, rejected = given
        found = self._encoder.encode(from_columns(tokens))
        chosen = [found[:, self._encoder.views.index(view)] for view in self._views]
        columns = [vectors.to_arrow(vectors.unit(matrix), dtype=self._dtype) for matrix in chosen]
        terms = self._encoder.terms
        columns += terms.columns() if terms else []
        dim, sparse = self._encoder.dim, terms is not None
        layout = schema.embeddings(self._views, dim, dtype=self._dtype, sparse=sparse)
        table = pa.table([tokens["doc_id"], tokens["content_hash"], *columns], schema=layout)
        if copied is not None and len(copied):
            fresh = table.append_column("row", tokens["row"])
            table = pa.concat_tables([fresh, copied.select(fresh.column_names)]).sort_by("row")
            table = table.drop_columns("row").cast(layout)
        return Encoded(table, self._encoder.cost, rejected)


def embeddings_part(part: str) -> str:
    """The part of embeddings that belongs to a part of documents."""
    return part.replace("documents/", "embeddings/", 1)
