"""Softmax over columns that arrive a chunk at a time, in powers of two."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(score, cap):
    """``cap * tanh(score / cap)``."""
    return cap - 2 * cap / (1 + tl.exp2(score * (2 * LOG2_E / cap)))


@triton.jit
def raised(peak, new):
    """The larger peak, and what the sums under ``peak`` are to be multiplied by; -inf where nothing was seen yet."""
    highest = tl.maximum(peak, new)
    # any finite number keeps -inf - -inf out
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, finite, tl.exp2(peak - finite)


@triton.jit
def fold(score, peak, total):
    """Fold a chunk of scores ``[M, N]`` into ``peak`` and ``total`` ``[M]``; a score that does not count is -inf.

    Returns the chunk's weights, what earlier weights are to be multiplied by, and the new peak and total.
    """
    highest, finite, decay = raised(peak, tl.max(score, axis=1))
    weights = tl.exp2(score - finite[:, None])
    return weights, decay, highest, total * decay + tl.sum(weights, axis=1)
