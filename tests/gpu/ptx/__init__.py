"""PTX on numpy: executes compiled kernels on host memory and reports what they may not do.

Integer PTX only. An instruction, modifier or type that is not known here is refused when the kernel is loaded.
"""

from .emulator import Emulator, Statistics
from .errors import BarrierDivergence, DataRace, Misaligned, OutOfBounds, PtxError, Trap, Unsupported

__all__ = [
    "BarrierDivergence",
    "DataRace",
    "Emulator",
    "Misaligned",
    "OutOfBounds",
    "PtxError",
    "Statistics",
    "Trap",
    "Unsupported",
]
