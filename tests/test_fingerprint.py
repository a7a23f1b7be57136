"""Every change of a model that may change its text shows in its fingerprint."""

import gc

import pytest
import torch
from tiny_models import make_model
from torch import nn

from specdec_fast.selfcheck.fingerprint import can_be_a_counter, differences, fingerprint


@pytest.fixture
def model():
    model = make_model("llama", seed=2)
    model.register_buffer("scale", torch.ones(1))
    return model


def replace_weight(model):
    head = model.lm_head
    shape = head.weight.shape
    head.weight = None
    gc.collect()
    # the allocator may give the address of the old one
    head.weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))


def patch_class(model):
    kind = type("Patched", (type(model.model.layers[0].self_attn),), {})
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind


CHANGES = {
    "mode": lambda model: model.model.layers[1].mlp.train(),
    "weight_in_place": lambda model: model.lm_head.weight.mul_(2),
    "weight_by_assignment": replace_weight,
    "weights_loaded": lambda model: model.load_state_dict(model.state_dict()),
    "buffer": lambda model: model.scale.add_(1),
    "module": lambda model: setattr(model, "lm_head", nn.Linear(64, 97, bias=False)),
    "setting_of_a_module": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "config": lambda model: setattr(model.config, "sliding_window", 7),
    "entry_of_a_config": lambda model: model.config.rope_parameters.update(rope_theta=5.0),
    "class_of_a_module": patch_class,
    "forward_of_an_instance": lambda model: setattr(model.lm_head, "forward", lambda x: x),
    "forward_hook": lambda model: model.lm_head.register_forward_hook(print),
    "forward_pre_hook": lambda model: model.lm_head.register_forward_pre_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change_shows(model, name):
    before = fingerprint(model)
    assert not differences(before, fingerprint(model))
    CHANGES[name](model)
    after = fingerprint(model)
    assert differences(before, after)
    assert not differences(after, fingerprint(model))


def test_a_patched_class_shows(model, monkeypatch):
    before = fingerprint(model)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x)
    assert differences(before, fingerprint(model))


def test_an_object_at_the_address_of_a_former_one_shows(model):
    class Setting:
        pass

    seen = set()
    for _ in range(50):
        model.setting = Setting()
        (key,) = (key for key in fingerprint(model) if key[1] == "setting")
        seen.add(fingerprint(model)[key])
        del model.setting
    assert len(seen) == 50


def test_a_value_that_holds_itself_has_an_end(model):
    model.nested = []
    model.nested.append(model.nested)
    before = fingerprint(model)
    model.nested.append(1)
    assert differences(before, fingerprint(model))


def test_only_attributes_of_a_models_own_can_be_counters(model):
    before = fingerprint(model)
    model.calls = 1
    model.train()
    changed = differences(before, fingerprint(model))
    assert {name for _, name in changed if can_be_a_counter((0, name))} == {"calls"}
