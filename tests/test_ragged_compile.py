"""Compiled rounds of the ragged layout: one graph, few shapes, little filler, the same text."""

import pytest
import torch
from decoding import NoisyOracleDrafter
from tiny_models import DRAFT_NOISE, greedy_oracle, left_pad, make_draft, make_model, make_prompts

from specdec_fast import EQSpec
from specdec_fast.errors import InputError
from specdec_fast.integrations import compat
from specdec_fast.layouts.ragged import Segment, compiled

LENGTHS = [3, 9, 1, 14, 6]
NEW_TOKENS = 20


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that were compiled; the backend only records them, for that is what shapes and breaks show up in."""
    seen = []
    torch._dynamo.reset()

    def record(graph, _):
        seen.append(graph)
        return graph.forward

    call = torch.compile(compat.call, fullgraph=True, backend=record)
    monkeypatch.setattr(compiled, "compiled_call", lambda device: call)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_round_is_one_graph_and_the_text_is_the_same(graphs, monkeypatch, family):
    model = make_model(family, seed=2)
    prompts = make_prompts(LENGTHS, 2)
    drafter = NoisyOracleDrafter(model, prompts, NEW_TOKENS, seed=0)
    decoder = EQSpec(model, drafter, num_draft_tokens=5, layout="ragged", compile=True)
    computed = []
    call = compiled.CompiledModel._call
    monkeypatch.setattr(
        compiled.CompiledModel,
        "_call",
        lambda self, ids, *rest: computed.append(ids.shape[1]) or call(self, ids, *rest),
    )
    result = decoder.generate(*left_pad(prompts, 0), max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert [row.token_ids for row in result.rows] == [greedy_oracle(model, p, NEW_TOKENS) for p in prompts]
    rounds = [sum(drafted + 1 for _, drafted, _ in counts) for counts in result.stats.accepted_by_round]
    assert len(set(rounds)) > 5, "rounds were all alike"
    assert computed == [sum(LENGTHS), *map(compiled.bucket, rounds)]
    assert 1 <= len(graphs) <= 5
    attention = [node for node in graphs[-1].graph.nodes if "ragged_attention" in str(node.target)]
    assert len(attention) == model.config.num_hidden_layers


@pytest.mark.slow
def test_compiled_code_gives_the_same_text():
    model = make_model("llama", seed=2)
    prompts = make_prompts(LENGTHS, 2)
    draft = make_draft(model, DRAFT_NOISE["llama"], 1)
    decoder = EQSpec(model, draft, num_draft_tokens=3, layout="ragged", compile=True)
    result = decoder.generate(*left_pad(prompts, 0), max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert [row.token_ids for row in result.rows] == [greedy_oracle(model, p, NEW_TOKENS) for p in prompts]


def test_buckets_are_few_and_hold_a_quarter_of_filler_at_most():
    sizes = [compiled.bucket(n) for n in range(1, 1025)]
    assert all(n <= size <= 1.25 * n for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 4 * 10 + 1


def test_filler_goes_to_a_slot_of_its_own():
    segments = [Segment(2, 4, 5), Segment(0, 0, 4)]
    packing = compiled.BucketedPacking(segments, [3, 0], torch.device("cpu"), scratch=3, capacity=16)
    assert len(packing) == 10 and packing.row_of.tolist() == [2] * 5 + [0] * 4 + [3]
    assert packing.next_row.tolist() == [2, 0] and packing.next_position.tolist() == [9, 4]
    assert packing.table.tolist() == [[2, 0, 3, 0], [9, 4, 1, 0], [5, 4, 1, 0], [0, 5, 9, 10]]
    assert packing.num_kept == 3 and packing.kept[:3].tolist() == [2, 3, 4]


def test_only_the_ragged_layout_is_compiled():
    model = make_model("llama", seed=2)
    with pytest.raises(InputError, match="compile=True needs layout='ragged', got layout='padded'"):
        EQSpec(model, model, layout="padded", compile=True)
    assert EQSpec(model, model, compile=True).layout == "ragged"
