"""Prompts: files and stdin in, left-padded token ids out."""

from __future__ import annotations

from .encoding import check_context, check_length, check_template, encode, encode_prompt, pad_left
from .files import read
from .records import Message, Prompt

__all__ = [
    "Message",
    "Prompt",
    "check_context",
    "check_length",
    "check_template",
    "encode",
    "encode_prompt",
    "pad_left",
    "read",
]
