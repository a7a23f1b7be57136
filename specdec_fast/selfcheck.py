"""A short probe that refuses a model whose outputs this package would get wrong."""

from __future__ import annotations

from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import compat
from .errors import UnsupportedModelError
from .layouts import LAYOUTS

_TAIL = 7
_DRAFTS = (3, 1)
_ACCEPTED = ((3, 1), (1, 1))
# relative logit difference that rounding may cause; eager attention has a float32 softmax even in float64
_ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3}
_HALF_ROUNDING = 5e-2
running: ContextVar[bool] = ContextVar("running", default=False)
"""True inside a self-check, whose forwards belong to no decoder."""
_checked: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str], int]] = WeakKeyDictionary()


@torch.no_grad()
def self_check(model: PreTrainedModel, layout: str, longest: int) -> None:
    """Run two ragged rows through a layout and compare with the model's own single-row forwards.

    The probe is longer than any sliding window that texts of ``longest`` tokens can reach. A model is probed once
    per layout and attention implementation, and again only when longer texts bring a window into play.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    traits = compat.model_traits(model, layout)
    reachable = [width for width in compat.window_sizes(model) if width < longest]
    width = min(max(reachable, default=8) + 2 * _TAIL, traits.max_position + 1)
    attention = compat.text_config(model)._attn_implementation
    done = _checked.setdefault(model, {})
    if done.get((layout, attention), 0) >= width:
        return
    name = f"{type(model).__name__} with attn_implementation={attention!r}"
    if width < 2 * _TAIL:
        raise UnsupportedModelError(f"{name} has a context of {width} tokens; the self-check needs {2 * _TAIL}")
    rounding = _ROUNDING.get(model.dtype, _HALF_ROUNDING)
    token = running.set(True)
    try:
        rows = _probe_rows(model, width)
        alone = [compat.one_shot_logits(model, row, len(row)) for row in rows]
        cached = [compat.incremental_logits(model, row, len(row) - _TAIL) for row in rows]
        noise = max(map(_difference, cached, alone))
        difference = _ragged_difference(model, layout, rows, alone)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot run on the {layout} layout ({type(error).__name__}: {error}); a model must take "
            f"{LAYOUTS[layout].needs}"
        ) from error
    finally:
        running.reset(token)
    if not noise <= 4 * rounding:
        raise UnsupportedModelError(
            f"{name}: its own logits with a KV cache differ from those without one by {noise:.1e} (relative), so it "
            "does not decode causally and no cached decoding can be checked against it"
        )
    if not difference <= rounding and layout == "ragged":
        # attention then runs in kernels of our own, so another of the model's own tells how much a kernel matters
        noise = max(noise, *map(_difference, _eager_logits(model, rows), alone))
    allowed = max(rounding, min(8 * noise, 4 * rounding))
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{name} failed the self-check of the {layout} layout: relative logit difference {difference:.1e} to its "
            f"own single-row forward, rounding explains {allowed:.1e}; outputs would be silently wrong, so it is "
            "refused" + ("; layout='padded' may serve it" if layout == "ragged" else "")
        )
    done[layout, attention] = width


def _probe_rows(model: PreTrainedModel, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = compat.text_config(model).vocab_size
    return [torch.randint(size, (n,), generator=generator, device="cpu").to(model.device) for n in (width, width - 5)]


def _eager_logits(model: PreTrainedModel, rows: list[Tensor]) -> list[Tensor]:
    with compat.attention_set(compat.attention_configs(model), "eager"):
        return [compat.one_shot_logits(model, row, len(row)) for row in rows]


def _ragged_difference(model: PreTrainedModel, layout: str, rows: list[Tensor], alone: list[Tensor]) -> float:
    """Largest relative difference over a prefill, a verify with ragged acceptance and the verify after it."""
    known = [len(row) - _TAIL for row in rows]
    width = max(known)
    input_ids = torch.stack([torch.nn.functional.pad(row[:n], (width - n, 0)) for row, n in zip(rows, known)])
    max_position = compat.model_traits(model).max_position
    batch = LAYOUTS[layout](input_ids, known, _TAIL + 1, max(_DRAFTS), [], max_position)
    follower = batch.follow(model)
    differences = []
    for num_drafts, accepted in zip((0, *_DRAFTS), ((0, 0), *_ACCEPTED)):
        batch.open_round(num_drafts)
        drafts = torch.stack([row[k : k + num_drafts] for row, k in zip(rows, known)])
        for b, n in enumerate(accepted):
            drafts[b, n:] = (drafts[b, n:] + 1) % compat.text_config(model).vocab_size
        # the second row drafts less where it can
        logits = follower.verify(drafts, [num_drafts, max(accepted[1], num_drafts - 1)])
        differences += [
            _difference(logits[b, : n + 1], alone[b][k - 1 : k + n]) for b, (k, n) in enumerate(zip(known, accepted))
        ]
        n_accepted = input_ids.new_tensor(accepted)
        target_ids = torch.stack([row[k : k + num_drafts + 1] for row, k in zip(rows, known)])
        batch.advance(batch.commit(drafts, target_ids, n_accepted, n_accepted).tolist())
        known = [k + n + 1 for k, n in zip(known, accepted)]
    return max(differences)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm())
