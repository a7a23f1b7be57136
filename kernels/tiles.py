"""Tiles: a few successive tokens of a row, and the columns that they see."""

import triton
import triton.language as tl


@triton.jit
def find_tile(table, segments, tile, TOKENS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Slot, first position, tokens and first packed token of a tile; 0 tokens where there is none.

    ``table`` is ``[4, S]`` int64: slot, end, size and first packed token of each segment. The tiles of segment s begin
    with number ``first // TOKENS + s``, which gives every segment as many as it needs.
    """
    every = tl.arange(0, SEGMENTS)
    exists = every < segments
    first = tl.load(table + 3 * segments + every, mask=exists, other=0)
    own = tl.sum((exists & (first // TOKENS + every <= tile)).to(tl.int32), axis=0) - 1
    slot, end = tl.load(table + own), tl.load(table + segments + own)
    size, first = tl.load(table + 2 * segments + own), tl.load(table + 3 * segments + own)
    done = (tile - own - first // TOKENS) * TOKENS
    tokens = tl.minimum(tl.maximum(size - done, 0), TOKENS)
    return slot, (end - size + done).to(tl.int32), tokens.to(tl.int32), first + done


@triton.jit
def find_columns(position, tokens, window, splits, STEP: tl.constexpr, WINDOWED: tl.constexpr, LEAST: tl.constexpr):
    """Columns ``[low, end)`` that some token of a tile sees, and how many of them make a split."""
    end = position + tokens
    low = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    size = tl.maximum(tl.cdiv(tl.cdiv(end - low, splits), STEP) * STEP, LEAST)
    return low, end, size
