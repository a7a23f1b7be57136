"""Models that would come out wrong are refused, by name or by the self-check."""

import copy
from functools import partial

import pytest
import torch
import transformers
from decoding import plant_in_attention
from tiny_models import greedy_oracle, make_model, make_prompts

from specdec_fast import EQSpec, EXSpec, ModelDrafter, NgramDrafter, ops, selfcheck
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.layouts import LAYOUTS, fastest_layout
from specdec_fast.layouts.ragged import Packing, attention

TINY = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_verdicts():
    """Architectures that passed in another test are checked again."""
    selfcheck._sound.clear()


def build(name, **extra):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TINY | extra)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def generate(model, layout="padded"):
    input_ids = torch.tensor(make_prompts([12], 0))
    return EQSpec(model, NgramDrafter(), layout=layout).generate(input_ids, max_new_tokens=20, eos_token_id=[])


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("Mamba", {}, "recurrent or state-space"),
        ("Jamba", {}, "recurrent or state-space"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "recurrent|layers of type"),
        ("Llama4Text", {"head_dim": 16}, "chunked_attention"),
        ("OpenAIGPT", {"n_embd": 32, "n_layer": 2, "n_head": 2}, "takes no KV cache"),
    ],
)
def test_state_and_chunked_layers_are_refused_by_name(name, extra, message):
    model = build(name, **extra)
    with pytest.raises(UnsupportedModelError, match=message):
        EQSpec(model, NgramDrafter())
    with pytest.raises(UnsupportedModelError, match=message):
        ModelDrafter(model)


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        EQSpec(transformers.T5ForConditionalGeneration(config), NgramDrafter())


def test_attention_that_takes_no_4d_mask_is_refused():
    model = make_model("llama", seed=0)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*sdpa, eager"):
        EQSpec(model, NgramDrafter(), layout="padded")


@pytest.mark.parametrize(
    ("name", "extra", "padded_works"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 2}, False),
        ("Falcon", {"alibi": True}, False),
        ("Mpt", {"d_model": 32, "n_heads": 2}, True),
    ],
)
def test_attention_that_cannot_be_replaced_is_refused_by_the_ragged_layout(name, extra, padded_works):
    with pytest.raises(UnsupportedModelError, match=f"{name}.*AttentionInterface") as refusal:
        EQSpec(build(name, **extra), NgramDrafter(), layout="ragged")
    assert ("use layout='padded'" in str(refusal.value)) == padded_works, "advice must have been tried"


def test_the_default_layout_serves_target_and_draft():
    free, fixed = make_model("llama", seed=0), build("Bloom", n_layer=2, n_head=2)
    assert EQSpec(free, NgramDrafter()).layout == "ragged"
    assert EQSpec(fixed, NgramDrafter()).layout == "padded"
    assert fastest_layout([free, fixed]) == fastest_layout([free.to("meta")]) == "padded"


# architectures that no code of this package names
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("GPTNeoX", {}),
        ("Mistral", {"sliding_window": 5, "head_dim": 16}),
        ("Phi3", {"sliding_window": 5}),
        ("Starcoder2", {"sliding_window": 5}),
        ("Qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
        ("Gemma2", {"sliding_window": 5, "head_dim": 16}),
        ("Cohere2", {"sliding_window": 5}),
        ("Olmo2", {}),
        ("StableLm", {}),
        ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2}),
        ("BioGpt", {}),
        ("Mixtral", {"sliding_window": 5, "experts_implementation": "eager"}),
        # hybrid families, all of whose layers are attention here
        ("Jamba", {"attn_layer_period": 1, "attn_layer_offset": 0, "num_experts": 1, "num_experts_per_tok": 1}),
        ("Qwen3Next", {"layer_types": ["full_attention"] * 2, "head_dim": 16, "num_experts": 0}),
        ("GraniteMoeHybrid", {"layer_types": ["attention"] * 2, "mamba_n_heads": 4, "num_local_experts": 0}),
        ("GptOss", {"sliding_window": 5, "head_dim": 16, "experts_implementation": "eager"}),
    ],
)
def test_other_architectures_equal_greedy(name, extra):
    model = build(name, **extra)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    prompts = make_prompts([12, 3, 7, 20, 1], 0)
    want = [greedy_oracle(model, prompt, 20) for prompt in prompts]
    for layout in LAYOUTS if model._can_set_attn_implementation() else ["padded"]:
        assert generate(model, layout).rows[0].token_ids == want[0]
        rows = EXSpec(model, NgramDrafter(), layout=layout, batch_size=3).generate_all(
            prompts, max_new_tokens=20, eos_token_id=[]
        )
        assert [row.token_ids for row in rows] == want


