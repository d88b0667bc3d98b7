"""Token rows as tensors: padded to the longest row, or packed one after the other without a pad.

    padded    ids [rows, longest]   every row starts a line, pads fill it up on the right
    packed    ids [1, total]        row i stands at offsets[i] : offsets[i + 1]

A position is counted within its row in both forms, so cutting rows out of a batch moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from scalingnote.models.prompt import Row


@dataclass(frozen=True)
class Packing:
    """Where the rows of a packed batch begin and end."""

    lengths: tuple[int, ...]  # on the host: cutting rows must not wait for a GPU
    offsets: Int[Tensor, " bounds"]  # int32, one more than there are rows; what varlen kernels read
    position_ids: Int[Tensor, "1 total"]  # 0, 1, 2... anew in every row
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> "Packing":
        """The packing of rows of these lengths."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        firsts = offsets[:-1].repeat_interleave(torch.tensor(lengths))
        position_ids = (torch.arange(len(firsts)) - firsts)[None]
        return cls(tuple(lengths), offsets, position_ids, max(lengths)).to(device)

    def to(self, device: torch.device | None) -> "Packing":
        """The same packing with its tensors on a device."""
        offsets, position_ids = (t.to(device, non_blocking=True) for t in (self.offsets, self.position_ids))
        return Packing(self.lengths, offsets, position_ids, self.longest)


@dataclass(frozen=True)
class Batch:
    """Token rows, padded (with a mask) or packed (with a packing), and the positions to pool."""

    ids: Int[Tensor, "lines tokens"]
    mask: Int[Tensor, "lines tokens"] | None
    positions: Int[Tensor, "rows positions"]
    packing: Packing | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        mask = None if self.mask is None else self.mask.to(device, non_blocking=True)
        packing = None if self.packing is None else self.packing.to(device)
        ids, positions = (t.to(device, non_blocking=True) for t in (self.ids, self.positions))
        return Batch(ids, mask, positions, packing)

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows `start` to `stop`, in the same form."""
        positions = self.positions[start:stop]
        if self.packing is None:
            assert self.mask is not None
            return Batch(self.ids[start:stop], self.mask[start:stop], positions)
        lengths = self.packing.lengths
        first, tokens = sum(lengths[:start]), sum(lengths[start:stop])
        ids = self.ids[:, first : first + tokens]
        return Batch(ids, None, positions, Packing.of(lengths[start:stop], self.ids.device))

    def by_length(self) -> tuple["Batch", Int[Tensor, " rows"]]:
        """The rows of a packed batch, shortest first, and where each row of this one now stands."""
        assert self.packing is not None
        lengths = self.packing.lengths
        order = sorted(range(len(self)), key=lengths.__getitem__)
        rows = self.ids[0].split(list(lengths))
        chosen = torch.tensor(order, device=self.ids.device)
        packing = Packing.of([lengths[i] for i in order], self.ids.device)
        ids = torch.cat([rows[i] for i in order])[None]
        return Batch(ids, None, self.positions[chosen], packing), chosen.argsort()

    def flat(self) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " rows"]]:
        """Token ids of all rows end to end, and how many each row has."""
        if self.packing is not None:
            return self.ids[0], self.packing.offsets.diff().long()
        assert self.mask is not None
        return self.ids[self.mask.bool()], self.mask.sum(1)

    def padded(self, pad: int) -> "Batch":
        """The same rows in padded form."""
        if self.packing is None:
            return self
        rows = self.ids[0].split(list(self.packing.lengths))
        ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)
        lengths = self.packing.offsets.diff()[:, None]
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths).long()
        return Batch(ids, mask, self.positions)


def collate(rows: Sequence[Row], *, pad: int, packed: bool = False) -> Batch:
    """One batch of at least one row. A tower that cannot read packed rows pads them itself."""
    positions = torch.tensor([row.positions for row in rows])
    lengths = [len(row.ids) for row in rows]
    if packed:
        ids = torch.tensor([id for row in rows for id in row.ids], dtype=torch.long)[None]
        return Batch(ids, None, positions, Packing.of(lengths))
    ids = torch.full((len(rows), max(lengths)), pad, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : lengths[i]] = torch.tensor(row.ids)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Batch(ids, mask, positions)
