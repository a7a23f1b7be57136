"""Candidates of an audit: a decoder by name, or any callable."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..decoding import autoregressive
from ..decoding.eqspec import EQSpec
from ..errors import InputError
from ..exspec import EXSpec
from ..integrations import compat
from ..result import GenerationResult, RowResult
from .setting import Setting
from .strategies import STRATEGIES

_LAYOUTS = {"eqspec": None, "eqspec-ragged": "ragged"}
NAMES = ("autoregressive", "exspec", *_LAYOUTS, *STRATEGIES)
Foreign = Callable[..., Tensor | Sequence[Any]]
_ARGUMENTS = ("input_ids", "attention_mask", "max_new_tokens")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

OnFinish = Callable[[RowResult], None]
Candidate = Callable[[Tensor, Tensor, OnFinish], None]
"""Decodes ``input_ids`` and ``attention_mask`` ``[B, P]``, left-padded, and hands over each row as it finishes."""


def resolve(name: str, setting: Setting) -> Candidate:
    """The candidate called ``name``: one of ``NAMES``, or ``module:callable``.

    A callable takes ``(input_ids, attention_mask, max_new_tokens)``, the first two ``[B, P]`` and left-padded, in any
    order if it calls them so, else in this one. Parameters named ``model`` and ``drafter`` are given the audited target
    and drafter, which lets a probe watch the target. It returns sequences ``[B, P + N]`` that begin with ``input_ids``,
    or a list of B rows, each a prompt without its padding and the new tokens after it.

    Raises:
        InputError: no such candidate, or a callable that cannot be called so; when it runs, also a callable that fails
            or returns something else.
    """
    if name == "autoregressive":
        return _own(partial(autoregressive.generate, setting.target), setting)
    if name == "exspec":
        return _exspec(setting)
    if name in _LAYOUTS or name in STRATEGIES:
        kind = STRATEGIES.get(name, EQSpec)
        decoder = kind(
            setting.target,
            setting.drafter,
            num_draft_tokens=setting.num_draft_tokens,
            layout=_LAYOUTS.get(name),
        )
        return _own(decoder.generate, setting)
    if ":" in name:
        return foreign(_import(name), setting, name)
    raise InputError(f"unknown candidate {name!r}: use one of {', '.join(NAMES)}, or module:callable")


def foreign(decode: Foreign, setting: Setting, name: str = "callable") -> Candidate:
    """A candidate from a callable as :func:`resolve` describes it; its answers are checked."""
    call = _caller(decode, setting, name)

    def run(input_ids: Tensor, attention_mask: Tensor, on_finish: OnFinish) -> None:
        with _failures_of(name):
            answer = call(input_ids, attention_mask, setting.max_new_tokens)
        for row in _rows(name, answer, input_ids, attention_mask, setting):
            on_finish(row)

    return run


def _exspec(setting: Setting) -> Candidate:
    def run(input_ids: Tensor, attention_mask: Tensor, on_finish: OnFinish) -> None:
        prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, attention_mask, strict=True)]
        # half of them at a time, so that rows join and leave
        decoder = EXSpec(
            setting.target,
            setting.drafter,
            num_draft_tokens=setting.num_draft_tokens,
            batch_size=-(-len(prompts) // 2),
        )
        stop, most = setting.eos_token_id, setting.max_new_tokens
        for row in decoder.generate(prompts, max_new_tokens=most, eos_token_id=stop):
            if row.error:
                raise InputError(f"exspec ended prompt {row.index} with an error: {row.error}")
            on_finish(row)

    return run


def _caller(decode: Foreign, setting: Setting, name: str) -> Foreign:
    offered = {"model": setting.target, "drafter": setting.drafter}
    try:
        signature = inspect.signature(decode)
        parameters = signature.parameters
        given = {key: value for key, value in offered.items() if key in parameters}
        by_name = all(key in parameters and parameters[key].kind in _NAMED for key in _ARGUMENTS)

        def arrange(*arguments: Any) -> tuple[Sequence[Any], dict[str, Any]]:
            return ((), dict(zip(_ARGUMENTS, arguments)) | given) if by_name else (arguments, given)

        positional, named = arrange(*_ARGUMENTS)
        signature.bind(*positional, **named)
    except Exception as error:
        # whatever a signature of its own making raises
        raise InputError(
            f"candidate {name} must take (input_ids, attention_mask, max_new_tokens) and at most model and drafter "
            f"beside: {error}"
        ) from error

    def call(*arguments: Any) -> Any:
        positional, named = arrange(*arguments)
        return decode(*positional, **named)

    return call


@contextlib.contextmanager
def _failures_of(name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"candidate {name} failed: {type(error).__name__}: {error}") from error


def _own(generate: Callable[..., GenerationResult], setting: Setting) -> Candidate:
    def run(input_ids: Tensor, attention_mask: Tensor, on_finish: OnFinish) -> None:
        generate(input_ids, attention_mask, **setting.limits, on_finish=on_finish)

    return run


def _import(name: str) -> Foreign:
    module, _, attribute = name.partition(":")
    if not module or module.startswith("."):
        raise InputError(f"candidate {name}: need module:callable with the full name of the module")
    # as `python -m` does: a module beside the caller
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _failures_of(name):
        found = importlib.import_module(module)
        decode = getattr(found, attribute, None)
    if not callable(decode):
        raise InputError(f"candidate {name}: {module} has no callable {attribute!r}")
    return decode


def _rows(name: str, answer: Any, ids: Tensor, mask: Tensor, setting: Setting) -> list[RowResult]:
    new = (_after_prompts if isinstance(answer, list | tuple) else _new_tokens)(name, answer, ids, mask)
    if not any(new):
        raise InputError(f"candidate {name} returned no new tokens, only its prompts")
    pairs = zip(mask.sum(1).tolist(), new, strict=True)
    rows = [autoregressive.new_row(i, *pair, setting.eos_token_id) for i, pair in enumerate(pairs)]
    vocabulary = range(compat.text_config(setting.target).vocab_size)
    # what fills a row after its EOS is cut by now
    outside = next((token for row in rows for token in row.token_ids if token not in vocabulary), None)
    if outside is not None:
        raise InputError(f"candidate {name} returned token id {outside}; the vocabulary has {len(vocabulary)}")
    return rows


def _after_prompts(name: str, answer: Sequence[Any], ids: Tensor, mask: Tensor) -> list[list[int]]:
    if len(answer) != len(ids):
        raise InputError(f"candidate {name} returned {len(answer)} rows; need one for each of {len(ids)} prompts")
    found = []
    for index, row in enumerate(answer):
        prompt = ids[index][mask[index].bool()].tolist()
        try:
            tokens = [operator.index(token) for token in row]
        except TypeError as error:
            raise InputError(f"candidate {name} returned a row {index} that is none of token ids: {error}") from error
        if tokens[: len(prompt)] != prompt:
            raise InputError(
                f"candidate {name} returned a row {index} that does not begin with its prompt; in a list, rows have "
                "their prompt without padding"
            )
        found.append(tokens[len(prompt) :])
    return found


def _new_tokens(name: str, sequences: Any, ids: Tensor, mask: Tensor) -> list[list[int]]:
    rows, width = ids.shape
    if not isinstance(sequences, Tensor) or sequences.dim() != 2 or len(sequences) != rows:
        shape = list(sequences.shape) if isinstance(sequences, Tensor) else type(sequences).__name__
        need = f"need sequences [{rows}, {width} + new tokens] or a list of rows"
        raise InputError(f"candidate {name} returned {shape}; {need}")
    if sequences.is_meta or sequences.dtype not in _INTEGERS:
        found = f"{sequences.dtype} on {sequences.device}"
        raise InputError(f"candidate {name} returned {found}; need integer token ids on a real device")
    sequences, seen = sequences.to(ids.device), mask.bool()
    if sequences.shape[1] < width or not sequences[:, :width].where(seen, 0).equal(ids.where(seen, 0)):
        raise InputError(f"candidate {name} returned sequences that do not begin with input_ids {list(ids.shape)}")
    return sequences[:, width:].tolist()
