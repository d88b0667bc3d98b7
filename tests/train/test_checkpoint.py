"""A checkpoint is complete or absent; the newest ones and the best one are kept, on any filesystem."""

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
    """An engine with a small state: a matrix, a vector and a count."""

    def __init__(self, value: float, layout: str = "whole") -> None:
        self.layout, self.is_restored = layout, False
        self.tensors = {
            "matrix": torch.full((3, 4), value),
            "vector.exp_avg": torch.full((5,), value),
            "vector.step": torch.tensor(value),
        }

    def state(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def after_restore(self, state: dict[str, Tensor]) -> None:
        self.is_restored = True

    def values(self) -> set[float]:
        return {float(v) for tensor in self.tensors.values() for v in tensor.reshape(-1)}


def save_steps(uri: Path | str, *steps: int, best: int | None = None) -> Checkpoints:
    checkpoints = Checkpoints(str(uri))
    for step in steps:
        checkpoints.save(step, Numbers(float(step)), {"curve": [step]}, best=step == best)
    checkpoints.wait()
    return checkpoints


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob(f"*/{MARKER}"))


def test_later_changes_are_not_in_the_restored_state(tmp_path: Path):
    source, target = Numbers(7.0), Numbers(0.0)
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.restore(target) is None
    checkpoints.save(40, source, {"curve": [1, 2]})
    for tensor in source.tensors.values():
        tensor.zero_()  # training continues while files are written
    info = checkpoints.restore(target)
    assert info is not None
    assert (info.step, info.notes) == (40, {"curve": [1, 2]})
    assert target.values() == {7.0}
    assert target.is_restored
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def test_a_kill_while_writing_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_steps(tmp_path, 10)

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
    info = again.restore(target)
    assert info is not None
    assert info.step == 10
    assert target.values() == {10.0}
    assert not (tmp_path / "step-000000020").exists()


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1])])
def test_a_damaged_checkpoint_is_ignored(tmp_path: Path, damage):
    save_steps(tmp_path, 10, 20)
    damage(next(tmp_path.glob("step-000000020/*.safetensors")))
    info = Checkpoints(str(tmp_path)).restore(Numbers(0.0))
    assert info is not None
    assert info.step == 10


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path: Path):
    checkpoints = save_steps(tmp_path, 10, 20, 30, 40, best=20)
    assert steps_in(tmp_path) == [20, 30, 40]
    target = Numbers(0.0)
    info = checkpoints.restore(target, best=True)
    assert info is not None
    assert target.values() == {20.0}
    checkpoints.save(50, Numbers(50.0), {}, best=True)
    checkpoints.wait()
    assert steps_in(tmp_path) == [40, 50]


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path):
    checkpoints = save_steps(tmp_path, 10)
    with pytest.raises(TrainingError, match="written as 'whole', this run reads 'zero-3 on 4 ranks'"):
        checkpoints.restore(Numbers(0.0, layout="zero-3 on 4 ranks"))


def test_checkpoints_on_another_filesystem_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uri = f"local://{tmp_path}/run"  # files of this machine, but through fsspec as if they were remote
    save_steps(uri, 10, 20, 30)
    target = Numbers(0.0)
    info = Checkpoints(uri).restore(target)
    assert info is not None
    assert target.values() == {30.0}
    assert steps_in(tmp_path / "run") == [20, 30]
    assert not (tmp_path / "scalingnote-cache").exists()  # read in place, without a copy


def test_a_rank_reads_only_its_own_shard_of_a_zero_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    layout, uri = "zero-1 on 2 ranks", f"local://{tmp_path}/run"
    checkpoints = Checkpoints(uri)
    checkpoints.save(10, Numbers(10.0, layout), {})
    checkpoints.wait()
    (own_shard,) = (tmp_path / "run").glob("*/*.safetensors")
    other_shard = own_shard.with_name(own_shard.name.replace("shard-00001", "shard-00002"))
    other_shard.write_bytes(b"shard of rank 1")
    marker = json.loads(own_shard.with_name(MARKER).read_text())
    marker["files"][other_shard.name] = other_shard.stat().st_size
    own_shard.with_name(MARKER).write_text(json.dumps(marker))
    target = Numbers(0.0, layout)
    assert checkpoints.restore(target) is not None
    assert target.values() == {10.0}


class Sharded(Numbers):
    """A matrix that is sharded over ranks by rows, another by columns, and a vector that every rank holds."""

    def __init__(self, factor: float) -> None:
        super().__init__(0.0)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        matrix = factor * torch.arange(4000.0).reshape(100, 40)
        self.tensors = {
            "rows": distribute_tensor(matrix, mesh, [Shard(0)]),
            "columns": distribute_tensor(matrix.bfloat16(), mesh, [Shard(1)]),
            "vector": factor * torch.arange(7.0),
            "step": torch.tensor(factor),
        }


def write_sharded(uri: str) -> None:
    checkpoints = Checkpoints(uri)
    checkpoints.save(10, Sharded(1.0), {})
    checkpoints.wait()


def read_sharded(uri: str) -> tuple[int, bool]:
    """Return the bytes that this rank read, and whether its tensors equal the written ones."""
    count, read_range = 0, checkpoint.fs.read_range

    def counted(uri: str, start: int, size: int) -> bytes:
        nonlocal count
        count += size
        return read_range(uri, start, size)

    checkpoint.fs.read_range = counted
    target = Sharded(0.0)
    assert Checkpoints(uri).restore(target) is not None
    expected = Sharded(1.0)
    equal = [
        torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
        for a, b in zip(target.tensors.values(), expected.tensors.values(), strict=True)
    ]
    return count, all(equal)


def test_a_rank_reads_mostly_its_own_rows_of_all_shards(tmp_path: Path):
    uri = str(tmp_path / "run")
    ranks.run(write_sharded, uri, world=2)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    for world, share in ((1, 1.0), (2, 0.7), (3, 0.7)):
        for count, equal in ranks.run(read_sharded, uri, world=world):
            assert equal
            # Three ranks read complete rows of another rank's chunk of the tensor that is sharded by columns.
            assert count <= share * size
