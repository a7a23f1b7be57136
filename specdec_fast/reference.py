"""Pure PyTorch definitions of what the kernels compute: a padded round's commit, and the ragged layout.

Symbols are those of "Correctness Forensics for Batch Speculative Decoding" (arXiv 2510.22876): B rows, K drafts
a round. Row b holds content in columns ``[start_b, end)``; its newest token, at ``end - 1``, has no KV before the
next verify. No function here reads a tensor back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .operators.arguments import StepArguments
from .operators.commits import packed


def accept_greedy(draft_ids: Tensor, target_ids: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of the drafts that equals the target's own choice (paper, section 3).

    Args:
        draft_ids: ``[B, K]`` int64.
        target_ids: ``[B, K + 1]`` int64, the target's argmax after the last committed token and after each draft.
        limit: ``[B]`` int64, drafts of each row that may be accepted, 0..K.

    Returns:
        ``n_accepted`` ``[B]`` and ``bonus`` ``[B]``: the target's token after the accepted prefix.
    """
    num_drafts = draft_ids.shape[1]
    position = torch.arange(num_drafts, device=draft_ids.device)
    matches = (draft_ids == target_ids[:, :num_drafts]) & (position < limit[:, None])
    n_accepted = matches.long().cumprod(1).sum(1)
    return n_accepted, target_ids.gather(1, n_accepted[:, None])[:, 0]


def committed_tokens(draft_ids: Tensor, n_accepted: Tensor, bonus: Tensor) -> Tensor:
    """Accepted drafts, then the bonus token, then zeros: ``[B, K + 1]`` int64."""
    position = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    drafts = torch.nn.functional.pad(draft_ids, (0, 1))
    tokens = torch.where(position < n_accepted[:, None], drafts, torch.zeros_like(drafts))
    return torch.where(position == n_accepted[:, None], bonus[:, None], tokens)


def finished_rows(
    committed: Tensor, n_accepted: Tensor, length: Tensor, max_length: Tensor, stop_ids: Tensor
) -> Tensor:
    """Rows whose committed tokens hold a stop id or reach ``max_length``: ``[B]`` bool.

    Only committed tokens are looked at, so a stop id inside the prompt ends nothing.
    """
    position = torch.arange(committed.shape[1], device=committed.device)
    stops = torch.isin(committed, stop_ids) & (position <= n_accepted[:, None])
    return stops.any(1) | (length + n_accepted + 1 >= max_length)


