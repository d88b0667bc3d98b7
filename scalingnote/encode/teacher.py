"""A part of the teacher's queries: how it is read and encoded, and what a student may inherit."""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.encode import queries
from scalingnote.encode.steps import Encoded
from scalingnote.encode.tally import Cost
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, vectors
from scalingnote.storage.artifact import Artifact

if TYPE_CHECKING:
    pass


_PSEUDO = "pseudo-"  # begins the names of parts whose texts are pseudo-queries


def pseudo_parts(pseudo: Artifact) -> dict[str, int]:
    """Parts of embeddings, one for each part of pseudo-queries, and their rows."""
    names = pseudo.table_parts("queries")
    parts = {name: name.replace("queries/part-", f"embeddings/{_PSEUDO}") for name in names}
    return {part: pseudo.manifest.parts[name].rows or 0 for name, part in parts.items()}


def read_queries(name: str, *, folder: str, pseudo: Artifact | None) -> pa.Table:
    """The queries of a part of embeddings: of triplets, from `folder`, or of pseudo-queries."""
    piece = name.removeprefix("embeddings/")
    if piece.startswith(_PSEUDO):
        assert pseudo is not None
        return pseudo.table(f"queries/part-{piece.removeprefix(_PSEUDO)}")
    piece = piece.removeprefix("part-").removesuffix(".parquet")
    with fs.open_input(queries.piece_uri(folder, piece)) as stream:
        return pq.read_table(stream)


class QueryParts:
    """Encodes queries, in a worker. With the part that `teacher` names it also leaves there what it knows.

    Texts whose `role` is "document" (passages among the pseudo-queries) go through the document tower.
    """

    def __init__(self, *, towers: Artifact, token_budget: int, teacher: dict[str, str]) -> None:
        from scalingnote.encode.encoder import Encoder

        self._teacher, self._towers, self._token_budget = teacher, towers, token_budget
        self._encoder = Encoder.load(towers.directory("query"), token_budget=token_budget)
        self._documents: Encoder | None = None  # loaded by the first passage
        self.peak = self._encoder.peak()

    def __call__(self, name: str, given: pa.Table) -> Encoded:
        """The embeddings of a part, in its order."""
        role = given["role"] if "role" in given.column_names else pa.array(["query"] * len(given))
        passages = np.asarray(pc.equal(role, "document"))
        texts = given["query"].to_pylist()
        embeddings = np.empty((len(texts), self._encoder.dim), np.float32)
        cost = Cost()
        if not passages.all():
            asked = [text for text, passage in zip(texts, passages, strict=True) if not passage]
            embeddings[~passages] = self._encoder.encode_queries(asked)
            cost = self._encoder.cost
        if passages.any():
            written = [text for text, passage in zip(texts, passages, strict=True) if passage]
            embeddings[passages], more = self._encode_passages(written)
            cost = cost + more
        if name in self._teacher:
            self._write_vocabulary(self._teacher[name])
        field = schema.embedding_field("embedding", self._encoder.dim)
        kept = given.select(["query_id", "query", "split"])
        return Encoded(kept.append_column(field, vectors.to_arrow(embeddings)), cost)

    def _encode_passages(self, texts: list[str]) -> tuple[Float32[ndarray, "texts dim"], Cost]:
        from scalingnote.encode.encoder import Encoder

        if self._documents is None:
            folder = self._towers.directory("document")
            self._documents = Encoder.load(folder, token_budget=self._token_budget)
        empty = [""] * len(texts)
        table = pa.table({"title": empty, "topic": empty, "content": texts})
        views = self._documents.encode_documents(table)
        return views.get("summary", next(iter(views.values()))), self._documents.cost

    def _write_vocabulary(self, folder: str) -> None:
        """What a student may inherit, so that distillation never loads the teacher.

        The tokenizer, and of each token its embedding and the query embedding that it gets when asked alone.
        """
        import safetensors.torch
        import torch

        tower = self._encoder.tower
        known = {
            "tokens": tower.token_embeddings.weight.float().cpu().contiguous(),
            "alone": torch.from_numpy(self._encoder.encode_tokens()),
        }
        for name, weight in known.items():
            data = safetensors.torch.save({"weight": weight})
            fs.write_bytes(fs.join(folder, f"{name}.safetensors"), data)
        fs.write_bytes(fs.join(folder, "tokenizer.json"), tower.tokenizer.backend_tokenizer.to_str().encode())
