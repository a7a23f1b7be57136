"""Copies of the Triton kernels with one thing wrong."""

from __future__ import annotations

from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
# what ragged attention would get wrong without
ATTENTION = {
    "the row's length": ("ragged_attention.py", "inside = column < stop", "inside = column < stop + 2"),
    "causality": ("ragged_attention.py", "(distance >= 0) & inside", "inside"),
    "the window": ("ragged_attention.py", "distance < window", "distance <= window"),
    "a token's own position": ("ragged_attention.py", "(position + token)[", "(position + tokens - 1 + 0 * token)["),
    "one sink for all splits": ("ragged_attention.py", "counts = split == 0", "counts = split >= 0"),
    "one scale for all splits": ("ragged_attention.py", "result * decay[:, None] + own", "result + own"),
    "memory of its own for a split": ("ragged_attention.py", "* splits + split) * QUERIES", "* splits) * QUERIES"),
}


def write(folder: Path, name: str, file: str, old: str, new: str) -> str:
    """The package in ``folder`` in which the first ``old`` of ``file`` is ``new``."""
    package = f"mutant_{name.replace(' ', '_').replace(chr(39), '')}"
    for source in KERNELS.glob("*.py"):
        text = source.read_text()
        assert source.name != file or old in text, f"{file} has no `{old}`"
        target = folder / package / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text.replace(old, new, 1) if source.name == file else text)
    return package
