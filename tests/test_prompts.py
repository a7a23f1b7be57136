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


def read_record(tmp_path, record):
    (prompt,) = read(write(tmp_path, "p.jsonl", json.dumps(record)))
    return prompt


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
    assert from_stdin(monkeypatch, b'[{"prompt": "a"},\n{"text": "b"}]') == ["a", "b"]
    assert from_stdin(monkeypatch, b"[1, 2]\n[a]\n") == ["[1, 2]", "[a]"]


def test_a_closed_stdin_is_an_input_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="cannot read prompts from stdin: it is closed"):
        read("-")


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_blank_lines_are_skipped_in_every_format(tmp_path, name):
    lines = ["a", "b"] if name == "p.txt" else ['{"prompt": "a"}', '{"prompt": "b"}']
    path = write(tmp_path, name, "\n" + "\n \r\n\n".join(lines) + "\n\n")
    assert [(prompt.index, prompt.text) for prompt in read(path)] == [(0, "a"), (1, "b")]


USER, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}
SHAREGPT = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]


@pytest.mark.parametrize(
    ("record", "text", "messages", "fields"),
    [
        ({"prompt": [USER]}, "ask", [USER], {}),
        (
            {"custom_id": "r-1", "method": "POST", "url": "/v1", "body": {"model": "m", "messages": [USER]}},
            "ask",
            [USER],
            {"custom_id": "r-1", "method": "POST", "url": "/v1", "body": {"model": "m"}},
        ),
        ({"custom_id": "r-2", "body": {"prompt": "ask"}}, "ask", None, {"custom_id": "r-2", "body": {}}),
        ({"id": 7, "conversations": SHAREGPT}, "ask", [USER], {"id": 7, "conversations": SHAREGPT}),
        (
            {"conversations": [*SHAREGPT, {"from": "human", "value": "more"}]},
            "more",
            [USER, ANSWER, {"role": "user", "content": "more"}],
            {"conversations": [*SHAREGPT, {"from": "human", "value": "more"}]},
        ),
        ({"instruction": "ask", "input": "", "output": "x", "text": "y"}, "ask", None, {"output": "x", "text": "y"}),
        ({"instruction": "ask", "input": "this"}, "ask\nthis", None, {}),
        (
            {"messages": [{"role": "user", "name": "n", "content": [{"type": "text", "text": t} for t in "ab"]}]},
            "ab",
            [{"role": "user", "name": "n", "content": "ab"}],
            {},
        ),
        ({"messages": [USER, ANSWER]}, "answer", [USER, ANSWER], {}),
        ({"prompt": "ask", "messages": [ANSWER, USER]}, "ask", [ANSWER, USER], {}),
        ({"prompt": "ask", "messages": [USER, ANSWER]}, "ask", None, {"messages": [USER, ANSWER]}),
        ({"turns": ["ask", "later"], "question_id": 81}, "ask", None, {"turns": ["ask", "later"], "question_id": 81}),
        ({"prompt": "ask", "id": None, "meta": {"a": [1.5]}}, "ask", None, {"id": None, "meta": {"a": [1.5]}}),
        ({"prompt": "ask", "temperature": 0.0, "n": 1}, "ask", None, {"temperature": 0.0, "n": 1}),
        ({"prompt": "ask", "stop": None}, "ask", None, {"stop": None}),
    ],
)
def test_records_of_other_tools(tmp_path, record, text, messages, fields):
    prompt = read_record(tmp_path, record)
    assert (prompt.text, prompt.messages, prompt.fields) == (text, messages, fields)


