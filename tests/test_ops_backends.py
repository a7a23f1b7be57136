"""The backend that serves a call, and the error if the one asked for cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from specdec_fast import ops
from specdec_fast.errors import InputError
from specdec_fast.operators import backends

CALL = """
import torch
from specdec_fast import ops
from specdec_fast.operators import backends
cache = torch.arange(6.0).view(1, 1, 6, 1)
ops.realign_([cache], torch.tensor([1]), torch.tensor([3]), torch.tensor([2]))
kernels = [torch._C._dispatch_has_kernel_for_dispatch_key("specdec_fast::realign_", key) for key in ("CPU", "CUDA")]
print(cache.flatten().tolist(), *kernels, *(b.name for b in backends.available() if b.available))
"""


def run(backend: str) -> subprocess.CompletedProcess:
    environment = os.environ | {backends.VARIABLE: backend}
    return subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("backend", "compiled"),
    [
        ("reference", False),
        pytest.param("cpu", True, marks=pytest.mark.skipif(not backends.is_built("_C"), reason="not built")),
    ],
)
def test_a_forced_backend_serves_alone(backend, compiled):
    done = run(backend)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"[0.0, 1.0, 2.0, 1.0, 2.0, 3.0] {compiled} False reference")


UNBUILT = """
import sys, warnings
from pathlib import Path
import torch
from specdec_fast.operators import backends
backends._PACKAGE = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from specdec_fast import ops
    assert not caught
    for pool in (torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 1)):
        new, where = torch.ones(1, 1, 1, 1), torch.tensor([0])
        ops.realign_([pool], where, where, where)
        ops.append_kv_(pool, pool.clone(), new, new, where, where)
print(*(warning.message for warning in caught), sep="\\n", end="")
"""


def warned_unbuilt(package, note=None, backend="auto") -> str:
    """Warnings of the first calls in a ``package`` without an extension, and with the ``note`` that setup.py left."""
    if note is not None:
        (package / "_C.missing").write_text(note)
    command = [sys.executable, "-c", UNBUILT, package]
    environment = os.environ | {backends.VARIABLE: backend}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("note", [None, "there is no C++ compiler (c++)"])
def test_the_first_call_without_the_extension_says_so_once(tmp_path, note):
    (warning,) = warned_unbuilt(tmp_path, note).split("\n")
    assert f"the C++ operators are not built{f': {note}' if note else ''}; " in warning
    assert "pip install --no-build-isolation --force-reinstall" in warning
    assert f"{backends.VARIABLE}=reference" in warning


@pytest.mark.parametrize(("note", "backend"), [("SPECDEC_FAST_BUILD=none", "auto"), (None, "reference")])
def test_who_wanted_no_extension_hears_nothing(tmp_path, note, backend):
    assert warned_unbuilt(tmp_path, note, backend) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can serve it")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_forced_backend_that_cannot_run_says_why(backend):
    reason = next(b.reason for b in backends.available() if b.name == backend)
    done = run(backend)
    assert done.returncode == 1
    assert f"InputError: SPECDEC_FAST_BACKEND={backend}, which cannot run here: {reason}" in done.stderr


def test_the_variable_takes_only_the_backends_there_are(monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "tpu")
    with pytest.raises(InputError, match="'tpu'; accepted are auto, reference, cpu, triton, cuda"):
        backends.requested()
    monkeypatch.setenv(backends.VARIABLE, "")
    assert backends.requested() == "auto"


def test_a_missing_extension_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "_PACKAGE", tmp_path)
    reasons = {b.name: b.reason for b in backends.available() if not b.available}
    assert "not built; install with `pip install --no-build-isolation`" in reasons["cpu"]
    assert "nvcc" in reasons["cuda"]


def test_an_extension_that_does_not_load_is_explained(monkeypatch, tmp_path):
    (tmp_path / "_C.abi3.so").write_text("not a library")
    monkeypatch.setattr(backends, "_PACKAGE", tmp_path)
    monkeypatch.setattr(backends, "load", backends.load.__wrapped__)
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    cpu = next(b for b in backends.available() if b.name == "cpu")
    assert not cpu.available
    assert cpu.reason.startswith(f"_C does not load into torch {torch.__version__}: ")


def test_the_triton_kernels_are_found_when_they_can_run(monkeypatch):
    kernels = types.SimpleNamespace(realign_=object())
    monkeypatch.setitem(sys.modules, "specdec_fast.kernels.realign", kernels)
    for able, module in ((True, kernels), (False, None)):
        monkeypatch.setattr(backends, "available", lambda able=able: [backends.Backend("triton", able, "")])
        assert ops._triton_module.__wrapped__("realign_") is module
