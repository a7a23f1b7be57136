"""The commit of a padded round, and the scatter and the attention of the ragged layout, as single operators.

Registered as ``torch.ops.specdec_fast.*`` with the schemas of ``schemas.inc``. :mod:`specdec_fast.reference` defines
what they do; :mod:`specdec_fast.operators.backends` says which implementations can run here. All of them write in
place, read nothing back to the host, and refuse misuse before any byte moves. Neither transformers nor triton is
imported.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .operators import backends, checks

SCHEMAS = re.findall(
    r"^SCHEMA\((.*?)\)$", (Path(__file__).parent / "schemas.inc").read_text(), re.DOTALL | re.MULTILINE
)

# name: what needs no memory, what needs real tensors, the definition
_OPERATORS: dict[str, tuple[Callable, Callable, Callable]] = {
    "realign_": (checks.realign_shapes, checks.realign_memory, reference.realign_),
    "append_kv_": (checks.append_kv_shapes, checks.append_kv_memory, reference.append_kv_),
    "realign_step_": (checks.realign_step_shapes, checks.realign_step_memory, reference.realign_step_),
    "ragged_attention_": (
        checks.ragged_attention_shapes,
        checks.ragged_attention_memory,
        reference.ragged_attention_,
    ),
}
# the Triton kernel serves these beside the CUDA operators, too
_WITHOUT_CUDA = ("ragged_attention_",)
_ANY = "CompositeExplicitAutograd"
# operators and devices
_by_triton: set[tuple[str, str]] = set()


def realign_(caches: Sequence[Tensor], start: Tensor, num_columns: Tensor, shift: Tensor) -> None:
    """Move columns ``[start_b, start_b + num_columns_b)`` of row b by ``shift_b``, in place, in all caches.

    Rows with shift 0 are not touched. Columns that nothing moves onto keep their bytes.

    Parameters
    ----------
    caches
        ``[B, H, C, D]`` each, strided views allowed, elements of 1, 2, 4 or 8 bytes; H, C, D and dtype may differ.
        After a verify, ``num_columns = length + n_accepted``: the bonus token has no KV.
    start, num_columns, shift
        ``[B]`` int64. Columns, before and after the move, must lie in ``[0, C)``; checked only on the CPU.

    Examples
    --------
    >>> cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> realign_([cache], torch.tensor([1]), torch.tensor([3]), torch.tensor([2]))
    >>> cache.flatten().tolist()
    [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
    """
    _need_no_grad("caches", caches)
    torch.ops.specdec_fast.realign_.default(caches, start, num_columns, shift)


def append_kv_(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, row_of: Tensor, position_of: Tensor) -> None:
    """Write the KV of N packed tokens to their rows and positions.

    Parameters
    ----------
    k_pool, v_pool
        ``[W, H, C, D]``, written; H, C and D may differ between the two.
    k, v
        ``[1, H, N, D]`` of the pool's dtype.
    row_of, position_of
        ``[N]`` int64, pairs distinct, in ``[0, W)`` and ``[0, C)``; the range is checked only on the CPU.

    Examples
    --------
    >>> k_pool, v_pool = torch.zeros(2, 1, 3, 1), torch.zeros(2, 1, 3, 1)
    >>> new = torch.tensor([5.0, 6.0]).view(1, 1, 2, 1)
    >>> append_kv_(k_pool, v_pool, new, new, torch.tensor([0, 1]), torch.tensor([2, 0]))
    >>> k_pool[:, 0, :, 0].tolist()
    [[0.0, 0.0, 5.0], [6.0, 0.0, 0.0]]
    """
    _need_no_grad("pools", (k_pool, v_pool))
    torch.ops.specdec_fast.append_kv_.default(k_pool, v_pool, k, v, row_of, position_of)


def realign_step_(
    caches: Sequence[Tensor],
    tokens: Tensor,
    draft_ids: Tensor,
    target_ids: Tensor,
    limit: Tensor,
    max_length: Tensor,
    stop_ids: Tensor,
    n_accepted: Tensor | None,
    start: Tensor,
    length: Tensor,
    new_start: Tensor,
    new_length: Tensor,
    position_ids: Tensor,
    masks: Sequence[Tensor],
    windows: Sequence[int],
    summary: Tensor,
    max_position: int,
    placement: int = 0,
) -> None:
    """Commit a padded round: accept, append, choose the new right edge, move, and prepare the next forward.

    Before the call, row b holds its tokens in columns ``[start_b, end)`` with ``end = start_b + length_b`` shared by
    all rows, and a verify has written the KV of columns ``[end - 1, end + K)``. After it, unfinished rows hold theirs
    in ``[new_start_b, end')``, with KV up to ``end' - 1``. A finished row does not move; its ``new_start`` is its
    ``start``, its ``new_length`` counts what it gained, and its masks and position IDs are finite but mean nothing.

    Tensors that are written must share no memory with any other argument. All index tensors are int64.

    Parameters
    ----------
    caches
        ``[B, H, C, D]`` each, moved in place as :func:`realign_` does. May be empty.
    tokens
        ``[B, C]``; the committed tokens are written at ``end``, then the row moves with its KV.
    draft_ids
        ``[B, K]``; K is 0 for the commit of a prefill.
    target_ids
        ``[B, K + 1]``, the target's choice after the last committed token and after each draft.
    limit
        ``[B]``, drafts of each row that may be accepted.
    max_length
        ``[B]``, the length at which a row is finished.
    stop_ids
        ``[S]``, token ids that finish a row. May be empty.
    n_accepted
        ``[B]`` in 0..K, accepted drafts decided elsewhere, or ``None`` for greedy acceptance: the longest prefix,
        of at most ``limit`` drafts, that equals the target's choice. The bonus is ``target_ids[b, n_accepted_b]``.
    start, length
        ``[B]``, read.
    new_start, new_length
        ``[B]``, written.
    position_ids
        ``[B, Q]``, written: of the queries in columns ``end' - 2 .. end' - 3 + Q``, held within ``0..max_position``.
    masks
        ``[B, 1, Q, C]`` each, written over all C columns for the same queries: additive (0 or the dtype's minimum),
        or bool. The rule is that of :func:`specdec_fast.reference.visible_columns`.
    windows
        Sliding window of each mask, 0 for full attention.
    summary
        ``[B, K + 4]``, written: ``n_accepted``, ``finished`` (0 or 1), ``end'``, then the K + 1 committed tokens
        (accepted drafts, bonus, zeros). One copy of it to the host is all a decoder needs; a row's shift is
        ``end' - (end + n_accepted + 1)`` unless it is finished.
    max_position
        Largest position ID of the model.
    placement
        0 moves the fewest columns (:func:`specdec_fast.reference.plan_realign`), 1 moves every row to minimal padding
        (:func:`specdec_fast.reference.plan_packed`).

    Examples
    --------
    Two rows accept 1 and 2 of 2 drafts; the second, which accepted more, stays where it is:

    >>> tokens = torch.tensor([[0, 0, 7, 8, 0, 0, 0], [0, 5, 6, 7, 0, 0, 0]])
    >>> new = {name: torch.zeros(2, dtype=torch.int64) for name in ("new_start", "new_length")}
    >>> summary, position_ids = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    >>> realign_step_(
    ...     [], tokens, torch.tensor([[9, 1], [8, 9]]), torch.tensor([[9, 2, 3], [8, 9, 4]]),
    ...     limit=torch.tensor([2, 2]), max_length=torch.tensor([99, 99]), stop_ids=torch.tensor([0]), n_accepted=None,
    ...     start=torch.tensor([2, 1]), length=torch.tensor([2, 3]), **new, position_ids=position_ids,
    ...     masks=[], windows=[], summary=summary, max_position=99,
    ... )
    >>> tokens.tolist()
    [[0, 0, 7, 7, 8, 9, 2], [0, 5, 6, 7, 8, 9, 4]]
    >>> summary.tolist()
    [[1, 0, 7, 9, 2, 0], [2, 0, 7, 8, 9, 4]]
    """
    _need_no_grad("caches and masks", (*caches, *masks))
    # fmt: off
    torch.ops.specdec_fast.realign_step_.default(
        caches, tokens, draft_ids, target_ids, limit, max_length, stop_ids, n_accepted, start, length,
        new_start, new_length, position_ids, masks, windows, summary, max_position, placement,
    )
    # fmt: on


def ragged_attention_(
    out: Tensor,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of packed tokens over slots: the token at position p of a row sees positions ``j <= p`` of that row.

    With ``window``, also ``p - j < window``. Sums are float32 or wider, each byte of a row is read once per KV head,
    and nothing beyond a row's last query. C++ on the CPU, Triton on a GPU for float16, bfloat16 and float32.

    Parameters
    ----------
    out
        ``[1, N, Hq, Dv]``, written. Tokens of no segment keep their bytes.
    query
        ``[1, Hq, N, D]``, float16, bfloat16, float32 or float64.
    k_pool, v_pool
        ``[W, H, C, D]`` and ``[W, H, C, Dv]`` of the query's dtype; H divides Hq.
    table
        ``[4, S]`` int64: slot, end, size and first token of each segment, a run of positions of the row in that slot.
        The tokens of segments are apart and in rising order; a segment of size 0 does not exist. This is
        checked only on the CPU.
    scale
        Factor of the scores.
    window
        Sliding window, or ``None``.
    soft_cap
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    sinks
        ``[Hq]``, a score without a value for each head.

    Examples
    --------
    A row of three tokens in slot 1 asks with its newest:

    >>> k_pool, v_pool = torch.zeros(2, 1, 4, 2), torch.arange(16.0).view(2, 1, 4, 2)
    >>> out, query = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    >>> ragged_attention_(out, query, k_pool, v_pool, torch.tensor([[1], [3], [1], [0]]), scale=1.0)
    >>> out.flatten().tolist()
    [10.0, 11.0]
    """
    _need_no_grad("out and query", (out, query))
    _need_no_grad("pools", (k_pool, v_pool))
    torch.ops.specdec_fast.ragged_attention_.default(out, query, k_pool, v_pool, table, scale, window, soft_cap, sinks)


def _need_no_grad(name: str, tensors: Sequence[Tensor]) -> None:
    """Compiled operators cannot see it, so it is refused here."""
    for i, x in enumerate(tensors):
        if x.requires_grad:
            raise RuntimeError(f"{name}[{i}] requires grad; what is written in place must not, decode under no_grad")


def _checked(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
    shapes, memory, _ = _OPERATORS[name]

    def run(*args) -> None:
        shapes(*args)
        memory(*args)
        kernel(*args)

    return run


def triton_kernel(name: str, device: str) -> ModuleType | None:
    """Module of the Triton kernel that serves operator ``name`` on ``device``, if one does."""
    return _triton_module(name) if (name, device) in _by_triton else None


@functools.cache
def _triton_module(name: str) -> ModuleType | None:
    """The module where Triton can run; found at the first call, to keep importing cheap."""
    if not next(b.available for b in backends.available() if b.name == "triton"):
        return None
    module = "ragged_attention" if name == "ragged_attention_" else "realign"
    return importlib.import_module(f"specdec_fast.kernels.{module}")


def _triton(name: str) -> Callable[..., None]:
    """The Triton kernel where it can run, else the definition."""

    def run(*args) -> None:
        module = _triton_module(name)
        (getattr(module, name) if module else _OPERATORS[name][2])(*args)

    return _checked(name, run)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=1)


def _announced(text: str, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args) -> None:
        _warn_once(text)
        kernel(*args)

    return run


def _unserved(name: str, backend: str) -> Callable[..., None]:
    def run(*args) -> None:
        device = next(x for x in args if isinstance(x, Tensor)).device
        raise RuntimeError(f"{name} got tensors on {device}, which {backends.VARIABLE}={backend} does not serve")

    return run


def _kernels(name: str, wanted: str, cuda: bool) -> dict[str, Callable[..., None]]:
    """Kernels that are registered beside the compiled ones, by dispatch key."""
    definition, triton, nobody = _checked(name, _OPERATORS[name][2]), _triton(name), _unserved(name, wanted)
    notice = backends.unbuilt_notice()
    kernels = {
        "auto": {_ANY: definition, "CUDA": triton, "CPU": _announced(notice, definition)},
        "reference": {_ANY: definition},
        "cpu": {_ANY: nobody},
        "triton": {_ANY: nobody, "CUDA": triton, "CPU": triton},
        "cuda": {_ANY: nobody, "CUDA": triton},
    }[wanted]
    if cuda and name not in _WITHOUT_CUDA:
        kernels.pop("CUDA", None)
    if not (notice if wanted == "auto" else backends.interprets_triton()):
        kernels.pop("CPU", None)
    _by_triton.update((name, key.lower()) for key, kernel in kernels.items() if kernel is triton)
    return kernels


def _register() -> torch.library.Library:
    wanted = backends.requested()
    if wanted != "auto":
        backends.require(wanted)
    library = torch.library.Library("specdec_fast", "FRAGMENT")
    if not (wanted in ("auto", "cpu") and _loaded("_C")):
        for schema in SCHEMAS:
            library.define(schema)
    cuda = wanted in ("auto", "cuda") and torch.version.cuda is not None and _loaded("_C_cuda")
    for name, (shapes, _, _) in _OPERATORS.items():
        torch.library.register_fake(f"specdec_fast::{name}", shapes, lib=library)
        for key, kernel in _kernels(name, wanted, cuda).items():
            library.impl(name, kernel, key)
    return library


def _loaded(extension: str) -> bool:
    if not backends.is_built(extension):
        return False
    problem = backends.load(extension)
    if problem:
        warnings.warn(f"{problem}; slower implementations take over", stacklevel=2)
    return not problem


_library = _register()
