"""A row's keys and values as the model computes them for that row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

Forward = Callable[[Tensor, DynamicCache], None]


class AloneRow:
    """Keys and values of a growing text, computed at batch size 1 by the model's own cached forward.

    Args:
        forward: runs ``input_ids`` ``[1, Q]`` through the model and its cache.
        device: of the model.

    Attributes:
        text: what is covered so far.
    """

    def __init__(self, forward: Forward, device: torch.device):
        self._forward, self._device = forward, device
        self.text: list[int] = []
        self._cache = DynamicCache()

    def extend(self, text: Sequence[int]) -> None:
        """Make sure that ``text`` is covered; begins anew where it is no continuation."""
        text = list(text)
        if len(text) <= len(self.text):
            if self.text[: len(text)] == text:
                return
            self.text = []
        elif text[: len(self.text)] != self.text:
            self.text = []
        if not self.text:
            self._cache = DynamicCache()
        self._forward(torch.tensor([text[len(self.text) :]], device=self._device), self._cache)
        self.text = text

    def entry(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: ``[H, N, D]`` each, N the length of the text."""
        found = self._cache.layers[layer]
        return found.keys[0], found.values[0]
