"""Sources of drafts."""

from .base import Drafter, DraftRun, Drafts
from .model import ModelDrafter
from .ngram import NgramDrafter
from .self_draft import SelfDrafter

__all__ = ["DraftRun", "Drafter", "Drafts", "ModelDrafter", "NgramDrafter", "SelfDrafter"]
