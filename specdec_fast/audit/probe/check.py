"""Hold one row of a forward pass against I1 and I2 (arXiv 2510.22876, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from .capture import RowView
from .history import History, Origin
from .row import TrackedRow
from .violation import Kind, Violation

# relative difference of an entry that rounding explains
_ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3}
# in half precision it grows from layer to layer, up to a third
_HALF_ROUNDING, _DEEP_HALF_ROUNDING = 1e-1, 3e-1


class RowCheck:
    """One row in one forward pass.

    Args:
        row: what is known of it.
        view: what it presented.
        history: the origin of every entry.
        round: forward passes before this one.
        compare: hold every cached entry against the row's own; without, only what the inputs show.
    """

    def __init__(self, row: TrackedRow, view: RowView, history: History, round: int, compare: bool):
        self.row, self.view, self.history, self.round, self.compare = row, view, history, round, compare
        self.cached, self.queries = view.cached, view.queries

    def find(self) -> Violation | None:
        """The first violation: cached entries by column and layer, then tokens, positions and mask of the queries."""
        if not self.queries or self._goes_on_with_filler():
            return None
        inputs = self._tokens() or self._positions() or self._mask()
        surplus = len(self.cached) > len(self.row.text)
        if self.cached and (self.compare or inputs or surplus):
            return self._entries() or inputs
        return inputs

    def _goes_on_with_filler(self) -> bool:
        """True for a row that has all its tokens: a decoder may keep it in the batch and feed it anything."""
        text, first = self.row.text, len(self.cached)
        return self.row.ended and (first >= len(text) or self.view.tokens[self.queries[0]] != text[first])

    def _violation(
        self, kind: Kind, layer: int | None, column: int, position: int, detail: str, token: int | None = None
    ) -> Violation:
        return Violation(kind, self.round, self.row.index, layer, column, position, detail, token)

    def _entries(self) -> Violation | None:
        known = min(len(self.cached), len(self.row.text))
        columns = torch.tensor(self.cached[:known], device=self.view.seen.device)
        self.row.alone.extend(self.row.text[:known])
        first: tuple[int, int] | None = None
        for layer, (keys, values) in enumerate(zip(self.view.keys, self.view.values, strict=True)):
            if keys is None or values is None:
                continue
            own_keys, own_values = self.row.alone.entry(layer)
            deep = layer > self._first_layer
            wrong = _differs(keys[:, columns], own_keys[:, :known], deep)
            wrong |= _differs(values[:, columns], own_values[:, :known], deep)
            if wrong.any():
                found = (int(wrong.nonzero()[0, 0]), layer)
                first = min(first, found) if first else found
        if first:
            return self._explain(*first)
        return self._explain(known, self._first_layer) if len(self.cached) > known else None

    @property
    def _first_layer(self) -> int:
        return next(i for i, keys in enumerate(self.view.keys) if keys is not None)

    def _explain(self, position: int, layer: int) -> Violation:
        """Names the entry in the place of ``position`` if it is not the one that belongs there."""
        column, text = self.cached[position], self.row.text
        keys, values = self.view.keys[layer], self.view.values[layer]
        assert keys is not None and values is not None
        key, value = keys[:, column], values[:, column]
        expected = text[position] if position < len(text) else None

        def violation(kind: Kind, detail: str, token: int | None = None) -> Violation:
            return self._violation(kind, layer, column, position, detail, token)

        origins = list(self.history.find(layer, value, key))
        if not origins:
            if not (value.isfinite().all() and key.isfinite().all()):
                return violation("wrong_kv", "its entry is not finite")
            is_empty = not (key.any() or value.any())
            if is_empty and self._other_holders:
                return violation("other_row", f"the slot is that of row {self._other_holders[0]}, and empty here")
            if is_empty:
                return violation("visible_padding", "a column is seen whose entry is all zeros")
            right_value = any(origin.token == expected for origin in self.history.find(layer, value))
            if right_value and layer == self._first_layer and self._is_rotated(key, position):
                return violation("wrong_position", f"token {expected} with the key of a position that no query had")
            return violation("wrong_kv", "its entry is none that a query wrote")
        own = [origin for origin in origins if origin.row == self.row.index]
        if any(origin.token == expected and origin.position == position for origin in own):
            return violation("wrong_kv", f"token {expected} at position {position} was computed in another context")
        origin = (own or origins)[0]
        kind, detail = self._explain_origin(origin, position, expected)
        if layer > self._first_layer:
            return violation("wrong_kv", f"right in the layers below, but here {detail}")
        return violation(kind, detail, origin.token)

    def _explain_origin(self, origin: Origin, position: int, expected: int | None) -> tuple[Kind, str]:
        text = self.row.text
        what = f"token {origin.token} computed at position {origin.position}"
        # equal tokens at equal positions look the same in every row, so the newest entries tell whose slot it is
        others = self._other_holders
        if origin.row != self.row.index or others:
            other = origin.row if origin.row != self.row.index else others[0]
            return "other_row", f"it holds {what if origin.content else 'padding'}, as row {other} has it"
        if not origin.content:
            return "visible_padding", "it holds padding"
        if self._leading_surplus(position):
            return "visible_padding", f"columns before the row's first are seen, where {what} was left behind"
        if origin.token == expected and origin.position != origin.place:
            return "wrong_position", f"{what}, not at {position}"
        # every entry before this one is right, that of origin.position too
        in_text = origin.position < len(text) and text[origin.position] == origin.token
        if in_text and origin.position < position:
            return "duplicated_token", f"{what} is there a second time"
        if in_text and origin.position > position:
            return "lost_token", f"token {expected} is missing; {what} follows"
        if expected not in (None, origin.token, self.view.tokens[self.queries[0]]):
            return "wrong_token", f"{what}: a draft that the target rejects was accepted"
        return "kept_rejected_token", f"{what} is not part of the text"

    @property
    def _other_holders(self) -> list[int]:
        """Rows that wrote the newest entries of the slot, if this row wrote none of them."""
        if self.row.index in self.view.holders:
            return []
        return [row for row in self.view.holders if row is not None]

    def _leading_surplus(self, position: int) -> bool:
        """True if the row's whole text follows some columns that do not belong to it."""
        text, first = self.row.text, self.view.positions[self.queries[0]]
        surplus = len(self.cached) - first
        keys = self.view.keys[self._first_layer]
        if not (surplus > 0 and position <= surplus < len(self.cached) and 0 < first < len(text)) or keys is None:
            return False
        own_keys, _ = self.row.alone.entry(self._first_layer)
        columns = torch.tensor(self.cached[surplus:], device=keys.device)
        return not _differs(keys[:, columns], own_keys[:, :first]).any()

    def _is_rotated(self, key: Tensor, position: int) -> bool:
        """True if ``key`` ``[H, D]`` may be that of another position: rotary embeddings keep the norm of every head."""
        own = self.row.alone.entry(self._first_layer)[0][:, position]
        return not _differs(key.norm(dim=-1)[:, None, None], own.norm(dim=-1)[:, None, None]).any()

    def _tokens(self) -> Violation | None:
        text, first = self.row.text, len(self.cached)
        for offset, query in enumerate(self.queries):
            position = first + offset
            committed = offset == 0 or position < self.row.prompt_length
            if committed and position < len(text) and not self.row.expects(position, self.view.tokens[query]):
                kind, detail = self._explain_token(query, position)
                return self._violation(kind, None, self.view.columns[query], position, detail)
        return None

    def _explain_token(self, query: int, position: int) -> tuple[Kind, str]:
        text, token = self.row.text, self.view.tokens[query]
        what = f"token {token} where the row has {text[position]}"
        presented = [self.view.tokens[q] for q in self.queries]
        prompt = text[: self.row.prompt_length]
        if not self.cached and len(presented) > len(prompt) and presented[-len(prompt) :] == prompt:
            return "visible_padding", f"{len(presented) - len(prompt)} columns before the prompt are seen"
        if not self.cached and presented == prompt[-len(presented) :]:
            return "lost_token", f"the first {len(prompt) - len(presented)} tokens of the prompt are not seen"
        if token in text[position + 1 :]:
            return "lost_token", f"{text.index(token, position) - position} tokens from {text[position]} on are missing"
        if position and token == text[position - 1] and self.view.positions[query] == position - 1:
            return "duplicated_token", f"{what}: it is there a second time"
        return "wrong_token", f"{what}: the target did not choose it"

    def _positions(self) -> Violation | None:
        for offset, query in enumerate(self.queries):
            position, given = len(self.cached) + offset, self.view.positions[query]
            if given != position:
                text, token = self.row.text, self.view.tokens[query]
                if offset == 0 and position < given < len(text) and text[given] == token and text[position] == token:
                    # equal tokens in a row: the text alone does not show that one of them is missing
                    return self._violation("lost_token", None, self.view.columns[query], position, "a token is missing")
                hidden = self._hidden_before(query)
                if given == position + len(hidden) and hidden:
                    column = self.view.columns[hidden[0]]
                    detail = f"the query at position {given} does not see column {column}"
                    return self._violation("wrong_mask", None, column, position, detail)
                detail = f"position ID {given} after {position} tokens"
                return self._violation("wrong_position", None, self.view.columns[query], position, detail)
        return None

    def _hidden_before(self, query: int) -> list[int]:
        """Queries before ``query``, after the row's first, that its position counts and its mask does not show."""
        between = range(self.queries[0] + 1, query)
        return [q for q in between if q not in self.queries and self.view.positions[q] < self.view.positions[query]]

    def _mask(self) -> Violation | None:
        content = self.cached + [self.view.columns[query] for query in self.queries]
        for offset, query in enumerate(self.queries):
            stop = len(self.cached) + offset + 1
            for seen, window in self.view.masks(query):
                expected = torch.zeros_like(seen)
                expected[content[max(0, stop - window) if window else 0 : stop]] = True
                wrong = (expected != seen).nonzero()[:, 0].tolist()
                if wrong:
                    verb = "sees" if seen[wrong[0]] else "does not see"
                    where = f" in a window of {window}" if window else ""
                    detail = f"the query at position {stop - 1} {verb} column {wrong[0]}{where}"
                    return self._violation("wrong_mask", None, wrong[0], stop - 1, detail)
        return None


def _differs(found: Tensor, own: Tensor, deep: bool = False) -> Tensor:
    """Marks those of N entries ``[H, N, D]`` that differ by more than rounding: ``[N]`` bool."""
    allowed = _ROUNDING.get(own.dtype, _DEEP_HALF_ROUNDING if deep else _HALF_ROUNDING)
    difference = (found.double() - own.double()).norm(dim=(0, 2))
    # not <=, so that nan differs
    return ~(difference <= allowed * own.double().norm(dim=(0, 2)))
