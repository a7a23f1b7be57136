"""Models by name: the embedded SmolLM2, a Hub id, or a local directory or GGUF file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import InputError
from .integrations import embedded_target as embedded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# x86 AVX-512 and AMX, and the Arm extension
_CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


def load(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer, in eval mode.

    Args:
        name: ``smollm2``, a Hub id, a local directory (safetensors, or a single ``.gguf``), or a ``.gguf`` file.
            Pickled weights are refused, and so are files that lack a tensor of the model.
        dtype: see ``resolve_dtype``.
        device: see ``resolve_device``.
        trust_remote_code: run model code that the Hub repository carries.

    Raises:
        InputError: no such model, device or dtype, a missing package, or files that cannot be used.
    """
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    with _bars_on_terminals_only():
        location, gguf_file = _locate(name)
        model, tokenizer = _read(name, location, gguf_file, dtype, trust_remote_code)
    return model.to(device).eval(), tokenizer


def resolve_device(device: str | torch.device | None) -> torch.device:
    """``auto`` (also None: CUDA where there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device}: use auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device} is not available: torch {torch.__version__} finds no CUDA GPU")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device} is not available: there are {torch.cuda.device_count()} CUDA GPUs")
    return resolved


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """A name in ``DTYPES``, or ``auto`` (also None): bfloat16 on CUDA and on CPUs that compute in it, else float32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None or dtype == "auto":
        native = device.type == "cuda" or any(map(torch.cpu.get_capabilities().get, _CPU_BFLOAT16))
        return torch.bfloat16 if native else torch.float32
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype}: use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _locate(name: str) -> tuple[Path | str, str | None]:
    """The model's directory or Hub id, and the GGUF file in it if that is the format."""
    if name == embedded.NAME:
        return embedded.directory(load), None
    # unlike Path.expanduser, leaves a ~user that does not exist as it is
    path = Path(os.path.expanduser(name))
    if path.is_file() and _is_gguf(path):
        return path.parent, _require_gguf(path.name)
    if path.is_dir():
        if (path / "config.json").exists():
            return path, None
        files = sorted(file.name for file in path.iterdir() if _is_gguf(file))
        if len(files) != 1:
            found = f"{len(files)} .gguf files; name one of them" if files else "neither config.json nor a .gguf file"
            raise InputError(f"{name} is no model directory: it has {found}")
        return path, _require_gguf(files[0])
    if path.exists() or name.count("/") > 1 or name.startswith(("/", ".", "~")) or _is_gguf(path):
        raise InputError(f"no model at {name}: use {embedded.NAME}, a Hub id, a model directory or a .gguf file")
    return name, None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _require_gguf(file: str) -> str:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(f"reading {file} needs {' and '.join(missing)}: pip install 'specdec-fast[demo]'")
    return file


def _read(
    name: str, location: Path | str, gguf_file: str | None, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": isinstance(location, Path),
        "gguf_file": gguf_file,
    }
    # the config first: a wrong name fails there at once, and with the clearest message
    _attempt(name, "config", lambda: AutoConfig.from_pretrained(location, **options))
    tokenizer = _attempt(name, "tokenizer", lambda: AutoTokenizer.from_pretrained(location, **options))
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        # made up by transformers where a directory has none
        raise InputError(f"cannot load the tokenizer of {name}: it knows no text; are its files missing?")
    options |= {"dtype": dtype, "use_safetensors": True}
    if gguf_file and hasattr(transformers, "GgufConfig"):
        # from 5.24 on the weights may otherwise stay packed, behind kernels of their own
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # the GGUF reader has a progress bar of its own that knows no switch
    silent = gguf_file is not None and not sys.stderr.isatty()
    with contextlib.redirect_stderr(io.StringIO()) if silent else contextlib.nullcontext():
        model = _attempt(name, "model", lambda: _read_weights(location, options))
    return model, tokenizer


def _read_weights(location: Path | str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    # transformers gives random values to what a file lacks, and to what has another shape
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(location, **options, **told)
    except OSError as error:
        if pickled := _pickled_weights(location):
            raise InputError(
                f"{pickled} is a pickle, which can run code when it is read; only safetensors and GGUF are read"
            ) from error
        raise
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(f"its files lack {len(missing)} tensors: {', '.join(missing[:3])}{more}")
    if mismatched := sorted(info["mismatched_keys"]):
        key, found, needed = mismatched[0]
        raise InputError(f"{key} is of shape {list(found)}, the config asks for {list(needed)}")
    return model


def _pickled_weights(location: Path | str) -> str | None:
    from transformers import utils

    if any(utils.has_file(location, name) for name in (utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME)):
        return None
    pickles = (utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME)
    return next((name for name in pickles if utils.has_file(location, name)), None)


def _attempt(name: str, part: str, load_part: Callable[[], Any]) -> Any:
    try:
        return load_part()
    except Exception as error:
        # files of others fail in many ways, some with pages of text
        reason = textwrap.shorten(str(error), 300)
        raise InputError(f"cannot load the {part} of {name}: {reason}") from error


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
