"""Errors a user can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .result import RequestResult


class InputError(ValueError):
    """An argument, file or model that cannot be used; the message names it and what is accepted."""


class UnsupportedModelError(InputError):
    """A model whose cache or attention this package cannot keep correct."""


class WriteError(InputError, OSError):
    """A file that could not be written any further; the message names it."""


class EndpointError(InputError):
    """A server that cannot be reached, or answers with something else than a completion.

    Attributes:
        status: the HTTP status, None without an answer.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class UnappliedSettingsWarning(UserWarning):
    """A model's generation config asks for something else than greedy search, and that is not applied."""


class RequestError(RuntimeError):
    """One request of an online session failed; ``result`` holds what it had gained."""

    def __init__(self, message: str, result: RequestResult):
        super().__init__(message)
        self.result = result
