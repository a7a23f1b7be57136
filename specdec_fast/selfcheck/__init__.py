"""A short probe that refuses a model whose outputs this package would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..integrations import compat
from ..layouts import LAYOUTS
from ..operators import commits
from .fingerprint import Fingerprint, Key, can_be_a_counter, differences, fingerprint
from .miniature import THRESHOLD, build_miniature

_TAIL = 7
_DRAFTS = (3, 1)
_ACCEPTED = ((3, 1), (1, 1))
# a text in which every size of a miniature takes effect
_WIDTH = THRESHOLD + 2 * _TAIL
# relative logit difference that rounding may cause; eager attention has a float32 softmax even in float64
_ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3}
_HALF_ROUNDING = 5e-2
# logits so far below the largest belong to tokens that are ruled out
_LOWEST = 1e3
running: ContextVar[bool] = ContextVar("running", default=False)
"""True inside a self-check, whose forwards belong to no decoder."""
# names and values of the sizes that texts exceed
Reached = tuple[tuple[str, int], ...]


@dataclass
class _Verdicts:
    """Faults found in a model in one state, by layout and sizes in reach; None is a pass.

    Attributes:
        counters: attributes that the model changes whenever it runs.
    """

    state: Fingerprint = field(default_factory=dict)
    counters: set[Key] = field(default_factory=set)
    faults: dict[tuple[str, Reached], str | None] = field(default_factory=dict)


_known: WeakKeyDictionary[PreTrainedModel, _Verdicts] = WeakKeyDictionary()
# the module types of miniatures that have passed, by class, config, layout, device and sizes in reach
_sound: dict[tuple[object, ...], frozenset[type]] = {}


@torch.no_grad()
def self_check(model: PreTrainedModel, layout: str, longest: int) -> None:
    """Run two ragged rows through a layout and compare with the model's own single-row forwards.

    A float32 miniature of the model's class and config shows wrong masks and positions, with every window and the like
    shrunk that texts of ``longest`` tokens reach. Then the model itself runs a few tokens. The verdict holds until its
    modules, settings, modes, adapters, weights or attention implementation change.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
        InputError: ``torch.autocast`` is on.
    """
    compat.refuse_autocast(model.device)
    with compat.turn():
        fault = _fault(model, layout, longest)
        if fault and layout == "ragged" and not _fault(model, "padded", longest):
            fault += "; layout='padded' serves it"
    if fault:
        raise UnsupportedModelError(fault)


@torch.no_grad()
def traits_on(model: PreTrainedModel, layout: str) -> compat.ModelTraits:
    """The model's traits, or an error that names the cause and advises the other layout where that was seen to work."""
    try:
        return compat.model_traits(model, layout)
    except UnsupportedModelError as error:
        with compat.turn():
            if layout == "ragged" and not _fault(model, "padded", _WIDTH):
                raise UnsupportedModelError(f"{error}; use layout='padded'") from None
        raise


def _fault(model: PreTrainedModel, layout: str, longest: int) -> str | None:
    """The reason why ``layout`` cannot serve the model, None if it can."""
    verdicts = _known.setdefault(model, _Verdicts())
    state = fingerprint(model)
    if differences(verdicts.state, state) - verdicts.counters:
        verdicts.state, verdicts.counters, verdicts.faults = state, set(), {}
    thresholds = compat.thresholds(compat.text_config(model))
    reached = tuple((name, size) for _, name, sizes in thresholds for size in sizes if size < longest)
    if (layout, reached) not in verdicts.faults:
        token = running.set(True)
        try:
            _check(model, layout, longest, reached)
            verdicts.faults[layout, reached] = None
        except UnsupportedModelError as error:
            verdicts.faults[layout, reached] = str(error)
        finally:
            running.reset(token)
            verdicts.counters |= set(filter(can_be_a_counter, differences(verdicts.state, fingerprint(model))))
    return verdicts.faults[layout, reached]


