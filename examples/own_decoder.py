"""A batch speculative decoder that knows nothing of specdec-fast but one call, ``realign_cache``."""

from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec_fast import realign_cache
from specdec_fast.integrations.compat import cache_argument


@torch.no_grad()
def decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    draft_tokens: Callable[[list[list[int]]], torch.Tensor],
    rounds: int,
) -> list[list[int]]:
    """Continue left-padded ``input_ids`` ``[B, P]``; ``draft_tokens`` maps the texts so far to drafts ``[B, K]``."""
    cache = {cache_argument(target): DynamicCache(config=target.config)}  # "cache" from transformers 5.24 on
    texts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask)]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    bonus = target(input_ids, attention_mask=mask, position_ids=positions, **cache).logits[:, -1:].argmax(-1)
    for step in range(rounds):
        texts = [text + new for text, new in zip(texts, bonus.tolist())]
        drafts = draft_tokens(texts)
        num_drafts = drafts.shape[1]
        if step == 0:
            positions = mask.sum(1, keepdim=True) + torch.arange(1 + num_drafts)
            mask = torch.nn.functional.pad(mask, (0, 1 + num_drafts), value=1)
        ids = torch.cat([bonus, drafts], 1)
        choice = target(ids, attention_mask=mask, position_ids=positions, **cache).logits.argmax(-1)
        n_accepted = (choice[:, :-1] == drafts).long().cumprod(1).sum(1)
        bonus = choice.gather(1, n_accepted[:, None])
        texts = [text + d[:n].tolist() for text, d, n in zip(texts, drafts, n_accepted)]
        (kv,) = cache.values()
        mask, positions = realign_cache(kv, mask, n_accepted, num_drafted=num_drafts, num_next=1 + num_drafts)
    return [text + new for text, new in zip(texts, bonus.tolist())]
