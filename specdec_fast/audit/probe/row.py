"""A row as it must look in the next forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .alone import AloneRow
from .capture import RowView
from .violation import Violation

# a decoder may cast logits before it picks from them
_CAST = {torch.float64: 1e-6, torch.float32: 1e-6}


@dataclass
class Ending:
    """Decisions of a row's newest forward pass that no later one has taken up.

    Attributes:
        text: tokens of the row, and those that the target chose after them.
        prompt_length: prompt tokens of ``text``.
        decided: position of the first token that this pass decided.
        round: forward passes before this one.
        column: of the token that was fed first.
        logits: ``[V]``, from which the last token of ``text`` was chosen.
    """

    text: list[int]
    prompt_length: int
    decided: int
    round: int
    column: int
    logits: Tensor | None

    def divergence(self, answer: Sequence[int]) -> int | None:
        """Position of the first of the new tokens ``answer`` that the target did not choose."""
        text = self.text[self.prompt_length :]
        offset = next((i for i, pair in enumerate(zip(answer, text)) if pair[0] != pair[1]), None)
        if offset is None:
            return None
        is_newest = self.prompt_length + offset == len(self.text) - 1
        if is_newest and self.logits is not None and chooses(self.logits, answer[offset]):
            return None
        return self.prompt_length + offset

    def violation(self, row: int, position: int, token: int) -> Violation:
        detail = f"the row ended with token {token} where the target chose {self.text[position]}"
        return Violation("wrong_token", self.round, row, None, self.column, position, detail, token)


@dataclass
class TrackedRow:
    """A row of the batch.

    Attributes:
        index: its number in the batch as it began.
        text: its prompt and every token that the target is known to choose after it. What was committed is a prefix
            of this: a decoder may keep fewer drafts than it could.
        prompt_length: prompt tokens of ``text``.
        longest: tokens at which the row has all it may gain, None if unknown.
        announced: the prompt was given, not read off the first forward.
        alone: its keys and values at batch size 1.
        ended: the text ends with an EOS or has its full length.
        broken: a violation was found, so what follows has no standard to be held to.
        newest_logits: ``[V]``, from which the last token of ``text`` was chosen.
    """

    index: int
    text: list[int]
    prompt_length: int
    longest: int | None
    announced: bool
    alone: AloneRow
    ended: bool = False
    broken: bool = False
    newest_logits: Tensor | None = None

    def expects(self, position: int, token: int) -> bool:
        """True if ``token`` may be fed at ``position``."""
        logits = self.newest_logits if position == len(self.text) - 1 else None
        if logits is not None and chooses(logits, token):
            # of equal logits either may be chosen
            self.text[position] = token
        return token == self.text[position]

    def take_chunk(self, first: int, tokens: list[int]) -> None:
        """Read another piece of the prompt, where only pieces of it were seen so far and this is no new token."""
        unread = not self.announced and first == self.prompt_length > 0
        if unread and len(tokens) > 1 and self.text[first : first + 1] != tokens[:1]:
            self.text[first:] = tokens
            self.longest = self.longest and self.longest + len(tokens)
            self.prompt_length, self.ended = len(self.text), False

    def learn(self, view: RowView, first: int, queries: list[int], eos_ids: set[int]) -> None:
        """Extend the text by what the model chooses after each query; ``first`` is the position of the first one."""
        for offset, query in enumerate(queries):
            position = first + offset
            if self.ended or position >= len(self.text) or view.tokens[query] != self.text[position]:
                return
            logits = view.choice(query)
            if position + 1 < len(self.text) or logits is None:
                continue
            choice = int(logits.argmax())
            if offset + 1 < len(queries) and chooses(logits, view.tokens[queries[offset + 1]]):
                choice = view.tokens[queries[offset + 1]]
            self.text.append(choice)
            self.newest_logits = logits
            self.ended = choice in eos_ids or len(self.text) == self.longest


@dataclass
class DraftedRow(TrackedRow):
    """A row as its draft model sees it: the text that the target committed, and after it the draft's own proposals."""

    _proposed: dict[int, int] = field(default_factory=dict)

    def follow(self, text: list[int]) -> None:
        """The target may have gone on, so proposals no longer count."""
        self.text = list(text)
        self._proposed.clear()

    def expects(self, position: int, token: int) -> bool:
        if token != self.text[position] and self._proposed.get(position) == token:
            # the target knows more of the row than was committed
            self.text[position:] = [token]
        return super().expects(position, token)

    def learn(self, view: RowView, first: int, queries: list[int], eos_ids: set[int]) -> None:
        logits = view.choice(queries[-1]) if queries else None
        after = first + len(queries)
        if logits is not None:
            self._proposed[after] = int(logits.argmax())
            self.text[len(self.text) :] = [self._proposed[after]] if after == len(self.text) else []


def chooses(logits: Tensor, token: int) -> bool:
    """True if ``token`` has the largest of ``logits`` ``[V]``, up to a cast of the logits."""
    if not 0 <= token < len(logits):
        return False
    largest = logits.max()
    return bool(largest - logits[token] <= _CAST.get(logits.dtype, 0.0) * largest.abs())
