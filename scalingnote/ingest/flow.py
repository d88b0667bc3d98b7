"""From the text of documents to what an index holds of them: read, encode, code, fuse.

    documents ─tokenise─► token rows ─tower─► embeddings ─codebooks─► codes ─fusion─► final embeddings

These are the functions of the stages encode, quantize and fuse, called one after the other: a document that
comes alone gets what it would have got among all others.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.encode.documents import TOWER, Reader
from scalingnote.encode.steps import Rejected
from scalingnote.encode.tally import Cost
from scalingnote.encode.tokens import COLUMNS, content_hashes, tokenise
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.token_rows import from_columns
from scalingnote.quantize import beam
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, vectors
from scalingnote.storage.artifact import Artifact

if TYPE_CHECKING:  # it needs torch, the writer of an index does not
    from scalingnote.fuse.fusion import DocumentFusion

VIEW = "summary"  # the embedding that is searched


@dataclass(frozen=True)
class Ready:
    """Documents as an index takes them (doc_id, content_hash, codes, embedding), and those set aside."""

    table: pa.Table
    rejected: Rejected


class DocumentFlow:
    """All that new documents need, loaded once; safe to keep for the life of a process."""

    def __init__(
        self,
        encoder: Any,
        prompt: DocumentPrompt,
        codebooks: Float[ndarray, "levels codes dim"],
        *,
        width: int = 1,
        dtype: str = "float16",
        fusion: "DocumentFusion | None" = None,
    ) -> None:
        """`width` is the beam that codes were found with, `dtype` the precision of stored embeddings."""
        self._encoder, self._prompt, self._codebooks = encoder, prompt, codebooks
        self._width, self._dtype, self._fusion = width, dtype, fusion

    @classmethod
    def load(
        cls,
        towers: Artifact,
        semantic_ids: Artifact,
        embeddings: Artifact,
        *,
        token_budget: int = 8192,
        reader: Reader = TOWER,
    ) -> "DocumentFlow":
        """Of a finished run: the tower of its documents, its codebooks, and the embeddings that it indexes.

        Where these were fused, their networks are loaded too.
        """
        from scalingnote.fuse.fusion import DocumentFusion

        first = pq.read_schema(fs.open_input(embeddings.file(embeddings.table_parts("embeddings")[0])))
        fused = bool(embeddings.names("document_fusion/"))
        return cls(
            reader.encoder(towers, token_budget),
            reader.prompt(towers),
            safetensors.load(fs.read_bytes(semantic_ids.file("codebooks.safetensors")))["codebooks"],
            width=int(semantic_ids.manifest.config.get("beam", 1)),
            dtype=vectors.dtype_of(first.field(VIEW)),
            fusion=DocumentFusion.load(embeddings.directory("document_fusion")) if fused else None,
        )

    @property
    def cost(self) -> Cost:
        """Of the last call."""
        cost: Cost = self._encoder.cost
        return cost

    def peak(self) -> float:
        """Floating-point operations a second that are possible here."""
        return float(self._encoder.peak())

    def __call__(self, documents: pa.Table) -> Ready:
        """Rows with doc_id, title, topic, content and the features that are known; in order."""
        texts = documents.select(COLUMNS).append_column(schema.CONTENT_HASH, content_hashes(documents))
        tokens, rejected = tokenise(texts, self._prompt)
        lost = pa.array([row["row"] for row in rejected], pa.string())
        kept = documents.filter(pc.invert(pc.is_in(documents["doc_id"], value_set=lost)))
        found = self._encoder.encode(from_columns(tokens))[:, list(self._encoder.views).index(VIEW)]
        # Rounded as it is stored: codes and final embeddings of the stages start from there.
        embeddings = vectors.to_numpy(vectors.to_arrow(vectors.unit(found), dtype=self._dtype))
        codes = beam.encode(embeddings, self._codebooks, beam=self._width)
        if self._fusion is not None:
            embeddings = self._fusion.fuse(kept, embeddings, codes)
        columns = {
            "doc_id": tokens["doc_id"],
            "content_hash": tokens["content_hash"],
            "codes": vectors.to_arrow(codes.astype(np.int32)),
            VIEW: vectors.to_arrow(embeddings, dtype=self._dtype),
        }
        return Ready(pa.table(columns), rejected)
