"""The padded batch keeps every KV entry and token where its row expects it, through any sequence of rounds."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_fast import reference
from specdec_fast.layouts.padded.batch import PaddedBatch
from specdec_fast.operators import commits

FULL, WINDOW = (torch.float64, None), (torch.float64, 3)

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def entry(row, position):
    """A value no other token of the test has."""
    return row * 1000.0 + position + 1


def forward(batch, cache, rows, first, columns):
    """Write the KV a model would: content position p of row r holds ``entry(r, p)``; padding holds -1."""
    column = first + torch.arange(columns)
    position = column - batch.start[:, None]
    value = torch.tensor(rows)[:, None] * 1000.0 + position + 1
    value = torch.where(position >= 0, value, torch.full_like(value, -1.0)).double()
    cache.write_at(first, batch.first_column)
    for layer in range(2):
        sign = (-1) ** layer
        key = (sign * value)[:, None, :, None].expand(-1, HEADS, -1, KEY_DIM)
        cache.update(key, key[..., :1].expand(-1, -1, -1, VALUE_DIM) * 2, layer)


def check(batch, caches, rows, texts):
    assert batch.start.tolist() == [batch.end - n for n in batch.lengths]
    assert batch.length.tolist() == batch.lengths
    for slot, row in enumerate(rows):
        start = batch.end - batch.lengths[slot]
        assert start >= 0
        assert batch.tokens[slot, start : batch.end].tolist() == texts[row]
        want = torch.tensor([entry(row, p) for p in range(batch.lengths[slot] - 1)]).double()
        for cache in caches:
            for index, x in enumerate(cache.tensors()):
                sign = (-1) ** (index // 2) * (1 + index % 2)
                held = x[slot, :, start : batch.end - 1]
                assert torch.equal(held, sign * want[None, :, None].expand(held.shape))
                assert torch.isfinite(x).all()


MODEL = SimpleNamespace(mask_kinds=[FULL, WINDOW])


def commit(batch, drafts, accepted):
    """Accept ``accepted`` drafts of every row, with 77 as the bonus; returns the commits on the host."""
    accepted = torch.tensor(accepted)
    target_ids = torch.full((len(batch), drafts.shape[1] + 1), 77)
    return commits.read(batch.commit(drafts, target_ids, accepted, accepted))


def prefilled(texts, **options):
    """A batch whose prompts went through one cache and gained their first token."""
    lengths = list(map(len, texts))
    input_ids = torch.tensor([[0] * (max(lengths) - len(text)) + text for text in texts])
    batch = PaddedBatch(input_ids, lengths, **{"max_new_tokens": 100, "stop_ids": [], "max_position": 999} | options)
    cache = batch.attach(MODEL)
    batch.open_round(0)
    forward(batch, cache, list(range(len(texts))), batch.first_column, max(lengths))
    return batch, cache


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rounds_keep_every_entry(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    num_drafts = data.draw(st.integers(1, 5))
    texts = [[1000 * row + p for p in range(n)] for row, n in enumerate(lengths)]
    input_ids = torch.tensor([[0] * (max(lengths) - len(text)) + text for text in texts])
    batch = PaddedBatch(input_ids, lengths, 100, num_drafts, [], 999)
    if data.draw(st.booleans()):
        # room for one round only, so that compaction and growth happen
        batch.capacity = batch.end + num_drafts + 2
        batch.tokens = batch.tokens[:, : batch.capacity].clone()
    caches = [batch.attach(MODEL), batch.attach(MODEL)]
    rows = list(range(len(lengths)))
    moved = 0

    def play(k, accepted, stop):
        nonlocal rows, moved
        batch.open_round(k)
        if k or batch.end > batch.slack + max(lengths):
            check(batch, caches, rows, texts)
            check_next_forward(batch, k)
        first = batch.end - 1 if texts[rows[0]][-1] == 77 else batch.first_column
        for cache in caches:
            forward(batch, cache, rows, first, batch.end + k - first)
        drafts = torch.randint(5, 50, (len(rows), k))
        for slot, row in enumerate(rows):
            texts[row] = texts[row] + drafts[slot, : accepted[slot]].tolist() + [77]
        batch.max_length = torch.tensor([0 if s else 10**6 for s in stop])
        before, counted = batch.end, batch.bytes_moved
        summary = commit(batch, drafts, accepted)
        assert [row.finished for row in summary] == stop
        order = batch.advance(summary)
        shifted = [
            len(texts[row]) - 1 for row, s, n in zip(rows, stop, accepted) if not s and before + n + 1 != batch.end
        ]
        replaced = sum(slot != row for slot, row in enumerate(order)) * (batch.end - batch.first_column) if order else 0
        assert batch.bytes_moved - counted == (sum(shifted) + replaced) * 2 * caches[0].bytes_per_column
        rows = [rows[slot] for slot in order]

    play(0, [0] * len(rows), [False] * len(rows))
    for _ in range(data.draw(st.integers(1, 12))):
        if rows:
            k = data.draw(st.integers(0, num_drafts))
            accepted = [data.draw(st.integers(0, k)) for _ in rows]
            play(k, accepted, [data.draw(st.integers(0, 5)) == 0 for _ in rows])
    if rows:
        check(batch, caches, rows, texts)


def check_next_forward(batch, k):
    """Masks and positions of the draft's and the target's forwards are those of the definition."""
    for first, count in [(batch.end - 2, 2), (batch.end - 1, k + 1), (batch.end - 1 + k, 1)]:
        want = reference.position_ids(batch.start, first, count, 999)
        assert torch.equal(batch.position_ids(first, count, 999), want)
        assert batch.position_ids(first, count, 3).max() <= 3
        for dtype, window in (FULL, WINDOW):
            want = reference.attention_mask(batch.start, first, count, batch.first_column, dtype, window)
            assert torch.equal(batch.mask((dtype, window), first, count), want)


def test_growth_is_geometric_and_compaction_comes_first():
    batch, cache = prefilled([list(range(8))], max_new_tokens=4, num_draft_tokens=2)
    batch.max_length += 10**6
    batch.advance(commit(batch, batch.tokens[:, :0], [0]))
    capacities = []
    for _ in range(300):
        batch.open_round(2)
        forward(batch, cache, [0], batch.end - 1, 3)
        batch.advance(commit(batch, torch.zeros(1, 2, dtype=torch.int64), [2]))
        capacities.append(batch.capacity)
    assert batch.capacity == cache.capacity > 900
    assert len(set(capacities)) < 12


def test_bytes_moved_counts_the_valid_columns_of_shifted_rows():
    batch, cache = prefilled([[1, 2, 3, 4], [5, 6]], num_draft_tokens=3)
    batch.advance(commit(batch, batch.tokens[:, :0], [0, 0]))
    assert batch.bytes_moved == 0
    batch.open_round(3)
    forward(batch, cache, [0, 1], batch.end - 1, 4)
    batch.advance(commit(batch, torch.full((2, 3), 9), [3, 1]))
    # the short row moves: 2 prompt tokens, 1 committed before, 1 accepted
    assert cache.bytes_per_column == 2 * HEADS * (KEY_DIM + VALUE_DIM) * 8
    assert batch.bytes_moved == 4 * cache.bytes_per_column


def test_one_operator_moves_target_and_draft():
    batch, cache = prefilled([[1, 2, 3, 4], [5, 6]], num_draft_tokens=3)
    draft_cache = batch.attach(MODEL)
    forward(batch, draft_cache, [0, 1], batch.first_column, 4)
    batch.advance(commit(batch, batch.tokens[:, :0], [0, 0]))
    batch.open_round(3)
    for each in (cache, draft_cache):
        forward(batch, each, [0, 1], batch.end - 1, 4)
    arguments = torch.full((2, 3), 9), torch.full((2, 4), 7), torch.tensor([3, 1]), torch.tensor([3, 1])
    with Dispatched() as dispatched:
        summary = batch.commit(*arguments)
    kernels = [name for name in dispatched.names if name not in ("aten::slice", "aten::new_empty", "aten::alias")]
    assert kernels == ["specdec_fast::realign_step_"]
    batch.advance(commits.read(summary))
    assert batch.bytes_moved == 4 * 2 * cache.bytes_per_column


class Dispatched(TorchDispatchMode):
    """Names of the operators that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().split(".")[0])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("finished", [[0], [1], [0, 2], [1, 2, 3]])
def test_finished_rows_are_replaced_by_the_last(finished):
    texts = [[10 * row + p for p in range(3)] for row in range(4)]
    batch, cache = prefilled(texts, num_draft_tokens=2)
    batch.max_length[finished] = 0
    order = batch.advance(commit(batch, batch.tokens[:, :0], [0] * 4))
    assert sorted(order) == [row for row in range(4) if row not in finished]
    check(batch, [cache], order, [[*text, 77] for text in texts])
    assert batch.bytes_moved == sum(slot != row for slot, row in enumerate(order)) * 4 * cache.bytes_per_column
