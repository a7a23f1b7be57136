"""Argument checks before any byte moves; ``csrc/checks.h`` makes the same for the compiled operators.

``*_shapes`` needs no memory, so it serves fake tensors too. ``*_memory`` needs real tensors: it refuses shared
memory and, on the CPU, values out of range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .arguments import AttentionArguments, StepArguments

if TYPE_CHECKING:
    from ..layouts.ragged import Packing

_ELEMENT_SIZES = (1, 2, 4, 8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MASK_DTYPES = (torch.bool, *_FLOATS)
_STEP_WRITES = ("tokens", "new_start", "new_length", "position_ids", "summary")


def realign_shapes(caches: Sequence[Tensor], start: Tensor, num_columns: Tensor, shift: Tensor) -> None:
    _need("start", start, ["B"], start.device)
    rows = start.shape[0]
    _need("num_columns", num_columns, [rows], start.device)
    _need("shift", shift, [rows], start.device)
    _need_caches(caches, rows, start.device)


def realign_memory(caches: Sequence[Tensor], start: Tensor, num_columns: Tensor, shift: Tensor) -> None:
    _need_disjoint(_numbered("caches", caches), [("start", start), ("num_columns", num_columns), ("shift", shift)])
    if not caches or start.device.type != "cpu":
        return
    capacity = min(x.shape[2] for x in caches)
    room = capacity - start
    holds = (start >= 0) & (room >= 0) & (num_columns >= 0) & (num_columns <= room)
    lands = (num_columns == 0) | ((shift >= -start) & (shift <= room - num_columns))

    def explain(row: int) -> str:
        first, count, by = (x[row].item() for x in (start, num_columns, shift))
        if not 0 <= first <= capacity:
            return f"start[{row}] is {first}; need 0..{capacity}"
        if not 0 <= count <= capacity - first:
            return f"num_columns[{row}] is {count}; the row starts at {first} of {capacity}, need 0..{capacity - first}"
        return (
            f"shift[{row}] is {by}; the row holds columns {first}..{first + count - 1} of {capacity}, "
            f"need {-first}..{capacity - first - count}"
        )

    _need_values(holds & lands, explain)


def append_kv_shapes(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, row_of: Tensor, position_of: Tensor) -> None:
    _need("row_of", row_of, ["N"], row_of.device)
    tokens = row_of.shape[0]
    _need("position_of", position_of, [tokens], row_of.device)
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        _need_kv(name, pool, "W", row_of.device)
    if k_pool.shape[0] != v_pool.shape[0]:
        _refuse(f"v_pool has {v_pool.shape[0]} rows, k_pool {k_pool.shape[0]}; need equal")
    for name, new, pool in (("k", k, k_pool), ("v", v, v_pool)):
        _need(name, new, [1, pool.shape[1], tokens, pool.shape[3]], row_of.device, pool.dtype)


def append_kv_memory(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, row_of: Tensor, position_of: Tensor) -> None:
    written = [("k_pool", k_pool), ("v_pool", v_pool)]
    _need_disjoint(written, [("k", k), ("v", v), ("row_of", row_of), ("position_of", position_of)])
    if row_of.device.type != "cpu":
        return
    _need_in_range("row_of", row_of, k_pool.shape[0])
    _need_in_range("position_of", position_of, min(k_pool.shape[2], v_pool.shape[2]))


def ragged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    packing: Packing,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Checks that need no operator table."""
    _need("query", query, [1, "Hq", len(packing), "D"], query.device, query.dtype)
    _need_attention(query, k_pool, v_pool, window, soft_cap, sinks)
    if packing.last_slot >= k_pool.shape[0] or packing.longest > k_pool.shape[2]:
        _refuse(
            f"packing ends at slot {packing.last_slot} and column {packing.longest - 1}; "
            f"need slots 0..{k_pool.shape[0] - 1} and columns 0..{k_pool.shape[2] - 1}"
        )


def ragged_attention_shapes(*args) -> None:
    a = AttentionArguments(*args)
    device, dtype = a.query.device, a.query.dtype
    if dtype not in _FLOATS:
        _refuse(f"query is {dtype}; need float16, bfloat16, float32 or float64")
    _need("query", a.query, [1, "Hq", "N", "D"], device, dtype)
    _need_attention(a.query, a.k_pool, a.v_pool, a.window, a.soft_cap, a.sinks)
    _need("out", a.out, [1, a.query.shape[2], a.query.shape[1], a.v_pool.shape[3]], device, dtype)
    _need("table", a.table, [4, "S"], device)


