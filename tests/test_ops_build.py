"""The compiled extension uses nothing beyond the stable ABI of torch 2.11, the oldest version it is meant for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import specdec_fast

EXTENSIONS = sorted(Path(specdec_fast.__file__).parent.glob("_C*.so"))
SHIM = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "stable" / "c" / "shim.h"


def symbols(path: Path, which: str) -> set[str]:
    listing = subprocess.run(["nm", "--dynamic", which, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()}


def added_after_2_11() -> set[str]:
    later = SHIM.read_text().partition("TORCH_FEATURE_VERSION >= TORCH_VERSION_2_12_0")[2]
    return set(re.findall(r"\b(torch_\w+)\(", later))


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.skipif(not EXTENSIONS, reason="nothing was built")
@pytest.mark.parametrize("path", EXTENSIONS, ids=lambda path: path.name)
def test_only_the_stable_abi_is_used(path):
    needed = symbols(path, "--undefined-only")
    assert any(name.startswith("aoti_torch_") for name in needed)
    unstable = [name for name in needed if re.match(r"_ZN?K?\d*(2at|3c10|5torch)", name)]
    assert not unstable
    assert not needed & added_after_2_11()
    exported = [name for name in symbols(path, "--defined-only") if "specdec_fast" in name]
    assert not exported
