"""The rounds that a correct decoder needs for a row: where its blocks end, and which drafts the target rejects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.eqspec import EQSpec
from ..drafters import Drafter, DraftRun, Drafts
from .setting import Setting


@dataclass(frozen=True)
class Block:
    """One round of a row.

    Attributes:
        start: index, among the new tokens, of its first draft.
        drafts: the drafted tokens.
        accepted: how many of them the target accepts.
    """

    start: int
    drafts: list[int]
    accepted: int

    @property
    def drafted(self) -> int:
        return len(self.drafts)

    def rejected_at(self, index: int) -> int | None:
        """The draft that the target rejects in favour of its own token ``index``."""
        here = index == self.start + self.accepted and self.accepted < self.drafted
        return self.drafts[self.accepted] if here else None


class Replay:
    """Decodes rows alone, correctly, with the draft under audit; a row is decoded once, whatever runs ask for it."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self._known: dict[tuple[int, ...], list[Block]] = {}

    def blocks(self, prompt: list[int]) -> list[Block]:
        """The rounds of one row."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self._decode(prompt)
        return self._known[key]

    def _decode(self, prompt: list[int]) -> list[Block]:
        setting, recorder = self.setting, _Recorder(self.setting.drafter)
        ids = torch.tensor([prompt], device=setting.target.device)
        decoder = EQSpec(setting.target, recorder, num_draft_tokens=setting.num_draft_tokens)
        accepted = decoder.generate(ids, **setting.limits).stats.accepted_by_round
        blocks, start = [], 1
        for drafts, ((_, drafted, kept),) in zip(recorder.rounds, accepted, strict=True):
            blocks.append(Block(start, drafts[:drafted], kept))
            start += kept + 1
        return blocks


class _Recorder(Drafter, DraftRun):
    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.rounds: list[list[int]] = []

    @property
    def models(self) -> Sequence[PreTrainedModel]:
        return self.drafter.models

    def check(self, target: PreTrainedModel) -> None:
        self.drafter.check(target)

    def begin(self, batch: Any, longest: int) -> DraftRun:
        self.run = self.drafter.begin(batch, longest)
        return self

    def draft(self, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        drafts = self.run.draft(texts, limits)
        self.rounds.append(drafts.ids[0, : drafts.counts[0]].tolist())
        return drafts