def ragged_attention_memory(*args) -> None:
    a = AttentionArguments(*args)
    read = [(name, x) for name, x in a._asdict().items() if isinstance(x, Tensor) and name != "out"]
    _need_disjoint([("out", a.out)], read)
    if a.table.device.type != "cpu":
        return
    slots, _, capacity, _ = a.k_pool.shape
    tokens = a.query.shape[2]
    slot, end, size, first = a.table
    exists = size != 0
    room = (slot >= 0) & (slot < slots) & (end <= capacity) & (size <= end)
    _need_values(
        ~exists | (room & (size > 0) & (first >= 0) & (first <= tokens - size)),
        lambda s: (
            f"table[:, {s}] is {a.table[:, s].tolist()}; need a slot in 0..{slots - 1}, an end in 0..{capacity}, "
            f"a size up to the end, and a first token that leaves room in {tokens}"
        ),
    )
    # of the segments before
    last = torch.where(exists, first + size, 0).cummax(0).values.roll(1) if len(size) else size
    last[:1] = 0
    _need_values(
        ~exists | (first >= last),
        lambda s: f"table[3, {s}] is {first[s].item()}; the segments before it take tokens up to {last[s].item() - 1}",
    )


def _need_attention(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, window: int | None, soft_cap: float | None, sinks: Tensor | None
) -> None:
    device, dtype = query.device, query.dtype
    _, query_heads, _, dim = query.shape
    _need("k_pool", k_pool, ["W", "H", "C", dim], device, dtype)
    num_slots, heads, capacity, _ = k_pool.shape
    _need("v_pool", v_pool, [num_slots, heads, capacity, "D"], device, dtype)
    if not heads or query_heads % heads:
        _refuse(f"query has {query_heads} heads, k_pool {heads}; need a multiple")
    if window is not None and window < 1:
        _refuse(f"window is {window}; need at least 1, or None for full attention")
    if soft_cap is not None and not soft_cap > 0:
        _refuse(f"soft_cap is {soft_cap}; need more than 0, or None for no cap")
    if sinks is not None:
        _need("sinks", sinks, [query_heads], device, sinks.dtype)
        if sinks.dtype not in _FLOATS:
            _refuse(f"sinks is {sinks.dtype}; need float16, bfloat16, float32 or float64")


def realign_step_shapes(*args) -> None:
    a = StepArguments(*args)
    device = a.start.device
    _need("start", a.start, ["B"], device)
    rows = a.start.shape[0]
    if rows == 0:
        _refuse("start is empty; need at least one row")
    _need("draft_ids", a.draft_ids, [rows, "K"], device)
    num_drafts = a.draft_ids.shape[1]
    _need("target_ids", a.target_ids, [rows, num_drafts + 1], device)
    for name in ("limit", "max_length", "length", "new_start", "new_length"):
        _need(name, getattr(a, name), [rows], device)
    if a.n_accepted is not None:
        _need("n_accepted", a.n_accepted, [rows], device)
    _need("stop_ids", a.stop_ids, ["S"], device)
    _need("tokens", a.tokens, [rows, "C"], device)
    _need("position_ids", a.position_ids, [rows, "Q"], device)
    _need("summary", a.summary, [rows, num_drafts + 4], device)
    _need_caches(a.caches, rows, device)
    for name, mask in _numbered("masks", a.masks):
        if mask.dtype not in _MASK_DTYPES:
            _refuse(f"{name} is {mask.dtype}; need bool, float16, bfloat16, float32 or float64")
        _need(name, mask, [rows, 1, a.position_ids.shape[1], "C"], device, mask.dtype)
    if len(a.windows) != len(a.masks):
        _refuse(f"windows has {len(a.windows)} entries, masks {len(a.masks)}; need one window for each mask")
    for i, window in enumerate(a.windows):
        if window < 0:
            _refuse(f"windows[{i}] is {window}; need a size, or 0 for full attention")
    if a.max_position < 0:
        _refuse(f"max_position is {a.max_position}; need at least 0")
    if a.placement not in (0, 1):
        _refuse(f"placement is {a.placement}; need 0 (minimal move) or 1 (packed)")


def realign_step_memory(*args) -> None:
    a = StepArguments(*args)
    written: list[tuple[str, Tensor]] = []
    read: list[tuple[str, Tensor]] = []
    for name, value in a._asdict().items():
        if isinstance(value, Tensor):
            (written if name in _STEP_WRITES else read).append((name, value))
    _need_disjoint([*_numbered("caches", a.caches), *_numbered("masks", a.masks), *written], read)
    if a.start.device.type != "cpu":
        return
    num_drafts = a.draft_ids.shape[1]
    # the verify has written K columns beyond the end; the bonus needs one more, in the tokens only
    last_end = min([a.tokens.shape[1] - 1, *(x.shape[2] for x in a.caches)]) - num_drafts

    def explain(row: int) -> str:
        first, count = a.start[row].item(), a.length[row].item()
        if first < 0:
            return f"start[{row}] is {first}; need at least 0"
        return f"length[{row}] is {count}; the row starts at {first} and K is {num_drafts}, need 1..{last_end - first}"

    _need_values((a.start >= 0) & (a.length >= 1) & (a.length <= last_end - a.start), explain)
    end = a.start + a.length
    _need_values(
        end == end[0],
        lambda row: f"start[{row}] + length[{row}] is {end[row].item()}, row 0 ends at {end[0].item()}; need one end",
    )
    if a.n_accepted is not None:
        n_accepted = a.n_accepted
        _need_values(
            (n_accepted >= 0) & (n_accepted <= num_drafts),
            lambda row: f"n_accepted[{row}] is {n_accepted[row].item()}; need 0..{num_drafts}",
        )


