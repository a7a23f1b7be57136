"""The decoder that callers see."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.acceptance import Acceptance
from ..decoding.base import Decoder
from ..drafters import Drafter
from ..errors import InputError
from ..result import GenerationStats, RequestResult
from ..scheduler import Scheduler
from .engine import Engine, Stream
from .executor import Executor
from .online import Session
from .request import TOKENIZED, PromptLimits, parse


class EXSpec(Decoder):
    """Speculative decoding of any number of prompts, equal to the target's own greedy decoding row by row.

    Rows join and leave the batch one by one, so no row waits for the slowest (paper, EXSPEC). Prompts are read as there
    is room for them, and a row's KV is free for the next one as soon as it ends. A prompt that cannot be decoded, a
    draft that fails and a cancelled row end with an ``error``; the others continue.

    Args:
        target, draft, num_draft_tokens, layout, acceptance: as for :class:`~specdec_fast.EQSpec`.
        batch_size: most rows of a verify (B).
        window: most rows decoded concurrently (W); ``None`` is 4 ``batch_size``.
        max_wait_rounds: a row that has started takes part at least once in so many rounds; ``None`` is 32 times the
            rounds that serving the window takes.
        kv_budget_bytes: KV bytes that target and draft may take; fewer rows run where they would need more. While a
            pool grows, one tensor of it is held twice.
        max_length: most tokens of a row, prompt and new ones; ``None`` is the target's context (of a longrope model,
            what stays before its switch).
        prefill_tokens: prompt tokens that ride along with a round; the padded layout runs prompts whole.

    Raises:
        InputError: an argument out of range, or a draft that does not fit the target.
        UnsupportedModelError: a model that cannot be kept correct.

    Warns:
        UnappliedSettingsWarning: the target's generation config asks for more than greedy search.

    Example:
        >>> for row in EXSpec(target, draft, batch_size=8).generate(prompts, max_new_tokens=64):
        ...     print(row.index, row.error or tokenizer.decode(row.token_ids))
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Drafter | PreTrainedModel,
        *,
        num_draft_tokens: int = 5,
        batch_size: int = 8,
        window: int | None = None,
        layout: str | None = "ragged",
        max_wait_rounds: int | None = None,
        kv_budget_bytes: int | None = None,
        max_length: int | None = None,
        prefill_tokens: int = 512,
        acceptance: Acceptance | None = None,
    ):
        super().__init__(target, draft, num_draft_tokens=num_draft_tokens, layout=layout, acceptance=acceptance)
        if self.context < super().context:
            warnings.warn(
                f"rows of more than {self.context} tokens, which may pass {self.rope_switch}, are refused",
                stacklevel=2,
            )
        if max_length is not None and (type(max_length) is not int or not 2 <= max_length <= self.context):
            raise InputError(f"max_length={max_length!r}: need an integer from 2 to the context of {self.context}")
        if kv_budget_bytes is not None and (type(kv_budget_bytes) is not int or kv_budget_bytes < 1):
            raise InputError(f"kv_budget_bytes={kv_budget_bytes!r}: need an integer of at least 1")
        self.max_length = self.context if max_length is None else max_length
        self.kv_budget_bytes = kv_budget_bytes
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "window": window,
            "layout": self.layout,
            "num_draft_tokens": num_draft_tokens,
            "max_wait_rounds": max_wait_rounds,
            "prefill_tokens": prefill_tokens,
        }
        # so that a setting that is out of range is refused here
        self.scheduler(self.max_length, None)

    @property
    def context(self) -> int:
        """Most tokens of a row. Of a longrope model, rows and their drafts stay before its switch."""
        before = self.context_before_switch(self.num_draft_tokens)
        return super().context if before is None else min(super().context, before)

    def prompt_limits(self, max_new_tokens: int) -> PromptLimits:
        """PromptLimits of prompts that get ``max_new_tokens`` where they do not say."""
        bound = f"the most of {self.max_length} tokens"
        if self.max_length == self.context:
            before = self.context < super().context
            bound += f": a longer row may pass {self.rope_switch}" if before else ", the target's context"
        return PromptLimits(self.vocab_size, self.max_length, bound, max_new_tokens)

    def generate(
        self,
        prompts: Iterable[Any],
        *,
        max_new_tokens: int,
        eos_token_id: int | Iterable[int] | None = None,
        on_round: Callable[[GenerationStats], None] | None = None,
    ) -> Stream:
        """Continue every prompt as the target's own greedy decoding would.

        Args:
            prompts: token ids, or dicts with ``input_ids`` and perhaps ``max_new_tokens``; read as there is room.
            max_new_tokens: new tokens of a prompt that does not say, at least 1.
            eos_token_id: id or ids that end a row; ``None`` takes the model's, ``[]`` means none.
            on_round: called after every round with the running counters.

        Returns:
            An iterator of :class:`~specdec_fast.result.RequestResult` in the order of their end.

        Raises:
            InputError: ``max_new_tokens`` out of range, or a budget too small for any row.
        """
        engine = self._engine(self._longest(prompts, max_new_tokens), max_new_tokens, eos_token_id)
        engine.feed(prompts)
        return Stream(engine, on_round)

    def generate_all(self, prompts: Sequence[Any], **options: Any) -> list[RequestResult]:
        """As :meth:`generate`, all results in the order of ``prompts``."""
        return sorted(self.generate(prompts, **options), key=lambda row: row.index)

    def serve(self, *, max_new_tokens: int, eos_token_id: int | Iterable[int] | None = None) -> Session:
        """Decode prompts as they are submitted, in a thread of its own; arguments and errors as for :meth:`generate`.

        Example:
            >>> with decoder.serve(max_new_tokens=64) as session:
            ...     answer = session.submit(prompt)
            ...     text = tokenizers.decoders.DecodeStream()
            ...     for token in answer:
            ...         print(text.step(tokenizer.backend_tokenizer, token) or "", end="")
        """
        return Session(self._engine(self.max_length, max_new_tokens, eos_token_id))

    def scheduler(self, longest: int, budget_columns: int | None) -> Scheduler:
        """A scheduler with this decoder's settings."""
        # no row can use more drafts
        settings = self._settings | {"num_draft_tokens": min(self.num_draft_tokens, longest)}
        try:
            return Scheduler(**settings, max_columns=longest, budget_columns=budget_columns)
        except InputError as error:
            if budget_columns is None:
                raise
            raise InputError(f"kv_budget_bytes={self.kv_budget_bytes} is too small: {error}") from error

    @torch.no_grad()
    def budget_columns(self, longest: int) -> int | None:
        """The budget in KV columns of all models together."""
        if self.kv_budget_bytes is None:
            return None
        size = Executor.column_bytes(self, longest)
        columns = self.kv_budget_bytes // size
        if columns < 2:
            raise InputError(f"kv_budget_bytes={self.kv_budget_bytes}: a row of 2 tokens takes {2 * size}")
        return columns

    def _engine(self, longest: int, max_new_tokens: int, eos_token_id: int | Iterable[int] | None) -> Engine:
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r}: need an integer of at least 1")
        return Engine(self, longest, max_new_tokens, eos_token_id)

    def _longest(self, prompts: Iterable[Any], max_new_tokens: int) -> int:
        """Most tokens that a row can reach; known where all prompts are there."""
        if not isinstance(prompts, Iterable) or isinstance(prompts, str | Mapping):
            raise InputError(
                f"prompts is of type {type(prompts).__name__}; need an iterable of prompts, each such as {TOKENIZED}"
            )
        if not isinstance(prompts, Sequence):
            return self.max_length
        limits, columns = self.prompt_limits(max_new_tokens), [2]
        for prompt in prompts:
            with suppress(InputError):
                ids, new = parse(prompt, limits)
                columns.append(len(ids) + new)
        return max(columns)
