"""Programs of test_elastic's drivers, each in its own process, and functions that run in Ray's workers.

A worker imports this file. Imports that it does not need are inside the functions, because they take seconds
in each process.
"""

import itertools
import sys
import time
from functools import partial
from pathlib import Path

import tiny
from scalingnote.encode.config import EncodeConfig, Fleet
from scalingnote.storage.artifact import open_artifact
from scalingnote.train.config import DataAccess, Losses, Optimizer, Ranks, TrainConfig

# Step at which the first groups of ranks wait until their number changes: rank 0 before it, the others in it.
# Each group makes its own checkpoint before, and runs more steps than that.
WAITS_AT = {1: 7, 2: 18}
CONFIG = TrainConfig(
    query=tiny.query_tower(),
    document=tiny.document_tower(),
    dim=8,
    losses=Losses(matryoshka=(8,)),
    optimizer=Optimizer(
        peak_lr=2e-3
    ),  # at higher rates a rounding error of 1e-6 grows to a tenth of the loss
    global_batch=8,
    epochs=3.0,
    precision="float32",
    validation=None,
    checkpoint_every=5,
    data=DataAccess(copy_limit_gb=0),
    resources=Ranks(workers=2, min_workers=1, gpus_per_worker=1),
)


def worlds(folder: Path) -> list[int]:
    """Read the number of ranks of its group, for each rank that started."""
    notes = folder / "worlds"
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def groups(folder: Path) -> list[int]:
    """List the numbers of ranks, without repetitions in a row."""
    return [ranks for ranks, _ in itertools.groupby(worlds(folder))]


class CountedEncoder:
    """Encoder that notes each part that it encodes."""

    def __init__(self, towers, token_budget: int, *, notes: str) -> None:
        from scalingnote.encode import engines

        self._encoder, self._notes = engines.load_document_encoder(towers, token_budget), notes

    def __getattr__(self, name: str):
        return getattr(self._encoder, name)

    def encode_with_cost(self, *rows, **options):
        time.sleep(0.3)
        with Path(self._notes).open("a") as file:
            file.write("part\n")
        return self._encoder.encode_with_cost(*rows, **options)


class PatientEncoder(CountedEncoder):
    """Encoder that notes its node, and encodes nothing before two nodes are noted."""

    def __init__(self, towers, token_budget: int, *, notes: str) -> None:
        import ray

        super().__init__(towers, token_budget, notes=notes)
        self._nodes = Path(notes).with_name("nodes")
        self._nodes.mkdir(exist_ok=True)
        (self._nodes / ray.get_runtime_context().get_node_id()).touch()

    def encode_with_cost(self, *rows, **options):
        while len(list(self._nodes.iterdir())) < 2:
            time.sleep(0.1)
        return super().encode_with_cost(*rows, **options)


def noted_rank(rank: int, world: int, *, prepare_rank, folder: str):
    import torch

    from scalingnote.train import job

    with (Path(folder) / "worlds").open("a") as file:
        file.write(f"{world}\n")
    waits_at = WAITS_AT.get(len(groups(Path(folder)))) if rank == 0 else None
    training = prepare_rank(rank, world)

    def waited(step: int):
        while step == waits_at:
            time.sleep(0.1)
        return training.batches(step)

    job.get_device = lambda: torch.device("cpu")
    return training._replace(batches=waited)


def parents(folder: Path) -> dict[str, str]:
    return {name: str(folder / name) for name in ("dataset", "triplets")}


def connect(nodes_wait_s: float = 0.0) -> None:
    """Join the cluster; make Ray Data and Ray Train look for new nodes every second, not every 20 seconds."""
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator

    from scalingnote.core import cluster

    class Quick(coordinator._AutoscalingCoordinatorActor):
        TICK_INTERVAL_S = 1

    cluster.connect(nodes_wait_s=nodes_wait_s)
    coordinator._AutoscalingCoordinatorActor = Quick
    coordinator.get_or_create_autoscaling_coordinator()


def train(folder: Path) -> None:
    import ray.train.torch

    from scalingnote.train import job

    class GlooTrainer(ray.train.torch.TorchTrainer):
        """Simulated GPUs cannot use NCCL, which Ray Train chooses for ranks with GPUs."""

        def __init__(self, *args, torch_config=None, **kwargs) -> None:
            super().__init__(*args, torch_config=ray.train.torch.TorchConfig(backend="gloo"), **kwargs)

    job.RESIZE_INTERVAL_S = 2.0
    launch = job.launch
    job.TorchTrainer = GlooTrainer
    job.launch = lambda prepare_rank, run: launch(
        partial(noted_rank, prepare_rank=prepare_rank, folder=str(folder)), run
    )
    job.run(CONFIG, **parents(folder), output=str(folder / "trained"))


def encode(folder: Path, encoder: type = CountedEncoder, *, min_workers: int | None = None) -> None:
    from scalingnote.encode import documents

    fleet = Fleet(workers=2, gpus_per_worker=1, min_workers=min_workers)
    documents.encode_documents(
        EncodeConfig(token_budget=2048, resources=fleet),
        str(folder / "dataset"),
        open_artifact(str(folder / "towers"), kind="dual_encoder"),
        str(folder / "encoded"),
        load_encoder=partial(encoder, notes=str(folder / "calls")),
    )


def main(program: str, folder: str) -> None:
    if program == "grow":
        connect(nodes_wait_s=120)
        encode(Path(folder), PatientEncoder, min_workers=1)
        return
    connect()
    {"train": train, "encode": encode}[program](Path(folder))


if __name__ == "__main__":
    from elastic_driver import main  # by the name under which workers find it

    main(*sys.argv[1:])
