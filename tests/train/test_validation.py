import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ranks
import tiny
from scalingnote.models.batch import Batch
from scalingnote.models.prompt import TokenRow
from scalingnote.storage.artifact import Draft
from scalingnote.train import validation
from scalingnote.train.config import Losses, TrainConfig, Validation
from scalingnote.train.data import Store
from scalingnote.train.engine import Engine
from scalingnote.train.prepare import prepare
from scalingnote.train.validation import ValidationSample, draw_sample, measure_retrieval, validator

CONFIG = TrainConfig(
    query=tiny.query_tower(), document=tiny.document_tower(), dim=8, losses=Losses(matryoshka=(8,))
)
SAMPLE = Validation(queries=6, documents=40)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("validation")
    dataset = tiny.dataset(str(folder / "dataset"))
    triplets = tiny.triplets(str(folder / "triplets"), dataset)
    return prepare(CONFIG, dataset=dataset, triplets=triplets, folder=str(folder / "store")).store


class BagOfTokens(nn.Module):
    """Embeds a row as a random projection of its tokens: related texts are similar, dropout has an effect."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(500, 24, generator=torch.Generator().manual_seed(0))
        self.table = nn.Parameter(table)
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5)
        self.calls = 0

    def embeddings(self, name: str, rows: Batch) -> Tensor:
        self.calls += 1
        assert not torch.is_grad_enabled()
        rows = rows.to_padded(0)
        assert rows.mask is not None
        out = (self.table[rows.ids] * rows.mask[..., None]).sum(1, keepdim=True)
        out = self.frozen(self.dropout(out))
        return out if name == "query" else torch.cat([torch.randn_like(out), out], dim=1)


def build_validator(store: str, module: nn.Module, config: Validation | None = SAMPLE):
    engine = Engine.__new__(Engine)  # only its module, device and autocast are used
    engine.module, engine.device, engine.precision = module, torch.device("cpu"), contextlib.nullcontext
    settings = CONFIG.model_copy(update={"validation": config, "seed": 3})
    with few_negatives():
        return validator(Store.open(store), engine, settings, views=("title", "summary"), pads=(0, 0))


@contextlib.contextmanager
def few_negatives() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "NEGATIVES", 12)
        yield


def on_one_rank(store: str) -> tuple[dict[str, float], int]:
    torch.manual_seed(0)
    module = BagOfTokens().train()
    validate = build_validator(store, module)
    assert validate is not None
    return validate(), module.calls


# --- the sample ------------------------------------------------------------------------------------------


@few_negatives()
def test_a_seed_determines_the_sample_with_all_positives(store: str):
    opened = Store.open(store)
    sample, again = (draw_sample(opened, SAMPLE, seed=3) for _ in range(2))
    other = draw_sample(opened, SAMPLE, seed=4)
    assert sample is not None
    assert again is not None
    assert other is not None
    assert sample.queries == again.queries
    assert sample.negatives.tolist() == again.negatives.tolist()
    assert sample.queries != other.queries or sample.pool != other.pool
    assert len(sample.queries) == 6
    assert len(sample.pool) == 40
    assert len({tuple(row.ids) for row in sample.pool}) == 40
    for number in range(6):
        negatives = sample.negatives[number].tolist()
        assert len(set(negatives)) == 12
        assert not sample.relevant[number, negatives].any()
        assert sample.relevant[number, sample.positives[number]]
        assert min(negatives) >= 6  # the positives of queries come first, negatives are drawn from the rest


def test_the_size_of_the_store_limits_the_sample(store: str):
    opened = Store.open(store)
    sample = draw_sample(opened, Validation(queries=500, documents=500), seed=0)
    assert sample is not None
    assert len(sample.queries) == len(opened["validation"]) == 8
    assert len(sample.pool) == len(opened["documents"])
    assert sample.negatives.shape == (8, len(sample.pool) - 1)


# --- the measures ----------------------------------------------------------------------------------------


def sample_of(positives: np.ndarray, relevant: np.ndarray, negatives: np.ndarray) -> ValidationSample:
    queries, documents = ([TokenRow([1], [0])] * count for count in relevant.shape)
    return ValidationSample(queries, documents, positives, relevant, negatives)


@given(st.integers(0, 10_000))
def test_measures_equal_their_plain_definitions(seed: int):
    rng = np.random.default_rng(seed)
    queries, pool = rng.normal(size=(5, 4)).astype(np.float32), rng.normal(size=(20, 4)).astype(np.float32)
    relevant = rng.random((5, 20)) < 0.15
    positives = rng.integers(0, 20, 5)
    relevant[np.arange(5), positives] = True
    negatives = np.stack([rng.choice(np.flatnonzero(~row), 4, replace=False) for row in relevant])
    sample = sample_of(positives, relevant, negatives)
    metrics = measure_retrieval(queries, pool, sample, temperature=0.1)
    expected = np.zeros((5, 4))
    for i in range(5):
        cosine = [
            float(q @ d / np.linalg.norm(q) / np.linalg.norm(d))
            for q, d in [(queries[i].astype(float), d.astype(float)) for d in pool]
        ]
        positive, *others = (cosine[c] / 0.1 for c in (positives[i], *negatives[i]))
        ranking = sorted(range(20), key=lambda c: -cosine[c])
        rank = 1 + next(place for place, column in enumerate(ranking) if relevant[i, column])
        expected[i] = (
            -positive + np.log(np.exp([positive, *others]).sum()),
            rank == 1,
            rank <= 10,
            (rank <= 10) / rank,
        )
    np.testing.assert_allclose(list(metrics.values()), expected.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, np.nan])
def test_constant_embeddings_have_a_recall_of_zero(value: float):
    pool = np.full((30, 4), value, np.float32)
    relevant = np.zeros((2, 30), dtype=bool)
    relevant[:, 0] = True
    negatives = np.tile(np.arange(1, 9), (2, 1))
    sample = sample_of(np.zeros(2, np.int64), relevant, negatives)
    metrics = measure_retrieval(pool[:2], pool, sample, temperature=0.001)
    assert metrics["R@10"] == metrics["MRR@10"] == 0.0
    assert np.isnan(value) or metrics["contrastive_entropy"] == pytest.approx(np.log(9))


# --- while training --------------------------------------------------------------------------------------


def test_all_ranks_have_the_numbers_of_one_process(store: str):
    expected, _ = on_one_rank(store)
    results = ranks.run(on_one_rank, store, world=3)  # 40 documents: unequal shares
    assert len({calls for _, calls in results}) == 1  # or a rank would wait forever for sharded weights
    for metrics, _ in results:
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert metrics == results[0][0]


def test_validation_does_not_change_training(store: str):
    module = BagOfTokens().train()
    module.frozen.eval()
    validate = build_validator(store, module)
    assert validate is not None
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = validate()
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert module.dropout.training
    assert not module.frozen.training  # the same as before
    assert torch.is_grad_enabled()
    assert validate() == first  # no dropout
    assert first["R@10"] > 0.5  # queries share words with their documents: the indexed view was used


def test_without_a_split_nothing_is_measured_and_a_line_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    table = triplets.table("triplets")
    table = table.set_column(table.schema.get_field_index("split"), "split", [["train"] * len(table)])
    draft = Draft(str(tmp_path / "all"), kind="triplets", config=tiny.Nothing(), parents={})
    draft.write_table("triplets.parquet", table)
    folder = str(tmp_path / "store")
    prepare(CONFIG, dataset=dataset, triplets=draft.commit(counts={}), folder=folder)
    lines: list[str] = []
    logger = SimpleNamespace(info=lines.append)
    monkeypatch.setattr("scalingnote.train.validation.get_logger", lambda name: logger)
    assert build_validator(folder, BagOfTokens()) is None
    assert lines == ["the triplets have no validation split: nothing is measured in training"]
    assert build_validator(folder, BagOfTokens(), None) is None
    assert len(lines) == 1
