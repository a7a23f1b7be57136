"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import typer


def with_options(kind: type) -> Callable[[Callable[[typer.Context, Any], None]], Callable[..., None]]:
    """Make ``function(context, options)`` a command with an option for each field of ``kind``."""

    def decorate(function: Callable[[typer.Context, Any], None]) -> Callable[..., None]:
        @wraps(function)
        def command(context: typer.Context, **given: Any) -> None:
            function(context, kind(**given))

        hints = get_type_hints(kind, include_extras=True)
        parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [_parameter(field, hints[field.name]) for field in fields(kind)]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(field: Field[Any], annotation: Any) -> Parameter:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    default = Parameter.empty if default is MISSING else default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
