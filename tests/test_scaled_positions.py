"""Models that scale positions by what else a forward holds: right text, or refused by name."""

import pytest
import torch
import transformers
from tiny_models import greedy_oracle, left_pad, make_prompts

from specdec_fast import EQSpec, EXSpec, NgramDrafter
from specdec_fast.errors import InputError, UnsupportedModelError
from specdec_fast.layouts import LAYOUTS

TINY = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SWITCH, K = 32, 5


def build(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.fixture(scope="module")
def longrope():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10_000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": SWITCH, **factors}
    return build(
        transformers.Phi3Config(
            **TINY, rope_parameters=rope, original_max_position_embeddings=SWITCH, max_position_embeddings=128
        )
    )


def expect_greedy(model, prompts, new, layout):
    ids, mask = left_pad(prompts, 0)
    decoder = EQSpec(model, NgramDrafter(), layout=layout, num_draft_tokens=K)
    result = decoder.generate(ids, mask, max_new_tokens=new, eos_token_id=[])
    assert [row.token_ids for row in result.rows] == [greedy_oracle(model, prompt, new) for prompt in prompts]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_longrope_is_served_on_either_side_of_its_switch(longrope, layout):
    expect_greedy(longrope, make_prompts([12, 5, 9], 0), SWITCH - 12 - K + 1, layout)
    expect_greedy(longrope, make_prompts([40, SWITCH + 1, 37], 1), 12, layout)
    expect_greedy(longrope, make_prompts([SWITCH, 9], 0), 1, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[25], [SWITCH], [12, 40], [5, SWITCH - 20 - K + 2]])
def test_longrope_is_refused_where_a_row_can_pass_its_switch(longrope, lengths, layout):
    with pytest.raises(InputError, match=r"may pass 32 tokens, where the longrope of Phi3ForCausalLM"):
        expect_greedy(longrope, make_prompts(lengths, 0), 20, layout)


def test_a_stream_of_longrope_rows_ends_before_the_switch(longrope):
    with pytest.warns(UserWarning, match=r"more than 28 tokens, which may pass 32 tokens, where the longrope"):
        decoder = EXSpec(longrope, NgramDrafter(), num_draft_tokens=K)
    prompts = make_prompts([12, 17, 16, 40], 0)
    rows = decoder.generate_all(prompts, max_new_tokens=12, eos_token_id=[])
    assert [row.error is None for row in rows] == [True, False, True, False]
    assert (
        "outgrows the most of 28 tokens: a longer row may pass 32 tokens, where the longrope of Phi3" in rows[1].error
    )
    for index in (0, 2):
        assert rows[index].token_ids == greedy_oracle(longrope, prompts[index], 12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dynamic_rope_scales_nothing_within_the_context(layout):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = build(transformers.LlamaConfig(**TINY, rope_parameters=rope, max_position_embeddings=48))
    expect_greedy(model, make_prompts([12, 28, 7], 0), 20, layout)
    with pytest.raises(InputError, match="outgrows the target's context"):
        expect_greedy(model, make_prompts([30], 0), 20, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_temperature_by_cache_columns_is_refused_where_a_row_reaches_it(layout):
    config = transformers.Llama4TextConfig(
        **TINY, head_dim=16, layer_types=["full_attention"] * 2, no_rope_layers=[0, 0], floor_scale=40,
        attn_temperature_tuning=True, attention_chunk_size=64, max_position_embeddings=128, num_local_experts=2,
        intermediate_size_mlp=64, experts_implementation="eager",
    )  # fmt: skip
    model = build(config)
    expect_greedy(model, make_prompts([9, 5], 0), 12, layout)
    with pytest.raises(UnsupportedModelError, match="beyond floor_scale=40"):
        expect_greedy(model, make_prompts([30, 20], 0), 20, layout)
