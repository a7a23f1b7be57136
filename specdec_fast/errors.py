"""Errors a user can act on."""


class InputError(ValueError):
    """An argument, file or model that cannot be used; the message names it and what is accepted."""


class UnsupportedModelError(InputError):
    """A model whose cache or attention this package cannot keep correct."""
