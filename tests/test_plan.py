"""bench_mfu.py plan against closed forms and real processes."""

from __future__ import annotations

import re
import shlex
import weakref
from collections import Counter
from itertools import product
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from benches import measured, run, shown
from checkout import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import bench_mfu
from core import parallel
from core.flops import flops_per_token
from core.optimizer import build_optimizer
from core.options import TrainConfig
from core.parallel import DistInfo
from core.runtime import Setup
from model import GPT, GPTConfig


def rows(*argv: str) -> list[dict[str, Any]]:
    return measured("plan", *argv)["rows"]


# --- what a step holds and sends ---

COLLECTIVES = {"c10d::_allgather_base_": "all-gather", "c10d::allreduce_": "all-reduce",
               "c10d::_reduce_scatter_base_": "reduce-scatter", "c10d::send": "ring"}


class Watch(TorchDispatchMode):
    """Peak bytes of storages, and bytes sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.peak = 0
        self.sent = Counter[str]()

    def add(self, value: Any) -> list[Tensor]:
        leaves = (getattr(t, "_local_tensor", t) for t in tree_leaves(value))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        for t in tensors:
            self.seen[t.untyped_storage()._cdata] = t.untyped_storage()
        return tensors

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        tensors = self.add((args, kwargs, out))
        self.peak = max(self.peak, sum(s.nbytes() for s in self.seen.values()))
        if kind := COLLECTIVES.get(function.name()):
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            n = dist.ProcessGroup.unbox(group).size()
            share = {"ring": 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
            self.sent[kind] += max(t.nbytes for t in tensors) * share
        return out


def second_step(rank: int, n: int, sizes: dict[str, Any], way: str, size: int, dtype: str,
                micro: int, checkpointing: bool) -> dict[str, Any]:
    """Bytes that a process of n holds and sends; the first step makes AdamW's moments."""
    torch.manual_seed(0)
    kernel = "tiled" if way == "ring" else "sdpa_flash"
    model = GPT(GPTConfig(**sizes, attention_backend=kernel)).train()
    model.gradient_checkpointing = checkpointing
    cpu = torch.device("cpu")
    config = TrainConfig(dtype=dtype)
    ranks = DistInfo(cpu, rank, n, dist.group.WORLD if n > 1 else None)
    if way == "ring":
        model.ring = attention.Ring(dist.group.WORLD)
    if way in ("fsdp", "hybrid"):
        parallel.shard(model, ranks, Setup(cpu, config), size)
    module = model if size > 1 else parallel.replicate(model, ranks)
    optimizer = build_optimizer(model, config, cpu)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    with autocast:
        model.plan(BATCH)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        with Watch() as watch:
            watch.add([[*model.parameters()], [[*s.values()] for s in optimizer.state.values()]])
            for i in range(micro):
                x = torch.randint(model.config.vocab_size, (BATCH, model.config.block_size))
                x, y = parallel.shard_batch(model.ring, x, x)
                parallel.average_gradients(module, i == micro - 1)
                with autocast:
                    loss = module(x, y)[1]
                loss.backward()
            optimizer.step()

    def stored(tensors: Any) -> int:
        found = [parallel.local(t).untyped_storage() for t in tensors]
        return sum({s._cdata: s.nbytes() for s in found}.values())

    params, state = list(model.parameters()), optimizer.state.values()
    return {"weights": stored(params), "gradients": stored(p.grad for p in params),
            "AdamW": stored(s[m] for s in state for m in ("exp_avg", "exp_avg_sq")),
            "peak": watch.peak, "sent": dict(watch.sent)}


BATCH = 8
DEEP = {"block_size": 128, "vocab_size": 128, "n_layer": 8, "n_head": 4, "n_embd": 64,
        "bias": False}
WIDE = {**DEEP, "block_size": 32, "vocab_size": 8192, "n_layer": 1}  # mostly logits
LLAMA = {**DEEP, "position": "rope", "mlp": "swiglu"}
# Nothing is a multiple of 2, 3 or 4.
UNEVEN = {"block_size": 17, "vocab_size": 101, "n_layer": 3, "n_head": 3, "n_embd": 30,
          "n_kv_head": 1, "bias": True}


@pytest.mark.slow
@pytest.mark.parametrize("sizes, n, way, dtype, micro, checkpointing", [
    *((UNEVEN, *how) for how in (
        (4, "hybrid", "float32", 3, False), (6, "hybrid", "bfloat16", 1, False),
        (2, "fsdp", "float32", 1, False), (3, "fsdp", "bfloat16", 2, True),
        (2, "ring", "bfloat16", 1, False), (3, "ring", "bfloat16", 1, True),
        (4, "ring", "float32", 1, False))),
    *((sizes, 1, "ddp", dtype, 1, on) for sizes, dtype, on in product(
        (DEEP, WIDE, LLAMA), ("float32", "bfloat16"), (False, True)))])
