"""The rows of a token-packed forward over a ragged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...layouts.ragged import Packing
from .capture import Recorder, RowView


def packed_rows(recorder: Recorder, packing: Packing, inputs: dict[str, Any], logits: Tensor) -> list[RowView]:
    """Splits a packed forward into its rows: a slot's columns are positions, and a query sees every one up to its own.

    Args:
        recorder: the pools that attention was given.
        packing: where the tokens belong.
        inputs: ``input_ids`` and ``position_ids`` ``[1, N]``.
        logits: ``[1, kept, V]``.
    """
    tokens, positions = inputs["input_ids"][0].tolist(), inputs["position_ids"][0].tolist()
    kept = range(len(tokens)) if packing.kept is None else packing.kept.tolist()
    layers = sorted(recorder.keys)
    views, first = [], 0
    for segment in packing.segments:
        mine = range(first, first + segment.size)
        column = torch.arange(segment.end, device=logits.device)
        views.append(
            RowView(
                segment.slot,
                tokens[first : mine.stop],
                positions[first : mine.stop],
                list(range(segment.start, segment.end)),
                column <= column[segment.start :, None],
                None,
                [recorder.keys[layer][segment.slot, :, : segment.end] for layer in layers],
                [recorder.values[layer][segment.slot, :, : segment.end] for layer in layers],
                logits[0, [i for i, token in enumerate(kept) if token in mine]],
            )
        )
        first = mine.stop
    return views
