"""Shared checks of decoders against the target's own greedy text."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tiny_models import greedy_oracle, left_pad
from transformers import PreTrainedModel

from specdec_fast import EQSpec
from specdec_fast.drafters import Drafter, DraftRun, Drafts
from specdec_fast.layouts.ragged import Segment, attention
from specdec_fast.result import GenerationResult


@dataclass
class Comparison:
    """Decoded rows compared with the oracle, and the cases exercised."""

    rows: int = 0
    wrong: int = 0
    ragged_rounds: int = 0
    accepted: set[int] = field(default_factory=set)
    texts: list[list[int]] = field(default_factory=list)

    def add(self, model: PreTrainedModel, prompts, result: GenerationResult, max_new_tokens: int, eos) -> None:
        for prompt, row in zip(prompts, result.rows, strict=True):
            self.rows += 1
            self.wrong += row.token_ids != greedy_oracle(model, prompt, max_new_tokens, eos)
            self.texts.append(row.token_ids)
        for counts in result.stats.accepted_by_round:
            accepted = {n for _, _, n in counts}
            self.accepted |= accepted
            self.ragged_rounds += len(accepted) > 1

    @property
    def distinct_tokens(self) -> float:
        """Mean number of different tokens in a text: low when texts loop."""
        return sum(len(set(text)) for text in self.texts) / len(self.texts)


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int = 24,
    eos: int | list[int] | None = None,
    layout: str = "padded",
    into: Comparison | None = None,
) -> Comparison:
    """Decode ``prompts`` as one batch and compare each row with batch-1 greedy ``generate``."""
    comparison = into or Comparison()
    input_ids, attention_mask = left_pad(prompts, 0)
    result = EQSpec(model, drafter, num_draft_tokens=k, layout=layout).generate(
        input_ids, attention_mask, max_new_tokens=max_new_tokens, eos_token_id=[] if eos is None else eos
    )
    comparison.add(model, prompts, result, max_new_tokens, eos)
    return comparison


def plant_in_attention(monkeypatch, change: Callable[[list[Segment]], list[Segment]]) -> None:
    """Let ragged attention work on other segments than it is given."""
    right = attention.ragged_attention

    def wrong(query, k_pool, v_pool, packing, *rest):
        segments, other = change(packing.segments), copy.copy(packing)
        firsts = [0, *itertools.accumulate(s.size for s in segments)]
        other.table = torch.tensor([(s.slot, s.end, s.size, first) for s, first in zip(segments, firsts)]).T
        return right(query, k_pool, v_pool, other, *rest)

    monkeypatch.setattr(attention, "ragged_attention", wrong)


class NoisyOracleDrafter(Drafter, DraftRun):
    """Drafts the target's own text, each token spoiled with a given probability, and sometimes fewer than asked."""

    def __init__(self, model: PreTrainedModel, prompts, max_new_tokens: int, seed: int, wrong: float = 0.3):
        self.texts = [list(prompt) + greedy_oracle(model, prompt, max_new_tokens) for prompt in prompts]
        self.vocab = model.config.vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.wrong = wrong

    def begin(self, batch, longest):
        return self

    def draft(self, texts, limits):
        ids = torch.zeros(len(limits), max(limits), dtype=torch.int64)
        counts = []
        for slot, ((row, text), limit) in enumerate(zip(texts, limits, strict=True)):
            counts.append(int(torch.randint(limit + 1, (), generator=self.generator)))
            ahead = self.texts[row][len(text) : len(text) + limit]
            spoil = torch.rand(len(ahead), generator=self.generator) < self.wrong
            ids[slot, : len(ahead)] = (torch.tensor(ahead, dtype=torch.int64) + spoil) % self.vocab
        return Drafts(ids, counts)
