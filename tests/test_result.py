"""Results as a person sees them."""

import torch

from specdec_fast.result import GenerationResult, GenerationStats, RequestRecord, RequestResult, RowResult

TOKENS = list(range(10_000, 11_000))


def test_the_repr_of_a_row_has_no_thousand_tokens():
    assert repr(RowResult(3, 7, TOKENS, "eos", rounds=250, drafted=1250, accepted=750)) == (
        "RowResult(index=3, prompt_length=7, token_ids=<1000 items>, finish_reason='eos', rounds=250, drafted=1250, "
        "accepted=750)"
    )
    assert "token_ids=[5, 6]" in repr(RowResult(3, 7, [5, 6]))


def test_the_repr_of_a_request_is_short_and_keeps_its_error():
    error = "a prompt has 9000 tokens; with max_new_tokens=16 it outgrows the most of 8192"
    shown = repr(RequestResult(3, 7, TOKENS, "error", error=error, record=RequestRecord(queued=4, ended_at=1 / 3)))
    assert shown.startswith("RequestResult(index=3") and len(shown) < 600
    assert error in shown and "queued=4" in shown and "ended_at=0.333)" in shown


def test_the_repr_of_a_result_is_short():
    stats = GenerationStats(tokens=8000, seconds=1 / 3, accepted_by_round=[[(0, 5, 3)] * 8] * 250)
    shown = repr(GenerationResult(torch.zeros(8, 1010, dtype=torch.int64), [RowResult(0, 7, TOKENS)] * 8, stats))
    assert shown.startswith(
        "GenerationResult(sequences=<torch.int64 (8, 1010)>, rows=<8 items>, stats=GenerationStats("
    )
    assert "tokens=8000, seconds=0.333, " in shown and "accepted_by_round=<250 items>" in shown
    assert len(shown) < 500
