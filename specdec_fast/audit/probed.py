"""A run of a candidate under a probe of the target, and of the draft where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from transformers import PreTrainedModel

from .probe import Probe, Violation
from .replay import Replay
from .results import ProbeReport
from .setting import Setting

if TYPE_CHECKING:
    from .compare import CandidateRow


class ProbedRun(contextlib.ExitStack):
    """Probes the models of ``setting`` inside the context.

    Attributes:
        target, draft: the probes; no draft probe where nothing but the target is run.
    """

    def __init__(self, setting: Setting):
        super().__init__()
        self.target = Probe(setting.target, eos_token_id=setting.eos_token_id, max_new_tokens=setting.max_new_tokens)
        model = getattr(setting.drafter, "model", None)
        self.draft = (
            Probe(model, follow=self.target)
            if isinstance(model, PreTrainedModel) and model is not setting.target
            else None
        )

    def __enter__(self) -> Self:
        super().__enter__()
        for probe in (self.target, self.draft):
            if probe:
                self.enter_context(probe)
        return self

    def violation(self, answers: Sequence[CandidateRow]) -> Violation | None:
        """The first of the target."""
        self.target.check_answers([answer.token_ids for answer in answers])
        return self.target.violation

    def report(self, replay: Replay, prompts: Sequence[list[int]], answers: Sequence[CandidateRow]) -> ProbeReport:
        """Reports what was seen, and whether drafts were accepted as often as for each row alone."""
        drafted = sum(answer.drafted for answer in answers)
        accepted = alone = None
        if drafted:
            blocks = [block for prompt in prompts for block in replay.blocks(prompt)]
            accepted = sum(answer.accepted for answer in answers) / drafted
            alone = sum(block.accepted for block in blocks) / max(1, sum(block.drafted for block in blocks))
        return ProbeReport(
            checked=self.target.forwards,
            violation=self.violation(answers),
            draft_violation=self.draft.violation if self.draft else None,
            accepted=accepted,
            accepted_alone=alone,
        )