def test_what_a_step_holds_and_sends(sizes, n, way, dtype, micro, checkpointing) -> None:
    size = {"fsdp": n, "hybrid": n // 2}.get(way, 1)  # ranks of a copy of the weights
    args = sizes, way, size, dtype, micro, checkpointing
    got = processes.run(second_step, n, *args) if n > 1 else [second_step(0, 1, *args)]
    context = n if way == "ring" else 1
    given = sizes | {
        "gpus": n, "gpus_per_node": size, "context_parallels": context, "dtype": dtype,
        "batch_size": BATCH, "gradient_accumulation_steps": micro * n // context,
        "gradient_checkpointing": checkpointing, "residual_dtype": "float32"}
    made = rows("--gpu=NVIDIA H200", *(f"--{k}={v}" for k, v in given.items()))
    want = next(row for row in made if row["parallel"] == way.replace("ring", "ddp"))
    assert (want["shard_size"], want["micro_steps"]) == (size, micro)
    numbers = sum(p.numel() for p in GPT(GPTConfig(**sizes)).parameters())
    for of in ("weights", "gradients", "AdamW"):
        whole = 4 * numbers * (of == "gradients" and size > 1 and micro > 1)
        # A moment has no filling: whoever has most of each parameter has as much as planned.
        assert want["memory"][of] - whole == max(process[of] for process in got), of
    # More where the pieces are large at different moments: logits, a layer computed again, FSDP.
    least = 0.6 if size > 1 else 0.65 if checkpointing or dtype == "bfloat16" else 0.85
    for process in got:
        assert least * want["memory_bytes"] < process["peak"] <= want["memory_bytes"]
        assert process["sent"] == pytest.approx({k: v for k, v in want["sent"].items() if v})


# --- over which link ---

ARGV = ("--gpu=NVIDIA H200", "--config=config/train_gpt2.py", "--vocab_size=50304")
NUMBERS = 124_373_760  # GPT-2's, without biases


@pytest.mark.parametrize("dtype, peak", [
    ("float32", 494.7), ("bfloat16", 989.4), ("float16", 989.4)])
def test_gpt2_on_two_servers_by_hand(dtype: str, peak: float) -> None:
    made = rows(*ARGV, "--gpus=16", "--batch_size=12", "--gradient_accumulation_steps=40",
                f"--dtype={dtype}")
    shards = {"ddp": 1} if dtype == "float16" else {"ddp": 1, "fsdp": 16, "hybrid": 8}
    assert [r["parallel"] for r in made if "memory" in r] == [*shards]  # FSDP scales no loss
    for way, S in shards.items():
        row = next(r for r in made if r["parallel"] == way)
        total = sum(row["sent"].values())
        assert (row["sequences"], row["micro_steps"], row["shard_size"]) == (30, 3, S)
        assert row["left_bytes"] == pytest.approx(0.95 * 141e9 - sum(row["memory"].values()))
        # One of a server's 8 GPUs joins a ring of 16 to the next; only hybrid's copies leave it.
        network = row["sent"]["all-reduce"] if way == "hybrid" else total / 8
        assert row["links"] == pytest.approx({"nvlink": total - network, "network": network})
        assert row["ms"] == pytest.approx(row["compute_ms"] + row["exposed_ms"])
        assert 0 < row["exposed_ms"] <= row["communication_ms"] * (1 + 1e-9)
        assert row["tokens_per_s"] == pytest.approx(480e3 * 1024 / row["ms"])
        for name, causal in (("mfu", False), ("mfu_causal", True)):
            share = row["tokens_per_s"] / (16 * peak * 1e12)
            flop = flops_per_token(GPTConfig(bias=False), 1024, causal)
            assert row[name] == pytest.approx(flop * share, rel=1e-3)


@pytest.mark.parametrize("context, crosses", [(4, False), (3, True), (12, True)])
def test_a_ring_that_a_server_does_not_hold_uses_the_network(context, crosses) -> None:
    for row in rows(*ARGV, "--gpus=24", f"--context_parallels={context}")[:2]:
        network = (sum(row["sent"].values()) - row["sent"]["ring"]) / 8
        assert row["links"]["network"] == pytest.approx(network + crosses * row["sent"]["ring"])


def test_faster_products_make_no_step_slower() -> None:
    """Gathers go while a block waits for its ring."""
    argv = "--gpus=16", "--context_parallels=8", "--block_size=8192", "--network_gbs=0.05"
    argv += ("--nvlink_gbs=1",)
    slow, fast = (rows(*ARGV, *argv, f"--products_tflops={rate}") for rate in (400, 989.4))
    assert all(one["ms"] <= other["ms"] for one, other in zip(fast, slow))


# --- the command ---


def test_every_table_says_that_it_is_planned() -> None:
    code, text, content = shown("plan", *ARGV, "--gpus=1,8,64,512")
    assert code == 0 and content["planned"] and all(row["planned"] for row in content["rows"])
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if set(line) <= set("| -") and line]
    assert heads and all("planned" in lines[i - 1] for i in heads)
    ways = [(r["gpus"], r["parallel"], r["context_parallel"]) for r in content["rows"]]
    every = [(n, way, 1) for n in (1, 8, 64, 512) for way in ("ddp", "fsdp", "hybrid")]
    few = (1, "fsdp"), (1, "hybrid"), (8, "hybrid")
    assert ways == [at for at in every if at[:2] not in few]  # rings only on demand
    # A ring of 8: 7/8 of the gradients, twice; 14 hops of 1.9 us for each of the 5 buckets.
    eight = 2 * 7 / 8 * 4 * NUMBERS / 450e6 + 5 * 14 * 1.9e-3
    assert [r["communication_ms"] for r in content["rows"][:2]] == [0, pytest.approx(eight)]
    # 480 sequences a step do not suffice for 512 GPUs
    assert [r["gpus"] for r in content["rows"] if "why" in r] == [512] * 3
    assert all("why" not in r for r in rows(*ARGV, "--gpus=512", "--context_parallels=2"))
    short = rows(*ARGV, "--gpus=8", "--context_parallels=8", "--block_size=7")
    assert all({"8", "7"} <= {*r["why"].split()} for r in short)
    _, text, content = shown("plan", *ARGV, "--gpus=8", "--memory_gb=6.5")
    ddp, fsdp = content["rows"]
    assert -ddp["left_bytes"] == pytest.approx(ddp["memory_bytes"] - 0.95 * 6.5e9)
    assert fsdp["left_bytes"] > 0
    assert f"over by {-ddp['left_bytes'] / 1e9:.3g} |" in text


