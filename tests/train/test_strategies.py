"""Every strategy on several ranks: the gradients and weights of one process with the entire batch."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from stages import learnt, steady
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import light
import ranks
import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.encode.encoder import Encoder
from scalingnote.models import batch, dual_encoder
from scalingnote.models.batch import Batch
from scalingnote.models.config import Lora
from scalingnote.models.prompt import TokenRow
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, GradCache, Memory, Optimizer, Ranks, Schedule
from scalingnote.train.engine import (
    Encode,
    Engine,
    Objective,
    WeightedLosses,
    gather,
    load_weights,
    rank,
    world_size,
)
from scalingnote.train.grad_cache import cached_backward
from scalingnote.train.objective import StageOne
from scalingnote.train.strategies import ZeroEngine, build

pytestmark = pytest.mark.slow

ROWS = 12  # of the global batch: divisible by 2 and 3 ranks
STEPS = 2
CPU = torch.device("cpu")
PLAIN, CHECKPOINTED = Memory(), Memory(gradient_checkpointing=True)
CACHED = Memory(grad_cache=GradCache(query_rows=3, document_rows=2), gradient_checkpointing=True)


@dataclass(frozen=True)
class Job:
    """Settings of one engine."""

    strategy: Ddp | Fsdp2 | DeepSpeed
    memory: Memory = PLAIN
    base: str | None = None  # of LoRA; None: all weights are trained
    precision: str = "float32"
    learning_rate: float = 1e-2
    light: bool = False  # LightRetriever in place of two towers


@dataclass
class Pairs:
    """A batch."""

    queries: Batch
    documents: Batch


class Contrast(Objective):
    """In-batch softmax over all ranks.

    Towers of two architectures, or two LoRA towers on one base, wide enough for a block of nf4.
    """

    def __init__(self, *, base: str | None = None, long: bool = False) -> None:
        """`long`: towers for long queries, with attention that depends on the position of a token."""
        super().__init__()
        adapter = {"lora": Lora(rank=2, base=base) if base else None}
        wide = tiny.CAUSAL.model_copy(update={"hidden": 64, "intermediate": 128} if base else {})
        narrow = tiny.query_tower(wide.model_copy(update={"max_positions": LONG + 8}) if long else wide)
        self.towers = dual_encoder.build(
            narrow.model_copy(update=adapter | ({"max_length": LONG} if long else {})),
            tiny.document_tower(wide if base else tiny.BIDIRECTIONAL).model_copy(update=adapter),
            dim=8,
            tokenizers={"query": learnt(), "document": learnt()},
            seed=0,
        )
        if long:
            for name, weight in self.towers.query.named_parameters():
                if "q_proj.weight" in name or "k_proj.weight" in name:
                    weight.data *= 25.0  # attention differs between tokens, and no token gets all of it
                elif "v_proj.weight" in name or "o_proj.weight" in name:
                    weight.data *= 10.0  # attention has weight in comparison with the token itself

    def encode(self, name: str, rows: Batch) -> dict[str, Tensor]:
        return {name: self.towers.encode(name, rows).float()}

    def losses(self, batch: Pairs, encode: Encode) -> WeightedLosses:
        queries = encode("query", batch.queries)["query"][:, 0]
        documents = encode("document", batch.documents)["document"].mean(1)
        queries, documents = (nn.functional.normalize(e, dim=-1) for e in (queries, documents))
        scores = queries @ gather(documents).T / 0.2
        loss = nn.functional.cross_entropy(scores, torch.arange(len(queries)) + rank() * len(queries))
        return {"contrastive": loss}, {"contrastive": loss, "queries": queries}


def share(module: Contrast | StageOne, step: int) -> Any:
    """Build this rank's rows of a step; a single process gets all of them."""
    size = ROWS // world_size()
    if isinstance(module, StageOne):
        rows = range(rank() * size, (rank() + 1) * size)
        return light.triplets(module, rows, of=ROWS, packed=True)
    start = step * ROWS + rank() * size
    documents = tiny.document_rows()[start : start + size]
    columns = [[row[name] for row in documents] for name in ("title", "topic", "content")]
    queries = module.towers.query.prompt.rows([row["content"][:20] for row in documents])
    encoded = module.towers.document.prompt.rows(*columns)
    return Pairs(
        batch.collate(queries, pad=module.towers.query.pad),
        batch.collate(encoded, pad=module.towers.document.pad),
    )


