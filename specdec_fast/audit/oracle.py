"""The target's own greedy decoding, one row at a time: the text that every batch decoder must reproduce."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..decoding.autoregressive import no_generation_defaults
from ..errors import InputError
from ..integrations import compat

_CHUNK = 1 << 24
_HALF = (torch.bfloat16, torch.float16)
# tokens that rounding could put in place of the oracle's
_RIVALS = 8


@dataclass(frozen=True)
class OracleRow:
    """The oracle of one prompt.

    Attributes:
        token_ids: new tokens, the EOS that ended the row included.
        gaps: at each of them, by how much its logit leads the largest of all others; None if that is unknown.
        noise: what rounding does to a logit of this text, None if it is unknown. The largest difference between
            incremental and one-shot forwards at batch size 1; where a float32 copy judges, half the largest difference
            that either makes to a lead.
        rivals: at each new token, the others with the largest logits; empty if they are unknown.
        leads: by how much the token's logit leads each of them.
    """

    token_ids: list[Any]
    gaps: Sequence[float | None]
    noise: float | None
    rivals: Sequence[Sequence[int]] = ()
    leads: Sequence[Sequence[float]] = ()

    def gap(self, index: int, token: Any) -> float | None:
        """By how much the logit of token ``index`` leads that of ``token``; the least it can be where that is unknown.

        None if nothing is known.
        """
        if not self.rivals:
            return self.gaps[index]
        rivals, leads = self.rivals[index], self.leads[index]
        return leads[rivals.index(token)] if token in rivals else leads[-1]


class Oracle:
    """Greedy ``generate`` of single rows, without speculation.

    Args:
        model: the target.
        eos_token_id: id or ids that end a row, None or ``[]`` for none.
        pad_token_id: handed to ``generate``; may equal an EOS id.
        max_new_tokens: new tokens per row, at least 1.
        cache_dir: where rows are kept between runs, by model weights, dtype, versions, settings and prompt;
            None keeps them in memory only.
        float32_judge: read leads and noise of a model in half precision from a float32 copy of it, which takes twice
            the model's memory; else from the model. The text is the model's own either way.

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
        float32_judge: bool = True,
    ) -> None:
        self._model = model
        self._judge = _float32_copy(model) if float32_judge and model.dtype in _HALF else None
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
            settings = [_fingerprint(model), eos_token_id, pad_token_id, max_new_tokens, self._judge is not None]
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
        text = torch.tensor(prompt_ids + token_ids[:-1], device=self._model.device)
        # generate hands out float32 logits whatever the model's dtype
        one_shot = compat.one_shot_logits(self._model, text, len(token_ids)).to(logits.dtype)
        exact = compat.one_shot_logits(self._judge, text, len(token_ids)) if self._judge else logits
        own = output.sequences[0, len(prompt_ids) :, None]
        rivals = exact.scatter(1, own, -torch.inf).topk(min(_RIVALS, exact.shape[1] - 1)).indices
        leads = _leads(exact, own, rivals)
        if self._judge:
            noise = torch.stack([(_leads(x, own, rivals) - leads).abs() for x in (logits, one_shot)]).max() / 2
        else:
            noise = (logits - one_shot).abs().max()
        return OracleRow(token_ids, leads[:, 0].tolist(), noise.item(), rivals.tolist(), leads.tolist())


def _leads(logits: Tensor, own: Tensor, rivals: Tensor) -> Tensor:
    return logits.gather(1, own) - logits.gather(1, rivals)


def _float32_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    try:
        return copy.deepcopy(model).float()
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        # no memory for it, or weights that have no other dtype
        warnings.warn(f"no float32 copy to judge near-ties with, so {model.dtype} does: {error}", stacklevel=3)
        return None


def _is_whole(row: OracleRow) -> bool:
    typed = _holds(row.token_ids, int) and _holds(row.gaps, float) and type(row.noise) is float
    nested = isinstance(row.rivals, list) and isinstance(row.leads, list)
    typed = typed and nested and all(_holds(ids, int) for ids in row.rivals)
    typed = typed and all(_holds(leads, float) for leads in row.leads)
    return typed and len(row.token_ids) == len(row.gaps) == len(row.rivals) == len(row.leads) > 0


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@torch.inference_mode()
def _fingerprint(model: PreTrainedModel) -> list[Any]:
    """A digest of everything the model's logits depend on, every byte of its weights included."""
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