def judge(
    draft_ids: Tensor,
    target_ids: Tensor,
    limit: Tensor,
    n_accepted: Tensor | None,
    length: Tensor,
    max_length: Tensor,
    stop_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``n_accepted`` ``[B]``, the committed tokens ``[B, K + 1]`` and which rows are finished ``[B]``.

    Arguments are those of :func:`specdec_fast.ops.realign_step_`.
    """
    if n_accepted is None:
        n_accepted, bonus = accept_greedy(draft_ids, target_ids, limit)
    else:
        bonus = target_ids.gather(1, n_accepted[:, None])[:, 0]
    committed = committed_tokens(draft_ids, n_accepted, bonus)
    return n_accepted, committed, finished_rows(committed, n_accepted, length, max_length, stop_ids)


def plan_realign(
    start: Tensor, end: Tensor, n_accepted: Tensor, finished: Tensor, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """Choose the shared ``end'`` that moves the fewest KV columns.

    Candidates leave in place the rows that accepted ``n`` drafts, for n in 0..K; a row may move left only into its
    own padding (``start' >= 0``). Ties take the smallest ``end'``. Finished rows have no say and do not move.

    Args:
        start: ``[B]`` int64.
        end: ``[]`` int64, before the round.
        n_accepted: ``[B]`` int64.
        finished: ``[B]`` bool.
        num_drafts: K.

    Returns:
        ``new_end`` ``[]`` and ``shift`` ``[B]``, int64.
    """
    candidate = torch.arange(num_drafts + 1, device=start.device)
    active = ~finished
    in_place = (n_accepted[:, None] == candidate) & active[:, None]
    columns_kept = (in_place * (end + n_accepted - start)[:, None]).sum(0)
    smallest = torch.where(active, n_accepted - start, torch.zeros_like(start)).amax()
    columns_kept = torch.where(candidate >= smallest, columns_kept, torch.full_like(columns_kept, -1))
    # argmax names no winner among equals, so the candidate itself breaks the tie
    best = (columns_kept * (num_drafts + 1) + (num_drafts - candidate)).argmax()
    shift = torch.where(active, best - n_accepted, torch.zeros_like(n_accepted))
    return end + best + 1, shift


def plan_packed(start: Tensor, end: Tensor, n_accepted: Tensor, finished: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's layout: every unfinished row to minimal padding, the longest of them at column 0.

    Arguments and results are those of :func:`plan_realign`. With every row finished, nothing moves.
    """
    active = ~finished
    longest = torch.where(active, end + n_accepted + 1 - start, torch.zeros_like(start)).amax()
    new_end = torch.where(active.any(), longest, end + 1)
    shift = torch.where(active, new_end - (end + n_accepted + 1), torch.zeros_like(n_accepted))
    return new_end, shift


def realign_(tensors: Sequence[Tensor], start: Tensor, num_columns: Tensor, shift: Tensor) -> None:
    """Move columns ``[start_b, start_b + num_columns_b)`` of row b by ``shift_b``, in place.

    Columns that nothing moves onto keep their bytes.

    Args:
        tensors: ``[B, H, C, D]`` each; H, C and D may differ.
        start, num_columns, shift: ``[B]`` int64. Every target column must lie in ``[0, C)``.
    """
    for x in tensors:
        batch, heads, capacity, _ = x.shape
        column = torch.arange(capacity, device=x.device)
        source = column - shift[:, None]
        moved = (source >= start[:, None]) & (source < (start + num_columns)[:, None])
        source = torch.where(moved, source, column)
        row = torch.arange(batch, device=x.device)[:, None, None]
        head = torch.arange(heads, device=x.device)[None, :, None]
        x.copy_(x[row, head, source[:, None]])


def append_kv_(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, row_of: Tensor, position_of: Tensor) -> None:
    """Write the KV of N packed tokens to their rows and positions of the pools.

    Args:
        k_pool, v_pool: ``[W, H, C, D]`` each; H, C and D may differ.
        k, v: ``[1, H, N, D]``.
        row_of, position_of: ``[N]`` int64, distinct pairs.
    """
    for pool, new in ((k_pool, k), (v_pool, v)):
        pool[row_of, :, position_of] = new[0].transpose(0, 1)


def ragged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    segments: Sequence[tuple[int, int, int]],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The token at position p of a row sees the positions ``j <= p`` of that row with ``p - j < window``.

    Scores are ``soft_cap * tanh(q k scale / soft_cap)``, the softmax runs over them and the head's sink, in float32 or
    wider. Nothing beyond a row's last query is read.

    Args:
        query: ``[1, Hq, N, D]``, the tokens of ``segments`` in their order.
        segments: slot, first position and size each: a run of positions of the row in that slot.
        k_pool, v_pool: ``[W, H, C, D]``; H divides Hq, the D of values may differ.
        sinks: ``[Hq]``, a score without a value.

    Returns:
        ``[1, N, Hq, D]`` of the values' D, in the query's dtype.
    """
    heads, groups = k_pool.shape[1], query.shape[1] // k_pool.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(1, query.shape[2], query.shape[1], v_pool.shape[3])
    # [H, groups, N, D]
    grouped = query[0].unflatten(0, (heads, groups))
    first = 0
    for slot, start, size in segments:
        tokens = slice(first, first + size)
        first += size
        end = start + size
        low = 0 if window is None else max(0, start + 1 - window)
        k, v = (pool[slot, :, None, low:end].to(wide) for pool in (k_pool, v_pool))
        scores = grouped[:, :, tokens].to(wide) @ k.mT * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        p = torch.arange(start, end, device=query.device)[:, None]
        j = torch.arange(low, end, device=query.device)
        hidden = j > p if window is None else (j > p) | (p - j >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.to(wide).view(heads, groups, 1, 1).expand(-1, -1, size, -1)
            scores = torch.cat([scores, sink], -1)
        # [H, groups, size, D]
        row = scores.softmax(-1)[..., : end - low] @ v
        out[0, tokens] = row.flatten(0, 1).transpose(0, 1).to(out.dtype)
    return out


def ragged_attention_(
    out: Tensor,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """:func:`ragged_attention` of the segments that exist: ``table`` ``[4, S]`` holds slot, end, size, first token.

    Segments of size 0 do not exist. Tokens of no segment keep what ``out`` ``[1, N, Hq, D]`` holds.
    """
    for slot, end, size, first in table.T.tolist():
        if size:
            tokens, segments = slice(first, first + size), [(slot, end - size, size)]
            own = ragged_attention(query[:, :, tokens], k_pool, v_pool, segments, scale, window, soft_cap, sinks)
            out[:, tokens] = own


def append_tokens_(tokens: Tensor, end: Tensor, committed: Tensor, n_accepted: Tensor) -> None:
    """Write the ``n_accepted_b + 1`` committed tokens of each row at column ``end`` of ``tokens`` ``[B, C]``."""
    offset = torch.arange(tokens.shape[1], device=tokens.device) - end
    new = committed[:, offset.clamp(0, committed.shape[1] - 1)]
    tokens.copy_(torch.where((offset >= 0) & (offset <= n_accepted[:, None]), new, tokens))


def position_ids(start: Tensor, first_query: int | Tensor, num_queries: int, max_position: int) -> Tensor:
    """Position IDs of the queries in columns ``[first_query, first_query + num_queries)``: ``[B, Q]`` int64.

    Padding columns get 0; drafts beyond what their row may accept are held at ``max_position``.
    """
    column = first_query + torch.arange(num_queries, device=start.device)
    return (column - start[:, None]).clamp_(0, max_position)


def visible_columns(start: Tensor, query: Tensor, column: Tensor, window: int | None = None) -> Tensor:
    """Columns ``column`` ``[C]`` that the queries in columns ``query`` ``[Q]`` see: ``[B, Q, C]`` bool.

    Query column q of row b sees ``start_b <= j <= q`` and, with a sliding window, ``q - j < window``. A query in
    the padding sees itself alone, so that no softmax runs over nothing.
    """
    query = query[:, None]
    band = column <= query
    if window is not None:
        band = band & (query - column < window)
    return (band & (column >= start[:, None, None])) | (column == query)


def mask_values(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """``visible`` as an additive mask of ``dtype``, 0 where a query sees, else the minimum; unchanged for bool."""
    if dtype == torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def attention_mask(
    start: Tensor,
    first_query: int,
    num_queries: int,
    first_column: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """Mask ``[B, 1, Q, first_query + num_queries - first_column]`` of the rule in :func:`visible_columns`."""
    end = first_query + num_queries
    query = torch.arange(first_query, end, device=start.device)
    column = torch.arange(first_column, end, device=start.device)
    return mask_values(visible_columns(start, query, column, window), dtype)[:, None]


def realign_step_(*arguments: Any) -> None:
    """The whole commit of a padded round; arguments are :class:`~specdec_fast.operators.arguments.StepArguments`."""
    a = StepArguments(*arguments)
    n_accepted, committed, finished = judge(
        a.draft_ids, a.target_ids, a.limit, a.n_accepted, a.length, a.max_length, a.stop_ids
    )
    end = a.start[0] + a.length[0]
    if a.placement == 0:
        new_end, shift = plan_realign(a.start, end, n_accepted, finished, a.draft_ids.shape[1])
    else:
        new_end, shift = plan_packed(a.start, end, n_accepted, finished)
    num_columns = (a.length + n_accepted) * ~finished
    realign_(a.caches, a.start, num_columns, shift)
    append_tokens_(a.tokens, end, committed, n_accepted)
    # the bonus token has no KV yet
    realign_([a.tokens[:, None, :, None]], a.start, num_columns + 1, shift)
    a.new_start.copy_(a.start + shift)
    a.new_length.copy_(a.length + n_accepted + 1)
    # a draft model's first step feeds the last two tokens
    first_query, num_queries = new_end - 2, a.position_ids.shape[1]
    a.position_ids.copy_(position_ids(a.new_start, first_query, num_queries, a.max_position))
    query = first_query + torch.arange(num_queries, device=a.start.device)
    for mask, window in zip(a.masks, a.windows, strict=True):
        column = torch.arange(mask.shape[3], device=a.start.device)
        mask.copy_(mask_values(visible_columns(a.new_start, query, column, window or None), mask.dtype)[:, None])
    a.summary.copy_(packed(n_accepted, finished, new_end.expand_as(a.start), committed))
