"""bench_mfu.py plan against closed forms and real processes."""

from __future__ import annotations

import json
import re
import shlex
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import benches
import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
from core import parallel
from core.flops import flops_per_token
from core.optimizer import build_optimizer
from core.options import TrainConfig
from core.parallel import DistInfo
from core.runtime import Setup
from core.settings import UserError
from course import build
from model import GPT, GPTConfig


def run(*argv: str) -> tuple[int, str]:
    return benches.run(["plan", *argv])


def rows(*argv: str) -> list[dict[str, Any]]:
    return json.loads(run(*argv, "--json")[1].splitlines()[-1])["rows"]


def planned(model: GPTConfig, way: str, gpus: int, dtype: str, batch: int, steps: int,
            checkpointing: bool, *more: str) -> dict[str, Any]:
    """The row of a model's step, with the residual stream in float32."""
    usual = asdict(GPTConfig())
    given = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias"}
    own = {k: v for k, v in asdict(model).items() if v != usual[k] or k in given}
    del own["attention_backend"]
    own |= {"gpus": gpus, "dtype": dtype, "batch_size": batch, "gradient_accumulation_steps": steps,
            "gradient_checkpointing": checkpointing, "residual_dtype": "float32"}
    made = rows("--gpu=NVIDIA H200", *(f"--{k}={v}" for k, v in own.items()), *more)
    return next(row for row in made if row["parallel"] == way)


# --- what is held ---


