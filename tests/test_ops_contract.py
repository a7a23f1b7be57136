"""Promises of the operators beyond values: one dispatch, no host read, opcheck, compilation, cheap import."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch
from test_ops_misuse import ARGUMENTS, IMPLEMENTATIONS, call, contents
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_fast import ops
from specdec_fast.operators import backends

compiled_only = pytest.mark.skipif(not backends.is_built("_C"), reason="the C++ operators are not built")
READS = ("item", "tolist", "numpy", "cpu", "to", "__bool__", "__int__", "__float__", "__index__")


class Dispatches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_call_is_one_dispatch(name):
    arguments = ARGUMENTS[name]()
    with Dispatches() as dispatches:
        getattr(ops, name)(**arguments)
    assert dispatches.names == [f"specdec_fast::{name}"]


@compiled_only
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_compiled_operator_runs_no_other(name):
    arguments = ARGUMENTS[name]()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        getattr(ops, name)(**arguments)
    assert {event.key for event in profiler.key_averages()} == {f"specdec_fast::{name}"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_nothing_is_read_back_to_the_host(implementation, name):
    if (implementation, name) == ("reference", "ragged_attention_"):
        pytest.skip("the definition goes through the table")
    arguments = ARGUMENTS[name]()
    reads = [mock.patch.object(torch.Tensor, read, side_effect=AssertionError(read)) for read in READS]
    for patch in reads:
        patch.start()
    try:
        call(implementation, name, arguments)
    finally:
        for patch in reads:
            patch.stop()


COMMIT_IN_READ_ONLY_MEMORY = """
import ctypes, mmap, sys, torch
from specdec_fast import ops
integers = lambda *shape: torch.zeros(*shape, dtype=torch.int64)
for accepted in eval(sys.argv[1]):
    n_accepted = torch.tensor(accepted)
    rows, drafts, length = len(n_accepted), 5, torch.arange(20, 20 + len(n_accepted))
    memory = mmap.mmap(-1, rows * 2 * 64 * 16 * 4)
    cache = torch.frombuffer(memory, dtype=torch.float32).view(rows, 2, 64, 16)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(len(memory)), mmap.PROT_READ)
    ops.realign_step_(
        [cache], integers(rows, 64), integers(rows, drafts), integers(rows, drafts + 1), n_accepted, length + 99,
        torch.tensor([7]), n_accepted, 50 - length, length, integers(rows), integers(rows), integers(rows, 7), [], [],
        integers(rows, drafts + 4), 99,
    )
