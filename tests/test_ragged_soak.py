"""Many requests through few slots, some of them cancelled: right texts, no slot lost, no memory kept."""

import os
import random
from pathlib import Path

import pytest
import torch
from tiny_models import DRAFT_NOISE, greedy_oracle, make_draft, make_model, make_prompts

from specdec_fast.decoding.acceptance import GreedyAcceptance
from specdec_fast.errors import InputError
from specdec_fast.layouts.ragged import RaggedPool, Segment
from specdec_fast.operators import commits

SLOTS = 16
MOST_DRAFTS = 4
PROMPT_CHUNK = 8
NEW_TOKENS = 16
EOS = 7
MEGABYTE = 2**20


class Server:
    """Serves requests as slots come free: prompts in chunks beside verifies, any number of drafts a row."""

    def __init__(self, model, draft, texts, seed):
        self.pool = RaggedPool(SLOTS, [EOS], torch.device("cpu"), chunk=8)
        self.target, self.draft = self.pool.follow(model), self.pool.follow(draft)
        self.texts = texts
        self.random = random.Random(seed)
        self.prompt_of, self.output = {}, {}
        self.finished = self.cancelled = self.accepted = self.drafted = 0

    def serve(self, requests):
        waiting = requests
        while waiting or self.prompt_of:
            while waiting and len(self.prompt_of) < SLOTS:
                waiting -= 1
                prompt = self.random.choice(list(self.texts))
                slot = self.pool.lease(torch.tensor(prompt), len(prompt) + NEW_TOKENS)
                self.prompt_of[slot], self.output[slot] = prompt, []
            for slot in list(self.prompt_of):
                if self.random.random() < 0.02:
                    self.pool.release(slot)
                    self.cancelled += 1
                    del self.prompt_of[slot]
            if self.prompt_of:
                self.round()

    def round(self):
        pool, filled = self.pool, self.target.cache.filled
        order = self.random.sample(list(self.prompt_of), len(self.prompt_of))
        ready = [slot for slot in order if pool.lengths[slot] - filled[slot] <= PROMPT_CHUNK]
        chunks = [Segment(slot, filled[slot], PROMPT_CHUNK) for slot in order if slot not in ready]
        pool.select(ready)
        counts = []
        if ready:
            counts = [self.random.randint(0, min(MOST_DRAFTS, self.room(slot))) for slot in ready]
            pool.open_round(max(counts))
            drafts = self.draft.draft(counts, lambda logits: logits.argmax(-1))
            pool.write_drafts(drafts)
        verify = [self.target.missing(slot, n) for slot, n in zip(ready, counts)]
        logits = self.target.forward(chunks + verify, [0] * len(chunks) + [n + 1 for n in counts])
        if ready:
            limit = torch.tensor(counts)
            judged = GreedyAcceptance()(drafts, limit, logits[pool.rectangle(counts, max(counts) + 1)])
            self.drafted += sum(counts)
            self.deliver(ready, commits.read(pool.commit(drafts, judged[0], limit, judged[1])))

    def room(self, slot):
        return NEW_TOKENS - len(self.output[slot]) - 1

    def deliver(self, ready, committed):
        self.pool.advance(committed)
        for slot, (n, finished, _, tokens) in zip(ready, committed):
            self.accepted += n
            self.output[slot] += tokens
            right = self.texts[self.prompt_of[slot]]
            # a block may hold tokens beyond the end of its row
            assert self.output[slot][: len(right)] == right[: len(self.output[slot])]
            if finished:
                assert len(self.output[slot]) >= len(right)
                self.finished += 1
                del self.prompt_of[slot]


def serve(requests, texts, warm_up=0):
    """Serve ``requests``; returns the server and the bytes by which the process grew after ``warm_up`` of them."""
    model = make_model("llama", seed=1)
    lengths = random.Random(0).choices(range(1, 30), k=texts)
    prompts = [tuple(prompt) for prompt in make_prompts(lengths, seed=1)]
    oracle = {prompt: greedy_oracle(model, prompt, NEW_TOKENS, EOS) for prompt in prompts}
    server = Server(model, make_draft(model, DRAFT_NOISE["llama"], 1), oracle, seed=0)
    with torch.no_grad():
        server.serve(warm_up)
        before = resident_bytes()
        server.serve(requests - warm_up)
    return server, resident_bytes() - before


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_end(server, requests):
    assert server.finished + server.cancelled == requests
    assert server.cancelled > requests / 50
    assert 0.3 < server.accepted / server.drafted < 0.95
    assert {len(text) < NEW_TOKENS for text in server.texts.values()} == {True, False}
    pool, prompt = server.pool, torch.tensor([5])
    assert pool.lengths == server.target.cache.filled == server.draft.cache.filled == [0] * SLOTS
    assert {pool.lease(prompt, 2) for _ in range(SLOTS)} == set(range(SLOTS))
    with pytest.raises(InputError, match="all 16 slots are leased"):
        pool.lease(prompt, 2)


def test_forty_requests():
    server, _ = serve(40, texts=24)
    check_end(server, 40)


@pytest.mark.slow
def test_two_thousand_requests():
    server, grown = serve(2000, texts=400, warm_up=400)
    check_end(server, 2000)
    assert server.pool.capacity <= 64
    assert grown < 4 * MEGABYTE
