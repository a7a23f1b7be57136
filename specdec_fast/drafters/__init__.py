"""Where drafts come from."""

from .base import Drafter, Drafts
from .model import ModelDrafter
from .ngram import NgramDrafter
from .self_draft import SelfDrafter

__all__ = ["Drafter", "Drafts", "ModelDrafter", "NgramDrafter", "SelfDrafter"]
