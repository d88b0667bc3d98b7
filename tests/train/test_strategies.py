"""Under every strategy, on several ranks: the gradients and weights of one process with the whole batch."""

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

ROWS = 12  # of the global batch: divides over 2 and 3 ranks
STEPS = 2
CPU = torch.device("cpu")
PLAIN, CHECKPOINTED = Memory(), Memory(gradient_checkpointing=True)
CACHED = Memory(grad_cache=GradCache(query_rows=3, document_rows=2), gradient_checkpointing=True)


@dataclass(frozen=True)
class Job:
    """What one engine is asked to do."""

    strategy: Ddp | Fsdp2 | DeepSpeed
    memory: Memory = PLAIN
    base: str | None = None  # of LoRA; None: all weights learn
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
        """`long`: towers for long queries, whose attention depends on where a token is."""
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
            share_base=True,
        )
        if long:
            for name, weight in self.towers.query.named_parameters():
                if "q_proj.weight" in name or "k_proj.weight" in name:
                    weight.data *= 25.0  # tokens differ in attention, and none has all of it
                elif "v_proj.weight" in name or "o_proj.weight" in name:
                    weight.data *= 10.0  # attention counts beside the token itself

    def encode(self, name: str, rows: Batch) -> dict[str, Tensor]:
        return {name: self.towers.encode(name, rows).float()}

    def losses(self, batch: Pairs, encode: Encode) -> WeightedLosses:
        queries = encode("query", batch.queries)["query"][:, 0]
        documents = encode("document", batch.documents)["document"].mean(1)
        queries, documents = (nn.functional.normalize(e, dim=-1) for e in (queries, documents))
        scores = queries @ gather(documents).T / 0.2
        loss = nn.functional.cross_entropy(scores, torch.arange(len(queries)) + rank() * len(queries))
        return {"contrastive": loss}, {"contrastive": loss, "queries": queries}


