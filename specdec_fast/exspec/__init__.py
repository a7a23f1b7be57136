"""EXSPEC: speculative decoding of a stream of prompts, across batches (arXiv 2510.22876)."""

from .decoder import EXSpec
from .engine import Stream
from .online import Answer, Session

__all__ = ["Answer", "EXSpec", "Session", "Stream"]
