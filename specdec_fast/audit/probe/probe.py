"""Watch a transformers model while a batch decoder runs it."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ... import selfcheck
from ...errors import InputError, UnsupportedModelError
from ...integrations import compat
from ...layouts.ragged import RaggedCache
from .alone import AloneRow
from .capture import Recorder, RowView
from .check import RowCheck
from .history import History, Origin
from .packed import packed_rows
from .row import DraftedRow, Ending, TrackedRow
from .violation import Violation


class Probe:
    """Checks I1 and I2 on every forward pass of ``model`` inside the context.

    For every row: the columns that attention sees hold exactly the row's text, each entry is what the model computes
    for that token at that position in a forward of this row alone, position IDs count the tokens before, the mask is
    causal, and what is committed is what the model chose. Nothing is asked of the decoder but to run the model with
    ``input_ids``; where it passes no cache, the model is given one.

    Args:
        model: the target of a greedy decoder.
        eos_token_id: id or ids after which nothing is expected of a row; None takes the model's, ``[]`` means none.
        max_new_tokens: new tokens after which nothing is expected of a row, None if the decoder has no limit.
        rate: share of rows whose cached entries are compared in a forward, 0..1; tokens, positions and masks always
            are. Only 1 finds every violation in the round where it happens; a row then costs about as much as
            decoding it alone.
        seed: of the choice of these rows.
        follow: the target's probe, if ``model`` is the draft of a decoder: rows then hold what the target committed,
            and after it the draft's own proposals.

    Attributes:
        violations: the first of each row, in the order found.
        forwards: passes checked.

    Raises:
        InputError: ``rate`` out of range.
        UnsupportedModelError: every layer has a sliding window, so that no mask shows the whole row.

    Example:
        >>> with Probe(target) as probe:
        ...     my_batch_decoder(target, input_ids, attention_mask)
        >>> print(probe.violation)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_id: int | list[int] | None = None,
        max_new_tokens: int | None = None,
        rate: float = 1.0,
        seed: int = 0,
        follow: Probe | None = None,
    ):
        if not 0 <= rate <= 1:
            raise InputError(f"rate={rate!r}: need a share from 0 to 1")
        self.model, self.rate = model, rate
        self.violations: list[Violation] = []
        self.forwards = 0
        self._max_new_tokens = max_new_tokens
        self._eos_ids = set(compat.eos_ids(model, eos_token_id))
        self._random = random.Random(seed)
        self._forward = model.forward
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._cache_argument = compat.cache_argument(model)
        self._configs = compat.attention_configs(model)
        self._attention = compat.text_config(model)._attn_implementation
        windows = compat.window_of_kinds(model)
        if windows["full_attention"] is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a sliding window in every layer; the probe needs one that sees whole rows"
            )
        self._window = windows.get("sliding_attention")
        self._follow = follow
        # the batch and the round of the target that the rows are in step with
        self._followed: History | None = None
        self._endings: dict[int, Ending] = {}
        # prompt length, and the text before the violation
        self._before: dict[Violation, tuple[int, list[int]]] = {}
        self._seen = -1
        self.begin(())

    @property
    def violation(self) -> Violation | None:
        """The first violation of all."""
        return self.violations[0] if self.violations else None

    def begin(self, prompts: Sequence[Sequence[int]], first: int = 0) -> None:
        """A batch begins, with these prompts; its rows are numbered from ``first`` on.

        Without this call a batch begins with the first forward on an empty cache after others, and its prompts are what
        the mask shows.
        """
        self._announced = bool(prompts)
        self.rows: list[TrackedRow] = [self._new_row(first + i, list(prompt)) for i, prompt in enumerate(prompts)]
        self.round = 0
        self._history = History()
        self._slots: dict[int, int] = {}
        self._decoding = False

    def check_answers(self, answers: Sequence[Sequence[int]]) -> None:
        """Hold the tokens that rows ended with, which entered no further forward, against what the model chose.

        A rejected token that the answer holds too was accepted, not only kept: its violation becomes ``wrong_token``.

        Args:
            answers: new tokens of every row, by its number. If they are not even what was fed, nothing is said of them.
                Violations are added to ``violations``.
        """
        self.violations = [self._settle(violation, answers) for violation in self.violations]
        endings, self._endings = self._endings, {}
        found = {
            row: position for row in sorted(endings) if (position := endings[row].divergence(answers[row])) is not None
        }
        if any(position < endings[row].decided for row, position in found.items()):
            # what was fed is not in the answers, so they are other rows'
            return
        for row, position in found.items():
            token = answers[row][position - endings[row].prompt_length]
            self.violations.append(endings[row].violation(row, position, token))

    def _settle(self, violation: Violation, answers: Sequence[Sequence[int]]) -> Violation:
        if violation.kind != "kept_rejected_token" or violation.row >= len(answers):
            return violation
        prompt_length, text = self._before[violation]
        new = [*text[prompt_length:], violation.token]
        if list(answers[violation.row][: len(new)]) != new:
            return violation
        return replace(violation, kind="wrong_token", detail=f"{violation.detail}, but of the answer")

    def __enter__(self) -> Self:
        self._former = vars(self.model).get("forward")
        self._forward = self.model.forward

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._watched(dict(zip(self._parameters, args)) | kwargs)

        self.model.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is None:
            del self.model.forward
        else:
            self.model.forward = self._former

    def _new_row(self, index: int, text: list[int]) -> TrackedRow:
        kind = DraftedRow if self._follow else TrackedRow
        longest = None if self._max_new_tokens is None else len(text) + self._max_new_tokens
        alone = AloneRow(self._run_alone, self.model.device)
        return kind(index, text, len(text), longest, self._announced, alone)

    def _run_alone(self, input_ids: Tensor, cache: Any) -> None:
        self._forward(input_ids=input_ids, use_cache=True, **{self._cache_argument: cache})

    def _watched(self, inputs: dict[str, Any]) -> Any:
        if inputs.get("input_ids") is None or selfcheck.running.get():
            return self._forward(**inputs)
        # either name is understood by newer releases
        name = next((n for n in ("cache", "past_key_values") if inputs.get(n) is not None), self._cache_argument)
        if inputs.get(name) is None:
            # what the model would make for itself
            inputs |= {name: DynamicCache(config=self.model.config), "use_cache": True}
        cache = inputs[name]
        past, recorder = int(cache.get_seq_length()), Recorder()
        with recorder.watch(cache):
            output = self._forward(**inputs)
        with torch.no_grad(), compat.attention_set(self._configs, self._attention):
            if isinstance(cache, RaggedCache) and cache.packing:
                views = packed_rows(recorder, cache.packing, inputs, output.logits)
            else:
                views = recorder.rows(past, inputs, output.logits, self._window)
            self._check(views)
        return output

    def _check(self, views: list[RowView]) -> None:
        if self._follow:
            self._follow_target(self._follow)
        elif not self._announced and self._decoding and not any(view.cached for view in views):
            self.begin(())
        for row, view in self._assign(views):
            queries, first = view.queries, len(view.cached)
            row.take_chunk(first, [view.tokens[query] for query in queries])
            if not row.broken:
                compare = self._random.random() < self.rate
                violation = RowCheck(row, view, self._history, self.round, compare).find()
                if violation:
                    self.violations.append(violation)
                    self._before[violation] = row.prompt_length, row.text[: violation.position]
                    row.broken = True
            self._remember(row, view, {query: first + offset for offset, query in enumerate(queries)})
            goes_on = queries and not row.ended
            row.learn(view, first, queries, self._eos_ids)
            if row.broken:
                self._endings.pop(row.index, None)
            elif goes_on:
                column = view.columns[queries[0]]
                self._endings[row.index] = Ending(
                    row.text, row.prompt_length, first + 1, self.round, column, row.newest_logits
                )
        self._decoding = any(view.cached for view in views)
        self.round += 1
        self.forwards += 1

    def _follow_target(self, target: Probe) -> None:
        if self._followed is not target._history:
            prompts = [row.text[: row.prompt_length] for row in target.rows]
            self.begin(prompts, target.rows[0].index if target.rows else 0)
            self._followed, self._seen = target._history, -1
        # rows may join a batch that is under way
        self.rows += [self._new_row(row.index, row.text[: row.prompt_length]) for row in target.rows[len(self.rows) :]]
        if self._seen != target.round:
            for own, row in zip(self.rows, target.rows, strict=True):
                assert isinstance(own, DraftedRow)
                own.follow(row.text)
            self._seen = target.round

    def _remember(self, row: TrackedRow, view: RowView, places: dict[int, int]) -> None:
        origins = [
            Origin(row.index, token, position, places.get(query))
            for query, (token, position) in enumerate(zip(view.tokens, view.positions, strict=True))
        ]
        for layer, (keys, values) in enumerate(zip(view.keys, view.values, strict=True)):
            if keys is not None and values is not None:
                self._history.add(layer, keys[:, view.columns], values[:, view.columns], origins)

    def _assign(self, views: list[RowView]) -> list[tuple[TrackedRow, RowView]]:
        """Finds the row of each slot: rows leave, return and change places; finished ones may go on with filler."""
        if not self._announced:
            newcomers = [view for view in views if not view.cached]
            first = len(self.rows)
            self.rows += [
                self._new_row(i, [view.tokens[q] for q in view.queries]) for i, view in enumerate(newcomers, first)
            ]
        stay = self._slots if len(self._slots) == len(views) else {}
        scores = []
        for view in views:
            view.holders = self._holders(view)
            for row in self.rows:
                likeness = self._likeness(view, row)
                if view.holders and stay.get(view.slot) == row.index:
                    likeness += 1.5
                scores.append((likeness, -row.index, row, view))
        scores.sort(key=lambda score: score[:2], reverse=True)
        assigned: dict[int, tuple[TrackedRow, RowView]] = {}
        taken: set[int] = set()
        for _, _, row, view in scores:
            # without a cache, a row may be presented several times at once, as in batch expansion
            free = row.index not in taken or (self.round > 0 and not view.cached)
            if free and view.slot not in assigned:
                assigned[view.slot] = (row, view)
                taken.add(row.index)
        self._slots = {slot: row.index for slot, (row, _) in assigned.items()}
        return sorted(assigned.values(), key=lambda pair: (pair[0].index, pair[1].slot))

    def _holders(self, view: RowView) -> list[int | None]:
        """Rows that wrote the newest entries of a slot."""
        if not view.cached:
            return []
        # the deepest, where equal tokens in other contexts differ
        layer = next((i for i, keys in reversed(list(enumerate(view.keys))) if keys is not None), None)
        if layer is None:
            raise UnsupportedModelError(f"{type(self.model).__name__} keeps only windows of its cache")
        keys, values = view.keys[layer], view.values[layer]
        assert keys is not None and values is not None
        origins = [next(self._history.find(layer, values[:, c], keys[:, c]), None) for c in view.cached[-3:]]
        return [origin.row if origin else None for origin in origins]

    def _likeness(self, view: RowView, row: TrackedRow) -> float:
        """Rates a slot as a row's: by the token it goes on with, and by whose entries it holds."""
        tokens = [view.tokens[query] for query in view.queries]
        if not view.holders:
            prompt = row.text[: row.prompt_length]
            aligned = (zip(tokens, row.text), zip(reversed(tokens), reversed(prompt)))
            return max(sum(a == b for a, b in pairs) for pairs in aligned) / max(len(tokens), len(prompt), 1)
        # a fault may break the positions or the mask, so both may tell where the row is
        places = (view.positions[view.queries[0]], len(view.cached)) if tokens else ()
        goes_on = [place for place in places if 0 <= place < len(row.text) and row.text[place] == tokens[0]]
        newest = len(row.text) - 1 in goes_on
        held = view.holders.count(row.index) / len(view.holders)
        # a row that ended has most likely left, whatever became of its entries
        return 0.5 * bool(goes_on) + 1.5 * newest + (0.75 if row.ended else 1.5) * held
