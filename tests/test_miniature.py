"""A miniature keeps what its model's masks and positions depend on."""

import pytest
import torch
import transformers
from transformers import LlamaConfig, PreTrainedConfig

from specdec_fast.integrations import compat
from specdec_fast.selfcheck import miniature

TINY = {
    "vocab_size": 97, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip


def build(config):
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def small(model, longest=100):
    return miniature.build_miniature(model, longest, runs=lambda _: True)


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 32},
        {"local_attention": 32},
        {"attention_span": 32},
        {"attention_chunk_size": [32, 16]},
        {"attention": {"window": 32}},
        {"layers": [{"window_size": 32}, {"kind": "full"}]},
        {"attention": PreTrainedConfig(sliding_window_size=32)},
    ],
)
def test_a_window_is_found_under_any_name(extra):
    config = LlamaConfig(**TINY, **extra)
    assert 32 in {size for _, _, sizes in compat.thresholds(config) for size in sizes}
    shrunk = compat.text_config(small(build(config)))
    assert {size for _, _, sizes in compat.thresholds(shrunk) for size in sizes} == {miniature.THRESHOLD}


def test_a_window_that_no_text_reaches_stays():
    config = compat.text_config(small(build(LlamaConfig(**TINY, sliding_window=32)), longest=32))
    assert config.sliding_window == 32


def test_what_is_no_window_stays():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = LlamaConfig(**TINY, max_window_layers=32, rope_parameters=rope)
    assert not list(compat.thresholds(config))


@pytest.mark.parametrize(("kv_heads", "kept"), [(8, 4), (2, 2), (1, 1)])
def test_shared_heads_stay_shared(kv_heads, kept):
    config = compat.text_config(small(build(LlamaConfig(**TINY | {"num_key_value_heads": kv_heads}))))
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, kept)


def test_first_layers_and_one_of_each_kind_are_kept():
    kinds = [*["sliding_attention"] * 30, "full_attention", *["sliding_attention"] * 9]
    config = transformers.Qwen3Config(**TINY | {"num_hidden_layers": 40}, layer_types=kinds, sliding_window=8)
    shrunk = compat.text_config(small(build(config)))
    assert shrunk.layer_types == [*["sliding_attention"] * 12, "full_attention", "sliding_attention"]


def test_a_candidate_that_cannot_be_used_is_passed_over():
    seen = []
    model = build(LlamaConfig(**TINY))
    assert miniature.build_miniature(model, 100, runs=seen.append) is None
    widths = [model.config.hidden_size for model in seen]
    assert widths == [64, 64, 64, 512, 64]


def test_a_miniature_leaves_the_random_state_and_the_model_alone():
    model = build(LlamaConfig(**TINY))
    state, config = torch.get_rng_state(), model.config.to_dict()
    small(model)
    assert torch.equal(torch.get_rng_state(), state) and model.config.to_dict() == config