def schedule(job: Job) -> Schedule:
    return Schedule(
        strategy=job.strategy,
        optimizer=Optimizer(peak_lr=1e-2, weight_decay=0.1),
        global_batch=ROWS,
        memory=job.memory,
        precision=job.precision,  # type: ignore[arg-type]
        resources=Ranks(workers=world_size()),
    )


def build_engine(job: Job) -> Engine:
    lora = Lora(rank=2) if job.base else None
    module = light.stage(lora=lora) if job.light else Contrast(base=job.base)
    return build(module, schedule=schedule(job), device=CPU)


def one_step(engine: Engine, step: int, job: Job, results: dict[str, Any]) -> None:
    engine.module.train()
    pairs = share(engine.module, step)
    if job.memory.grad_cache is not None:
        cached_backward(engine, pairs, config=job.memory.grad_cache)
    else:
        engine.backward(engine(pairs)[0])
    if step == 0:
        results["gradients"] = gradients(engine, job)
    results["norms"].append(float(engine.step(job.learning_rate)))


def gradients(engine: Engine, job: Job) -> dict[str, Tensor]:
    """Return unsharded gradients after the backward pass, as far as the strategy gives access to them."""
    sharded = job.strategy if isinstance(job.strategy, DeepSpeed) else None
    if sharded and job.memory.grad_cache and (sharded.stage < 3 or sharded.offload):
        return {}  # they complete the gradients of several backward passes in the step
    full_gradients = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif sharded:
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(parameter).reshape(getattr(parameter, "ds_shape", parameter.shape))
        full_gradients[name] = gradient.clone()
    return full_gradients


@steady()
def train(job: Job, folder: Path | None = None) -> dict[str, Any]:
    """Return gradients of the first step, weights after the first and the last, and all gradient norms.

    With a folder, return also the weights of a second run that starts from a checkpoint after the first step.
    """
    engine, results = build_engine(job), {"norms": []}
    checkpoints = Checkpoints(str(folder)) if folder else None
    for step in range(STEPS):
        one_step(engine, step, job, results)
        if step == 0:
            results["first"] = engine.weights()
            if checkpoints:
                checkpoints.save(1, engine, {"from": "here"})
    results["last"] = engine.weights()
    if checkpoints:
        second = build_engine(job)
        restored = checkpoints.restore(second)
        assert restored is not None
        assert restored.notes == {"from": "here"}
        results["restored"] = second.weights()
        for step in range(1, STEPS):
            one_step(second, step, job, {"norms": []})
        results["resumed"] = second.weights()
    return results


def train_all(jobs: dict[str, Job], folder: str | None) -> dict[str, dict[str, Any]]:
    return {name: train(job, Path(folder, name) if folder else None) for name, job in jobs.items()}


@lru_cache
def one_process(base: str | None = None, of_light: bool = False) -> dict[str, Any]:
    return train(Job(Ddp(), base=base, light=of_light))


def compare(results: dict[str, Any], job: Job) -> None:
    expected = one_process(job.base, job.light)
    torch.testing.assert_close(results["norms"], expected["norms"], atol=1e-5, rtol=1e-4)
    for part in ("gradients", "first", "last"):
        assert set(results[part]) == set(expected[part]) or not results[part]
        for name, value in results[part].items():
            near = {"atol": 1e-5 if job.light else 5e-6, "rtol": 1e-4}
            torch.testing.assert_close(value, expected[part][name], **near, msg=f"{part} {name}")