@pytest.mark.parametrize("key", ["prompt", "input_ids"])
def test_token_ids_are_continued_as_they_are(tmp_path, key):
    tokenizer = make_tokenizer()
    prompt = read_record(tmp_path, {key: [5, 2, 9]})
    assert prompt.text == "[5, 2, 9]" and prompt.messages is None
    assert encode([prompt], tokenizer, chat=True) == encode([prompt], tokenizer, chat=False) == [[5, 2, 9]]
    with pytest.raises(InputError, match="prompt 0 has token id 97; the tokenizer knows 97 tokens"):
        encode([read_record(tmp_path, {key: [5, 97]})], tokenizer, chat=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "type image_url"),
        ({"messages": [{"role": "user", "content": [1]}]}, "a part of type int; only text parts"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "from is 'tool'; need one of system, human"),
        ({"conversations": [{"from": "human"}]}, "each message must be an object with role and content"),
        ({"input_ids": [1, -1]}, "token ids must be a list of integers of at least 0"),
        ({"input_ids": [1, 1.5]}, "token ids must be a list of integers"),
        ({"input_ids": [0, 5], "attention_mask": [0, 1]}, "attention_mask hides tokens"),
        ({"custom_id": "r", "body": {"model": "m", "input": "x"}}, "body has none of the keys messages, prompt"),
        ({"custom_id": "r", "body": "x"}, "body must be an object, not str"),
        ({"prompt": "a", "id": "\ud800"}, "line 1 has a surrogate that is no character"),
        ({"prompt": "a", "max_tokens": 50}, "max_tokens 50 is not served per prompt: .* --max-new-tokens sets the"),
        ({"body": {"messages": [USER], "max_completion_tokens": 9}}, "line 1: body: max_completion_tokens 9 .*--max"),
        ({"prompt": "a", "max_new_tokens": 50}, "max_new_tokens 50 is not served"),
        ({"prompt": "a", "temperature": 0.7}, "temperature 0.7 is not served per prompt: leave it out"),
        ({"prompt": "a", "stop": ["\n"]}, r'stop \["\\n"\] is not served'),
        ({"prompt": "a", "seed": 0}, "seed 0 is not served"),
        ({"prompt": "a", "n": 2}, "n 2 is not served"),
        ({"prompt": "a", "sampling_params": {"top_k": 5}}, "sampling_params .* is not served"),
        ({"prompt": "a", "system": "Be brief."}, 'system "Be brief." is not served per prompt: make it part of mess'),
    ],
)
def test_what_would_be_ignored_in_silence_is_refused_by_name(tmp_path, record, message):
    with pytest.raises(InputError, match=message):
        read_record(tmp_path, record)


def test_json_files_hold_a_list_or_lines(tmp_path):
    records = [{"prompt": "a"}, {"messages": [USER]}]
    assert texts(write(tmp_path, "p.json", json.dumps([*records, "c"], indent=2))) == ["a", "ask", "c"]
    assert texts(write(tmp_path, "p.JSON", json.dumps(records[0], indent=2))) == ["a"]
    assert texts(write(tmp_path, "p.json", "\n".join(map(json.dumps, records)))) == ["a", "ask"]
    with pytest.raises(InputError, match=r"p\.json item 2 must be a JSON object, not int"):
        read(write(tmp_path, "p.json", '["a", 5]'))
    with pytest.raises(InputError, match="has no prompts"):
        read(write(tmp_path, "p.json", "[]"))


def test_skipped_errors_keep_their_place_and_say_why(tmp_path):
    bad = [b"{", b'{"custom_id": "r", "body": {}}', b"\xff"]
    path = write(tmp_path, "p.jsonl", b"\n".join([b'{"prompt": "a"}', *bad, b'{"prompt": "b"}']))
    prompts = read(path, skip_errors=True)
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [bool(prompt.error) for prompt in prompts] == [False, True, True, True, False]
    assert [prompt.text for prompt in prompts[1:4]] == [*(line.decode() for line in bad[:2]), "\ufffd"]
    assert prompts[2].fields["custom_id"] == "r" and "line 3: body has none" in prompts[2].error
    assert prompts[3].error.endswith("line 4 is not UTF-8")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "has no prompts"),
        ("p.txt", " \n\n", "has no prompts"),
        ("p.jsonl", "\n", "has no prompts"),
        ("p.txt", b"a\nb\n\xff\n", "line 3 is not UTF-8"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not valid JSON"),
        ("p.jsonl", '{"prompt": "a"}\n\n["b"]\n', "line 3 must be a JSON object, not list"),
        ("p.jsonl", '{"promt": "a"}\n', "line 1 has none of the keys prompt, instruction, text"),
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
        ("p.csv", "a\n", r"\.txt, \.jsonl, \.json file"),
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
