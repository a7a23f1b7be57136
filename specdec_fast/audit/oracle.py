"""The target's own greedy decoding, one row at a time: the text that every batch decoder must reproduce."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from .. import compat
from ..autoregressive import no_generation_defaults
from ..errors import InputError

_CHUNK = 1 << 24


@dataclass(frozen=True)
class OracleRow:
    """The oracle of one prompt.

    Attributes:
        token_ids: new tokens, the EOS that ended the row included.
        gaps: at each of them, by how much its logit leads the second largest; None if that is unknown.
        noise: largest logit difference between incremental and one-shot forwards of this text at batch size 1; None
            if it is unknown.
    """

    token_ids: list[Any]
    gaps: Sequence[float | None]
    noise: float | None


class Oracle:
    """Greedy ``generate`` of single rows, without speculation.

    Args:
        model: the target.
        eos_token_id: id or ids that end a row, None or ``[]`` for none.
        pad_token_id: handed to ``generate``; may equal an EOS id.
        max_new_tokens: new tokens per row, at least 1.
        cache_dir: where rows are kept between runs, by model weights, dtype, versions, settings and prompt;
            None keeps them in memory only.

    Raises:
        InputError: ``cache_dir`` cannot be written.

    Example:
        >>> Oracle(model, eos_token_id=2, pad_token_id=2, max_new_tokens=64).decode([5, 17, 9]).token_ids
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_id: int | list[int] | None,
        pad_token_id: int | None,
        max_new_tokens: int,
        cache_dir: Path | None = None,
    ) -> None:
        self._model = model
        self._config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None if eos_token_id == [] else eos_token_id,
            pad_token_id=pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
        self._rows: dict[tuple[int, ...], OracleRow] = {}
        self._folder: Path | None = None
        if cache_dir is not None:
            settings = [_fingerprint(model), eos_token_id, pad_token_id, max_new_tokens]
            self._folder = cache_dir / _digest(settings)[:32]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot keep the oracle in {cache_dir}: {error.strerror}") from error

    def decode(self, prompt_ids: list[int]) -> OracleRow:
        """Continue one prompt; a row that was decoded before is not decoded again."""
        key = tuple(prompt_ids)
        if key not in self._rows:
            self._rows[key] = self._recall(prompt_ids) or self._record(prompt_ids)
        return self._rows[key]

    def _recall(self, prompt_ids: list[int]) -> OracleRow | None:
        if self._folder is None:
            return None
        try:
            record = json.loads(self._path(prompt_ids).read_bytes())
            row = OracleRow(**record["row"])
            whole = record["prompt_ids"] == prompt_ids and _is_whole(row)
        except (OSError, ValueError, TypeError, KeyError):
            # missing, or damaged: it is decoded anew
            return None
        return row if whole else None

    def _record(self, prompt_ids: list[int]) -> OracleRow:
        row = self._decode(prompt_ids)
        if self._folder is not None:
            # in one step, so that a kill leaves no half a row
            temporary = self._folder / f"{secrets.token_hex(4)}.tmp"
            temporary.write_text(json.dumps({"prompt_ids": prompt_ids, "row": asdict(row)}))
            temporary.replace(self._path(prompt_ids))
        return row

    def _path(self, prompt_ids: list[int]) -> Path:
        assert self._folder is not None
        return self._folder / f"{_digest(prompt_ids)}.json"

    @torch.inference_mode()
    def _decode(self, prompt_ids: list[int]) -> OracleRow:
        input_ids = torch.tensor([prompt_ids], device=self._model.device)
        with no_generation_defaults(self._model):
            output = self._model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=self._config
            )
        token_ids = output.sequences[0, len(prompt_ids) :].tolist()
        logits = torch.cat(output.logits)
        first, second = logits.topk(2).values.unbind(1)
        text = torch.tensor(prompt_ids + token_ids[:-1], device=self._model.device)
        one_shot = compat.one_shot_logits(self._model, text, len(token_ids))
        # generate hands out float32 logits whatever the model's dtype
        noise = (logits - one_shot.to(logits.dtype)).abs().max().item()
        return OracleRow(token_ids, (first - second).tolist(), noise)


def _is_whole(row: OracleRow) -> bool:
    typed = _holds(row.token_ids, int) and _holds(row.gaps, float) and type(row.noise) is float
    return typed and len(row.token_ids) == len(row.gaps) > 0


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@torch.inference_mode()
def _fingerprint(model: PreTrainedModel) -> list[Any]:
    """What the model's logits depend on, every byte of its weights included."""
    weights = hashlib.blake2b()
    for name, weight in model.state_dict().items():
        weights.update(json.dumps([name, list(weight.shape), str(weight.dtype)]).encode())
        for chunk in weight.flatten().split(_CHUNK):
            weights.update(chunk.cpu().view(torch.uint8).numpy())
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    return [
        weights.hexdigest(),
        json.dumps(config, sort_keys=True, default=str),
        compat.text_config(model)._attn_implementation,
        model.device.type,
        torch.__version__,
        transformers.__version__,
    ]
