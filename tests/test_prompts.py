"""Prompt files, encoding and padding."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_dirs import make_tokenizer
from transformers import LlamaConfig

from specdec_fast.errors import InputError
from specdec_fast.prompts import Prompt, check_context, encode, pad_left, read

EXAMPLES = Path(__file__).parents[1] / "examples" / "prompts.jsonl"


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts(source):
    return [prompt.text for prompt in read(source)]


def from_stdin(monkeypatch, data):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    return texts("-")


def test_text_file_has_a_prompt_a_line(tmp_path):
    assert texts(write(tmp_path, "p.txt", "one\r\ntwo \u2028 still two\nthree\n\n")) == [
        "one",
        "two \u2028 still two",
        "three",
    ]


def test_byte_order_mark_is_dropped(tmp_path):
    assert texts(write(tmp_path, "p.txt", b"\xef\xbb\xbfone\n")) == ["one"]


def test_jsonl_keys(tmp_path):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "chat"}]
    records = [
        {"prompt": "a"},
        {"text": "b", "id": 3},
        {"question": "c"},
        {"turns": ["d", "later"]},
        {"messages": chat},
    ]
    lines = "\n\n".join(json.dumps(record) for record in records)
    prompts = read(write(tmp_path, "p.jsonl", lines))
    assert [prompt.text for prompt in prompts] == ["a", "b", "c", "d", "chat"]
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [prompt.messages for prompt in prompts] == [None, None, None, None, chat]


def test_jsonl_lines_end_at_newlines_only(tmp_path):
    line = json.dumps({"prompt": "a\u2028b\x0cc"}, ensure_ascii=False)
    assert texts(write(tmp_path, "p.jsonl", line)) == ["a\u2028b\x0cc"]


def test_stdin_is_jsonl_or_lines(monkeypatch):
    assert from_stdin(monkeypatch, b'\n{"prompt": "a"}\n{"text": "b"}\n') == ["a", "b"]
    assert from_stdin(monkeypatch, b"{a\nb\n") == ["{a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "has no prompts"),
        ("p.txt", " \n\n", "has no prompts"),
        ("p.jsonl", "\n", "has no prompts"),
        ("p.txt", "a\n\nb\n", "line 2 is empty"),
        ("p.txt", b"a\nb\n\xff\n", "line 3 is not UTF-8"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not valid JSON"),
        ("p.jsonl", '{"prompt": "a"}\n\n["b"]\n', "line 3 must be a JSON object, not list"),
        ("p.jsonl", '{"promt": "a"}\n', "line 1 has none of the keys prompt, text"),
        ("p.jsonl", '{"prompt": 5}\n', "line 1: prompt must be a string, not int"),
        ("p.jsonl", '{"prompt": null}\n', "line 1: prompt must be a string"),
        ("p.jsonl", '{"prompt": " "}\n', "line 1: prompt is empty"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "line 1: prompt has a surrogate"),
        ("p.jsonl", '{"turns": "a"}\n', "line 1: turns must be a list"),
        ("p.jsonl", '{"turns": []}\n', "line 1: turns must be a list that is not empty"),
        ("p.jsonl", '{"turns": [1]}\n', "line 1: turns must be a string"),
        ("p.jsonl", '{"messages": ["a"]}\n', "line 1: each message must be an object"),
        (
            "p.jsonl",
            '{"messages": [{"role": "user"}]}\n',
            "line 1: each message must be an object with role and content",
        ),
        ("p.jsonl", '{"messages": [{"role": "user", "content": ""}]}\n', "line 1: the last message is empty"),
        ("p.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
        ("p.csv", "a\n", ".txt or .jsonl file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message):
        read(write(tmp_path, name, content))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read(str(tmp_path / "none.txt"))
    with pytest.raises(InputError, match="Is a directory"):
        read(str(tmp_path))


def test_encode_plain_and_chat():
    tokenizer = make_tokenizer()
    prompts = [Prompt(0, "ab"), Prompt(1, "c", [{"role": "user", "content": "b"}, {"role": "user", "content": "c"}])]
    a, b, c = tokenizer("abc")["input_ids"]
    assert encode(prompts[:1], tokenizer, chat=False) == [[a, b]]
    assert encode(prompts, tokenizer, chat=True) == [[1, a, b, 2, 1], [1, b, 2, 1, c, 2, 1]]


SMOLLM2_SHAPE = (
    "{% for message in messages %}{{ '<bos>' + message['role'] + ' ' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant ' }}{% endif %}"
)


@pytest.mark.parametrize("content", ["It is", "It is ", "q"])
@pytest.mark.parametrize("trim", ["", ".strip()"])
def test_a_last_message_of_the_assistant_is_continued_not_closed(content, trim):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SMOLLM2_SHAPE.replace("['content']", f"['content']{trim}")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    (ids,) = encode([Prompt(0, content, chat)], tokenizer, chat=True)
    kept = content.strip() if trim else content
    assert tokenizer.decode(ids) == f"<bos>user q<eos><bos>assistant {kept}"
    (ids,) = encode([Prompt(0, "q", chat[:1])], tokenizer, chat=True)
    assert tokenizer.decode(ids) == "<bos>user q<eos><bos>assistant "


def test_a_template_that_drops_the_message_to_continue_is_an_input_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    with pytest.raises(InputError, match=r"rejects prompt 0: .*final message does not appear"):
        encode([Prompt(0, "It is", chat)], tokenizer, chat=True)


def test_messages_need_a_template():
    chat = [Prompt(0, "a"), Prompt(1, "a", [{"role": "user", "content": "a"}])]
    with pytest.raises(InputError, match="prompt 1 is a list of messages"):
        encode(chat, make_tokenizer(), chat=False)
    with pytest.raises(InputError, match="no chat template"):
        encode(chat, make_tokenizer(chat=False), chat=True)


def test_a_template_that_refuses_is_an_input_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="rejects prompt 0: roles must alternate"):
        encode([Prompt(0, "a")], tokenizer, chat=True)


def test_mask_follows_lengths_not_the_pad_id():
    ids, mask = pad_left([[2, 5, 2], [2], [7, 2]], pad_id=2)
    assert ids.tolist() == [[2, 5, 2], [2, 2, 2], [2, 7, 2]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_context_is_checked_per_prompt():
    config = LlamaConfig(max_position_embeddings=10)
    check_context([[1] * 4, [1] * 6], config, 4)
    with pytest.raises(InputError, match=r"prompt 1 .* 7 tokens and 4 new .* llama .* context of 10"):
        check_context([[1] * 4, [1] * 7], config, 4)


def test_examples_are_varied():
    lengths = sorted(len(text.split()) for text in texts(str(EXAMPLES)))
    assert len(lengths) == len(set(texts(str(EXAMPLES)))) == 32
    assert lengths[0] <= 10 and lengths[-1] >= 150
