"""What can be audited: a decoder by name, or any callable."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import autoregressive
from ..errors import InputError
from ..result import GenerationResult, RowResult
from .setting import Setting
from .strategies import STRATEGIES

NAMES = ("autoregressive", *STRATEGIES)
Foreign = Callable[..., Tensor]


OnFinish = Callable[[RowResult], None]
Candidate = Callable[[Tensor, Tensor, OnFinish], None]
"""Decodes ``input_ids`` and ``attention_mask`` ``[B, P]``, left-padded, and hands over each row as it finishes."""


def resolve(name: str, setting: Setting) -> Candidate:
    """The candidate called ``name``: one of ``NAMES``, or ``module:callable``.

    A callable takes ``(input_ids, attention_mask, max_new_tokens)``, the first two ``[B, P]`` and left-padded, and
    returns sequences ``[B, P + N]`` that begin with ``input_ids``. Parameters named ``model`` and ``drafter`` are
    given the audited target and drafter, which lets a probe watch the target.

    Raises:
        InputError: no such candidate.
    """
    if name == "autoregressive":
        return _own(partial(autoregressive.generate, setting.target), setting)
    if name in STRATEGIES:
        decoder = STRATEGIES[name](setting.target, setting.drafter, num_draft_tokens=setting.num_draft_tokens)
        return _own(decoder.generate, setting)
    if ":" in name:
        return foreign(_import(name), setting, name)
    raise InputError(f"unknown candidate {name!r}: use one of {', '.join(NAMES)}, or module:callable")


def foreign(decode: Foreign, setting: Setting, name: str = "candidate") -> Candidate:
    """A candidate from a callable as :func:`resolve` describes it; its answers are checked for shape."""
    parameters = inspect.signature(decode).parameters
    offered = {"model": setting.target, "drafter": setting.drafter}
    given = {key: value for key, value in offered.items() if key in parameters}

    def run(input_ids: Tensor, attention_mask: Tensor, on_finish: OnFinish) -> None:
        sequences = decode(input_ids, attention_mask, setting.max_new_tokens, **given)
        for row in _rows(name, sequences, input_ids, attention_mask, setting):
            on_finish(row)

    return run


def _own(generate: Callable[..., GenerationResult], setting: Setting) -> Candidate:
    def run(input_ids: Tensor, attention_mask: Tensor, on_finish: OnFinish) -> None:
        generate(input_ids, attention_mask, **setting.limits, on_finish=on_finish)

    return run


def _import(name: str) -> Foreign:
    module, _, attribute = name.partition(":")
    # as `python -m` does: a module beside the caller
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"candidate {name}: cannot import {module}: {error}") from error
    decode = getattr(found, attribute, None)
    if not callable(decode):
        raise InputError(f"candidate {name}: {module} has no callable {attribute!r}")
    return decode


def _rows(name: str, sequences: Any, ids: Tensor, mask: Tensor, setting: Setting) -> list[RowResult]:
    rows, width = ids.shape
    if not isinstance(sequences, Tensor) or sequences.dim() != 2 or len(sequences) != rows:
        shape = list(sequences.shape) if isinstance(sequences, Tensor) else type(sequences).__name__
        raise InputError(f"{name} returned {shape}; need sequences [{rows}, {width} + new tokens]")
    sequences = sequences.to(ids.device)
    if sequences.shape[1] <= width or not sequences[:, :width].where(mask.bool(), 0).equal(ids.where(mask.bool(), 0)):
        raise InputError(f"{name} returned sequences that do not begin with input_ids {list(ids.shape)}")
    pairs = zip(mask.sum(1).tolist(), sequences[:, width:].tolist(), strict=True)
    return [autoregressive.new_row(i, *pair, setting.eos_token_id) for i, pair in enumerate(pairs)]
