"""The ragged layout's computation, and the model's state after it."""

import threading

import pytest
import torch
from decoding import NoisyOracleDrafter
from observers import observe
from tiny_models import DRAFT_NOISE, FAMILIES, left_pad, make_draft, make_model, make_prompts

from specdec_fast import EQSpec, ModelDrafter, NgramDrafter
from specdec_fast.integrations import compat
from specdec_fast.layouts.ragged import RaggedCache, RaggedPool
from specdec_fast.layouts.ragged import attention as ragged_attention

LENGTHS = [3, 9, 1, 14]


def rows_through(module):
    """Rows that reach a linear layer, call by call."""
    seen = []
    observe(module, lambda args, _: seen.append(args[0].shape[:-1].numel()))
    return seen


def test_only_real_tokens_are_computed():
    model = make_model("llama", seed=2)
    prompts = make_prompts(LENGTHS, 2)
    decoder = EQSpec(model, NoisyOracleDrafter(model, prompts, 20, seed=0), num_draft_tokens=5, layout="ragged")
    decoder.generate(*left_pad(prompts, 0), max_new_tokens=2, eos_token_id=[])
    computed, judged = rows_through(model.model.layers[0].mlp.up_proj), rows_through(model.lm_head)
    result = decoder.generate(*left_pad(prompts, 0), max_new_tokens=20, eos_token_id=[])
    rounds = [sum(drafted + 1 for _, drafted, _ in counts) for counts in result.stats.accepted_by_round]
    assert computed == [sum(LENGTHS), *rounds]
    assert judged == [len(LENGTHS), *rounds]
    assert any(0 in {drafted for _, drafted, _ in counts} for counts in result.stats.accepted_by_round)
    assert result.stats.bytes_moved == 0


def judged_drafts(decoder, prompts):
    """``(drafted, accepted)`` of each row, round by round."""
    rows = [[] for _ in prompts]
    result = decoder.generate(*left_pad(prompts, 0), max_new_tokens=20, eos_token_id=[])
    for counts in result.stats.accepted_by_round:
        for row, *judged in counts:
            rows[row].append(judged)
    return rows


def check_acceptance(k, batch_sizes):
    """Rows of a batch draft and accept in every round what they do alone."""
    model = make_model("llama", seed=2)
    draft = make_draft(model, DRAFT_NOISE["llama"], 1)
    decoder = EQSpec(model, draft, num_draft_tokens=k, layout="ragged")
    prompts = make_prompts([(7 * b) % 23 + 1 for b in range(max(batch_sizes))], seed=k)
    alone = [judged_drafts(decoder, [prompt])[0] for prompt in prompts]
    assert len({accepted for row in alone for _, accepted in row}) > 1
    for batch_size in batch_sizes:
        assert judged_drafts(decoder, prompts[:batch_size]) == alone[:batch_size]


@pytest.mark.parametrize(("batch_size", "k"), [(3, 16), (7, 2), (16, 5)])
def test_rows_accept_what_they_do_alone(batch_size, k):
    check_acceptance(k, [batch_size])


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 17))
def test_rows_of_every_batch_size_accept_what_they_do_alone(k):
    check_acceptance(k, range(2, 17))