STRATEGIES = {
    "ddp": Ddp(),
    "fsdp2": Fsdp2(),
    "zero-1": DeepSpeed(stage=1),
    "zero-2": DeepSpeed(stage=2),
    "zero-3": DeepSpeed(stage=3),
}
ONE_BATCH = {
    **{f"{name}, checkpointed": Job(strategy, CHECKPOINTED) for name, strategy in STRATEGIES.items()},
    **{f"{name}, cached": Job(strategy, CACHED) for name, strategy in STRATEGIES.items()},
    **{f"{name}, lora": Job(STRATEGIES[name], CACHED, base="full") for name in ("ddp", "fsdp2")},
    "zero-3, lora": Job(DeepSpeed(stage=3), base="full"),
    "ddp, int8": Job(Ddp(), base="int8"),
    "ddp, nf4": Job(Ddp(), CACHED, base="nf4"),
    "fsdp2, int8": Job(Fsdp2(), CACHED, base="int8"),
    "fsdp2, nf4": Job(Fsdp2(), CHECKPOINTED, base="nf4"),
    "fsdp2, kept": Job(Fsdp2(reshard=False, offload=True)),
    "zero-2, offloaded": Job(DeepSpeed(stage=2, offload=True), CACHED),
    "zero-3, offloaded": Job(DeepSpeed(stage=3, offload=True), CACHED),
    **{f"{name}, light": Job(STRATEGIES[name], light=True) for name in ("ddp", "fsdp2", "zero-2", "zero-3")},
    **{f"{name}, light, cached": Job(STRATEGIES[name], CACHED, light=True) for name in ("fsdp2", "zero-3")},
    **{
        f"{name}, light, lora": Job(STRATEGIES[name], base="full", light=True) for name in ("fsdp2", "zero-3")
    },
    "ddp, light, cached, lora": Job(Ddp(), CACHED, base="full", light=True),
}
HALF = {f"{name}, half": Job(STRATEGIES[name], precision="bfloat16") for name in ("ddp", "fsdp2", "zero-3")}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run all jobs in one pair of processes: these take longer to start than to train."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return ranks.run(train_all, ONE_BATCH | HALF, str(folder), world=2)[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONE_BATCH)
def test_two_ranks_compute_the_same_as_one_process(on_two: dict[str, dict[str, Any]], name: str):
    compare(on_two[name], ONE_BATCH[name])


@pytest.mark.parametrize("name", ONE_BATCH | HALF)
def test_a_restored_run_is_bit_identical(on_two: dict[str, dict[str, Any]], name: str):
    results = on_two[name]
    for left, right in (("restored", "first"), ("resumed", "last")):
        assert all(torch.equal(results[left][key], value) for key, value in results[right].items())


@pytest.mark.parametrize("name", HALF)
def test_half_precision_has_nearly_the_same_gradient_norms(on_two: dict[str, dict[str, Any]], name: str):
    assert on_two[name]["norms"] == pytest.approx(one_process()["norms"], rel=0.2)


LONG = 512  # tokens; bfloat16 frequencies of a base of 10^6 are off by 0.6 radians there