"""


@compiled_only
@pytest.mark.parametrize(
    ("n_accepted", "signal"),
    [([[3, 3, 3, 3], [0, 0], [5, 5], [2], [0]], 0), ([[2, 3]], -11)],
    ids=["uniform acceptance and single rows", "ragged acceptance"],
)
def test_rows_that_stay_write_no_kv_byte(n_accepted, signal):
    # whoever writes to read-only memory dies of signal 11
    code = [sys.executable, "-c", COMMIT_IN_READ_ONLY_MEMORY, str(n_accepted)]
    run = subprocess.run(code, capture_output=True)
    assert run.returncode == signal, run.stderr.decode()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name):
    arguments = tuple(ARGUMENTS[name]().values())
    torch.library.opcheck(getattr(torch.ops.specdec_fast, name).default, arguments)


@compiled_only
@pytest.mark.parametrize("schema", ops.SCHEMAS, ids=lambda schema: schema.split("(")[0])
def test_the_extension_registers_the_schemas_that_python_reads(schema):
    wanted = torch._C.parse_schema(f"specdec_fast::{schema}")
    assert getattr(torch.ops.specdec_fast, wanted.name.split("::")[1]).default._schema == wanted


def test_every_operator_has_a_schema_and_a_public_function():
    names = {schema.split("(")[0] for schema in ops.SCHEMAS}
    assert names == set(ops._OPERATORS)
    for schema in ops.SCHEMAS:
        parsed = torch._C.parse_schema(schema)
        code = getattr(ops, parsed.name).__code__
        assert [a.name for a in parsed.arguments] == list(code.co_varnames[: code.co_argcount])


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_equal_eager_ones(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    actual, expected = ARGUMENTS[name](), ARGUMENTS[name]()
    getattr(ops, name)(**expected)
    compiled(**actual)
    assert all(torch.equal(a, b) for a, b in zip(contents(actual), contents(expected), strict=True))


def test_a_fake_call_checks_shapes_of_unknown_size():
    seen = []

    def scatter(k_pool, v_pool, k, v, row_of, position_of):
        ops.append_kv_(k_pool, v_pool, k, v, row_of, position_of)
        return k_pool.sum()

    torch._dynamo.reset()
    compiled = torch.compile(
        scatter, fullgraph=True, dynamic=True, backend=lambda graph, _: seen.append(graph) or graph
    )
    for tokens in (7, 9, 11):
        pools, new = torch.zeros(2, 4, 2, 16, 3).unbind(), torch.ones(2, 1, 2, tokens, 3).unbind()
        compiled(*pools, *new, torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens))
    assert len(seen) == 1


class Decoder:
    """A decode loop over random weights, all of a round in one function: embed, attend, argmax, commit."""

    def __init__(self, seed: int):
        rows, heads, columns, dim, self.drafts = 4, 2, 96, 8, 3
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(23, heads, dim, generator=generator)
        self.places = torch.randn(columns, heads, dim, generator=generator)
        self.caches = [torch.zeros(rows, heads, columns, dim) for _ in range(2)]
        self.tokens = torch.randint(0, 23, (rows, columns), generator=generator)
        length = torch.tensor([9, 5, 7, 3])
        self.state = [(20 - length, length), (torch.zeros_like(length), torch.zeros_like(length))]
        self.queries = self.drafts + 2
        self.mask = torch.zeros(rows, 1, self.queries, columns)
        self.position_ids = torch.zeros(rows, self.queries, dtype=torch.int64)
        self.summary = torch.zeros(rows, self.drafts + 4, dtype=torch.int64)
        self.noise = torch.randint(0, 23, (40, rows, self.drafts), generator=generator)
        self.end = 20
        self.commit(self.noise[0][:, :0], self.tokens[:, 20:21].clone(), self.summary[:, :4])

    def commit(self, draft_ids, target_ids, summary) -> None:
        old, new = self.state
        limit = torch.full_like(old[0], self.drafts)
        ops.realign_step_(
            self.caches, self.tokens, draft_ids, target_ids, limit, limit + 10_000, limit[:0], None, *old, *new,
            self.position_ids, [self.mask], [0], summary, 500,
        )  # fmt: skip
        self.state = [new, old]

    def round(self, draft_ids: torch.Tensor, end: int) -> None:
        first = end - 2
        ids = torch.cat([self.tokens[:, first:end], draft_ids], 1)
        x = (self.embed[ids] + self.places[self.position_ids]).transpose(1, 2)
        for cache in self.caches:
            cache[:, :, first : first + self.queries] = x
        x = F.scaled_dot_product_attention(x * 3, *self.caches, attn_mask=self.mask)
        target_ids = torch.einsum("bhqd,vhd->bqv", x, self.embed).argmax(-1)[:, 1:]
        # two of three drafts are right
        draft_ids = torch.where(draft_ids % 3 > 0, target_ids[:, :-1], draft_ids)
        self.commit(draft_ids, target_ids, self.summary)

    def run(self, step, rounds: int) -> list[torch.Tensor]:
        end, seen = int(self.state[0][0][0] + self.state[0][1][0]), []
        for i in range(rounds):
            step(self.noise[i], end)
            seen.append(self.summary.clone())
            end = int(self.summary[0, 2])
        return seen


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_decode_round_compiles_without_a_graph_break(backend):
    torch._dynamo.reset()
    eager, compiled = Decoder(3), Decoder(3)
    expected = eager.run(eager.round, 12)
    actual = compiled.run(torch.compile(compiled.round, fullgraph=True, backend=backend, dynamic=True), 12)
    accepted = torch.stack(expected)[:, :, 0]
    assert accepted.unique().numel() == 4 and (accepted != accepted[:, :1]).any()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(compiled.tokens, eager.tokens)


IMPORT = """
import sys, time
began = time.perf_counter()
import torch
loaded = time.perf_counter()
import specdec_fast.ops
share = (time.perf_counter() - loaded) / (loaded - began)
print(share, sorted({name.split(".")[0] for name in sys.modules} & {"transformers", "triton"}))
"""


def test_importing_is_cheap_and_needs_neither_transformers_nor_triton():
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    shares, modules = zip(*(run.stdout.split(maxsplit=1) for run in runs), strict=True)
    assert set(modules) == {"[]\n"}
    assert min(map(float, shares)) < 0.05, "of the time that torch itself takes"
