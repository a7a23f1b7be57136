"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError
from .records import Prompt

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[list[int]]:
    """Token ids of each prompt, unpadded; arguments and errors as for :func:`encode_prompt`."""
    return [encode_prompt(prompt, tokenizer, chat) for prompt in prompts]


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: of those that ``read`` returned; token ids stay as they are.
        tokenizer: the target's.
        chat: render the prompt with the chat template: an assistant turn is opened, or left open where the last
            message is one.

    Raises:
        InputError: a chat without a template to render it, an unknown token id, or a prompt without tokens.
    """
    check_template(tokenizer, chat)
    if prompt.token_ids is not None:
        return _check_ids(prompt, tokenizer)
    ids = _encode_chat(prompt, tokenizer) if chat else _encode_text(prompt, tokenizer)
    if not ids:
        raise InputError(f"prompt {prompt.index} has no tokens")
    return ids


def check_template(tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
    """Raise ``InputError`` where a chat template is wanted and there is none."""
    if chat and not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template; use --no-chat")


def check_context(rows: Sequence[Sequence[int]], config: PretrainedConfig, max_new_tokens: int) -> None:
    """Raise ``InputError`` for a row that does not fit the model's context together with its new tokens."""
    for index, row in enumerate(rows):
        check_length(index, row, config, max_new_tokens)


def check_length(index: int, row: Sequence[int], config: PretrainedConfig, max_new_tokens: int) -> None:
    """As :func:`check_context`, for the row of prompt ``index``."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and len(row) + max_new_tokens > context:
        raise InputError(
            f"prompt {index} is too long: {len(row)} tokens and {max_new_tokens} new ones (--max-new-tokens) "
            f"do not fit the {config.model_type} model's context of {context}"
        )


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad ragged rows.

    Returns:
        ``input_ids`` and ``attention_mask``, both ``[B, P]`` int64 on the CPU. The mask comes from the lengths, so ``pad_id``
        may occur in the text.
    """
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device="cpu")
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device="cpu")
    return ids, mask


def _check_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    assert prompt.token_ids is not None
    if (largest := max(prompt.token_ids)) >= len(tokenizer):
        raise InputError(f"prompt {prompt.index} has token id {largest}; the tokenizer knows {len(tokenizer)} tokens")
    return prompt.token_ids


def _encode_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if prompt.messages is not None:
        raise InputError(f"prompt {prompt.index} is a list of messages, which needs a chat template and --chat")
    return tokenizer(prompt.text)["input_ids"]


def _encode_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    begun = messages[-1]["role"] == "assistant"
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=not begun, continue_final_message=begun, tokenize=True, return_dict=True
        )
    except Exception as error:
        # templates are programs of their own: they raise what they like, for instance on roles out of turn
        raise InputError(f"the chat template rejects prompt {prompt.index}: {error}") from error
    return encoded["input_ids"]
