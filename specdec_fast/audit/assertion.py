"""The audit as an assertion, for the test suites of other decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import compat
from ..drafters import Drafter, NgramDrafter
from ..errors import InputError
from ..prompts import Prompt, check_context, encode
from ..result import RowResult
from .candidates import Foreign, foreign, resolve
from .compare import Answer, Run
from .oracle import Oracle
from .results import AuditReport, PromptAudit, RunAudit
from .runner import Judge, decode
from .setting import Setting
from .summary import describe


def assert_output_equivalent(
    candidate: Foreign | str,
    target: PreTrainedModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: Drafter | None = None,
    batch_sizes: Sequence[int] = (1, 4),
    num_draft_tokens: int = 5,
    max_new_tokens: int = 32,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> AuditReport:
    """Fail unless ``candidate`` writes the greedy text of ``target``, near-ties aside, at every batch size.

    Args:
        candidate: ``(input_ids, attention_mask, max_new_tokens) -> sequences``, the first two ``[B, P]`` and
            left-padded, the result ``[B, P + N]``; or what :func:`~specdec_fast.audit.candidates.resolve` takes.
        target: the model whose greedy text counts. In float32 or float64 a failure is no rounding.
        prompts: token ids of each prompt, or texts for ``tokenizer``.
        tokenizer: of the target.
        drafter: for candidates that draft; n-grams of the row's own text by default.
        batch_sizes: consecutive prompts decoded together.
        num_draft_tokens: K.
        max_new_tokens: new tokens per prompt.
        eos_token_id: ids that end a row, the target's own by default, ``[]`` for none.
        pad_token_id: of the padding, the target's own by default.

    Returns:
        The audit.

    Raises:
        AssertionError: with a table of all runs and their first divergences.
        InputError: prompts that cannot be used, or a candidate that returns something else than sequences.

    Example:
        >>> assert_output_equivalent(my_generate, model, ["Once upon a time", "def add("], tokenizer=tokenizer)
    """
    __tracebackhide__ = True
    encoded = _encode(prompts, tokenizer)
    if not batch_sizes or min(batch_sizes) < 1:
        raise InputError(f"batch_sizes {list(batch_sizes)}: need integers of at least 1")
    check_context(encoded, target.config, max_new_tokens)
    eos = compat.eos_ids(target, eos_token_id)
    pad = compat.pad_id(target, pad_token_id, eos)
    setting = Setting(target, drafter or NgramDrafter(), num_draft_tokens, max_new_tokens, eos, pad)
    report = _audit(candidate, setting, encoded, batch_sizes, tokenizer.decode if tokenizer else str)
    if not report.equivalent:
        raise AssertionError(f"the output is not the target's own greedy text\n{describe(report)}")
    return report


def _encode(prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    if not prompts or not all(prompts):
        raise InputError("prompts: need at least one, and none that is empty")
    if not any(isinstance(prompt, str) for prompt in prompts):
        return [list(prompt) for prompt in prompts]
    if tokenizer is None or not all(isinstance(prompt, str) for prompt in prompts):
        raise InputError("prompts: need token ids, or texts and their tokenizer")
    return encode([Prompt(index, text) for index, text in enumerate(prompts)], tokenizer, chat=False)


def _audit(
    candidate: Foreign | str,
    setting: Setting,
    prompts: list[list[int]],
    batch_sizes: Sequence[int],
    to_text: Callable[[list[int]], str],
) -> AuditReport:
    if isinstance(candidate, str):
        name, decoder = candidate, resolve(candidate, setting)
    else:
        name = getattr(candidate, "__name__", "candidate")
        decoder = foreign(candidate, setting, name)
    oracle = Oracle(setting.target, **setting.limits)
    judge = Judge(setting, oracle, prompts, to_text=to_text)

    def run(batch_size: int) -> RunAudit:
        answers: dict[int, Answer] = {}

        def keep(index: int, row: RowResult, seconds: float) -> None:
            answers[index] = Answer(row.token_ids, seconds)

        decode(decoder, setting, prompts, batch_size, keep)
        return judge.run(Run(name, batch_size), decoder, [answers[index] for index in range(len(prompts))])

    runs = [run(batch_size) for batch_size in batch_sizes]
    rows = [oracle.decode(ids).token_ids for ids in prompts]
    audits = [
        PromptAudit(index, to_text(ids), len(ids), row, to_text(row))
        for index, (ids, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    return AuditReport({"num_draft_tokens": setting.num_draft_tokens, **setting.limits}, audits, runs)
