"""The ragged layout: every row writes its KV at its own offset, and nothing moves."""

from .cache import RaggedCache
from .compiled import CompiledBatch
from .model import RaggedModel
from .packing import Packing, Segment
from .pool import RaggedBatch, RaggedPool

__all__ = ["CompiledBatch", "Packing", "RaggedBatch", "RaggedCache", "RaggedModel", "RaggedPool", "Segment"]
