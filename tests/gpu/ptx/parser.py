"""PTX text to kernels: parameters, registers, shared memory, and a flat list of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import PtxError, Unsupported
from .types import NAME, size_of

_SHARED = re.compile(rf"\.shared\s+(?:\.align\s+(\d+)\s+)?\.({NAME})\s+([\w$]+)\s*(?:\[(\d*)\])?")
_PARAM = re.compile(rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.({NAME}|f32)\b.*?([\w$]+)\s*(?:\[(\d+)\])?$")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
# whole lines, and comments, that say nothing about what a thread does
_NOISE = re.compile(r"//[^\n]*|^[ \t]*\.(?:loc|file)\b[^\n]*", re.M)


@dataclass(frozen=True)
class Instruction:
    """``op.modifiers operands``, executed where ``predicate`` holds."""

    op: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str
    line: int


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """One ``.entry``; shared variables are given by their offset in the block's shared memory."""

    name: str
    parameters: list[Parameter]
    block: tuple[int, ...] | None
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    dynamic_shared: set[str] = field(default_factory=set)
    shared_bytes: int = 0


def parse(source: str) -> dict[str, Kernel]:
    """Kernels of a PTX module by name."""
    source = _NOISE.sub("", source)
    kernels = {}
    for entry in re.finditer(r"\.entry\s+([\w$]+)\s*\(", source):
        head = source.index(")", entry.end())
        opening = source.index("{", head)
        closing = _closing_brace(source, opening)
        kernel = Kernel(entry[1], _parameters(source[entry.end() : head]), _block(source[head + 1 : opening]))
        for declaration in re.finditer(r"[^;{}]*\.shared\s[^;{}]*;", source[: entry.start()]):
            _declare_shared(kernel, declaration[0])
        _parse_body(kernel, source[opening + 1 : closing], source.count("\n", 0, opening) + 1)
        kernels[kernel.name] = kernel
    return kernels


def split_operands(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [*parts, current.strip()] if current.strip() else parts


def _closing_brace(source: str, opening: int) -> int:
    depth = 0
    for brace in re.finditer(r"[{}]", source[opening:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return opening + brace.start()
    raise PtxError("a kernel body is not closed")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _parameters(text: str) -> list[Parameter]:
    parameters, offset = [], 0
    for declaration in split_operands(text):
        match = _PARAM.search(declaration)
        if not match:
            raise Unsupported(f"parameter `{declaration}`")
        alignment, type_name, name, count = match.groups()
        size = size_of(type_name) * int(count or 1)
        offset = _align(offset, int(alignment or size_of(type_name)))
        parameters.append(Parameter(name, offset, size))
        offset += size
    return parameters


def _block(directives: str) -> tuple[int, ...] | None:
    match = re.search(r"\.reqntid\s+([\d,\s]+)", directives)
    return tuple(int(x) for x in match[1].split(",")) if match else None


def _declare_shared(kernel: Kernel, declaration: str) -> None:
    match = _SHARED.search(declaration)
    if not match:
        raise Unsupported(f"declaration `{declaration.strip()}`")
    alignment, type_name, name, count = match.groups()
    if ".extern" in declaration or count == "":
        kernel.dynamic_shared.add(name)
        return
    kernel.shared[name] = _align(kernel.shared_bytes, int(alignment or size_of(type_name)))
    kernel.shared_bytes = kernel.shared[name] + size_of(type_name) * int(count or 1)


def _tokens(body: str, line: int) -> Iterator[tuple[str, str, int]]:
    """Scopes, labels and statements in order, as ``(kind, text, line)``."""
    text, start = "", line
    for char in body:
        line += char == "\n"
        bare = text.strip()
        if not bare:
            start = line
        if char in "{}" and not bare:
            yield char, "", line
        elif char == ":" and re.fullmatch(r"[\w$]+", bare):
            yield "label", bare, line
        elif char == ";":
            if bare:
                yield "statement", " ".join(bare.split()), start
        else:
            text += char
            continue
        text = ""


def _parse_body(kernel: Kernel, body: str, line: int) -> None:
    # inner scopes may reuse register names: each gets names of its own
    scopes: list[dict[str, str]] = [{}]
    opened = 0
    for kind, text, at in _tokens(body, line):
        if kind == "{":
            opened += 1
            scopes.append({})
        elif kind == "}":
            scopes.pop()
        elif kind == "label":
            kernel.labels[text] = len(kernel.code)
        elif text.startswith(".reg"):
            _declare_registers(kernel, text, scopes, opened)
        elif ".shared" in text.split()[:2]:
            _declare_shared(kernel, text)
        elif text.startswith("."):
            if not text.startswith(".pragma"):
                raise Unsupported(f"line {at}: `{text}`")
        else:
            kernel.code.append(_instruction(text, scopes, at))


def _declare_registers(kernel: Kernel, text: str, scopes: list[dict[str, str]], opened: int) -> None:
    match = re.match(rf"\.reg\s+\.({NAME})\s", text)
    if not match:
        raise Unsupported(f"declaration `{text}`")
    for item in text[match.end() :].split(","):
        counted = re.fullmatch(r"([%\w$]+)<(\d+)>", item.strip())
        names = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [item.strip()]
        for name in names:
            scopes[-1][name] = name if len(scopes) == 1 else f"{name}@{opened}"
            kernel.registers[scopes[-1][name]] = match[1]


def _instruction(text: str, scopes: list[dict[str, str]], line: int) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if not match:
        raise Unsupported(f"line {line}: `{text}`")

    def resolve(name: str) -> str:
        return next((scope[name] for scope in reversed(scopes) if name in scope), name)

    negation, predicate, mnemonic, rest = match.groups()
    op, *modifiers = mnemonic.replace("::", ":").split(".")
    operands = split_operands(re.sub(r"%?[\w$]+", lambda word: resolve(word[0]), rest))
    return Instruction(
        op, tuple(modifiers), tuple(operands), resolve(predicate) if predicate else None, bool(negation), text, line
    )