@pytest.mark.parametrize(("name", "extra"), [("Bloom", {"n_layer": 2, "n_head": 2}), ("Falcon", {"alibi": True})])
def test_what_cannot_take_a_4d_mask_is_refused_by_the_probe(name, extra):
    with pytest.raises(UnsupportedModelError, match=f"{name}.* cannot run on the padded layout.* no 4D attention mask"):
        generate(build(name, **extra))


# their own cached forward differs from the one without a cache, which must not widen what passes for rounding
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "extra"), [("Bert", {}), ("Roberta", {}), ("Doge", {"keep_window_size": 20})])
def test_models_that_do_not_decode_causally_are_refused(name, extra, layout):
    model = build(name, **extra)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    with pytest.raises(UnsupportedModelError, match=r"does not decode causally|self-check|cannot run"):
        generate(model, layout)


def test_a_context_too_short_to_check_is_refused():
    model = build("Llama", max_position_embeddings=13)
    with pytest.raises(UnsupportedModelError, match="context of 13 tokens"):
        EQSpec(model, NgramDrafter()).generate(torch.tensor([[5, 6]]), max_new_tokens=4, eos_token_id=[])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_wrong_mask_or_position_is_refused(family, dtype, monkeypatch):
    step = ops.realign_step_

    def broken(*args, break_what):
        step(*args)
        new_start, positions, masks, windows = args[10], args[12], args[13], args[14]
        if break_what == "positions":
            positions += new_start[:, None] % 3
        for mask, window in zip(masks, windows):
            if break_what == "padding":
                mask.masked_fill_(mask != 0, 0).masked_fill_(~torch.ones_like(mask).tril(new_start[0]).bool(), -1e9)
            elif break_what == "window" and window:
                mask.copy_(masks[0])

    for break_what in ("positions", "padding", *(["window"] if family == "gemma3" else [])):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "realign_step_", partial(broken, break_what=break_what))
            with pytest.raises(UnsupportedModelError, match="self-check"):
                generate(make_model(family, seed=1, dtype=dtype))
    generate(make_model(family, seed=1, dtype=dtype))


def wrong_positions(monkeypatch):
    right = Packing.__init__

    def skewed(self, *args):
        right(self, *args)
        self.position_of = self.position_of - torch.tensor([s.start % 2 for s in self.segments for _ in range(s.size)])

    monkeypatch.setattr(Packing, "__init__", skewed)


def no_causality(monkeypatch):
    plant_in_attention(monkeypatch, lambda segments: [s._replace(start=s.start + 1) for s in segments])


def no_window(monkeypatch):
    right = attention.ragged_attention
    monkeypatch.setattr(attention, "ragged_attention", lambda *args: right(*args[:5], None, *args[6:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_wrong_position_or_attention_is_refused_by_the_ragged_layout(family, dtype, monkeypatch):
    for plant in (wrong_positions, no_causality, *([no_window] if family == "gemma3" else [])):
        with monkeypatch.context() as patch:
            plant(patch)
            with pytest.raises(UnsupportedModelError, match="self-check of the ragged layout"):
                generate(make_model(family, seed=1, dtype=dtype), "ragged")
    generate(make_model(family, seed=1, dtype=dtype), "ragged")


def test_a_model_is_probed_once_and_again_when_a_window_comes_into_reach():
    model = make_model("gemma3", seed=1)
    widths = []
    model.register_forward_pre_hook(lambda _, a, kw: widths.append(kw["input_ids"].shape), with_kwargs=True)
    selfcheck.self_check(model, "padded", longest=6)
    short = len(widths)
    selfcheck.self_check(model, "padded", longest=6)
    assert len(widths) == short > 0
    selfcheck.self_check(model, "padded", longest=100)
    assert len(widths) > short


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_refused(dtype, layout):
    for family in ("llama", "gemma3", "qwen3"):
        generate(make_model(family, seed=1, dtype=dtype), layout)


# neither hands its window to the attention function, which the ragged layout relies on
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("Phimoe", {}),
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 2, "moe_intermediate_size": 32}),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "window"), [("bfloat16", 64), ("bfloat16", 1024), ("float16", 200), ("float32", 2048)]
)
def test_a_window_that_never_reaches_attention_is_refused_in_every_dtype(name, extra, dtype, window):
    sizes = {"sliding_window": window, "max_position_embeddings": 4096, "num_local_experts": 2, "num_experts": 4}
    model = build(name, **sizes, **extra).to(getattr(torch, dtype))
    selfcheck.self_check(model, "ragged", longest=window)
    with pytest.raises(UnsupportedModelError, match=f"beyond sliding_window={window} failed .* of the ragged layout"):
        selfcheck.self_check(model, "ragged", longest=window + 1)


