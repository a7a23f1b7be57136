"""Drafts from a smaller causal LM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import compat
from ..cache import PaddedCache
from ..errors import InputError
from ..padded import PaddedBatch, PaddedModel
from ..selfcheck import self_check
from .base import Drafter, Drafts


class ModelDrafter(Drafter):
    """Greedy drafts from any Hugging Face causal LM that shares the target's tokenizer.

    Its KV cache lives in the target's batch and is realigned with it, so it never prefills a row twice.

    Args:
        model: the draft model, on the target's device.
        tokenizer, target_tokenizer: compared when given. Needed when the two models' ``vocab_size`` differ, to tell
            padding of the embedding from another vocabulary.

    Raises:
        InputError: the vocabularies differ.
        UnsupportedModelError: the model keeps state that cannot follow per-row acceptance.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.runner = PaddedModel(model)
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer

    @property
    def model(self) -> PreTrainedModel:
        return self.runner.model

    def check(self, target: PreTrainedModel) -> None:
        if self.model.device != target.device:
            raise InputError(
                f"the draft is on {self.model.device}, the target on {target.device}; put both on one device"
            )
        self._check_vocabulary(compat.text_config(self.model).vocab_size, compat.text_config(target).vocab_size)
        self._vocabulary = min(compat.text_config(m).vocab_size for m in (self.model, target))

    def _check_vocabulary(self, draft_size: int, target_size: int) -> None:
        if self.tokenizer is not None and self.target_tokenizer is not None:
            draft, target = self.tokenizer.get_vocab(), self.target_tokenizer.get_vocab()
            different = [token for token in draft.keys() | target.keys() if draft.get(token) != target.get(token)]
            if different:
                raise InputError(
                    f"the draft's tokenizer is not the target's: {len(different)} of {len(target)} entries differ, "
                    f"for example {min(different)!r}; a draft must share the target's vocabulary"
                )
        elif draft_size != target_size:
            raise InputError(
                f"draft vocab_size {draft_size} is not target vocab_size {target_size}; if only padding differs, pass "
                "tokenizer= and target_tokenizer= so that the vocabularies can be compared"
            )

    def begin(self, batch: PaddedBatch, longest: int) -> None:
        self_check(self.runner, longest)
        self._cache: PaddedCache = batch.attach(self.runner)
        self._pending: int | None = None

    def draft(self, batch: PaddedBatch, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        num_drafts = max(limits)
        if num_drafts == 0:
            if self._pending is not None:
                self._pending += 1
            return Drafts(batch.tokens.new_zeros(len(batch), 0), limits)
        first = batch.first_column if self._pending is None else batch.end - self._pending
        # ids beyond the shared vocabulary are padding no tokenizer emits; the clamp only keeps a lookup in range
        ids = batch.tokens[: len(batch), first : batch.end].clamp(max=self._vocabulary - 1)
        drafts = []
        for step in range(num_drafts):
            logits = self.runner.forward(batch, self._cache, first, ids, keep=1)[:, -1, : self._vocabulary]
            ids = logits.argmax(-1, keepdim=True)
            drafts.append(ids)
            first = batch.end + step
        # a fully accepted block leaves the last draft without KV, so the next round feeds two tokens
        self._pending = 2
        return Drafts(torch.cat(drafts, 1), limits)