class Live(TorchDispatchMode):
    """Peak bytes of storages."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.peak = 0

    def add(self, value: Any) -> None:
        for t in tree_leaves(value):
            t = getattr(t, "_local_tensor", t)
            if isinstance(t, Tensor):
                self.seen[t.untyped_storage()._cdata] = t.untyped_storage()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        self.add((args, kwargs, out))
        self.peak = max(self.peak, sum(s.nbytes() for s in self.seen.values()))
        return out


def made(model: GPTConfig, checkpointing: bool) -> GPT:
    torch.manual_seed(0)
    made = GPT(model).train()
    made.gradient_checkpointing = checkpointing
    return made


def autocast(dtype: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")


def stepped(model: GPT, dtype: str, batch: int, micro: int) -> tuple[int, Any]:
    """Peak bytes of the second step, and the optimizer."""
    how: Any = SimpleNamespace(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95)
    optimizer = build_optimizer(model, how, torch.device("cpu"))
    with autocast(dtype):
        model.plan(batch)
    for _ in range(2):  # the first makes the moments
        optimizer.zero_grad(set_to_none=True)
        with Live() as live:
            live.add([[*model.parameters()], [[*s.values()] for s in optimizer.state.values()]])
            for i in range(micro):
                x = torch.randint(model.config.vocab_size, (batch, model.config.block_size))
                parallel.average_gradients(model, i == micro - 1)
                with autocast(dtype):
                    loss = model(x, x)[1]
                loss.backward()
                del loss
            optimizer.step()
    return live.peak, optimizer


FLASH: dict[str, Any] = {"attention_backend": "sdpa_flash"}
DEEP = GPTConfig(128, 128, 8, 4, 64, bias=False, **FLASH)
WIDE = GPTConfig(32, 8192, 1, 4, 64, bias=False, **FLASH)  # mostly logits
UNEVEN = GPTConfig(17, 101, 3, 3, 30, 1, bias=True, **FLASH)  # nothing is a multiple of 2, 3 or 4


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [DEEP, WIDE, replace(DEEP, position="rope", mlp="swiglu")])
def test_the_sum_is_a_little_more_than_the_most_that_is_held(model, dtype, checkpointing) -> None:
    got, _ = stepped(made(model, checkpointing), dtype, 8, 1)
    want = planned(model, "ddp", 1, dtype, 8, 1, checkpointing)["memory_bytes"]
    # More where the pieces are large at different moments: logits, and a layer computed again.
    assert (0.65 if checkpointing or dtype == "bfloat16" else 0.85) * want < got <= want


# --- what is sent ---


def note_collectives(sent: Counter[str]) -> None:
    """Add up the bytes of FSDP2's collectives by kind."""
    new = hasattr(dist, "all_gather_single")  # what FSDP2 calls, by PyTorch's version
    gather, scatter = (("all_gather_single", "reduce_scatter_single") if new else
                       ("all_gather_into_tensor", "reduce_scatter_tensor"))
    kinds = {gather: "all-gather", scatter: "reduce-scatter", "all_reduce": "all-reduce"}

    def noting(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            whole = max(t.numel() * t.element_size() for t in given)
            ranks = dist.get_world_size(kwargs.get("group"))
            sent[kind] += round(whole * (ranks - 1) / ranks * (1 + (kind == "all-reduce")))
            return real(*args, **kwargs)

        return call

    for name, kind in kinds.items():
        setattr(dist, name, noting(kind, getattr(dist, name)))


def fsdp_step(rank: int, n: int, model: GPTConfig, size: int, dtype: str, micro: int,
              checkpointing: bool) -> dict[str, Any]:
    """What a process of n holds, and sends in two steps."""
    real, sent, cpu = made(model, checkpointing), Counter[str](), torch.device("cpu")
    setup = Setup(cpu, TrainConfig(dtype=dtype))
    parallel.shard(real, DistInfo(cpu, rank, n, dist.group.WORLD), setup, size)
    note_collectives(sent)
    peak, optimizer = stepped(real, dtype, 2, micro)

    def storages(tensors: Any) -> int:
        found = [t.to_local().untyped_storage() for t in tensors]
        return sum({s._cdata: s.nbytes() for s in found}.values())

    params, state = list(real.parameters()), optimizer.state.values()
    moments = (storages(s[m] for s in state) for m in ("exp_avg", "exp_avg_sq"))
    held = {"weights": storages(params), "gradients": storages(p.grad for p in params)}
    return {**held, "AdamW": sum(moments), "peak": peak, "sent": dict(sent)}


@pytest.mark.slow
@pytest.mark.parametrize("n, size, dtype, micro, checkpointing", [
    (2, 2, "float32", 1, False), (3, 3, "bfloat16", 2, True), (4, 2, "bfloat16", 1, False),
    (4, 2, "float32", 3, False),
])
def test_what_fsdp_holds_and_sends(n, size, dtype, micro, checkpointing) -> None:
    got = processes.run(fsdp_step, n, UNEVEN, size, dtype, micro, checkpointing)
    want = planned(UNEVEN, "fsdp" if size == n else "hybrid", n, dtype, 2, micro * n,
                   checkpointing, f"--gpus_per_node={size}")
    assert (want["shard_size"], want["micro_steps"]) == (size, micro)
    total = sum(p.numel() for p in GPT(UNEVEN).parameters())
    for of in ("weights", "gradients", "AdamW"):
        largest = max(process[of] for process in got)
        whole = 4 * total * (of == "gradients" and micro > 1)
        # A moment has no filling: whoever has most of each parameter has as much as planned.
        assert want["memory"][of] - whole == largest, of
    for process in got:
        assert 0.6 * want["memory_bytes"] < process["peak"] <= want["memory_bytes"]
        twice = {kind: 2 * n for kind, n in want["sent"].items() if n}
        assert {kind: n for kind, n in process["sent"].items() if n} == pytest.approx(twice, abs=99)


def ring_step(rank: int, n: int, model: GPTConfig, dtype: str, checkpointing: bool) -> int:
    """Bytes sent in a step."""
    real, sent = made(model, checkpointing), list[int]()
    real.ring = attention.Ring(dist.group.WORLD)
    send = dist.batch_isend_irecv

    def noting(ops: list[Any]) -> Any:
        sent.extend(op.tensor.numel() * op.tensor.element_size() for op in ops
                    if op.op is dist.isend)
        return send(ops)

    dist.batch_isend_irecv = noting
    x = real.ring.shard(torch.randint(model.vocab_size, (2, model.block_size)))
    with autocast(dtype):
        real.plan(len(x))  # its probe sends messages too
        sent.clear()
        real(x, x)[1].backward()
    return sum(sent)


@pytest.mark.slow
@pytest.mark.parametrize("n, dtype, checkpointing", [
    (2, "bfloat16", False), (3, "bfloat16", True), (4, "float32", False),
])
def test_what_a_ring_sends(n, dtype, checkpointing) -> None:
    model = replace(UNEVEN, attention_backend="tiled")
    want = planned(model, "ddp", n, dtype, 2, 1, checkpointing, f"--context_parallels={n}")
    got = processes.run(ring_step, n, model, dtype, checkpointing)
    assert {*got} == {want["sent"]["ring"]}


# --- over which link ---

ARGV = ("--gpu=NVIDIA H200", "--config=config/train_gpt2.py", "--vocab_size=50304")
NUMBERS = 124_373_760  # GPT-2's, without biases


@pytest.mark.parametrize("dtype, peak", [
    ("float32", 494.7), ("bfloat16", 989.4), ("float16", 989.4),
])
def test_gpt2_on_two_servers_by_hand(dtype: str, peak: float) -> None:
    """Of a rank of 16, without uneven shards' padding."""
    made = rows(*ARGV, "--gpus=16", "--batch_size=12", "--gradient_accumulation_steps=40",
                f"--dtype={dtype}")
    shards = {"ddp": 1} if dtype == "float16" else {"ddp": 1, "fsdp": 16, "hybrid": 8}
    assert [r["parallel"] for r in made if "memory" in r] == [*shards]  # FSDP scales no loss
    for way, S in shards.items():
        row = next(r for r in made if r["parallel"] == way)
        memory, sent, total = row["memory"], row["sent"], sum(row["sent"].values())
        assert (row["sequences"], row["micro_steps"], row["shard_size"]) == (30, 3, S)
        assert memory["weights"] == pytest.approx(4 * NUMBERS / S, rel=1e-3)
        assert memory["AdamW"] == pytest.approx(8 * NUMBERS / S, rel=1e-3)
        assert row["left_bytes"] == pytest.approx(0.95 * 141e9 - sum(memory.values()))
        # One of a server's 8 GPUs joins a ring of 16 to the next; only hybrid's copies leave it.
        network = sent["all-reduce"] if way == "hybrid" else total / 8
        assert row["links"] == pytest.approx({"nvlink": total - network, "network": network})
        if way != "fsdp":
            of = 2 * 15 / 16 if way == "ddp" else 2 * 1 / 2 / 8
            assert sent["all-reduce"] == pytest.approx(of * 4 * NUMBERS, rel=1e-3)
        assert row["ms"] == pytest.approx(row["compute_ms"] + row["exposed_ms"])
        assert 0 < row["exposed_ms"] <= row["communication_ms"] * (1 + 1e-9)
        assert row["tokens_per_s"] == pytest.approx(480e3 * 1024 / row["ms"])
        for name, causal in (("mfu", False), ("mfu_causal", True)):
            share = row["tokens_per_s"] / (16 * peak * 1e12)
            flop = flops_per_token(GPTConfig(bias=False), 1024, causal)
            assert row[name] == pytest.approx(flop * share, rel=1e-3)


def test_one_gpu_beside_several_leaves_the_links_of_the_several() -> None:
    sent = {r["gpus"]: r["communication_ms"] for r in rows(*ARGV, "--gpus=1,8,16")
            if r["parallel"] == "ddp"}
    # A ring of 8: 7/8 of the gradients, twice; 14 hops of 1.9 us for each of the 5 buckets.
    eight = 2 * 7 / 8 * 4 * NUMBERS / 450e6 + 5 * 14 * 1.9e-3
    assert (sent[1], sent[8]) == (0, pytest.approx(eight))


# --- the command ---


def test_every_table_says_that_it_is_planned() -> None:
    code, out = run(*ARGV, "--gpus=8,64,512", "--json")
    *text, last = out.splitlines()
    content = json.loads(last)
    assert code == 0 and content["planned"] and all(row["planned"] for row in content["rows"])
    heads = [i for i, line in enumerate(text) if set(line) <= set("| -") and line]
    assert heads and all("planned" in text[i - 1] for i in heads)
    ways = [(r["gpus"], r["parallel"], r["context_parallel"]) for r in content["rows"]]
    every = [(n, way, 1) for n in (8, 64, 512) for way in ("ddp", "fsdp", "hybrid")]
    assert ways == [at for at in every if at[:2] != (8, "hybrid")]  # rings only on demand
    # 480 sequences a step do not suffice for 512 GPUs
    assert [r["gpus"] for r in content["rows"] if "why" in r] == [512] * 3
    assert all("why" not in r for r in rows(*ARGV, "--gpus=512", "--context_parallels=2"))
    *lines, last = run(*ARGV, "--gpus=8", "--memory_gb=6.5", "--json")[1].splitlines()
    ddp, fsdp = json.loads(last)["rows"]
    assert -ddp["left_bytes"] == pytest.approx(ddp["memory_bytes"] - 0.95 * 6.5e9)
    assert fsdp["left_bytes"] > 0
    assert any(f"over by {-ddp['left_bytes'] / 1e9:.3g} |" in line for line in lines)


@pytest.mark.parametrize("part, gpus, usual, gb, where, ms", [  # the datasheet, docs/MEASURE.md
    ("H100 PCIe", 16, "NVIDIA H100 PCIe", 80, "8 x H100", "140 ms"),
    ("nvidia h100", 8, "NVIDIA H100 80GB HBM3", 80, "8 x H100", "140 ms"),
    ("H200", 1, "NVIDIA H200", 141, "1 x H200", "1,068.71 ms"),
    ("a100 40gb", 3, "NVIDIA A100-SXM4-40GB", 40, "4 x A100", "633.40 ms"),
    ("4090", 8, "NVIDIA GeForce RTX 4090", 24, "2 x RTX 4090", "1,191.34 ms"),
])
def test_a_part_of_a_name_is_the_usual_gpu_of_it_with_the_nearest_measured_step(
    part: str, gpus: int, usual: str, gb: int, where: str, ms: str
) -> None:
    links = ("--nvlink_gbs=300", "--network_gbs=25", "--gpus_per_node=64")
    _, out = run(f"--gpu={part}", *ARGV[1:], f"--gpus={gpus}", *links, "--json")
    *lines, last = out.splitlines()
    assert any(repr(part) in line and usual in line for line in lines)
    row = json.loads(last)["rows"][0]
    assert row["memory_bytes"] + row["left_bytes"] == pytest.approx(0.95 * gb * 1e9)
    (line,) = (line for line in lines if "Others measured" in line)
    assert where in line and ms in line and out.index("planned: a step, ms") < out.index(line)


@pytest.mark.parametrize("argv, named", [
    ([], "--gpu"), (["--gpu=NVIDIA H800"], "--nvlink_gbs"),  # half of the H100's
    (["--gpu=RTX 409"], "NVIDIA GeForce RTX 4090"),  # the name that is near
    (["--gpu=Tesla T4", "--dtype=bfloat16"], "bfloat16 rates"),
    (["--gpu=NVIDIA H200", "--gpus=12"], "--gpus=12"),
    (["--gpu=NVIDIA H200", "--context_parallels=3"], "--context_parallels"),
    (["--gpu=RTX 4090 Laptop GPU"], "Laptop"), (["--gpu=GB200"], "'GB200'"),
    (["--gpu=titan"], "TITAN V"), (["--gpu=NVIDIA"], "'NVIDIA'"),
    (["--gpu=NVIDIA H200", "--peak_tflops=measure"], "--peak_tflops"),
])
def test_a_mistake_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        run(*argv)


def test_the_page_is_what_the_code_and_its_command_say() -> None:
    text = build.PLAN.read_text(encoding="utf-8")
    assert build.rebuild(text, build.PLAN)[1] == []
    (command,) = re.findall(r"plan (--gpu=.*--gpus=16 --block_size(?:.|\n)*?)```", text)
    printed = run(*shlex.split(command.replace("\\\n", " ")))[1].replace(" ", "")
    tables = re.findall(r"<!-- figure: plan .*\n((?:\|.*\n)+)", text)
    rows = [row.replace(" ", "") for table in tables for row in table.splitlines()[2:]]
    assert len(rows) == 12 and [row for row in rows if row not in printed] == []
