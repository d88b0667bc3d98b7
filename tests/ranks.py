"""Runs of a function on several ranks, each a separate process that communicates through gloo."""

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 240.0


def run(work: Callable[..., Any], *args: Any, world: int, timeout: float = TIMEOUT) -> list[Any]:
    """Run ``work(*args)`` on each of `world` ranks and return the results; raise a rank's error here.

    `work` must be importable (a plain function of a test file). The error is the first one, with its trace:
    other ranks wait for the one that failed, and are killed together with it. Ranks are also killed after
    `timeout` seconds.
    """
    # A server imports the common modules once and forks the ranks: an import takes longer than most tests.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers", "peft", "ray.train.torch"]
    )
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(rank, world, folder, timeout, sender, work, args))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, deadline=time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], *, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = list(pipes)
    while waiting:
        ready = wait(waiting, timeout=deadline - time.monotonic())
        assert ready, f"ranks {sorted(pipes.index(p) for p in waiting)} sent no result in time"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                error, result = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a report") from None
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            results[rank] = result
            waiting.remove(pipe)  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(pipes))]


def _enter(
    rank: int,
    world: int,
    folder: str,
    timeout: float,
    pipe: Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage at every start: imported objects need not be scanned
    faulthandler.dump_traceback_later(0.9 * timeout)  # shows where a rank hangs
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = work(*args)
        dist.barrier()  # a rank that ends early resets the connections of the others
        dist.destroy_process_group()
        # Not `send`, which would share tensors instead of copying them.
        pipe.send_bytes(pickle.dumps((None, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        signal.pause()  # keeps the connections until this rank is killed, so that no other rank fails