def _refuse(message: str) -> NoReturn:
    raise RuntimeError(message)


def _numbered(name: str, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"{name}[{i}]", x) for i, x in enumerate(tensors)]


def _need(
    name: str, x: Tensor, shape: Sequence[int | str], device: torch.device, dtype: torch.dtype = torch.int64
) -> None:
    """A letter in ``shape`` stands for any size."""
    fits = x.dim() == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, x.shape, strict=True))
    if not fits or x.dtype != dtype or x.device != device:
        wanted = ", ".join(map(str, shape))
        _refuse(f"{name} is {x.dtype} {list(x.shape)} on {x.device}; need {dtype} [{wanted}] on {device}")


def _need_kv(name: str, x: Tensor, rows: int | str, device: torch.device) -> None:
    _need(name, x, [rows, "H", "C", "D"], device, x.dtype)
    if x.element_size() not in _ELEMENT_SIZES:
        _refuse(f"{name} has elements of {x.element_size()} bytes; need 1, 2, 4 or 8")


def _need_caches(caches: Sequence[Tensor], rows: int, device: torch.device) -> None:
    for i, x in enumerate(caches):
        # fast check; full check only to build the message
        if x.dim() != 4 or x.shape[0] != rows or x.device != device or x.element_size() not in _ELEMENT_SIZES:
            _need_kv(f"caches[{i}]", x, rows, device)


def _need_values(accepted: Tensor, explain: Callable[[int], str]) -> None:
    """Refuse unless all of ``accepted`` holds; ``explain`` is asked about the first that does not.

    The assertion reads nothing back to Python, so that a round without mistakes has no host read.
    """
    try:
        torch._assert_async(accepted.all())
    except RuntimeError:
        _refuse(explain(int((~accepted).nonzero()[0, 0])))


def _need_in_range(name: str, index: Tensor, size: int) -> None:
    _need_values((index >= 0) & (index < size), lambda i: f"{name}[{i}] is {index[i].item()}; need 0..{size - 1}")


class _Span:
    """The bytes of a strided tensor: address of the first, and of the one after the last."""

    def __init__(self, name: str, x: Tensor, written: bool):
        self.name, self.x, self.written, self.size = name, x, written, x.element_size()
        self.begin = x.data_ptr()
        if x.is_contiguous():
            self.end = self.begin + x.numel() * self.size
        else:
            self.end = self.begin + (_extent(self.dims, self.size) if x.numel() else 0)

    @functools.cached_property
    def dims(self) -> list[tuple[int, int]]:
        """Stride in bytes and size, from large strides to small, without those of size 1."""
        pairs = zip(self.x.stride(), self.x.shape, strict=True)
        return sorted(((stride * self.size, n) for stride, n in pairs if n != 1), reverse=True)

    def overlaps_itself(self) -> bool:
        dims = [] if self.x.is_contiguous() else self.dims
        return any(stride < _extent(dims[i + 1 :], self.size) for i, (stride, _) in enumerate(dims))


def _need_disjoint(written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor]]) -> None:
    spans = [_Span(name, x, True) for name, x in written] + [_Span(name, x, False) for name, x in read]
    open_spans: list[_Span] = []
    for span in sorted(spans, key=lambda s: s.begin):
        if span.end == span.begin:
            continue
        if span.written and span.overlaps_itself():
            _refuse(f"{span.name} has elements that share memory; it is written in place, so each needs its own")
        open_spans = [other for other in open_spans if other.end > span.begin]
        for other in open_spans:
            if (span.written or other.written) and _meet(span.begin - other.begin, other, other.dims, span, span.dims):
                _refuse(f"{other.name} and {span.name} share memory; what is written in place must be apart")
        open_spans.append(span)


def _extent(dims: Sequence[tuple[int, int]], size: int) -> int:
    return sum(stride * (n - 1) for stride, n in dims) + size


def _meet(gap: int, a: _Span, a_dims: list, b: _Span, b_dims: list) -> bool:
    """True if b, ``gap`` bytes after a, shares a byte with it: exact for views of one layout, else cautious."""
    if gap >= _extent(a_dims, a.size) or -gap >= _extent(b_dims, b.size):
        return False
    stride = max([dims[0][0] for dims in (a_dims, b_dims) if dims], default=0)
    if stride == 0:
        return True
    (a_count, a_dims), (b_count, b_dims) = _peel(a_dims, stride), _peel(b_dims, stride)
    # index i of a and j of b leave a gap of gap + (j - i) * stride to the smaller strides
    low = max(-((_extent(b_dims, b.size) - 1 + gap) // stride), 1 - a_count)
    high = min((_extent(a_dims, a.size) - 1 - gap) // stride, b_count - 1)
    # views of one layout leave two candidates at most
    return high - low > 1 or any(_meet(gap + k * stride, a, a_dims, b, b_dims) for k in range(low, high + 1))


def _peel(dims: list, stride: int) -> tuple[int, list]:
    """Size of the dimension of that stride, 1 if there is none, and the other dimensions."""
    return (dims[0][1], dims[1:]) if dims and dims[0][0] == stride else (1, dims)
