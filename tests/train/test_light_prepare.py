"""LightRetriever from triplets to search: tokens for its towers, and search by table and by counts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from stages import mapped_batches

import light
import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.models.config import LookupConfig, TokenWiseConfig
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import Losses, Schedule, Sparse, TrainConfig
from scalingnote.train.data import Order, Store
from scalingnote.train.job import build_stage_one
from scalingnote.train.objective import TripletBatches
from scalingnote.train.prepare import PreparedStore, prepare

STEPS = 60
CONFIG = TrainConfig(
    query=TokenWiseConfig(max_length=16, instruction="find: ", storage="float32"),
    document=light.document_tower(),
    dim=light.DIM,
    losses=Losses(temperature=0.1, bidirectional=False, alpha=0, matryoshka=(light.DIM,)),
    sparse=Sparse(),
    align=True,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.dataset(str(tmp_path_factory.mktemp("dataset") / "dataset"))


@pytest.fixture(scope="module")
def prepared(dataset: Artifact, tmp_path_factory: pytest.TempPathFactory) -> PreparedStore:
    folder = tmp_path_factory.mktemp("prepared")
    triplets = tiny.triplets(str(folder / "triplets"), dataset)
    return prepare(CONFIG, dataset=dataset, triplets=triplets, folder=str(folder / "store"))


def batches(prepared: PreparedStore) -> TripletBatches:
    order = Order(Schedule(global_batch=24), prepared.sizes)
    return mapped_batches(prepared.store, order, steps=STEPS)


def test_a_batch_holds_tokens_terms_and_spans(prepared: PreparedStore):
    module, batch = build_stage_one(CONFIG, prepared.tokenizers), batches(prepared)(3)
    assert (batch.step.item(), batch.steps.item()) == (3, STEPS)
    ids, lengths = batch.queries.flat()
    rows = [part.tolist() for part in ids.split(lengths.tolist())]
    terms = [[term for term in row if term >= 0] for row in batch.terms.tolist()]
    # Both towers have one tokenizer here, and the query tower adds nothing; terms are read after a space.
    decode = module.towers.query.prompt.tokenizer.decode
    assert list(map(decode, terms)) == [f" {decode(row)}" for row in rows]
    assert max(map(len, terms)) <= batch.terms.shape[1] == Store.open(prepared.store).facts["terms"]
    assert batch.documents.positions.shape[1] == module.towers.document.prompt.width


def test_a_lookup_table_can_be_trained_without_a_backbone(dataset: Artifact, tmp_path: Path):
    config = CONFIG.model_copy(update={"query": LookupConfig(max_length=16), "align": False, "sparse": None})
    prepared = prepare(
        config,
        dataset=dataset,
        triplets=tiny.triplets(str(tmp_path / "triplets"), dataset),
        folder=str(tmp_path / "store"),
    )
    module = build_stage_one(config, prepared.tokenizers)
    loss, parts = module(batches(prepared)(0))
    loss.backward()
    assert set(parts) == {"contrastive", "margin"}
    assert module.towers.query.table.grad.abs().sum() > 0
    assert batches(prepared)(0).terms is None


def test_training_improves_search_by_table_and_by_counts(prepared: PreparedStore, tmp_path: Path):
    torch.manual_seed(0)
    module, source = build_stage_one(CONFIG, prepared.tokenizers), batches(prepared)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss, _ = module(source(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    module.eval().towers.save(tmp_path)
    documents = tiny.document_rows()
    encoder = Encoder.load(tmp_path / "document", precision="float32")
    encoding = encoder.encode_with_cost(encoder.document_rows(pa.Table.from_pylist(documents)))
    embeddings = arrow.l2_normalize(encoding.embeddings[:, encoder.views.index("summary")])
    texts = [row["title"] for row in documents]
    cheap = arrow.l2_normalize(QueryEncoder(tmp_path / "query").encode_queries(texts))
    by_table = np.argsort(-(cheap @ embeddings.T), axis=1)[:, :10]
    terms = [
        dict(zip(t, i, strict=True))
        for t, i in zip(*(c.to_pylist() for c in encoding.terms.columns()), strict=True)
    ]
    query_terms = SparseQuery.load(tmp_path / "sparse_query").tokens(texts)
    scores = np.array([[sum(doc.get(t, 0.0) for t in row) for doc in terms] for row in query_terms])
    by_counts = np.argsort(-scores, axis=1)[:, :10]
    chance = 10 / len(documents)
    for ranking in (by_table, by_counts):
        assert np.mean([i in row for i, row in enumerate(ranking)]) > 2 * chance
