"""The vectorised definitions against loops that spell them out."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast import reference


@st.composite
def rounds(draw):
    rows = draw(st.integers(1, 8))
    num_drafts = draw(st.integers(0, 6))
    vector = lambda low, high: draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows))  # noqa: E731
    end = draw(st.integers(12, 30))
    return {
        "start": vector(0, end - 1),
        "end": end,
        "n_accepted": vector(0, num_drafts),
        "finished": draw(st.lists(st.booleans(), min_size=rows, max_size=rows)),
        "num_drafts": num_drafts,
    }


@given(rounds())
def test_plan_moves_the_fewest_columns(r):
    new_end, shift = reference.plan_realign(
        torch.tensor(r["start"]),
        torch.tensor(r["end"]),
        torch.tensor(r["n_accepted"]),
        torch.tensor(r["finished"]),
        r["num_drafts"],
    )
    new_end, shift = int(new_end), shift.tolist()
    active = [b for b, done in enumerate(r["finished"]) if not done]
    assert all(shift[b] == 0 for b in range(len(shift)) if b not in active)

    def cost(end):
        moved = 0
        for b in active:
            s = end - (r["end"] + r["n_accepted"][b] + 1)
            if r["start"][b] + s < 0:
                return None
            moved += (r["end"] + r["n_accepted"][b] - r["start"][b]) if s else 0
        return moved

    costs = {end: cost(end) for end in range(r["end"] + 1, r["end"] + r["num_drafts"] + 2)}
    possible = {end: c for end, c in costs.items() if c is not None}
    assert new_end == min(possible, key=lambda end: (possible[end], end))
    for b in active:
        assert shift[b] == new_end - (r["end"] + r["n_accepted"][b] + 1)


@given(
    st.integers(1, 5), st.integers(0, 5), st.integers(0, 2**16), st.integers(1, 3)
)  # few distinct ids, so that prefixes match
def test_accept_greedy_takes_the_longest_allowed_prefix(rows, num_drafts, seed, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randint(vocabulary, (rows, num_drafts), generator=generator)
    target = torch.randint(vocabulary, (rows, num_drafts + 1), generator=generator)
    limit = torch.randint(num_drafts + 1, (rows,), generator=generator)
    n_accepted, bonus = reference.accept_greedy(draft, target, limit)
    committed = reference.committed_tokens(draft, n_accepted, bonus)
    for b in range(rows):
        n = 0
        while n < limit[b] and draft[b, n] == target[b, n]:
            n += 1
        assert n_accepted[b] == n and bonus[b] == target[b, n]
        assert committed[b].tolist() == [*draft[b, :n].tolist(), int(bonus[b]), *[0] * (num_drafts - n)]


def test_a_row_finishes_at_a_stop_id_it_committed_or_at_its_limit():
    committed = torch.tensor([[5, 2, 7], [5, 9, 2], [2, 0, 0], [5, 6, 7], [5, 6, 7]])
    n_accepted = torch.tensor([2, 1, 0, 2, 2])
    length = torch.tensor([10, 10, 10, 10, 10])
    max_length = torch.tensor([99, 99, 99, 13, 14])
    finished = reference.finished_rows(committed, n_accepted, length, max_length, torch.tensor([2, 3]))
    assert finished.tolist() == [True, False, True, True, False]
    nothing = reference.finished_rows(
        committed, n_accepted, length, max_length + 99, torch.tensor([], dtype=torch.int64)
    )
    assert not nothing.any()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([None, 1, 3]),
)
def test_mask_and_positions(start, first_query, num_queries, first_column, window):
    first_column = min(first_column, first_query)
    mask = reference.attention_mask(torch.tensor(start), first_query, num_queries, first_column, torch.float32, window)
    positions = reference.position_ids(torch.tensor(start), first_query, num_queries, 6)
    assert mask.shape == (len(start), 1, num_queries, first_query + num_queries - first_column)
    for b, begin in enumerate(start):
        for i in range(num_queries):
            q = first_query + i
            assert positions[b, i] == min(max(q - begin, 0), 6)
            for c in range(mask.shape[-1]):
                j = c + first_column
                sees = (begin <= j <= q and (window is None or q - j < window)) or j == q
                assert mask[b, 0, i, c] == (0 if sees else torch.finfo(torch.float32).min)
