"""EXSPEC's cross-batch scheduling (arXiv 2510.22876): chooses the rows of each round, without tensors."""

from __future__ import annotations

from .core import POLICIES, Scheduler
from .plan import Chunk, Plan, Seat
from .rows import Outcome, Record, Request

__all__ = ["POLICIES", "Chunk", "Outcome", "Plan", "Record", "Request", "Scheduler", "Seat"]
