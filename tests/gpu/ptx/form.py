"""An instruction taken apart: a part that no handler claims makes it unsupported."""

from __future__ import annotations

import re

from . import operands
from .errors import Unsupported
from .operands import Reader, Writer
from .parser import Instruction, Kernel
from .types import NAME


class Form:
    """Modifiers and operands of an instruction, claimed one by one by its handler."""

    def __init__(self, instruction: Instruction, kernel: Kernel):
        self.op = instruction.op
        self.operands = instruction.operands
        self.kernel = kernel
        self._unclaimed = list(instruction.modifiers)

    def take(self, *choices: str) -> str | None:
        """The modifier among ``choices``, if the instruction has one."""
        found = next((modifier for modifier in self._unclaimed if modifier in choices), None)
        if found:
            self._unclaimed.remove(found)
        return found

    def need(self, *choices: str) -> str:
        found = self.take(*choices)
        if not found:
            raise Unsupported(f"none of the modifiers {', '.join(choices)}")
        return found

    def type(self) -> str:
        """The last type among the modifiers."""
        types = [modifier for modifier in self._unclaimed if re.fullmatch(NAME, modifier)]
        if not types:
            raise Unsupported("no integer type")
        last = len(self._unclaimed) - 1 - self._unclaimed[::-1].index(types[-1])
        return self._unclaimed.pop(last)

    def expect(self, *counts: int) -> None:
        if len(self.operands) not in counts:
            raise Unsupported(f"{len(self.operands)} operands")

    def read(self, index: int, type_name: str) -> Reader:
        return operands.reader(self.operands[index], type_name, self.kernel)

    def write(self, index: int = 0) -> Writer:
        return operands.writer(self.operands[index], self.kernel)

    def close(self) -> None:
        """Refuse modifiers that no handler claimed."""
        if self._unclaimed:
            raise Unsupported(f"modifier {', '.join(self._unclaimed)}")