def _check(model: PreTrainedModel, layout: str, longest: int, reached: Reached) -> None:
    attention = compat.text_config(model)._attn_implementation
    name = f"{type(model).__name__} with attn_implementation={attention!r}"
    context = compat.model_traits(model, layout).max_position + 1
    if context < 2 * _TAIL:
        raise UnsupportedModelError(f"{name} has a context of {context} tokens; the self-check needs {2 * _TAIL}")
    width = min(_WIDTH, context)
    structure = (compat.plain_class(model), repr(model.config.to_dict()), attention, layout, model.device, reached)
    if structure not in _sound:
        small = build_miniature(model, longest, partial(_runs, width=width))
        if small is not None:
            beyond = " beyond " + ", ".join(f"{key}={size}" for key, size in reached) if reached else ""
            _Probe(small, layout, name + beyond, width, is_causal=False).run()
            _sound[structure] = frozenset(map(type, small.modules()))
        elif model.dtype not in _ROUNDING:
            raise UnsupportedModelError(
                f"{name} cannot be checked in {model.dtype}, where rounding may hide a wrong mask: no small float32 "
                "model of its class could be built"
            )
    if not _is_plain(model, _sound.get(structure, frozenset())):
        # only the model itself shows what such modules do beyond a window
        width = min(max([_WIDTH, *(size + 2 * _TAIL for _, size in reached)]), context)
    _Probe(model, layout, name, width, is_causal=structure in _sound).run()


def _is_plain(model: PreTrainedModel, known: frozenset[type]) -> bool:
    """All modules are of types that the miniature has, with the forward of their class."""
    return all(type(module) in known and "forward" not in vars(module) for module in model.modules())


def _runs(model: PreTrainedModel, width: int) -> bool:
    """A miniature can be used if its logits are finite, with its cache and without."""
    logits = [f(model, row) for row in _probe_rows(model, width) for f in (_one_shot, _incremental)]
    return all(bool(x.isfinite().all()) for x in logits)


class _Probe:
    """Two rows of ``width`` and ``width - 5`` tokens, alone and on a layout.

    Args:
        name: of the model in messages.
        is_causal: the architecture was seen to decode causally.
    """

    def __init__(self, model: PreTrainedModel, layout: str, name: str, width: int, *, is_causal: bool):
        self.model, self.layout, self.name, self.is_causal = model, layout, name, is_causal
        self.rounding = _ROUNDING.get(model.dtype, _HALF_ROUNDING)
        self.rows = _probe_rows(model, width)

    def run(self) -> None:
        """Raise ``UnsupportedModelError`` with the cause that was found."""
        alone, noise = self._own_logits()
        try:
            difference = self._summary(_ragged_differences(self.model, self.layout, self.rows, alone))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name} cannot run on the {self.layout} layout: {self._why(error)}"
            ) from error
        if not difference <= self.rounding and self.layout == "ragged":
            # attention then runs in kernels of our own, so another of the model's own tells how much a kernel matters
            noise = max(noise, self._summary(list(map(_differences, self._eager_logits(), alone))))
        allowed = _allowed(self.rounding, noise)
        if not difference <= allowed:
            raise UnsupportedModelError(
                f"{self.name} failed the self-check of the {self.layout} layout: relative logit difference "
                f"{difference:.1e} to its own single-row forward, rounding explains {allowed:.1e}; outputs would be "
                "silently wrong, so it is refused"
            )

    def _own_logits(self) -> tuple[list[Tensor], float]:
        """The model's logits of the last tokens of each row, and by how much its own cache changes them."""
        try:
            alone, again, cached = map(self._logits, (_one_shot, _one_shot, _incremental))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name}: its own forward over {len(self.rows[0])} tokens, or over as many with a KV cache, fails "
                f"({type(error).__name__}: {error})"
            ) from error
        _refuse_unstable(self.model, self.name, alone, again)
        noise = self._summary(list(map(_differences, cached, alone)))
        if not noise <= 4 * self.rounding:
            raise UnsupportedModelError(
                f"{self.name}: its own logits with a KV cache differ from those without one by {noise:.1e} (relative), "
                + self._why_own_cache_matters()
            )
        return alone, noise

    def _summary(self, differences: list[Tensor]) -> float:
        """The largest; in half precision, where one token may go to another expert, the median."""
        of_all = torch.cat(differences)
        return float(of_all.max() if self.model.dtype in _ROUNDING else of_all.median())

    def _logits(self, forward: Callable[[PreTrainedModel, Tensor], Tensor]) -> list[Tensor]:
        return [forward(self.model, row) for row in self.rows]

    def _why_own_cache_matters(self) -> str:
        if self.is_causal and self.model.training:
            return "and it is in training mode, perhaps with gradient checkpointing; call model.eval()"
        if self.is_causal:
            return (
                "though its architecture decodes causally: a token's logits depend on the tokens that are computed "
                "beside it, as when a module quantizes activations by the range of a whole forward"
            )
        return "so it does not decode causally and no cached decoding can be checked against it"

    def _why(self, error: Exception) -> str:
        if self.layout == "padded" and not compat.takes_4d_mask(self.model, self.rows[0]):
            return "its forward takes no 4D attention mask"
        return f"{type(error).__name__}: {error}; a model must take {LAYOUTS[self.layout].needs}"

    def _eager_logits(self) -> list[Tensor]:
        with compat.attention_set(compat.attention_configs(self.model), "eager"):
            return self._logits(_one_shot)


