"""A checkpoint is whole or not there; the newest and the best are kept; any filesystem will do."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ranks
from scalingnote.core.errors import TrainingError
from scalingnote.train import checkpoint
from scalingnote.train.checkpoint import MARKER, Checkpoints
from scalingnote.train.engine import Engine


class Numbers(Engine):
    """Something with a state: a matrix, a vector and a count."""

    def __init__(self, value: float, layout: str = "whole") -> None:
        self.layout, self.told = layout, False
        self.tensors = {
            "matrix": torch.full((3, 4), value),
            "vector.exp_avg": torch.full((5,), value),
            "vector.step": torch.tensor(value),
        }

    def state(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def after_restore(self, state: dict[str, Tensor]) -> None:
        self.told = True

    def values(self) -> set[float]:
        return {float(v) for tensor in self.tensors.values() for v in tensor.reshape(-1)}


def saved(uri: Path | str, *steps: int, best: int | None = None) -> Checkpoints:
    checkpoints = Checkpoints(str(uri))
    for step in steps:
        checkpoints.save(step, Numbers(float(step)), {"curve": [step]}, best=step == best)
    checkpoints.wait()
    return checkpoints


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob(f"*/{MARKER}"))


def test_what_is_restored_is_what_was_saved_and_not_what_became_of_it(tmp_path: Path):
    source, target = Numbers(7.0), Numbers(0.0)
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.restore(target) is None
    checkpoints.save(40, source, {"curve": [1, 2]})
    for tensor in source.tensors.values():
        tensor.zero_()  # training goes on while files are written
    found = checkpoints.restore(target)
    assert found is not None
    assert (found.step, found.notes) == (40, {"curve": [1, 2]})
    assert target.values() == {7.0}
    assert target.told
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def test_a_run_killed_while_writing_left_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path, 10)

    def killed(uri: str) -> dict[str, int]:
        raise InterruptedError  # after the shards, before the marker

    checkpoints = Checkpoints(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.fs, "list_files", killed)
        checkpoints.save(20, Numbers(20.0), {})
        with pytest.raises(InterruptedError):
            checkpoints.wait()
    assert list(tmp_path.glob("step-000000020/*.safetensors"))
    target = Numbers(0.0)
    again = Checkpoints(str(tmp_path))
    found = again.restore(target)
    assert found is not None
    assert found.step == 10
    assert target.values() == {10.0}
    assert not (tmp_path / "step-000000020").exists()


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1])])
def test_a_checkpoint_that_lost_bytes_is_passed_over(tmp_path: Path, damage):
    saved(tmp_path, 10, 20)
    damage(next(tmp_path.glob("step-000000020/*.safetensors")))
    found = Checkpoints(str(tmp_path)).restore(Numbers(0.0))
    assert found is not None
    assert found.step == 10


def test_the_newest_are_kept_and_the_best_whenever_it_was(tmp_path: Path):
    checkpoints = saved(tmp_path, 10, 20, 30, 40, best=20)
    assert steps_in(tmp_path) == [20, 30, 40]
    target = Numbers(0.0)
    found = checkpoints.restore(target, best=True)
    assert found is not None
    assert target.values() == {20.0}
    checkpoints.save(50, Numbers(50.0), {}, best=True)
    checkpoints.wait()
    assert steps_in(tmp_path) == [40, 50]


def test_shards_of_another_cut_are_refused(tmp_path: Path):
    checkpoints = saved(tmp_path, 10)
    with pytest.raises(TrainingError, match="written as 'whole', this run reads 'zero-3 on 4 ranks'"):
        checkpoints.restore(Numbers(0.0, layout="zero-3 on 4 ranks"))


def test_checkpoints_of_another_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uri = f"local://{tmp_path}/run"  # this machine's files, but through fsspec as if they were elsewhere
    saved(uri, 10, 20, 30)
    target = Numbers(0.0)
    found = Checkpoints(uri).restore(target)
    assert found is not None
    assert target.values() == {30.0}
    assert steps_in(tmp_path / "run") == [20, 30]
    assert not (tmp_path / "scalingnote-cache").exists()  # read where they lie, without a copy


def test_a_rank_reads_only_its_own_shard_of_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    layout, uri = "zero-1 on 2 ranks", f"local://{tmp_path}/run"
    checkpoints = Checkpoints(uri)
    checkpoints.save(10, Numbers(10.0, layout), {})
    checkpoints.wait()
    (own,) = (tmp_path / "run").glob("*/*.safetensors")
    other = own.with_name(own.name.replace("shard-00001", "shard-00002"))
    other.write_bytes(b"what rank 1 wrote")
    marker = json.loads(own.with_name(MARKER).read_text())
    marker["files"][other.name] = other.stat().st_size
    own.with_name(MARKER).write_text(json.dumps(marker))
    target = Numbers(0.0, layout)
    assert checkpoints.restore(target) is not None
    assert target.values() == {10.0}


class Sharded(Numbers):
    """A matrix that is cut over ranks by rows, another by columns, and a vector that every rank holds."""

    def __init__(self, factor: float) -> None:
        super().__init__(0.0)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        whole = factor * torch.arange(4000.0).reshape(100, 40)
        self.tensors = {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
            "vector": factor * torch.arange(7.0),
            "step": torch.tensor(factor),
        }


def write_sharded(uri: str) -> None:
    checkpoints = Checkpoints(uri)
    checkpoints.save(10, Sharded(1.0), {})
    checkpoints.wait()


def read_sharded(uri: str) -> tuple[int, bool]:
    """Bytes that this rank read, and whether its tensors are those that were written."""
    count, read = 0, checkpoint.fs.read_range

    def counted(uri: str, start: int, size: int) -> bytes:
        nonlocal count
        count += size
        return read(uri, start, size)

    checkpoint.fs.read_range = counted
    target = Sharded(0.0)
    assert Checkpoints(uri).restore(target) is not None
    expected = Sharded(1.0)
    own = [
        torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
        for a, b in zip(target.tensors.values(), expected.tensors.values(), strict=True)
    ]
    return count, all(own)


def test_a_rank_reads_its_own_rows_of_any_number_of_shards(tmp_path: Path):
    uri = str(tmp_path / "run")
    ranks.run(write_sharded, uri, world=2)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    for world, share in ((1, 1.0), (2, 0.7), (3, 0.7)):
        for count, equal in ranks.run(read_sharded, uri, world=world):
            assert equal
            # Of the tensor that is cut by columns, three ranks read whole rows of another's chunk.
            assert count <= share * size
