"""The losses equal float64 transcriptions of their equations, on one rank and on two."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ranks
from scalingnote.fuse.config import FuseConfig, FusionLosses
from scalingnote.fuse.job import build
from scalingnote.fuse.networks import Clicks, DocumentInputs, QueryInputs, fusion_loss
from scalingnote.train.engine import rank, world_size

ROWS, GROUP, DIM, LEVELS = 8, 3, 16, 2
CONFIG = FuseConfig.model_validate(
    {
        "losses": {"matryoshka": [8, DIM], "skipped": GROUP - 1},
        "document": {"id_buckets": 32},
        "query": {"history": 3},
        "hide": 0,
    }
)
NO_FEATURES = {"documents": [], "users": []}


def batch(rows: slice = slice(None)) -> Clicks:
    """Build a global batch in which two rows clicked one document, and some rows skipped few documents."""
    rng = np.random.default_rng(0)

    def unit(count: int) -> np.ndarray:
        matrix = rng.standard_normal((count, DIM))
        return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)

    group = rng.integers(10, 50, (ROWS, GROUP))
    group[:, 0] = [0, 1, 2, 1, 3, 4, 5, 6]
    group[2, 1:], group[5, 2] = -1, -1
    queries = {
        "embeddings": unit(ROWS),
        "words": rng.integers(0, 32, (ROWS, 8)),
        "importances": rng.random((ROWS, 8), np.float32),
        "features": np.zeros((ROWS, 0), np.float32),
        "history": rng.integers(-1, 4, (ROWS, 3, LEVELS)),
    }
    documents = {
        "embeddings": unit(ROWS * GROUP),
        "codes": rng.integers(0, 4, (ROWS * GROUP, LEVELS)),
        "buckets": rng.integers(0, 32, ROWS * GROUP),
        "features": np.zeros((ROWS * GROUP, 0), np.float32),
    }
    log_q = np.log(rng.random(ROWS, np.float32))
    log_q[3] = log_q[1]
    of_documents = np.arange(ROWS * GROUP).reshape(ROWS, GROUP)[rows].ravel()
    return Clicks(
        QueryInputs.of(**{name: column[rows] for name, column in queries.items()}),
        DocumentInputs.of(**{name: column[of_documents] for name, column in documents.items()}),
        torch.from_numpy(group[rows]),
        torch.from_numpy(log_q[rows]),
    )


def twin(
    queries: np.ndarray, documents: np.ndarray, clicks: Clicks, losses: FusionLosses
) -> tuple[float, float]:
    """Compute the equation of Yi et al. and the softmax over a session, in loops."""
    group, log_q = clicks.group.numpy(), clicks.log_q.double().numpy()
    batch_loss = skipped_loss = 0.0
    for dim in losses.matryoshka:
        q = queries[:, :dim] / np.linalg.norm(queries[:, :dim], axis=1, keepdims=True)
        d = documents[:, :, :dim] / np.linalg.norm(documents[:, :, :dim], axis=2, keepdims=True)
        for i in range(len(q)):
            corrected = {}
            for j in range(len(q)):
                if j == i or group[j, 0] != group[i, 0]:
                    corrected[j] = q[i] @ d[j, 0] / losses.temperature - log_q[j]
            batch_loss += np.log(sum(np.exp(s - corrected[i]) for s in corrected.values())) / len(q)
            skipped_scores = [
                q[i] @ d[i, g] / losses.temperature for g in range(d.shape[1]) if group[i, g] >= 0
            ]
            skipped_loss += np.log(sum(np.exp(s - skipped_scores[0]) for s in skipped_scores)) / len(q)
    return batch_loss, skipped_loss


def test_losses_equal_their_equations_in_float64():
    clicks = batch()
    queries = clicks.queries.embeddings.double()
    documents = clicks.documents.embeddings.double().unflatten(0, (ROWS, GROUP))
    exact = twin(queries.numpy(), documents.numpy(), clicks, CONFIG.losses)
    loss, parts = fusion_loss(queries.float(), documents.float(), clicks, CONFIG.losses)
    assert [parts["batch"].item(), parts["skipped"].item()] == pytest.approx(exact, rel=1e-5)
    assert loss.item() == pytest.approx(sum(exact), rel=1e-5)


@pytest.mark.parametrize("prefixes", [(8,), (8, DIM, 4 * DIM)])
def test_losses_read_the_complete_embedding_once(prefixes: tuple[int, ...]):
    """This holds for any prefixes: values after the longest prefix would not be trained."""
    config = CONFIG.model_copy(update={"losses": CONFIG.losses.model_copy(update={"matryoshka": prefixes})})
    codebooks = torch.zeros(LEVELS, 4, DIM)
    losses = [build(each, codebooks, NO_FEATURES)(batch())[0].item() for each in (config, CONFIG)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def step(share: int) -> dict[str, torch.Tensor]:
    """Compute loss and gradients of this rank's rows, averaged over ranks."""
    rows = slice(rank() * share, (rank() + 1) * share)
    codebooks = torch.randn(LEVELS, 4, DIM, generator=torch.Generator().manual_seed(0))
    stage = build(CONFIG, codebooks, NO_FEATURES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    loss, parts = stage(batch(rows))
    loss.backward()
    values = {"loss": loss.detach(), **parts} | {n: p.grad for n, p in stage.named_parameters()}
    if dist.is_initialized():
        for value in values.values():
            dist.all_reduce(value)
            value /= world_size()
    return values


@pytest.mark.slow
def test_two_ranks_have_the_loss_and_gradients_of_one():
    one = step(ROWS)
    assert all(value is not None for value in one.values())  # an unused parameter would stop DDP
    (two, other) = ranks.run(step, ROWS // 2, world=2)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(other[name], two[name])
