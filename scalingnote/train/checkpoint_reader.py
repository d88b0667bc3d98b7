"""Reading of checkpoints where they lie: each rank reads the bytes of its own shards, from any filesystem.

torch's reader of safetensors wants local files, so every node would first copy the shards of all ranks: 170
GB for two 7B towers with their moments. This one reads the headers of all files, then the ranges that a rank
needs, whatever the number of ranks that wrote them.
"""

import json
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors.torch import _getdtype
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from scalingnote.storage import filesystem as fs

PARALLEL_READS = 16  # threads, which wait for the store
HEADER_BYTES = 8  # of the header's length, before it


@dataclass(frozen=True)
class StoredChunk:
    """A piece of a tensor in a safetensors file."""

    uri: str
    start: int  # byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A block of the chunk; the rows of its first dimension are read as one range."""
        if not self.shape:
            return self._rows(0, 1).reshape(())
        block = self._rows(offsets[0], lengths[0])
        slices = tuple(slice(at, at + n) for at, n in zip(offsets[1:], lengths[1:], strict=True))
        return block[(slice(None), *slices)]

    def _rows(self, first: int, count: int) -> Tensor:
        row = self.shape[1:]
        size = prod(row) * self.dtype.itemsize
        if not count * size:
            return torch.empty((count, *row), dtype=self.dtype)
        data = bytearray(fs.read_range(self.uri, self.start + first * size, count * size))
        return torch.frombuffer(data, dtype=self.dtype).reshape(count, *row)


class ShardReader(FileSystemReader):
    """Reader of torch's distributed checkpoints, of the files that HuggingFaceStorageWriter writes."""

    storage_data: dict[MetadataIndex, StoredChunk]

    def __init__(self, uri: str, names: Sequence[str]) -> None:
        """Of the files `names` below `uri`."""
        super().__init__(path=uri)
        self._uris = [fs.join(uri, name) for name in names if name.endswith(".safetensors")]

    def read_metadata(self) -> Metadata:
        """Shape and place of every piece of every tensor, from the files' headers."""
        chunks: dict[MetadataIndex, StoredChunk] = {}
        tensors: dict[str, TensorStorageMetadata] = {}
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            headers = list(pool.map(_header, self._uris))
        for uri, (header, end) in zip(self._uris, headers, strict=True):
            offsets = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
            for name, about in header.items():
                shape, dtype = tuple(about["shape"]), _getdtype(about["dtype"])
                offset = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(shape)
                index = MetadataIndex(name, offset)
                chunks[index] = StoredChunk(uri, end + about["data_offsets"][0], dtype, shape)
                piece = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                ends = [at + n for at, n in zip(offset, shape, strict=True)]
                if name in tensors:
                    tensors[name].chunks.append(piece)
                    ends = [max(pair) for pair in zip(ends, tensors[name].size, strict=True)]
                    tensors[name].size = torch.Size(ends)
                else:
                    properties = TensorProperties(dtype=dtype)
                    tensors[name] = TensorStorageMetadata(properties, torch.Size(ends), [piece])
        about_load = StorageMeta(load_id=self.load_id)
        return Metadata(state_dict_metadata=tensors, storage_data=chunks, storage_meta=about_load)  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a rank."""

        def read(item: ReadItem) -> None:
            target = planner.resolve_tensor(item).detach()
            found = self.storage_data[item.storage_index].read(item.storage_offsets, item.lengths)
            target.copy_(found)
            planner.commit_tensor(item, target)

        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            list(pool.map(read, plan.items))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _header(uri: str) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the byte at which its data begin."""
    (size,) = struct.unpack("<Q", fs.read_range(uri, 0, HEADER_BYTES))
    return json.loads(fs.read_range(uri, HEADER_BYTES, size)), HEADER_BYTES + size
