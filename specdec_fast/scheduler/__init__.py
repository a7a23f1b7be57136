"""Which rows run together, and when: EXSPEC's cross-batch scheduling (arXiv 2510.22876), without a tensor in sight."""

from __future__ import annotations

from .core import POLICIES, Counters, Scheduler
from .plan import Chunk, Move, Plan, Seat
from .rows import Outcome, Record, Request

__all__ = ["POLICIES", "Chunk", "Counters", "Move", "Outcome", "Plan", "Record", "Request", "Scheduler", "Seat"]
