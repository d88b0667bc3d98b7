"""What training may read: the queries and documents its triplets name, and the tokenizer learnt from them."""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.storage.artifact import Artifact

COLUMNS = ["doc_id", "title", "topic", "content"]
# A tokenizer learns nothing new from the far end of long documents.
_TOKENIZER_CHARS = 2000


def named_documents(dataset: Artifact, triplets: pa.Table) -> pa.Table:
    """The documents that the triplets name, in dataset order; the rest of the pool is never loaded."""
    negatives = pc.list_flatten(triplets["negatives"])
    wanted = pa.concat_arrays([*triplets["positive"].chunks, *negatives.chunks]).unique()
    kept = []
    for batch in dataset.batches("documents", columns=COLUMNS):
        kept.append(batch.filter(pc.is_in(batch["doc_id"], value_set=wanted)))
    return pa.Table.from_batches(kept)


def tokenizers(towers: dict[str, TowerConfig], *, texts: Callable[[], Iterable[str]]) -> dict[str, str]:
    """Tokenizer JSON for each tower that starts from scratch; towers of one vocabulary size share one.

    `texts` is called once per vocabulary size, so that a stream can be read again.
    """
    sizes = {name: t.backbone.vocabulary for name, t in towers.items() if isinstance(t.backbone, Scratch)}
    learnt = {size: train_tokenizer(texts(), vocabulary=size) for size in sorted(set(sizes.values()))}
    return {name: learnt[size] for name, size in sizes.items()}


def texts(triplets: pa.Table, documents: pa.Table) -> Iterator[str]:
    """The text a tokenizer learns from: queries once each, then every field of the documents."""
    yield from pc.unique(triplets["query"]).to_pylist()
    for name in ("title", "topic", "content"):
        for batch in documents.select([name]).to_batches():
            for text in batch[name].to_pylist():
                yield text[:_TOKENIZER_CHARS]
