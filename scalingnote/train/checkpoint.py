"""Checkpoints of a run: sharded, written in the background, complete or absent.

    {uri}/step-000000400/shard-00001-....safetensors   one file per rank, written by torch's DCP
    {uri}/step-000000400/checkpoint.json               written last: without it there is no checkpoint

DCP stores the position of each shard in its tensor, so a different number of ranks can read a state of the
same layout: each rank reads only the ranges that it needs, without a copy of the files.
:meth:`Checkpoints.save` copies the tensors before it returns; the files are written while training continues.
"""

import json
import struct
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem
from safetensors.torch import _getdtype
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scalingnote.core.errors import TrainingError
from scalingnote.storage import filesystem as fs
from scalingnote.train.engine import WHOLE, Engine, rank

MARKER = "checkpoint.json"
KEEP = 2  # number of the newest checkpoints that are not deleted
PARALLEL_READS = 16  # threads: they mostly wait for the store
HEADER_BYTES = 8  # size of the number before the header, which is the header's length
STAGING = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


@dataclass(frozen=True)
class CheckpointInfo:
    """The marker of a complete checkpoint."""

    step: int
    notes: dict[str, Any]  # the loop's own state, as JSON
    layout: str  # layout of the tensors, see Engine.layout
    best: bool  # whether it was the best when it was written
    files: dict[str, int]  # sizes in bytes


