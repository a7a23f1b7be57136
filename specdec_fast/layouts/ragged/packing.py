"""Slots and positions of packed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...errors import InputError


class Segment(NamedTuple):
    """Tokens ``[start, start + size)`` of the row in ``slot``."""

    slot: int
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Packing:
    """The N tokens of one forward pass, segment after segment.

    Args:
        segments: at most one per slot, of at least one token each.
        keep: trailing tokens of each segment whose logits are wanted.

    Attributes:
        row_of, position_of: ``[N]`` int64, slot and position of each token.
        next_row, next_position: ``[S]`` int64, slot and position of the token after each segment.
        table: ``[4, S]`` int64: slot, end, size and first packed token of each segment.
        most_tokens, longest, last_slot: the most tokens of a segment, the last end of one, and the last slot.
        segments, keep: as given.
        kept: int64 indices of the tokens whose logits are wanted, or ``None`` for all of them.
    """

    def __init__(self, segments: Sequence[Segment], keep: Sequence[int], device: torch.device):
        if len({s.slot for s in segments}) != len(segments) or any(s.size < 1 for s in segments):
            raise InputError(f"segments={segments}: need at least one token each, and one segment for a slot")
        self.segments, self.keep = segments, keep
        rows = [s.slot for s in segments for _ in range(s.size)]
        positions = [p for s in segments for p in range(s.start, s.end)]
        sizes = [s.size for s in segments]
        ends = list(accumulate(sizes))
        kept = [i for end, n in zip(ends, keep, strict=True) for i in range(end - n, end)]
        firsts = [end - size for end, size in zip(ends, sizes, strict=True)]
        table = [*(s.slot for s in segments), *(s.end for s in segments), *sizes, *firsts]
        parts = (rows, positions, table, kept)
        # one copy to the device
        index = torch.tensor([i for part in parts for i in part], device="cpu").to(device, non_blocking=True)
        split = index.split([len(part) for part in parts])
        self.row_of, self.position_of = split[:2]
        self.table = split[2].view(4, -1)
        self.next_row, self.next_position = self.table[:2]
        self.kept = None if len(kept) == len(rows) else split[3]
        self.most_tokens, self.longest = max(sizes), max(s.end for s in segments)
        self.last_slot = max(s.slot for s in segments)

    def __len__(self) -> int:
        return len(self.row_of)
