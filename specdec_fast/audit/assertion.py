"""The audit as an assertion, for the test suites of other decoders."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters import Drafter, NgramDrafter
from ..errors import InputError
from ..integrations import compat
from ..prompts import Prompt, check_context, encode
from ..result import RowResult
from .candidates import Foreign, foreign, resolve
from .compare import CandidateRow, Run
from .decoding import Judge, decode
from .oracle import Oracle
from .results import AuditReport, PromptAudit, RunAudit
from .setting import Setting
from .summary import describe


def assert_output_equivalent(
    candidate: Foreign | str,
    target: PreTrainedModel,
    prompts: Iterable[str] | Iterable[Iterable[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: Drafter | None = None,
    batch_sizes: int | Iterable[int] = (1, 4),
    num_draft_tokens: int = 5,
    max_new_tokens: int = 32,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> AuditReport:
    """Fail unless ``candidate`` writes the greedy text of ``target``, near-ties aside, at every batch size.

    Args:
        candidate: ``(input_ids, attention_mask, max_new_tokens) -> sequences``, the first two ``[B, P]`` and
            left-padded, the result ``[B, P + N]``; or whatever else
            :func:`~specdec_fast.audit.candidates.resolve` takes.
        target: the model whose greedy text counts. In float32 or float64 a failure is no rounding.
        prompts: token ids of each prompt, lists or tensors or arrays ``[P]``, or texts for ``tokenizer``.
        tokenizer: of the target.
        drafter: for candidates that draft; n-grams of the row's own text by default.
        batch_sizes: consecutive prompts decoded together, one number or several.
        num_draft_tokens: K.
        max_new_tokens: new tokens per prompt.
        eos_token_id: ids that end a row, the target's own by default, ``[]`` for none.
        pad_token_id: of the padding, the target's own by default.

    Returns:
        The audit.

    Raises:
        AssertionError: with a table of all runs and their first divergences.
        InputError: an argument that cannot be used, or a candidate that fails or returns something else than
            sequences.

    Example:
        >>> assert_output_equivalent(my_generate, model, ["Once upon a time", "def add("], tokenizer=tokenizer)
    """
    __tracebackhide__ = True
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens}: need at least 1")
    sizes = _sizes(batch_sizes)
    encoded = _encode(prompts, tokenizer)
    _check_vocabulary(encoded, compat.text_config(target).vocab_size)
    check_context(encoded, target.config, max_new_tokens)
    eos = compat.eos_ids(target, eos_token_id)
    pad = compat.pad_id(target, pad_token_id, eos)
    setting = Setting(target, drafter or NgramDrafter(), num_draft_tokens, max_new_tokens, eos, pad)
    report = _audit(candidate, setting, encoded, sizes, tokenizer.decode if tokenizer else str)
    if not report.equivalent:
        raise AssertionError(f"the output is not the target's own greedy text\n{describe(report)}")
    return report


def _sizes(batch_sizes: Any) -> list[int]:
    try:
        sizes = [operator.index(size) for size in ([batch_sizes] if isinstance(batch_sizes, int) else batch_sizes)]
    except TypeError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"batch_sizes {batch_sizes}: need integers of at least 1")
    return sizes


def _encode(prompts: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts: need several, not one {type(prompts).__name__}")
    given = list(prompts)
    texts = [Prompt(index, prompt) for index, prompt in enumerate(given) if isinstance(prompt, str)]
    rows = [] if texts else [_token_ids(*pair) for pair in enumerate(given)]
    if not given or not all(prompt.text for prompt in texts) or not all(rows):
        raise InputError("prompts: need at least one, and none that is empty")
    if not texts:
        return rows
    if tokenizer is None or len(texts) < len(given):
        raise InputError("prompts: need token ids, or texts and their tokenizer")
    return encode(texts, tokenizer, chat=False)


def _token_ids(index: int, prompt: Any) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InputError(f"prompts: prompt {index} is neither a text nor a row of integers: {error}") from error


def _check_vocabulary(prompts: list[list[int]], size: int) -> None:
    for index, prompt in enumerate(prompts):
        for token in prompt:
            if token not in range(size):
                raise InputError(f"prompts: prompt {index} has token id {token}, the target's vocabulary {size}")


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
        name = getattr(candidate, "__name__", type(candidate).__name__)
        decoder = foreign(candidate, setting, name)
    oracle = Oracle(setting.target, **setting.limits)
    # first, while nobody else has touched the target
    rows = [oracle.decode(ids).token_ids for ids in prompts]
    judge = Judge(setting, oracle, prompts, to_text=to_text)

    def run(batch_size: int) -> RunAudit:
        answers: dict[int, CandidateRow] = {}

        def keep(index: int, row: RowResult, seconds: float) -> None:
            answers[index] = CandidateRow(row.token_ids, seconds)

        decode(decoder, setting, prompts, batch_size, keep)
        return judge.run(Run(name, batch_size), decoder, [answers[index] for index in range(len(prompts))])

    runs = [run(batch_size) for batch_size in batch_sizes]
    audits = [
        PromptAudit(index, to_text(ids), len(ids), row, to_text(row))
        for index, (ids, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    return AuditReport({"num_draft_tokens": setting.num_draft_tokens, **setting.limits}, audits, runs)
