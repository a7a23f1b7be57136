"""EQSPEC: batch speculative decoding whose output equals the target's own (arXiv 2510.22876, section 3)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import compat
from .acceptance import Acceptance, GreedyAcceptance
from .batch import Batch
from .drafters import Drafter, Drafts, ModelDrafter
from .errors import InputError
from .layouts import LAYOUTS
from .ragged import CompiledBatch
from .result import GenerationResult, GenerationStats, RowResult
from .selfcheck import self_check
from .timing import StageClock


class EQSpec:
    """Batch speculative decoding, equal to the target's own greedy decoding row by row.

    Args:
        target: any Hugging Face causal LM with attention layers only.
        draft: a :class:`~specdec_fast.drafters.Drafter`, or a draft model.
        num_draft_tokens: most drafts per row and round (K).
        layout: where rows keep their KV. ``"padded"``: rows share a right edge and are realigned every round.
            ``"ragged"``: every row has a length of its own, nothing moves, and only real tokens are computed.
        acceptance: how drafts are judged; greedy by default.
        compile: run the models of the ragged layout under ``torch.compile``, each forward as one graph. Up to a quarter
            more tokens are then computed, so that forwards have few shapes.

    Raises:
        InputError: an argument out of range, or a draft that does not fit the target.
        UnsupportedModelError: a model that cannot be kept correct.

    Example:
        >>> result = EQSpec(target, draft).generate(input_ids, attention_mask, max_new_tokens=64)
        >>> tokenizer.batch_decode(result.sequences, skip_special_tokens=True)
    """

    batch_type: type[Batch] | None = None
    """What keeps the rows, in place of that of ``layout``."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Drafter | PreTrainedModel,
        *,
        num_draft_tokens: int = 5,
        layout: str = "padded",
        acceptance: Acceptance | None = None,
        compile: bool = False,
    ):
        if not isinstance(num_draft_tokens, int) or num_draft_tokens < 1:
            raise InputError(f"num_draft_tokens={num_draft_tokens!r}: need an integer of at least 1")
        if layout not in LAYOUTS:
            raise InputError(f"layout={layout!r}: accepted are {', '.join(map(repr, LAYOUTS))}")
        if compile and layout != "ragged":
            raise InputError(f"compile=True needs layout='ragged', got layout={layout!r}")
        self.open_batch: type[Batch] = type(self).batch_type or (CompiledBatch if compile else LAYOUTS[layout])
        self.target, self.traits = target, compat.model_traits(target, layout)
        self.drafter = draft if isinstance(draft, Drafter) else ModelDrafter(draft)
        self.drafter.check(target)
        self.num_draft_tokens = num_draft_tokens
        self.acceptance = acceptance or GreedyAcceptance()
        if compat.rope_depends_on_batch(target):
            warnings.warn(
                f"{type(target).__name__} scales its rotary embedding by the longest row of a batch, so its batched "
                "output differs from single rows by design",
                stacklevel=2,
            )

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
        stop_ids = compat.eos_ids(self.target, eos_token_id)
        self_check(self.target, self.open_batch.layout, max(lengths) + max_new_tokens)
        prompts = [ids[-n:] for ids, n in zip(input_ids.tolist(), lengths, strict=True)]
        run = _Run(self, input_ids, prompts, max_new_tokens, stop_ids)
        run.on_finish = on_finish
        run.prefill()
        while run.active:
            run.round()
            if on_round:
                run.stats.seconds = time.perf_counter() - began
                on_round(run.stats)
        run.stats.stage_seconds = run.clock.seconds()
        run.stats.bytes_moved = run.batch.bytes_moved
        run.stats.seconds = time.perf_counter() - began
        pad = compat.pad_id(self.target, pad_token_id, stop_ids)
        width = max(len(row.result.token_ids) for row in run.rows)
        new = [row.result.token_ids + [pad] * (width - len(row.result.token_ids)) for row in run.rows]
        sequences = torch.cat([input_ids, input_ids.new_tensor(new)], 1)
        return GenerationResult(sequences, [row.result for row in run.rows], run.stats)

    def _check_input(self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> list[int]:
        """Content length of each row."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r}: need an integer of at least 1")
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
        size = compat.text_config(self.target).vocab_size
        known = ((input_ids >= 0) & (input_ids < size)) | ~visible
        facts = torch.stack([lengths, left_padded.all(1).long(), known.all(1).long()], 1).tolist()
        context = self.traits.max_position + 1
        for row, (length, is_left_padded, is_known) in enumerate(facts):
            if length == 0:
                raise InputError(f"row {row} of attention_mask is all zeros; an empty prompt cannot be continued")
            if not is_left_padded:
                raise InputError(f"row {row} of attention_mask is not left-padded; need zeros, then ones")
            if not is_known:
                raise InputError(f"row {row} of input_ids holds ids outside the target's vocabulary of {size}")
            if length + max_new_tokens > context:
                raise InputError(
                    f"row {row} has {length} tokens; with max_new_tokens={max_new_tokens} it outgrows the target's "
                    f"context of {context}"
                )
        return [fact[0] for fact in facts]


@dataclass
class _Row:
    """A row on the host: its text so far and its counters."""

    text: list[int]
    remaining: int
    result: RowResult


class _Run:
    """One ``generate`` call."""

    def __init__(
        self, decoder: EQSpec, input_ids: Tensor, prompts: list[list[int]], max_new_tokens: int, stop_ids: list[int]
    ):
        self.decoder = decoder
        self.stop_ids = set(stop_ids)
        # a round commits its drafts and a bonus, so more could never be used
        self.num_draft_tokens = min(decoder.num_draft_tokens, max(1, max_new_tokens - 1))
        lengths = list(map(len, prompts))
        max_position = decoder.traits.max_position
        self.batch = decoder.open_batch(
            input_ids, lengths, max_new_tokens, self.num_draft_tokens, stop_ids, max_position
        )
        self.target = self.batch.follow(decoder.target)
        self.drafting = decoder.drafter.begin(self.batch, max(lengths) + max_new_tokens)
        self.vocab_size = compat.text_config(decoder.target).vocab_size
        self.rows = [_Row(prompt, max_new_tokens, RowResult(i, len(prompt))) for i, prompt in enumerate(prompts)]
        self.active = list(self.rows)
        self.clock = StageClock(input_ids.device)
        self.stats = GenerationStats()
        self.on_finish: Callable[[RowResult], None] | None = None
        self._finished: list[RowResult] = []

    def prefill(self) -> None:
        """Every row gains its first token; no draft takes part."""
        batch = self.batch
        batch.open_round(0)
        self._verify_and_commit(Drafts(batch.tokens.new_zeros(len(batch), 0), [0] * len(batch)))
        self._report_finished()

    def round(self) -> None:
        """Draft, verify, accept, commit, stop."""
        limits = [min(self.num_draft_tokens, row.remaining - 1) for row in self.active]
        self.batch.open_round(max(limits))
        with self.clock.stage("draft"):
            texts = [(row.result.index, row.text) for row in self.active]
            drafts = self._checked(self.drafting.draft(texts, limits), limits)
        self.stats.rounds += 1
        self.stats.host_reads += 1
        rows = self.active
        n_accepted = self._verify_and_commit(drafts)
        for row, drafted, accepted in zip(rows, drafts.counts, n_accepted, strict=True):
            row.result.rounds += 1
            row.result.drafted += drafted
            row.result.accepted += accepted
        counts = [(r.result.index, d, n) for r, d, n in zip(rows, drafts.counts, n_accepted, strict=True)]
        self.stats.accepted_by_round.append(counts)
        self.stats.row_rounds += len(counts)
        self.stats.drafted += sum(drafts.counts)
        self.stats.accepted += sum(n_accepted)
        self._report_finished()

    def _verify_and_commit(self, drafts: Drafts) -> list[int]:
        """Accepted drafts of each row that was active when the round began."""
        batch, clock = self.batch, self.clock
        with clock.stage("verify"):
            logits = self.target.verify(*drafts)
        with clock.stage("accept"):
            limit = torch.tensor(drafts.counts, device=batch.device)
            target_ids, n_accepted = self.decoder.acceptance(drafts.ids, limit, logits)
        with clock.stage("commit"):
            # the one device-to-host copy of a round
            summary = batch.commit(drafts.ids, target_ids, limit, n_accepted).tolist()
            rows = self.active
            for row, (n, finished, _, *tokens) in zip(rows, summary, strict=True):
                self._append(row, tokens[: n + 1])
                if finished:
                    self._finished.append(row.result)
            self.active = [rows[slot] for slot in batch.advance(summary)]
        return [line[0] for line in summary]

    def _checked(self, drafts: Drafts, limits: list[int]) -> Drafts:
        """Drafts cut to the columns in use, or an error that names what the drafter got wrong."""
        ids, counts = drafts
        name = type(self.decoder.drafter).__name__
        if len(counts) != len(limits) or not all(0 <= n <= limit for n, limit in zip(counts, limits, strict=True)):
            raise InputError(f"{name} drafted {counts} tokens; need 0 to {limits}")
        width, device = max(counts), self.batch.device
        if ids.dim() != 2 or len(ids) != len(limits) or ids.shape[1] < width or ids.dtype != torch.int64:
            raise InputError(f"{name} drafted ids {ids.dtype} {list(ids.shape)}; need int64 [{len(limits)}, {width}]")
        if ids.device != device:
            raise InputError(f"{name} drafted on {ids.device}; the batch is on {device}")
        # filler may be anything, and an id no row can hold is only a wrong draft
        return Drafts(ids[:, :width].clamp(0, self.vocab_size - 1), counts)

    def _append(self, row: _Row, tokens: list[int]) -> None:
        stop = next((i for i, token in enumerate(tokens) if token in self.stop_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
            row.result.finish_reason = "eos"
        row.text += tokens
        row.remaining -= len(tokens)
        row.result.token_ids += tokens
        self.stats.tokens += len(tokens)

    def _report_finished(self) -> None:
        for result in self._finished:
            if self.on_finish:
                self.on_finish(result)
        self._finished.clear()
