"""EXSPEC: speculative decoding of a stream of prompts, across batches (arXiv 2510.22876)."""

from .decoder import EXSpec
from .engine import Stream

__all__ = ["EXSpec", "Stream"]
