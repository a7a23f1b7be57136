"""A verdict about a model ends with the state it was reached in, and a refusal names the cause that was found."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import greedy_oracle, make_model, make_prompts
from torch import nn
from transformers import LlamaForCausalLM

from specdec_fast import EQSpec, EXSpec, NgramDrafter, selfcheck
from specdec_fast.errors import InputError, UnsupportedModelError
from specdec_fast.integrations import compat
from specdec_fast.layouts import LAYOUTS

PROMPT = torch.tensor([[5, 6, 7, 5, 6]])


def generate(model, layout=None, draft=None):
    return EQSpec(model, draft or NgramDrafter(), layout=layout).generate(PROMPT, max_new_tokens=8, eos_token_id=[])


class Adapter(nn.Module):
    """A linear layer with a low-rank addition that can be switched off, with dropout before it."""

    def __init__(self, base, dropout):
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)
        self.disabled = False

    def forward(self, x):
        return self.base(x) if self.disabled else self.base(x) + self.up(self.down(self.dropout(x)))


def adapted(dropout):
    model = make_model("llama", seed=2)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj, dropout)
    return model.eval()


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_dropout_that_is_switched_on_after_the_check_is_refused(layout):
    model = adapted(dropout=0.3)
    generate(model, layout)
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"training mode, with dropout; call model.eval\(\)"):
        generate(model, layout)
    model.eval()
    assert generate(model, layout).rows[0].token_ids == greedy_oracle(model, PROMPT[0].tolist(), 8)


def test_training_mode_without_dropout_is_served():
    model = make_model("llama", seed=2).train()
    assert generate(model).rows[0].token_ids == greedy_oracle(model, PROMPT[0].tolist(), 8)


def test_gradient_checkpointing_is_served_or_named():
    model = make_model("llama", seed=2)
    model.gradient_checkpointing_enable()
    model.train()
    text = refusal = None
    try:
        text = generate(model).rows[0].token_ids
    except UnsupportedModelError as error:
        refusal = str(error)
    assert "call model.eval()" in refusal if refusal else text == greedy_oracle(model.eval(), PROMPT[0].tolist(), 8)


def count_checks(monkeypatch):
    """Layouts in the order in which models were checked on them."""
    checked, check = [], selfcheck._check
    monkeypatch.setattr(selfcheck, "_check", lambda *args: (checked.append(args[1]), check(*args)))
    return checked


def test_a_model_that_counts_its_calls_is_checked_once(monkeypatch):
    model = make_model("llama", seed=2)
    model.calls = 0
    model.register_forward_hook(lambda module, *_: setattr(module, "calls", module.calls + 1))
    checked = count_checks(monkeypatch)
    for _ in range(3):
        generate(model, "padded")
    assert checked == ["padded"] and model.calls > 3
    model.model.layers[0].mlp.calls = 0
    generate(model, "padded")
    assert checked == ["padded"] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_that_is_switched_on_between_two_results_is_refused(layout):
    model = adapted(dropout=0.3)
    stream = EXSpec(model, NgramDrafter(), batch_size=1, layout=layout).generate(
        [[5, 6, 7]] * 3, max_new_tokens=8, eos_token_id=[]
    )
    assert next(stream).token_ids == greedy_oracle(model, [5, 6, 7], 8)
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"training mode, with dropout; call model.eval\(\)"):
        next(stream)
    assert list(stream) == []


def test_dropout_that_is_switched_on_while_a_session_is_open_is_refused():
    model = adapted(dropout=0.3)
    with EXSpec(model, NgramDrafter()).serve(max_new_tokens=8, eos_token_id=[]) as session:
        assert session.submit([5, 6, 7]).result(60).token_ids == greedy_oracle(model, [5, 6, 7], 8)
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"training mode, with dropout; call model.eval\(\)"):
            session.submit([5, 6, 7]).result(60)


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_hook_that_steers_after_the_check_is_refused(layout):
    model = make_model("llama", seed=2)
    generate(model, layout)

    def steer(module, args, output):
        output = output.clone()
        output[:, -1] += 0.1
        return output

    handle = model.model.layers[1].register_forward_hook(steer)
    with pytest.raises(UnsupportedModelError, match="computed beside it"):
        generate(model, layout)
    handle.remove()
    assert generate(model, layout).rows[0].token_ids == greedy_oracle(model, PROMPT[0].tolist(), 8)


def test_a_check_leaves_every_random_state_alone(monkeypatch):
    selfcheck._sound.clear()
    monkeypatch.setattr("torch.cuda.manual_seed_all", lambda seed: pytest.fail("seeds the GPUs"))
    model, state = make_model("llama", seed=2), torch.get_rng_state()
    generate(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_that_passes_its_arguments_on_takes_a_cache():
    class Passing(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = make_model("llama", seed=2)
    model.__class__ = Passing
    assert generate(model).rows[0].token_ids == greedy_oracle(model, PROMPT[0].tolist(), 8)


def test_a_padded_decoder_waits_for_a_packed_forward():
    model = make_model("llama", seed=2)
    with ThreadPoolExecutor(1) as pool:
        with compat.attention_set(compat.attention_configs(model), "specdec_fast"):
            waiting = pool.submit(generate, model, "padded")
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
        assert waiting.result().rows[0].token_ids == greedy_oracle(model, PROMPT[0].tolist(), 8)


def test_a_draft_that_is_refused_is_called_the_draft():
    model, draft = make_model("llama", seed=2), make_model("llama", seed=3)
    with torch.no_grad():
        draft.lm_head.weight[0] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"^the draft model: .*NaN or Inf as logits"):
        generate(model, "padded", draft)


def test_weights_that_turn_to_nan_are_named():
    model = make_model("llama", seed=2)
    generate(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(
        UnsupportedModelError, match=r"NaN or Inf as logits: model\.layers\.1\.mlp\.down_proj\.weight holds"
    ):
        generate(model)


def test_another_attention_implementation_is_checked_anew(monkeypatch):
    model = make_model("llama", seed=2, dtype=torch.float32)
    checked = count_checks(monkeypatch)
    generate(model, "padded")
    generate(model, "padded")
    assert checked == ["padded"]
    model.set_attn_implementation("eager")
    generate(model, "padded")
    assert checked == ["padded", "padded"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_is_refused_by_name(layout):
    model = make_model("llama", seed=2, dtype=torch.float32)
    stream = EXSpec(model, NgramDrafter(), layout=layout).generate([[5, 6, 7]], max_new_tokens=8)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InputError, match=r"torch\.autocast is on"):
            generate(model, layout)
        with pytest.raises(InputError, match=r"torch\.autocast is on"):
            next(stream)


class Quantized(nn.Module):
    """A linear layer whose inputs are rounded to 4 bits of the largest one of the forward."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        step = x.abs().amax() / 7
        return self.base((x / step).round() * step)