class Checkpoints:
    """Checkpoints below a URI that every rank can read and write: the newest KEEP, and the best one.

    Every rank makes the same calls. The constructor deletes incomplete checkpoints of an interrupted run.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        # Background collectives must not mix with those of training, and files need no GPU.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        if rank() == 0:
            for name in self._folders():
                if self._complete(name) is None:
                    fs.delete(fs.join(uri, name))
        self._barrier()

    def save(self, step: int, source: Engine, notes: dict[str, Any], *, best: bool = False) -> None:
        """Start to write the checkpoint after `step` steps, when the previous one is written.

        The state of `source` is copied before this method returns; :meth:`restore` returns `notes`. A `best`
        checkpoint replaces the best one so far.
        """
        self.wait()
        uri = fs.join(self.uri, _name(step))
        state = DefaultStager(STAGING).stage(source.state())
        marker = {"step": step, "notes": notes, "layout": source.layout, "best": best}
        # DCP's async_save cannot be used: when it has finished, our marker is still missing.
        with self._without_dcp_warning():
            self._pending = self._thread.submit(self._write, state, uri, marker)
            if self._group is None:
                wait([self._pending])

    def wait(self) -> None:
        """Wait until nothing is being written; raise the error of the background thread if it has one."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def restore(self, target: Engine, *, best: bool = False) -> CheckpointInfo | None:
        """Fill `target` from the newest (or the best) complete checkpoint; return None if there is none.

        Raises:
            TrainingError: it was written in another layout, for example for another number of ranks.
        """
        self.wait()
        self._barrier()
        info = next((candidate for candidate in self._newest_first() if candidate.best or not best), None)
        if info is None:
            return None
        uri = fs.join(self.uri, _name(info.step))
        if info.layout != target.layout:
            raise TrainingError(
                f"{uri} was written as {info.layout!r}, this run reads {target.layout!r}: resume it with "
                "the same strategy and number of workers, or delete it to start again"
            )
        # Each rank reads all files of the layout WHOLE; of another layout, each reads its own files.
        prefix = "" if info.layout == WHOLE else f"shard-{rank() + 1:05d}-"
        state = target.state()
        reader = _ShardReader(uri, [name for name in info.files if name.startswith(prefix)])
        with self._without_dcp_warning():
            load(state, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        target.after_restore(state)
        return info

    def _newest_first(self) -> Iterator[CheckpointInfo]:
        """Yield the markers of the complete checkpoints."""
        return filter(None, map(self._complete, reversed(self._folders())))

    def _write(self, state: Any, uri: str, marker: dict[str, Any]) -> None:
        """Write the shards of this rank; when all ranks have written theirs, rank 0 writes the marker."""
        filesystem, path = fs.resolve(uri)
        if isinstance(filesystem, LocalFileSystem):
            self._write_shards(state, path)
        else:
            with tempfile.TemporaryDirectory(prefix="scalingnote-") as folder:
                self._write_shards(state, folder)
                fs.upload(folder, uri)
        self._barrier()
        if rank() == 0:
            marker["files"] = fs.list_files(uri)
            fs.write_bytes(fs.join(uri, MARKER), json.dumps(marker).encode())
            self._prune()

    def _write_shards(self, state: Any, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
        save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)

    def _prune(self) -> None:
        best = next((_name(info.step) for info in self._newest_first() if info.best), None)
        for name in self._folders()[:-KEEP]:
            if name != best:
                fs.delete(fs.join(self.uri, name))

    def _folders(self) -> list[str]:
        names = {path.partition("/")[0] for path in fs.list_files(self.uri)}
        return sorted(name for name in names if name.startswith("step-"))

    def _complete(self, name: str) -> CheckpointInfo | None:
        """Return the marker of a folder; None if the marker, a file or a part of a file is missing."""
        sizes = fs.list_files(fs.join(self.uri, name))
        if MARKER not in sizes:
            return None
        info = CheckpointInfo(**json.loads(fs.read_bytes(fs.join(self.uri, name, MARKER))))
        return info if all(sizes.get(file) == size for file, size in info.files.items()) else None

    @contextmanager
    def _without_dcp_warning(self) -> Iterator[None]:
        """Silence DCP's warning about a process without a group (a notebook, a test).

        Such a process waits for its files, because warning filters apply to all threads.
        """
        with warnings.catch_warnings() if self._group is None else nullcontext():
            if self._group is None:
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def _name(step: int) -> str:
    return f"step-{step:09d}"


# --- reading: each rank reads the bytes of its own shards, from any filesystem ------------------------------


@dataclass(frozen=True)
class _StoredChunk:
    """A piece of a tensor in a safetensors file."""

    uri: str
    start: int  # byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a block of the chunk; the rows of its first dimension are read as one range."""
        row = self.shape[1:]
        first, count = (offsets[0], lengths[0]) if self.shape else (0, 1)
        block = torch.empty((count, *row), dtype=self.dtype)
        if block.nbytes:
            size = prod(row) * self.dtype.itemsize
            data = bytearray(fs.read_range(self.uri, self.start + first * size, block.nbytes))
            block = torch.frombuffer(data, dtype=self.dtype).reshape(block.shape)
        if not self.shape:
            return block.reshape(())
        further = (slice(at, at + n) for at, n in zip(offsets[1:], lengths[1:], strict=True))
        return block[(slice(None), *further)]


class _ShardReader(FileSystemReader):
    """Reader of the files of HuggingFaceStorageWriter at any URI.

    torch's own reader needs local files, so every node would first copy the shards of all ranks: 170 GB for
    two 7B towers with their moments. This reader reads the headers of all files, then the ranges that a rank
    needs, for any number of ranks that wrote them.
    """

    storage_data: dict[MetadataIndex, _StoredChunk]

    def __init__(self, uri: str, names: Sequence[str]) -> None:
        """Store the URIs of the files `names` below `uri`."""
        super().__init__(path=uri)
        self._uris = [fs.join(uri, name) for name in names if name.endswith(".safetensors")]

    def read_metadata(self) -> Metadata:
        """Read shape and place of every piece of every tensor from the headers of the files."""
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            headers = list(pool.map(_header, self._uris))
        chunks: dict[MetadataIndex, _StoredChunk] = {}
        tensors: dict[str, TensorStorageMetadata] = {}
        for uri, (header, end) in zip(self._uris, headers, strict=True):
            offsets = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
            for name, entry in header.items():
                shape, dtype = torch.Size(entry["shape"]), _getdtype(entry["dtype"])
                offset = torch.Size(offsets[name]["saved_offsets"] if name in offsets else [0] * len(shape))
                start = end + entry["data_offsets"][0]
                chunks[MetadataIndex(name, offset)] = _StoredChunk(uri, start, dtype, shape)
                tensor = tensors.setdefault(
                    name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
                )
                tensor.chunks.append(ChunkStorageMetadata(offset, shape))
                ends = map(sum, zip(offset, shape, strict=True))
                tensor.size = torch.Size(map(max, zip(ends, tensor.size, strict=True)))
        load_info = StorageMeta(load_id=self.load_id)
        return Metadata(state_dict_metadata=tensors, storage_data=chunks, storage_meta=load_info)  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the tensors of a rank."""

        def read(item: ReadItem) -> None:
            target = planner.resolve_tensor(item).detach()
            block = self.storage_data[item.storage_index].read(item.storage_offsets, item.lengths)
            target.copy_(block)
            planner.commit_tensor(item, target)

        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            list(pool.map(read, plan.items))
        finished: torch.futures.Future[None] = torch.futures.Future()
        finished.set_result(None)
        return finished


def _header(uri: str) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file, and return it with the byte at which the data begin."""
    (size,) = struct.unpack("<Q", fs.read_range(uri, 0, HEADER_BYTES))
    return json.loads(fs.read_range(uri, HEADER_BYTES, size)), HEADER_BYTES + size
