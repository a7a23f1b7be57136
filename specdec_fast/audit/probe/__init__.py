"""Checks I1 and I2 on every forward pass of a transformers model (arXiv 2510.22876, section 3)."""

from .probe import Probe as Probe
from .violation import Violation as Violation