def test_activations_quantized_by_forward_are_no_lack_of_causality():
    model = make_model("llama", seed=2)
    for layer in model.model.layers:
        layer.mlp.down_proj = Quantized(layer.mlp.down_proj)
    with pytest.raises(UnsupportedModelError, match=r"architecture decodes causally.*quantizes activations"):
        generate(model)


def test_threads_share_a_decoder_and_nothing_is_demoted():
    model = make_model("llama", seed=2)
    decoder = EQSpec(model, NgramDrafter())
    prompts = make_prompts([4, 7, 5, 9], 1)
    oracles = [greedy_oracle(model, prompt, 16) for prompt in prompts]
    together = threading.Barrier(4)

    def run(index):
        together.wait()
        for _ in range(3):
            result = decoder.generate(torch.tensor([prompts[index]]), max_new_tokens=16, eos_token_id=[])
            assert result.rows[0].token_ids == oracles[index]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert decoder.layout == "ragged"


def test_a_failure_that_is_no_verdict_does_not_demote(monkeypatch):
    model = make_model("llama", seed=2)
    decoder = EQSpec(model, NgramDrafter())
    with monkeypatch.context() as patch:
        patch.setattr(compat, "one_shot_logits", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            decoder.generate(PROMPT, max_new_tokens=8, eos_token_id=[])
    decoder.generate(PROMPT, max_new_tokens=8, eos_token_id=[])
    assert decoder.layout == "ragged"