def _allowed(rounding: float, noise: float) -> float:
    """The difference that rounding explains in a model whose own cache changes its logits by ``noise``."""
    return max(rounding, min(8 * noise, 4 * rounding))


def _one_shot(model: PreTrainedModel, row: Tensor) -> Tensor:
    return compat.one_shot_logits(model, row, _TAIL + 1)


def _incremental(model: PreTrainedModel, row: Tensor) -> Tensor:
    return compat.incremental_logits(model, row, len(row) - _TAIL, _TAIL + 1)


def _refuse_unstable(model: PreTrainedModel, name: str, alone: list[Tensor], again: list[Tensor]) -> None:
    if not all(bool(x.max(dim=-1).values.isfinite().all()) for x in alone):
        broken = next((key for key, weight in model.named_parameters() if not weight.isfinite().all()), None)
        raise UnsupportedModelError(
            f"{name} gives NaN or Inf as logits" + (f": {broken} holds NaN or Inf" if broken else "")
        )
    # kernels of a GPU may add in any order
    tolerance = 0.0 if model.device.type == "cpu" else _ROUNDING.get(model.dtype, _HALF_ROUNDING)
    if not torch.cat(list(map(_differences, again, alone))).max() <= tolerance:
        training = any(module.training for module in model.modules())
        raise UnsupportedModelError(
            f"{name} gives other logits when it runs the same text again"
            + (": it is in training mode, with dropout; call model.eval()" if training else "")
        )


def _probe_rows(model: PreTrainedModel, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = compat.text_config(model).vocab_size
    return [torch.randint(size, (n,), generator=generator, device="cpu").to(model.device) for n in (width, width - 5)]


def _ragged_differences(model: PreTrainedModel, layout: str, rows: list[Tensor], alone: list[Tensor]) -> list[Tensor]:
    """Relative differences over a prefill, a verify with ragged acceptance and the verify after it.

    Args:
        alone: logits of the last ``_TAIL + 1`` tokens of each row.
    """
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
        for b, (k, n, row) in enumerate(zip(known, accepted, rows)):
            first = k - len(row) + _TAIL
            differences.append(_differences(logits[b, : n + 1], alone[b][first : first + n + 1]))
        n_accepted = input_ids.new_tensor(accepted)
        target_ids = torch.stack([row[k : k + num_drafts + 1] for row, k in zip(rows, known)])
        batch.advance(commits.read(batch.commit(drafts, target_ids, n_accepted, n_accepted)))
        known = [k + n + 1 for k, n in zip(known, accepted)]
    return differences


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """Of logits ``[N, V]``, relative to ``b``: ``[N]``. Tokens that both rule out, as with -inf, do not count."""
    a, b = a.double(), b.double()
    floor = b.max(dim=-1, keepdim=True).values - _LOWEST
    counted = b.masked_fill(b <= floor, 0).norm(dim=-1)
    return (a.maximum(floor) - b.maximum(floor)).norm(dim=-1) / counted.clamp(min=torch.finfo(b.dtype).tiny)
