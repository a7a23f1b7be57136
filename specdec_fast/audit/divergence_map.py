"""A picture of the places at which the rows of a run leave the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from .results import AuditReport, RowAudit, RunAudit

_HEIGHT = 600
_CLEAN_HEIGHT = 300
_LABEL_PIXELS = 14
_TICKS = 7


@dataclass(frozen=True)
class Bar:
    """A prompt's line of the divergence map; positions are in percent of the map's width.

    Attributes:
        row: what the line shows.
        oracle_tokens: length of the oracle's text.
        oracle: where the oracle's text ends.
        matched: where the matched tokens end.
        after: where the first differing token ends.
        end: where the candidate's text ends.
    """

    row: RowAudit
    oracle_tokens: int
    oracle: float
    matched: float
    after: float
    end: float

    @property
    def score(self) -> str:
        """Matched tokens of the oracle's."""
        return f"{_matched(self.row)}/{self.oracle_tokens}"


@dataclass(frozen=True)
class Chart:
    """The divergence map of a run: prompts down, token positions across.

    Attributes:
        width: token positions.
        pitch: pixels from bar to bar.
        label_every: bars from label to label.
        tick_every: token positions from tick to tick.
        bars: sorted by prompt.
    """

    width: int
    pitch: int
    label_every: int
    tick_every: int
    bars: list[Bar]

    @classmethod
    def of(cls, run: RunAudit, report: AuditReport) -> Chart:
        """The map of one run; all maps of a report have the same width, so that they can be compared."""
        oracles = {prompt.index: len(prompt.oracle_ids) for prompt in report.prompts}
        width = max(1, *oracles.values(), *(len(row.token_ids) for each in report.runs for row in each.rows))
        height = _CLEAN_HEIGHT if all(row.exact for row in run.rows) else _HEIGHT
        pitch = min(24, max(3, height // len(run.rows)))
        bars = [_bar(row, oracles[row.index], width) for row in sorted(run.rows, key=lambda row: row.index)]
        return cls(width, pitch, _step(len(bars) * pitch / _LABEL_PIXELS, len(bars)), _step(_TICKS, width), bars)

    @property
    def height(self) -> int:
        return self.pitch * len(self.bars)

    @property
    def bar(self) -> int:
        """Pixels of a bar that are filled."""
        return min(12, self.pitch - max(1, self.pitch // 4))

    @property
    def ticks(self) -> range:
        return range(0, self.width, self.tick_every)


def _bar(row: RowAudit, oracle_tokens: int, width: int) -> Bar:
    matched, length = _matched(row), len(row.token_ids)
    columns = (oracle_tokens, matched, matched + 1, length)
    return Bar(row, oracle_tokens, *(round(100 * column / width, 3) for column in columns))


def _matched(row: RowAudit) -> int:
    return len(row.token_ids) if row.first_divergence is None else row.first_divergence


def _step(most: float, total: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that divides ``total`` into at most ``most`` parts."""
    return next(step for power in count() for step in (10**power, 2 * 10**power, 5 * 10**power) if total <= most * step)
