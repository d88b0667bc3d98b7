"""What training may read: blocks of an artifact's parts, the texts a tokenizer learns from, and the prompts.

Everything here streams: an artifact's table is never held whole.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, UInt64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.models import backbone as backbones
from scalingnote.models import native_tower
from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.config import LookupConfig, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt
from scalingnote.models.sparse_head import SparseHead
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Role, Tower
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.exchange import hash_of

AnyTower = TowerConfig | LookupConfig | TokenWiseConfig
COLUMNS = ["doc_id", "title", "topic", "content"]
# A tokenizer learns nothing new from the far end of long documents, or from the second million of them.
_TOKENIZER_CHARS = 2000
_TOKENIZER_TEXTS = 1_000_000


def read(artifact: Artifact, parts: Iterable[str], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of some parts, in blocks of a few thousand rows."""
    for part in parts:
        yield from artifact.batches(part, columns=columns)


def among(hashes: UInt64[ndarray, " rows"], wanted: UInt64[ndarray, " wanted"]) -> Bool[ndarray, " rows"]:
    """Which of some hashes stand in a sorted list of them."""
    if not len(wanted):
        return np.zeros(len(hashes), dtype=bool)
    place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
    return np.asarray(wanted[place] == hashes)


def tokenizers(towers: dict[str, AnyTower], *, texts: Callable[[], Iterable[str]]) -> dict[str, str]:
    """Tokenizer JSON for each tower that starts from scratch; towers of one vocabulary size share one.

    `texts` is called once per vocabulary size, so that a stream can be read again.
    """
    found = {name: vocabulary(tower) for name, tower in towers.items()}
    sizes = {name: size for name, size in found.items() if size is not None}
    learnt = {size: train_tokenizer(texts(), vocabulary=size) for size in sorted(set(sizes.values()))}
    return {name: learnt[size] for name, size in sizes.items()}


def texts(triplets: Artifact, dataset: Artifact, named: UInt64[ndarray, " named"]) -> Iterator[str]:
    """The text a tokenizer learns from: queries once each, then every field of the documents in `named`.

    `named` are sorted hashes of doc_ids; where they are too many, the smallest ones are a fair sample.
    """
    yield from distinct_queries(triplets, "triplets")
    sampled = named[:_TOKENIZER_TEXTS]
    for batch in dataset.batches("documents", columns=COLUMNS):
        rows = batch.filter(pa.array(among(hash_of(batch["doc_id"]), sampled)))
        for name in ("title", "topic", "content"):
            for text in rows[name].to_pylist():
                yield text[:_TOKENIZER_CHARS]


def distinct_queries(artifact: Artifact, table: str) -> Iterator[str]:
    """The queries of a table, each once; a tokenizer needs no more than the first million of them."""
    seen: set[str] = set()
    for batch in artifact.batches(table, columns=["query"]):
        for query in pc.unique(batch["query"]).to_pylist():
            if query not in seen:
                seen.add(query)
                yield query
                if len(seen) == _TOKENIZER_TEXTS:
                    return


def vocabulary(config: AnyTower) -> int | None:
    """How many tokens a tower's tokenizer learns; None where its checkpoint brings one."""
    if isinstance(config, LookupConfig):
        return config.vocabulary
    return config.backbone.vocabulary if isinstance(config.backbone, Scratch) else None


def prompt(
    config: AnyTower, *, role: Role, tokenizer_json: str | None, sparse: bool = False
) -> QueryPrompt | DocumentPrompt | LookupPrompt:
    """How a tower of this config reads a text, one with a `sparse` head too. No weights are drawn or loaded.

    ConfigError as for the tower itself.
    """
    if isinstance(config, LookupConfig):
        assert tokenizer_json is not None
        return LookupPrompt(Tokenizer.from_str(tokenizer_json), max_length=config.max_length)
    if isinstance(config, TowerConfig) and config.pooling != "placeholders":
        return native_tower.prompt_of(config, role=role)
    with torch.device("meta"):
        if isinstance(config.backbone, Scratch):
            shell = backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=0)
        else:
            assert config.backbone is not None, "a tower without a backbone of its own reads as another does"
            shell = backbones.shell(config.backbone.path)
        # What changes no prompt, and may need a GPU, is left out.
        plain = config.model_copy(update={"lora": None, "attention": "eager"})
        if isinstance(plain, TokenWiseConfig):
            return TokenWise(shell, plain, dim=1).prompt
        return Tower(shell, plain, role=role, dim=1, sparse=SparseHead(None) if sparse else None).prompt