def share(made: Contrast | StageOne, step: int) -> Any:
    """This rank's rows of a step; a process alone gets all of them."""
    size = ROWS // world_size()
    if isinstance(made, StageOne):
        own = range(rank() * size, (rank() + 1) * size)
        return light.triplets(made, own, of=ROWS, packed=True)
    start = step * ROWS + rank() * size
    documents = tiny.document_rows()[start : start + size]
    columns = [[row[name] for row in documents] for name in ("title", "topic", "content")]
    queries = made.towers.query.prompt.rows([row["content"][:20] for row in documents])
    encoded = made.towers.document.prompt.rows(*columns)
    return Pairs(
        batch.collate(queries, pad=made.towers.query.pad),
        batch.collate(encoded, pad=made.towers.document.pad),
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


def made(job: Job) -> Engine:
    lora = Lora(rank=2) if job.base else None
    module = light.stage(lora=lora) if job.light else Contrast(base=job.base)
    return build(module, schedule=schedule(job), device=CPU)


def one_step(engine: Engine, step: int, job: Job, found: dict[str, Any]) -> None:
    engine.module.train()
    pairs = share(engine.module, step)
    if job.memory.grad_cache is not None:
        cached_backward(engine, pairs, config=job.memory.grad_cache)
    else:
        engine.backward(engine(pairs)[0])
    if step == 0:
        found["gradients"] = gradients(engine, job)
    found["norms"].append(float(engine.step(job.learning_rate)))


def gradients(engine: Engine, job: Job) -> dict[str, Tensor]:
    """Whole gradients after the backward pass, as far as the strategy shows them."""
    sharded = job.strategy if isinstance(job.strategy, DeepSpeed) else None
    if sharded and job.memory.grad_cache and (sharded.stage < 3 or sharded.offload):
        return {}  # they settle the gradients of several backward passes within the step
    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif sharded:
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(parameter).reshape(getattr(parameter, "ds_shape", parameter.shape))
        found[name] = gradient.clone()
    return found


@steady()
def train(job: Job, folder: Path | None = None) -> dict[str, Any]:
    """Gradients of the first step, weights after the first and the last, all gradient norms.

    With a folder, also the weights of a second run that starts from a checkpoint after the first step.
    """
    engine, found = made(job), {"norms": []}
    checkpoints = Checkpoints(str(folder)) if folder else None
    for step in range(STEPS):
        one_step(engine, step, job, found)
        if step == 0:
            found["first"] = engine.weights()
            if checkpoints:
                checkpoints.save(1, engine, {"from": "here"})
    found["last"] = engine.weights()
    if checkpoints:
        again = made(job)
        restored = checkpoints.restore(again)
        assert restored is not None
        assert restored.notes == {"from": "here"}
        found["restored"] = again.weights()
        for step in range(1, STEPS):
            one_step(again, step, job, {"norms": []})
        found["resumed"] = again.weights()
    return found


def train_all(jobs: dict[str, Job], folder: str | None) -> dict[str, dict[str, Any]]:
    return {name: train(job, Path(folder, name) if folder else None) for name, job in jobs.items()}


@lru_cache
def alone(base: str | None = None, of_light: bool = False) -> dict[str, Any]:
    return train(Job(Ddp(), base=base, light=of_light))


def compare(found: dict[str, Any], job: Job) -> None:
    expected = alone(job.base, job.light)
    torch.testing.assert_close(found["norms"], expected["norms"], atol=1e-5, rtol=1e-4)
    for what in ("gradients", "first", "last"):
        assert set(found[what]) == set(expected[what]) or not found[what]
        for name, value in found[what].items():
            near = {"atol": 1e-5 if job.light else 5e-6, "rtol": 1e-4}
            torch.testing.assert_close(value, expected[what][name], **near, msg=f"{what} {name}")


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
    """All jobs in one pair of processes: they take longer to start than to train."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return ranks.run(train_all, ONE_BATCH | HALF, str(folder), world=2)[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONE_BATCH)
def test_two_ranks_equal_one_process(on_two: dict[str, dict[str, Any]], name: str):
    compare(on_two[name], ONE_BATCH[name])


@pytest.mark.parametrize("name", ONE_BATCH | HALF)
def test_a_checkpoint_continues_bit_for_bit(on_two: dict[str, dict[str, Any]], name: str):
    found = on_two[name]
    for left, right in (("restored", "first"), ("resumed", "last")):
        assert all(torch.equal(found[left][key], value) for key, value in found[right].items())


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_nearly_as_good(on_two: dict[str, dict[str, Any]], name: str):
    assert on_two[name]["norms"] == pytest.approx(alone()["norms"], rel=0.2)


LONG = 512  # tokens; bfloat16 frequencies of a base of 10^6 are off by 0.6 radians there


def agreement(jobs: dict[str, Job]) -> dict[str, tuple[float, float]]:
    """The largest cosine distance between long queries as they are trained and as they are encoded.

    The second number is that with rounded frequencies, as a cast of all buffers leaves them.
    """
    found = {}
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
            trained = engine(pairs)[1]["queries"].float()
        weights = engine.weights()
        if rank() == 0:
            fresh = Contrast(long=True)
            load_weights(fresh, weights)
            right = distance(trained, fresh, rows)
            frequencies = fresh.towers.query.backbone.rotary_emb.inv_freq
            frequencies.copy_(frequencies.bfloat16())
            found[name] = right, distance(trained, fresh, rows)
    return found


def distance(trained: Tensor, made: Contrast, rows: list[TokenRow]) -> float:
    encoded = torch.from_numpy(Encoder(made.towers.query, precision="bfloat16").encode(rows)[:, 0])
    return float(1 - nn.functional.cosine_similarity(trained, encoded).min())


@pytest.mark.timeout(600)
def test_what_is_trained_is_what_is_encoded_at_every_position():
    # A small step: what gradients near zero make of a large one would hide the positions.
    jobs = {name: Job(each, precision="bfloat16", learning_rate=1e-5) for name, each in STRATEGIES.items()}
    gaps = ranks.run(agreement, jobs, world=2)[0]
    assert set(gaps) == set(STRATEGIES)
    assert max(right for right, _ in gaps.values()) < 1e-3 < min(rounded for _, rounded in gaps.values()), (
        gaps
    )


@pytest.mark.timeout(600)
def test_three_ranks_equal_one_process():
    jobs = {name: Job(STRATEGIES[name], CACHED) for name in ("ddp", "fsdp2")}
    jobs |= {f"{name}, plain": Job(STRATEGIES[name]) for name in ("ddp", "fsdp2")}
    for name, found in ranks.run(train_all, jobs, None, world=3)[0].items():
        compare(found, jobs[name])


def write(folder: str) -> None:
    job = Job(Fsdp2())
    engine = made(job)
    one_step(engine, 0, job, {"norms": []})
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, engine, {})
    checkpoints.wait()


def read(folder: str, job: Job) -> dict[str, Tensor] | None:
    engine = made(job)
    assert Checkpoints(folder).restore(engine) is not None
    return engine.weights()


def test_shards_are_cut_anew_for_another_number_of_ranks_and_for_ddp(tmp_path: Path):
    ranks.run(write, str(tmp_path), world=3)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 3
    sharded = ranks.run(read, str(tmp_path), Job(Fsdp2()), world=2)[0]
    whole = read(str(tmp_path), Job(Ddp()))
    assert whole is not None
    for name, value in whole.items():
        assert torch.equal(value, sharded[name])


def test_frozen_weights_are_held_once_in_the_format_of_products():
    engine = made(Job(Ddp(), base="full", precision="bfloat16"))
    towers = engine.module.towers
    layers = [
        [p for name, p in tower.backbone.named_parameters() if "base_layer.weight" in name]
        for tower in (towers.query, towers.document)
    ]
    assert len(layers[0]) == 7
    assert [id(p) for p in layers[0]] == [id(p) for p in layers[1]]
    assert {p.dtype for p in layers[0]} == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in engine.module.parameters() if p.requires_grad)


def test_what_cannot_be_had_is_said():
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


def test_deepspeed_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch):
    from scalingnote.train import strategies

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(ConfigError, match="needs the environment variable DS_ACCELERATOR=cpu"):
        strategies._import_deepspeed(CPU)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'scalingnote\[gpu\]'"):
        strategies._import_deepspeed(CPU)
