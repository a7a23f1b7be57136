"""The base of every speculative decoder."""

from __future__ import annotations

import warnings

from transformers import PreTrainedModel

from ..drafters import Drafter
from ..drafters.model import as_drafter
from ..errors import InputError, UnappliedSettingsWarning
from ..integrations import compat
from ..integrations.generation_config import refuse_own_inputs, unapplied
from ..layouts import LAYOUTS, fastest_layout
from ..selfcheck import traits_on
from .acceptance import Acceptance, GreedyAcceptance


class Decoder:
    """A target, a drafter, a KV layout, and how drafts are judged.

    Args:
        target: any Hugging Face causal LM with attention layers only.
        draft: a :class:`~specdec_fast.drafters.Drafter`, or a draft model.
        num_draft_tokens: most drafts per row and round (K).
        layout: where rows keep their KV, one of ``LAYOUTS``; ``None`` takes
            :func:`~specdec_fast.layouts.fastest_layout`.
        acceptance: how drafts are judged; greedy by default.

    Raises:
        InputError: an argument out of range, or a draft that does not fit the target.
        UnsupportedModelError: a model that cannot be kept correct.
    """

    applies_generation_config = False
    """The target's generation config has been applied by whoever calls this decoder."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Drafter | PreTrainedModel,
        *,
        num_draft_tokens: int,
        layout: str | None,
        acceptance: Acceptance | None,
    ):
        if not isinstance(num_draft_tokens, int) or num_draft_tokens < 1:
            raise InputError(f"num_draft_tokens={num_draft_tokens!r}: need an integer of at least 1")
        if layout not in (None, *LAYOUTS):
            raise InputError(f"layout={layout!r}: accepted are None, {', '.join(map(repr, LAYOUTS))}")
        compat.require_model("target", target)
        self.drafter = as_drafter(draft)
        self.layout = layout or fastest_layout([target, *self.drafter.models])
        self.target, self.traits = target, traits_on(target, self.layout)
        refuse_own_inputs(target)
        self.drafter.check(target)
        self.num_draft_tokens = num_draft_tokens
        self.acceptance = acceptance or GreedyAcceptance()
        if not self.applies_generation_config and (text := unapplied(target)):
            warnings.warn(text, UnappliedSettingsWarning, stacklevel=3)

    @property
    def context(self) -> int:
        """Most tokens of a row: its last one needs no position."""
        return self.traits.max_position + 1

    @property
    def rope_switch(self) -> str:
        """The switch of a longrope target and its consequence, for messages."""
        return (
            f"{compat.rope_switch(self.target)} tokens, where the longrope of {type(self.target).__name__} changes the "
            "angles of all positions and batched text would not be its own"
        )

    def context_before_switch(self, num_drafts: int) -> int | None:
        """Most tokens of a row that stays, with ``num_drafts`` drafts, before the switch of a longrope target."""
        switch = compat.rope_switch(self.target)
        return None if switch is None else switch - num_drafts + 1

    @property
    def vocab_size(self) -> int:
        return compat.text_config(self.target).vocab_size
