"""The padded batch keeps every KV entry and token where its row expects it, through any sequence of rounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_fast.padded import PaddedBatch

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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rounds_keep_every_entry(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    num_drafts = data.draw(st.integers(1, 5))
    texts = [[1000 * row + p for p in range(n)] for row, n in enumerate(lengths)]
    width = max(lengths)
    input_ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    batch = PaddedBatch(input_ids, lengths, 100, num_drafts, [])
    if data.draw(st.booleans()):
        # room for one round only, so that compaction and growth happen
        batch.capacity = batch.end + num_drafts + 2
        batch.tokens = batch.tokens[:, : batch.capacity].clone()
    caches = [batch.new_cache(), batch.new_cache()]
    rows = list(range(len(lengths)))
    moved = 0

    def commit(drafts, accepted, stop):
        nonlocal rows, moved
        for slot, row in enumerate(rows):
            texts[row] += drafts[slot, : accepted[slot]].tolist() + [77]
        stop_length = torch.tensor([0 if s else 10**6 for s in stop])
        batch.max_length = stop_length
        done = batch.commit(drafts, torch.tensor(accepted), torch.full((len(rows),), 77))
        assert done.finished.tolist() == stop
        moved += sum(
            n + count for n, count, s in zip(batch.lengths, accepted, done.shift.tolist(), strict=True) if s != 0
        )
        keep = [slot for slot, s in enumerate(stop) if not s]
        order = batch.advance(int(done.new_end), accepted, keep)
        rows = [rows[slot] for slot in order]

    for cache in caches:
        forward(batch, cache, rows, batch.first_column, batch.end - batch.first_column)
    batch.open_round(0)
    commit(input_ids[:, :0], [0] * len(rows), [False] * len(rows))
    for _ in range(data.draw(st.integers(1, 12))):
        if not rows:
            break
        k = data.draw(st.integers(0, num_drafts))
        batch.open_round(k)
        check(batch, caches, rows, texts)
        for cache in caches:
            forward(batch, cache, rows, batch.end - 1, k + 1)
        drafts = torch.randint(5, 50, (len(rows), k))
        accepted = [data.draw(st.integers(0, k)) for _ in rows]
        commit(drafts, accepted, [data.draw(st.integers(0, 5)) == 0 for _ in rows])
    if rows:
        check(batch, caches, rows, texts)


def test_growth_is_geometric_and_compaction_comes_first():
    batch = PaddedBatch(torch.arange(8)[None], [8], 4, 2, [])
    cache = batch.new_cache()
    forward(batch, cache, [0], batch.first_column, 8)
    batch.open_round(0)
    batch.max_length += 10**6
    done = batch.commit(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]), torch.tensor([77]))
    batch.advance(int(done.new_end), [0], [0])
    capacities = []
    for _ in range(300):
        batch.open_round(2)
        forward(batch, cache, [0], batch.end - 1, 3)
        done = batch.commit(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), torch.tensor([77]))
        batch.advance(int(done.new_end), [2], [0])
        capacities.append(batch.capacity)
    assert batch.capacity == cache.capacity > 900
    assert len(set(capacities)) < 12


def test_bytes_moved_counts_the_valid_columns_of_shifted_rows():
    texts = [[1, 2, 3, 4], [5, 6]]
    batch = PaddedBatch(torch.tensor([texts[0], [0, 0, *texts[1]]]), [4, 2], 100, 3, [])
    cache = batch.new_cache()
    forward(batch, cache, [0, 1], batch.first_column, 4)
    batch.open_round(0)
    done = batch.commit(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]), torch.tensor([7, 7]))
    batch.advance(int(done.new_end), [0, 0], [0, 1])
    assert cache.bytes_moved == 0
    batch.open_round(3)
    forward(batch, cache, [0, 1], batch.end - 1, 4)
    done = batch.commit(torch.full((2, 3), 9), torch.tensor([3, 1]), torch.tensor([7, 7]))
    batch.advance(int(done.new_end), [3, 1], [0, 1])
    # the short row moves: 2 prompt tokens, 1 committed before, 1 accepted
    assert done.shift.tolist() == [0, 2]
    assert cache.bytes_per_column == 2 * HEADS * (KEY_DIM + VALUE_DIM) * 8
    assert cache.bytes_moved == 4 * cache.bytes_per_column


@pytest.mark.parametrize("finished", [[0], [1], [0, 2], [1, 2, 3]])
def test_finished_rows_are_replaced_by_the_last(finished):
    texts = [[10 * row + p for p in range(3)] for row in range(4)]
    batch = PaddedBatch(torch.tensor(texts), [3] * 4, 100, 2, [])
    cache = batch.new_cache()
    forward(batch, cache, [0, 1, 2, 3], batch.first_column, 3)
    batch.open_round(0)
    done = batch.commit(torch.zeros(4, 0, dtype=torch.int64), torch.tensor([0] * 4), torch.tensor([77] * 4))
    keep = [row for row in range(4) if row not in finished]
    order = batch.advance(int(done.new_end), [0] * 4, keep)
    assert sorted(order) == keep
    check(batch, [cache], order, [[*text, 77] for text in texts])
    assert cache.bytes_moved == sum(slot != row for slot, row in enumerate(order)) * 4 * cache.bytes_per_column