def test_the_check_of_a_large_window_and_vocabulary_is_small():
    model = build("Mistral", vocab_size=64_000, sliding_window=2048, head_dim=16, max_position_embeddings=8192).float()
    widths, logits = [], []
    model.register_forward_pre_hook(lambda _, a, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True)
    model.register_forward_hook(lambda _, a, out: logits.append(out.logits.shape[1]))
    for layout in LAYOUTS:
        selfcheck.self_check(model, layout, longest=4000)
    assert max(widths) <= 40 and max(logits) <= 10, "two rows of 22 and 17 tokens, and logits of their last 8"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_that_is_not_its_classs_own_is_checked_beyond_the_window(layout):
    model = build("Mistral", sliding_window=32, head_dim=16)
    generate(model, layout)
    widths = []
    model.register_forward_pre_hook(lambda _, a, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True)
    selfcheck.self_check(model, layout, longest=40)
    assert max(widths, default=0) <= 40
    for layer in model.model.layers:
        layer.self_attn.forward = partial(type(layer.self_attn).forward, layer.self_attn)
    selfcheck.self_check(model, layout, longest=40)
    assert max(widths) >= 32


def test_a_model_whose_head_size_is_fixed_has_a_miniature():
    factors = {"short_factor": [1.0] * 24, "long_factor": [4.0] * 24, "rope_theta": 10_000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **factors}
    sizes = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.Phi3Config(**TINY | sizes, rope_parameters=rope, original_max_position_embeddings=4096)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    generate(model)


class Patchy(transformers.MistralForCausalLM):
    """Layer 3 of 6 forgets its window."""

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            if index == 3:
                layer.self_attn.config = copy.deepcopy(config)
                layer.self_attn.config.sliding_window = None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_middle_layer_without_its_window_is_refused(dtype):
    model = Patchy(transformers.MistralConfig(**TINY | {"num_hidden_layers": 6}, sliding_window=32)).to(dtype).eval()
    selfcheck.self_check(model, "ragged", longest=32)
    with pytest.raises(UnsupportedModelError, match=r"beyond sliding_window=32 failed .* of the ragged layout"):
        selfcheck.self_check(model, "ragged", longest=33)


class Masking(torch.nn.Module):
    """A head that rules two tokens out."""

    def __init__(self, head, lowest):
        super().__init__()
        self.head, self.lowest = head, lowest

    def forward(self, x):
        logits = self.head(x).clone()
        logits[..., [3, 5]] = self.lowest
        return logits


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tokens_that_are_ruled_out_hide_no_difference_and_are_none(dtype, lowest, monkeypatch):
    def masked():
        model = make_model("llama", seed=1, dtype=dtype)
        model.lm_head = Masking(model.lm_head, lowest)
        return model

    for layout in LAYOUTS:
        generate(masked(), layout)
    wrong_positions(monkeypatch)
    selfcheck._sound.clear()
    with pytest.raises(UnsupportedModelError, match="self-check of the ragged layout"):
        generate(masked(), "ragged")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_zeros_is_served(layout):
    model = make_model("llama", seed=1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert generate(model, layout).rows[0].token_ids == [0] * 20


def test_the_models_own_noise_widens_what_passes_within_bounds():
    assert selfcheck._allowed(1e-3, 0) == 1e-3
    assert selfcheck._allowed(1e-3, 3e-4) == pytest.approx(2.4e-3)
    assert selfcheck._allowed(1e-3, 1) == pytest.approx(4e-3)


def test_an_architecture_that_passed_is_not_checked_again_until_something_of_it_changes(monkeypatch):
    built, build_one = [], selfcheck.build_miniature
    monkeypatch.setattr(selfcheck, "build_miniature", lambda *args: (built.append(1), build_one(*args))[1])

    def miniatures(layout="padded", longest=32, attention="sdpa", **extra):
        built.clear()
        model = build("Mistral", **{"sliding_window": 64} | extra)
        model.set_attn_implementation(attention)
        selfcheck.self_check(model, layout, longest)
        return len(built)

    assert [miniatures(), miniatures()] == [1, 0]
    assert [miniatures(layout="ragged"), miniatures(attention="eager"), miniatures(rope_theta=5.0)] == [1, 1, 1]
    assert [miniatures(longest=65), miniatures(longest=90), miniatures(longest=64)] == [1, 0, 0]