def test_a_draft_computes_what_it_lacks_and_one_token_a_step():
    model = make_model("qwen3", seed=2)
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE["qwen3"], 1))
    decoder = EQSpec(model, drafter, num_draft_tokens=3, layout="ragged")
    input_ids, mask = left_pad(make_prompts(LENGTHS, 2), 0)
    decoder.generate(input_ids, mask, max_new_tokens=2, eos_token_id=[])
    computed = rows_through(drafter.model.model.norm)
    result = decoder.generate(input_ids, mask, max_new_tokens=14, eos_token_id=[])
    rounds = result.stats.accepted_by_round
    full = [{row for row, drafted, accepted in counts if drafted == accepted} for counts in rounds]
    assert any(full[:-1]) and any(len(rows) < 4 for rows in full)
    want = []
    for r, counts in enumerate(rounds):
        for step in range(max(drafted for _, drafted, _ in counts)):
            active = [row for row, drafted, _ in counts if drafted > step]
            first = sum(LENGTHS) + len(active) if r == 0 else len(active) + len(full[r - 1] & set(active))
            want.append(first if step == 0 else len(active))
    assert computed == want


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_left_as_it_was(family):
    model = make_model(family, seed=2)
    model.set_attn_implementation("eager")
    ids = torch.tensor(make_prompts([8], 1))
    before = model(input_ids=ids).logits
    decoder = EQSpec(model, NgramDrafter(), layout="ragged")
    seen = []
    decoder.generate(
        ids, max_new_tokens=8, eos_token_id=[], on_round=lambda _: seen.append(model(input_ids=ids).logits)
    )
    assert seen and all(torch.equal(logits, before) for logits in seen)
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
def test_a_failing_forward_leaves_the_model_as_it_was():
    model = make_model("llama", seed=2)
    pool = RaggedPool(2, [], torch.device("cpu"))
    follower = pool.follow(model)
    slot = pool.lease(torch.tensor([5, 6, 7]), 20)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        follower.forward([follower.missing(slot)], [1])
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert follower.cache.filled == [0, 0] and follower.cache.packing is None
    logits = follower.forward([follower.missing(slot)], [3])
    torch.testing.assert_close(logits, compat.one_shot_logits(model, torch.tensor([5, 6, 7]), 3))


def test_packed_attention_needs_a_packed_forward():
    model = make_model("llama", seed=2)
    ids = torch.tensor([[5, 6, 7]])
    packed = compat.attention_set(compat.attention_configs(model), ragged_attention.NAME)
    with packed, pytest.raises(RuntimeError, match="packed forwards over a RaggedCache only"):
        model(input_ids=ids)
    cache = RaggedCache(1, 8)
    with pytest.raises(RuntimeError, match="packed forwards only"):
        model(input_ids=ids, **{compat.cache_argument(model): cache})


@torch.no_grad()
def test_a_mask_of_the_models_own_is_named():
    model = make_model("llama", seed=2)
    pool = RaggedPool(3, [], torch.device("cpu"))
    follower = pool.follow(model)
    slot = pool.lease(torch.tensor([5, 6, 7]), 20)
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"attention_mask": torch.ones(1)}), with_kwargs=True
    )
    with pytest.raises(RuntimeError, match="LlamaAttention makes an attention mask of its own"):
        follower.forward([follower.missing(slot)], [1])


@torch.no_grad()
def test_keys_that_bypass_the_cache_are_refused(monkeypatch):
    model = make_model("llama", seed=2)
    pool = RaggedPool(3, [], torch.device("cpu"))
    follower = pool.follow(model)
    slot = pool.lease(torch.tensor([5, 6, 7]), 20)
    monkeypatch.setattr(RaggedCache, "update", lambda self, k, v, *args, **kwargs: (k, v))
    with pytest.raises(RuntimeError, match="LlamaAttention attends to keys that did not come from its cache"):
        follower.forward([follower.missing(slot)], [1])


def test_a_draft_of_a_shorter_context_is_held_at_its_last_position():
    model = make_model("llama", seed=2)
    draft = make_draft(model, DRAFT_NOISE["llama"], 3)
    draft.config.max_position_embeddings = 24
    positions = []
    observe(draft.model.rotary_emb, lambda _, kwargs: positions.append(int(kwargs["position_ids"].max())))
    decoder = EQSpec(model, ModelDrafter(draft), num_draft_tokens=3, layout="ragged")
    decoder.generate(torch.tensor(make_prompts([20], 1)), max_new_tokens=20, eos_token_id=[])
    assert max(positions) == 23


def test_threads_take_turns_with_a_config():
    """Else one would put the other's attention back as if it were the model's own."""
    model = make_model("llama", seed=1)
    configs, own, inside = compat.attention_configs(model), model.config._attn_implementation, []

    def other():
        with compat.attention_set(configs, ragged_attention.NAME):
            inside.append(model.config._attn_implementation)

    thread = threading.Thread(target=other)
    with compat.attention_set(configs, "eager"):
        thread.start()
        thread.join(0.2)
        assert inside == [] and model.config._attn_implementation == "eager"
    thread.join()
    assert inside == [ragged_attention.NAME] and model.config._attn_implementation == own
