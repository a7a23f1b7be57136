"""The lanes of the padded layout: which row sits where, and what has to move before a batch can run."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Move
from .rows import Row


class Stage:
    """Lanes of equal width, of which the first n form a batch of n.

    A row keeps its lane and columns for as long as it is in every batch. Where there is a pool, KV is written to the
    lane and to the row's slot in the pool alike, so a row leaves its lane without a move, and comes back by a gather.

    Args:
        max_columns: longest content of a row.
        num_draft_tokens: most drafts per row and round.
    """

    def __init__(self, max_columns: int, num_draft_tokens: int):
        # any row fits left of the first edge, and edges may wander right before all rows move back to it
        self.first_edge = max_columns
        self.last_edge = 2 * max_columns
        self.width = self.last_edge + num_draft_tokens + 1
        self._rows: set[Row] = set()

    def place(self, rows: Sequence[Row], slack: int) -> tuple[int, list[Move]]:
        """Seat ``rows`` in the first lanes at the right edge that moves the fewest columns; all other rows leave.

        Rows that end up to ``slack`` columns beyond the edge stay where they are.

        Returns:
            The edge, and the moves of rows that hold KV.
        """
        for row in self._rows.difference(rows):
            self.release(row)
        lanes = range(len(rows))
        # a verify runs over a view of the first lanes, so a row beyond them has to move into a hole
        seated = [row for row in rows if row.lane in lanes]
        edge = self._cheapest_edge(seated, slack)
        free = sorted(set(lanes).difference(row.lane for row in seated))
        moves = []
        for row in rows:
            is_seated = row.lane in lanes
            if is_seated and edge <= row.end <= edge + slack:
                continue
            lane = row.lane if is_seated and row.lane is not None else free.pop(0)
            if row.is_ready:
                came_from = row.length if row.lane is None else row.end
                moves.append(Move(row.id, row.lane, lane, row.columns, edge - came_from))
                row.realigns += 1
            row.lane, row.end = lane, edge
        self._rows = set(rows)
        return edge, moves

    def release(self, row: Row) -> None:
        row.lane = None
        self._rows.discard(row)

    def clear(self) -> None:
        for row in list(self._rows):
            self.release(row)

    def _cheapest_edge(self, seated: Sequence[Row], slack: int) -> int:
        """The edge that leaves most columns in place, and of equals the one with the shortest leads."""

        def kept(edge: int) -> tuple[int, int]:
            staying = [row for row in seated if edge <= row.end <= edge + slack]
            return sum(row.columns for row in staying), -sum(row.end - edge for row in staying)

        edges = {row.end for row in seated if self.first_edge <= row.end <= self.last_edge}
        return max(sorted(edges), key=kept, default=self.first_edge)
