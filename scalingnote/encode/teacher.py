"""A part of the teacher's queries: how it is read and encoded, and what a student may inherit."""

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.encode import queries
from scalingnote.encode.steps import Encoded
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, vectors
from scalingnote.storage.artifact import Artifact


def read_queries(name: str, *, folder: str) -> pa.Table:
    """The queries of a part."""
    piece = name.removeprefix("embeddings/part-").removesuffix(".parquet")
    with fs.open_input(queries.piece_uri(folder, piece)) as stream:
        return pq.read_table(stream)


class QueryParts:
    """Encodes queries, in a worker. With the part that `teacher` names it also leaves there what it knows."""

    def __init__(self, *, towers: Artifact, token_budget: int, teacher: dict[str, str]) -> None:
        from scalingnote.encode.encoder import Encoder

        self._teacher = teacher
        self._encoder = Encoder.load(towers.directory("query"), token_budget=token_budget)
        self.peak = self._encoder.peak()

    def __call__(self, name: str, given: pa.Table) -> Encoded:
        """The embeddings of a part."""
        embeddings = self._encoder.encode_queries(given["query"].to_pylist())
        cost = self._encoder.cost
        if name in self._teacher:
            self._write_vocabulary(self._teacher[name])
        field = schema.embedding_field("embedding", self._encoder.dim)
        return Encoded(given.append_column(field, vectors.to_arrow(embeddings)), cost)

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
