"""Errors of a kernel."""


class PtxError(RuntimeError):
    """A kernel that cannot be loaded or did something it must not do."""


class Unsupported(PtxError):
    """PTX whose meaning is not known here."""


class OutOfBounds(PtxError):
    """An access outside every registered memory."""


class Misaligned(PtxError):
    """An address that is not a multiple of the access size."""


class DataRace(PtxError):
    """Two threads on one byte, at least one of them storing, with no barrier between."""


class BarrierDivergence(PtxError):
    """Threads of one block that wait at different barriers, or exit before one."""


class Trap(PtxError):
    """The kernel executed ``trap``."""
