"""The workload of a command that decodes: target, encoded prompts, limits and drafter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InputError
from ..prompts import Prompt, check_length, check_template, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters import Drafter
    from ..result import RowResult
    from .journal import Row


class ModelOptions(Protocol):
    """The part of a command line that loads a target and bounds its rows."""

    @property
    def target(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def chat(self) -> bool | None: ...

    @property
    def max_new_tokens(self) -> int: ...


class Workload:
    """Prompts and the model that continues them.

    Attributes:
        target, tokenizer: as loaded.
        prompts: as read.
        encoded: token ids of each prompt.
        errors: why a prompt cannot be continued, by its index.
        limits: ``max_new_tokens``, ``eos_token_id`` (a list) and ``pad_token_id``.

    With ``check_lengths``, a prompt that does not fit the context is an error at once; with ``skip_errors``, errors of
    a prompt are only noted.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        options: ModelOptions,
        message: Callable[[str], None],
        *,
        check_lengths: bool = True,
        skip_errors: bool = False,
    ):
        from ..integrations import compat

        self.prompts, self._options, self._message = prompts, options, message
        self.target, self.tokenizer = self._load(options.target)
        self._say_what_is_not_applied()
        self.errors = {prompt.index: prompt.error for prompt in prompts if prompt.error}
        self._check_lengths, self._skip_errors = check_lengths, skip_errors
        self.encoded = self._encode(options.chat)
        self._check_context(self.target, options.max_new_tokens)
        fallback = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        eos = compat.eos_ids(self.target, None) or fallback
        self.limits: dict[str, Any] = {
            "max_new_tokens": options.max_new_tokens,
            "eos_token_id": eos,
            "pad_token_id": compat.pad_id(self.target, self.tokenizer.pad_token_id, eos),
        }

    def drafter(self, name: str) -> Drafter:
        """``ngram``, ``self:LAYERS`` or a model."""
        from ..drafters import ModelDrafter, NgramDrafter, SelfDrafter

        if name == "ngram":
            return NgramDrafter()
        if name.startswith("self:"):
            return SelfDrafter.from_spec(self.target, name.removeprefix("self:"))
        model, tokenizer = self._load(name)
        self._check_context(model, self.limits["max_new_tokens"])
        return ModelDrafter(model, tokenizer=tokenizer, target_tokenizer=self.tokenizer)

    def record(self, index: int, row: RowResult) -> Row:
        """A finished row as the journal keeps it."""
        from ..result import RequestResult

        return {
            "index": index,
            "prompt": self.prompts[index].text,
            "text": self.tokenizer.decode(row.token_ids, skip_special_tokens=True),
            "token_ids": row.token_ids,
            "num_tokens": len(row.token_ids),
            "finish_reason": row.finish_reason,
            "rounds": row.rounds,
            "drafted": row.drafted,
            "accepted": row.accepted,
            **({"error": row.error} if isinstance(row, RequestResult) and row.error else {}),
        }

    def _encode(self, chat: bool | None) -> list[list[int]]:
        use_template = bool(self.tokenizer.chat_template) if chat is None else chat
        check_template(self.tokenizer, use_template)
        encoded: list[list[int]] = []
        for prompt in self.prompts:
            encoded.append([])
            if prompt.error is None:
                with self._noted(prompt.index):
                    encoded[-1] = encode_prompt(prompt, self.tokenizer, use_template)
        return encoded

    def _say_what_is_not_applied(self) -> None:
        from ..errors import UnappliedSettingsWarning
        from ..integrations.generation_config import unapplied

        if text := unapplied(self.target):
            self._message(f"warning: {text}")
            # each decoder would say it again
            warnings.simplefilter("ignore", UnappliedSettingsWarning)

    def _check_context(self, model: PreTrainedModel, max_new_tokens: int) -> None:
        if self._check_lengths:
            for index, row in enumerate(self.encoded):
                with self._noted(index):
                    check_length(index, row, model.config, max_new_tokens)

    @contextmanager
    def _noted(self, index: int) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            if not self._skip_errors:
                raise
            self.errors.setdefault(index, str(error))

    def _load(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        from ..models import load

        self._message(f"loading {name}")
        return load(name, dtype=self._options.dtype, device=self._options.device)