@pytest.mark.parametrize("part, gpus, usual, gb, where, ms", [  # the datasheet, docs/MEASURE.md
    ("H100 PCIe", 16, "NVIDIA H100 PCIe", 80, "8 x H100", "140 ms"),
    ("nvidia h100", 8, "NVIDIA H100 80GB HBM3", 80, "8 x H100", "140 ms"),
    ("H200", 1, "NVIDIA H200", 141, "1 x H200", "1,068.71 ms"),
    ("mi300x", 8, "AMD Instinct MI300X", 192, "8 x H200", "143.87 ms"),
    ("A100 80GB", 8, "NVIDIA A100-SXM4-80GB", 80, "8 x A100", "300 ms"),
    ("a100 40gb", 3, "NVIDIA A100-SXM4-40GB", 40, "4 x A100", "633.40 ms"),
    ("4090", 8, "NVIDIA GeForce RTX 4090", 24, "2 x RTX 4090", "1,191.34 ms")])
def test_a_part_of_a_name_is_the_usual_gpu_of_it(part, gpus, usual, gb, where, ms) -> None:
    """Below it stands the nearest measured step."""
    links = ("--nvlink_gbs=300", "--network_gbs=25", "--gpus_per_node=64")
    _, text, content = shown("plan", f"--gpu={part}", *ARGV[1:], f"--gpus={gpus}", *links)
    lines, row = text.splitlines(), content["rows"][0]
    assert any(repr(part) in line and usual in line for line in lines)
    assert row["memory_bytes"] + row["left_bytes"] == pytest.approx(0.95 * gb * 1e9)
    (line,) = (line for line in lines if "Others measured" in line)
    assert where in line and ms in line and text.index("planned: a step, ms") < text.index(line)


def test_a_plan_of_muon_says_that_it_is_adamws_with_notes_on_ignored_names(capsys) -> None:
    argv = ["plan", "--gpu=H200", str(ROOT / "config" / "train_gpt2_muon.py"), "--backend=nccl"]
    assert bench_mfu.main(argv) == 0 and "backend is ignored" in (said := capsys.readouterr()).err
    assert "AdamW's, not Muon's" in said.out


def test_the_page_has_what_its_command_prints() -> None:
    text = (ROOT / "docs" / "PLAN.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"plan (--gpu=.*--gpus=16 --block_size(?:.|\n)*?)```", text)
    printed = run(["plan", *shlex.split(command.replace("\\\n", " "))])[1].replace(" ", "")
    tables = re.findall(r"<!-- figure: plan .*\n((?:\|.*\n)+)", text)
    lines = [line.replace(" ", "") for table in tables for line in table.splitlines()[2:]]
    assert len(lines) == 12 and [line for line in lines if line not in printed] == []
