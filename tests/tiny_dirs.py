"""Model directories for the command line: tiny models with a tokenizer of one token per character."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tiny_models import VOCAB_SIZE, make_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# several, so that rows of a batch end at different times
EOS_IDS = [2, 11, 23, 38, 52, 67, 81]
CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>{% endif %}"
)


def make_tokenizer(*, chat: bool = True, reverse: bool = False) -> PreTrainedTokenizerFast:
    """``<pad>``, ``<bos>``, ``<eos>`` (also the pad token) and 94 characters; ``reverse`` gives another vocabulary."""
    characters = (" " + string.ascii_letters + string.digits + string.punctuation)[: VOCAB_SIZE - 3]
    tokens = ["<pad>", "<bos>", "<eos>", *(reversed(characters) if reverse else characters)]
    backend = Tokenizer(models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def save_pair(path: Path, model: PreTrainedModel, **tokenizer_options: bool) -> Path:
    """Save ``model`` and a tokenizer as a model directory."""
    model.save_pretrained(path)
    make_tokenizer(**tokenizer_options).save_pretrained(path)
    return path


def save_gguf(path: Path, *, without: str | None = None) -> Path:
    """The tiny Llama in a GGUF file, with a byte-level tokenizer; tensors named like ``without`` are left out."""
    import gguf

    model, vocabulary = make_model("llama", 0, torch.float32), make_tokenizer().get_vocab()
    # two characters give way to two merges
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__)[:-2], "ab", "cd"]
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, weight in model.state_dict().items():
        if without is None or without not in key:
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_tiny(path: Path, *, seed: int = 0, **tokenizer_options: bool) -> Path:
    """A float32 tiny Llama with ``EOS_IDS``, and generation defaults that greedy decoding must not pick up."""
    model = make_model("llama", seed, torch.float32, eos_token_id=EOS_IDS, pad_token_id=2)
    model.generation_config.repetition_penalty = 1.5
    return save_pair(path, model, **tokenizer_options)
