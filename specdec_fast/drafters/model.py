"""Drafts from a smaller causal LM."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.acceptance import greedy_ids
from ..errors import InputError, UnsupportedModelError
from ..integrations import compat
from ..layouts.batch import Batch, Follower
from ..selfcheck import self_check
from .base import Drafter, DraftRun, Drafts


class ModelDrafter(Drafter):
    """Greedy drafts from any Hugging Face causal LM that shares the target's tokenizer.

    Its KV cache follows the target's batch, so it never prefills a row twice.

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
        compat.require_model("model", model)
        compat.model_traits(model)
        self.model = model
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer

    @property
    def models(self) -> Sequence[PreTrainedModel]:
        return (self.model,)

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

    def begin(self, batch: Batch, longest: int) -> DraftRun:
        try:
            self_check(self.model, batch.layout, longest)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"the draft model: {error}") from error
        return _ModelRun(batch.follow(self.model), self._vocabulary)


def as_drafter(draft: Drafter | PreTrainedModel) -> Drafter:
    """``draft`` itself, or a :class:`ModelDrafter` of a model."""
    if isinstance(draft, Drafter):
        return draft
    if not isinstance(draft, Module):
        raise InputError(f"draft is {draft!r}; need a Drafter, such as NgramDrafter(), or a loaded model")
    return ModelDrafter(draft)


class _ModelRun(DraftRun):
    def __init__(self, follower: Follower, vocabulary: int):
        self.follower, self.vocabulary = follower, vocabulary

    def draft(self, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        return Drafts(self.follower.draft(limits, self._choose), limits)

    def _choose(self, logits: Tensor) -> Tensor:
        return greedy_ids(logits[:, : self.vocabulary])