def agreement(jobs: dict[str, Job]) -> dict[str, tuple[float, float]]:
    """Compute the largest cosine distance between long queries as trained and as encoded.

    The second number is that with rounded frequencies, the result of a cast of all buffers.
    """
    distances = {}
    for name, job in jobs.items():
        module = Contrast(long=True)
        engine = build(module, schedule=schedule(job), device=CPU)
        one_step(engine, 0, job, {"norms": []})
        engine.module.eval()
        texts = [" ".join([row["content"]] * 40) for row in tiny.document_rows()[: ROWS // world_size()]]
        rows = module.towers.query.prompt.rows(texts)
        assert {len(row.ids) for row in rows} == {LONG}
        pairs = share(module, 1)
        pairs.queries = batch.collate(rows, pad=module.towers.query.pad)
        with torch.no_grad():
            trained_queries = engine(pairs)[1]["queries"].float()
        weights = engine.weights()
        if rank() == 0:
            target = Contrast(long=True)
            load_weights(target, weights)
            exact = distance(trained_queries, target, rows)
            frequencies = target.towers.query.backbone.rotary_emb.inv_freq
            frequencies.copy_(frequencies.bfloat16())
            distances[name] = exact, distance(trained_queries, target, rows)
    return distances


def distance(trained: Tensor, module: Contrast, rows: list[TokenRow]) -> float:
    encoded = torch.from_numpy(Encoder(module.towers.query, precision="bfloat16").encode(rows)[:, 0])
    return float(1 - nn.functional.cosine_similarity(trained, encoded).min())


@pytest.mark.timeout(600)
def test_training_and_encoding_agree_at_every_position():
    # A small step: the effects of gradients near zero in a large step would hide the positions.
    jobs = {
        name: Job(strategy, precision="bfloat16", learning_rate=1e-5) for name, strategy in STRATEGIES.items()
    }
    gaps = ranks.run(agreement, jobs, world=2)[0]
    assert set(gaps) == set(STRATEGIES)
    assert max(exact for exact, _ in gaps.values()) < 1e-3 < min(rounded for _, rounded in gaps.values()), (
        gaps
    )


@pytest.mark.timeout(600)
def test_three_ranks_compute_the_same_as_one_process():
    jobs = {name: Job(STRATEGIES[name], CACHED) for name in ("ddp", "fsdp2")}
    jobs |= {f"{name}, plain": Job(STRATEGIES[name]) for name in ("ddp", "fsdp2")}
    for name, results in ranks.run(train_all, jobs, None, world=3)[0].items():
        compare(results, jobs[name])


def write(folder: str) -> None:
    job = Job(Fsdp2())
    engine = build_engine(job)
    one_step(engine, 0, job, {"norms": []})
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, engine, {})
    checkpoints.wait()


def read(folder: str, job: Job) -> dict[str, Tensor] | None:
    engine = build_engine(job)
    assert Checkpoints(folder).restore(engine) is not None
    return engine.weights()


def test_other_numbers_of_ranks_and_ddp_read_the_shards(tmp_path: Path):
    ranks.run(write, str(tmp_path), world=3)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 3
    sharded = ranks.run(read, str(tmp_path), Job(Fsdp2()), world=2)[0]
    unsharded = read(str(tmp_path), Job(Ddp()))
    assert unsharded is not None
    for name, value in unsharded.items():
        assert torch.equal(value, sharded[name])


def test_frozen_weights_are_shared_in_the_compute_dtype():
    engine = build_engine(Job(Ddp(), base="full", precision="bfloat16"))
    towers = engine.module.towers
    layers = [
        [p for name, p in tower.backbone.named_parameters() if "base_layer.weight" in name]
        for tower in (towers.query, towers.document)
    ]
    assert len(layers[0]) == 7
    assert [id(p) for p in layers[0]] == [id(p) for p in layers[1]]
    assert {p.dtype for p in layers[0]} == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in engine.module.parameters() if p.requires_grad)


def test_unsupported_combinations_raise_errors():
    with pytest.raises(ConfigError, match=r"lora\.base int8 and nf4 need ddp or fsdp2"):
        ZeroEngine(Contrast(base="int8"), DeepSpeed(), schedule=Schedule(), device=CPU)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs a GPU, found cpu"):
        build(
            Contrast(),
            schedule=Schedule(optimizer=Optimizer(kind="adamw_8bit"), precision="float32"),
            device=CPU,
        )
    with pytest.raises(ValidationError, match="cannot step on the shards of fsdp2"):
        Schedule(strategy=Fsdp2(), optimizer=Optimizer(kind="adamw_8bit"))


def test_missing_deepspeed_raises_errors_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    from scalingnote.train import strategies

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(ConfigError, match="needs the environment variable DS_ACCELERATOR=cpu"):
        strategies._import_deepspeed(CPU)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'scalingnote\[gpu\]'"):
        strategies._import_deepspeed(CPU)
