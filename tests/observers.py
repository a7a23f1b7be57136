"""Hooks on a model's forwards that leave out those of the self-check, which a new hook starts anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from specdec_fast import selfcheck


def observe(module: nn.Module, see: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> RemovableHandle:
    """Call ``see`` with the arguments of each forward of ``module``, before it."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not selfcheck.running.get():
            see(args, kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)
