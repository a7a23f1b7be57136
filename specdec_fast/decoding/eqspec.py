"""EQSPEC: batch speculative decoding whose output equals the target's own (arXiv 2510.22876, section 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters import Drafter, Drafts
from ..errors import InputError, UnsupportedModelError
from ..integrations import compat
from ..layouts import LAYOUTS, BatchType, fastest_layout
from ..layouts.ragged import CompiledBatch
from ..result import GenerationResult, GenerationStats, RowResult
from ..selfcheck import self_check
from .acceptance import Acceptance
from .base import Decoder
from .rounds import Rounds, Row


class EQSpec(Decoder):
    """Batch speculative decoding, equal to the target's own greedy decoding row by row.

    Args:
        target: any Hugging Face causal LM with attention layers only.
        draft: a :class:`~specdec_fast.drafters.Drafter`, or a draft model.
        num_draft_tokens: most drafts per row and round (K).
        layout: where rows keep their KV. ``"padded"``: rows share a right edge and are realigned every round.
            ``"ragged"``: every row has a length of its own, nothing moves, and only real tokens are computed.
            ``None`` takes :func:`~specdec_fast.layouts.fastest_layout`.
        acceptance: how drafts are judged; greedy by default.
        compile: run the models of the ragged layout under ``torch.compile``, each forward as one graph. Up to a quarter
            more tokens are then computed, so that forwards have few shapes.

    Raises:
        InputError: an argument out of range, or a draft that does not fit the target.
        UnsupportedModelError: a model that cannot be kept correct.

    Warns:
        UnappliedSettingsWarning: the target's generation config asks for more than greedy search.

    Example:
        >>> result = EQSpec(target, draft).generate(input_ids, attention_mask, max_new_tokens=64)
        >>> tokenizer.batch_decode(result.sequences, skip_special_tokens=True)
    """

    batch_type: BatchType | None = None
    """Keeps the rows, in place of the batch type of ``layout``."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Drafter | PreTrainedModel,
        *,
        num_draft_tokens: int = 5,
        layout: str | None = None,
        acceptance: Acceptance | None = None,
        compile: bool = False,
    ):
        own = type(self).batch_type
        layout = own.layout if own else "ragged" if compile and layout is None else layout
        self._may_fall_back = layout is None
        super().__init__(target, draft, num_draft_tokens=num_draft_tokens, layout=layout, acceptance=acceptance)
        if compile and self.layout != "ragged":
            raise InputError(f"compile=True needs layout='ragged', got layout={self.layout!r}")
        self._batch_type: BatchType = own or (CompiledBatch if compile else LAYOUTS[self.layout])

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        eos_token_id: int | Iterable[int] | None = None,
        pad_token_id: int | None = None,
        on_round: Callable[[GenerationStats], None] | None = None,
        on_finish: Callable[[RowResult], None] | None = None,
    ) -> GenerationResult:
        """Continue every row as the target's own greedy decoding would.

        Args:
            input_ids: ``[B, P]`` int64, left-padded, on the target's device.
            attention_mask: ``[B, P]``, 0 on padding. ``None`` means no padding: it is never guessed from the pad id,
                which may be a real token.
            max_new_tokens: new tokens per row, at least 1.
            eos_token_id: id or ids that end a row; ``None`` takes the model's, ``[]`` means none.
            pad_token_id: fills ``sequences`` after a row's end; ``None`` takes the model's, else an EOS id, else 0.
            on_round: called after every round with the running counters.
            on_finish: called with each row as it finishes.

        Returns:
            A :class:`~specdec_fast.result.GenerationResult`.

        Raises:
            InputError: shapes, dtypes, devices, padding or lengths that cannot be decoded.
        """
        began = time.perf_counter()
        lengths = self._check_input(input_ids, attention_mask, max_new_tokens)
        self._refuse_rope_switch(lengths, max_new_tokens)
        stop_ids = compat.eos_ids(self.target, eos_token_id)
        longest = max(lengths) + max_new_tokens
        open_batch = self._settle_layout(longest)
        prompts = [ids[-n:] for ids, n in zip(input_ids.tolist(), lengths, strict=True)]
        run = _Run(self, open_batch, input_ids, prompts, max_new_tokens, stop_ids)
        run.on_finish = on_finish
        run.prefill()
        while run.active:
            run.round()
            if on_round:
                run.stats.seconds = time.perf_counter() - began
                on_round(run.stats)
        run.stats.stage_seconds = run.rounds.clock.seconds()
        run.stats.bytes_moved = run.batch.bytes_moved
        run.stats.seconds = time.perf_counter() - began
        pad = compat.pad_id(self.target, pad_token_id, stop_ids)
        width = max(len(row.result.token_ids) for row in run.rows)
        new = [row.result.token_ids + [pad] * (width - len(row.result.token_ids)) for row in run.rows]
        sequences = torch.cat([input_ids, input_ids.new_tensor(new)], 1)
        return GenerationResult(sequences, [row.result for row in run.rows], run.stats)

    def _refuse_rope_switch(self, lengths: list[int], max_new_tokens: int) -> None:
        """Of a longrope model, all rows must stay on one side of its switch, drafts included."""
        num_drafts = min(self.num_draft_tokens, max_new_tokens - 1)
        context, after = self.context_before_switch(num_drafts), self.context_before_switch(0)
        if context is None or after is None or min(lengths) >= after:
            return
        row = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[row] + max_new_tokens > context:
            raise InputError(
                f"row {row} has {lengths[row]} tokens; with max_new_tokens={max_new_tokens} and {num_drafts} drafts it "
                f"may pass {self.rope_switch}; keep all rows and drafts of a batch before it, or every prompt beyond it"
            )

    def _settle_layout(self, longest: int) -> BatchType:
        """Check the models; where the layout was left to us, the padded one serves texts that the other cannot."""
        if not self._may_fall_back:
            self_check(self.target, self._batch_type.layout, longest)
            return self._batch_type
        models = [self.target, *self.drafter.models]
        self.layout = self._checked_layout(models, longest)
        return LAYOUTS[self.layout]

    @staticmethod
    def _checked_layout(models: list[PreTrainedModel], longest: int) -> str:
        try:
            if fastest_layout(models) == "ragged":
                for model in models:
                    self_check(model, "ragged", longest)
                return "ragged"
        except UnsupportedModelError:
            pass
        self_check(models[0], "padded", longest)
        return "padded"

    def _check_input(self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> list[int]:
        """Content length of each row."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r}: need an integer of at least 1")
        if not isinstance(input_ids, Tensor):
            raise InputError(
                f"input_ids is a {type(input_ids).__name__}; need int64 [rows, tokens]: pass input_ids and "
                "attention_mask of tokenizer(prompts, return_tensors='pt', padding=True, padding_side='left')"
            )
        if not isinstance(attention_mask, Tensor | None):
            raise InputError(f"attention_mask is a {type(attention_mask).__name__}; need a tensor shaped as input_ids")
        if input_ids.dim() != 2 or input_ids.numel() == 0 or input_ids.dtype != torch.int64:
            raise InputError(
                f"input_ids is {input_ids.dtype} {list(input_ids.shape)}; need int64 [rows, tokens], neither 0"
            )
        if input_ids.device != self.target.device:
            raise InputError(f"input_ids is on {input_ids.device}, the target on {self.target.device}")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise InputError(
                f"attention_mask is {list(mask.shape)}, input_ids {list(input_ids.shape)}; need equal shapes"
            )
        visible = mask.bool()
        lengths = visible.sum(1)
        left_padded = visible == (torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - lengths[:, None])
        known = ((input_ids >= 0) & (input_ids < self.vocab_size)) | ~visible
        facts = torch.stack([lengths, left_padded.all(1).long(), known.all(1).long()], 1).tolist()
        for row, (length, is_left_padded, is_known) in enumerate(facts):
            if length == 0:
                raise InputError(f"row {row} of attention_mask is all zeros; an empty prompt cannot be continued")
            if not is_left_padded:
                raise InputError(
                    f"row {row} of attention_mask is not left-padded; need zeros, then ones: tokenize with "
                    "padding_side='left'"
                )
            if not is_known:
                raise InputError(
                    f"row {row} of input_ids holds ids outside the target's vocabulary of {self.vocab_size}"
                )
            if length + max_new_tokens > self.context:
                raise InputError(
                    f"row {row} has {length} tokens; with max_new_tokens={max_new_tokens} it outgrows the target's "
                    f"context of {self.context}"
                )
        return [fact[0] for fact in facts]


class _Run:
    """One ``generate`` call."""

    def __init__(
        self,
        decoder: EQSpec,
        open_batch: BatchType,
        input_ids: Tensor,
        prompts: list[list[int]],
        max_new_tokens: int,
        stop_ids: list[int],
    ):
        # a round commits its drafts and a bonus, so more could never be used
        self.num_draft_tokens = min(decoder.num_draft_tokens, max(1, max_new_tokens - 1))
        lengths = list(map(len, prompts))
        max_position = decoder.traits.max_position
        self.batch = open_batch(input_ids, lengths, max_new_tokens, self.num_draft_tokens, stop_ids, max_position)
        self.rounds = Rounds(decoder, self.batch, max(lengths) + max_new_tokens, stop_ids)
        self.stats = self.rounds.stats
        self.rows = [Row(prompt, max_new_tokens, RowResult(i, len(prompt))) for i, prompt in enumerate(prompts)]
        self.active = list(self.rows)
        self.on_finish: Callable[[RowResult], None] | None = None

    def prefill(self) -> None:
        """Every row gains its first token; no draft takes part."""
        self.batch.open_round(0)
        self._verify(self.rounds.no_drafts(len(self.rows)))

    def round(self) -> None:
        """Draft, verify, accept, commit, stop."""
        limits = [min(self.num_draft_tokens, row.remaining - 1) for row in self.active]
        self.batch.open_round(max(limits))
        self._verify(self.rounds.draft(self.active, limits), is_round=True)

    def _verify(self, drafts: Drafts, *, is_round: bool = False) -> None:
        rows = self.active
        outcomes, stay = self.rounds.verify(rows, drafts)
        self.active = [rows[place] for place in stay]
        if is_round:
            self.rounds.count(rows, drafts.counts, outcomes)
            self.stats.host_reads += 1
            counts = [(r.result.index, d, x.accepted) for r, d, x in zip(rows, drafts.counts, outcomes, strict=True)]
            self.stats.accepted_by_round.append(counts)
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.finished and self.on_finish:
                self.on_finish(row.result)
