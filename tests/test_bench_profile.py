"""bench_mfu.py train --profile: whose time it is, and how little it could be.

A profile of real steps on the CPU, and for CUDA events as Kineto gives them, which PyTorch's own
code links and nests before ours sees them. No time is asserted but of those.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_process
import pytest
from test_bench import MODEL, SMALL, job, run
from torch.autograd import DeviceType
from torch.autograd.profiler import profile as autograd_profile
from torch.autograd.profiler_util import EventList
from torch.profiler import record_function

from attention.machine.system import kineto
from bench import parts, record, train
from bench.config import BenchConfig
from bench.parts import RANGE, Scopes, read, work
from core import flops
from model import GPTConfig

GPT2 = GPTConfig(bias=False)  # 124M, vocabulary 50304, T = 1024
H200, PEAK = 4.8e12, 989.4


# --- the roofline ---


def test_a_step_of_gpt2_on_an_h200():
    """At 790 TFLOP/s the products of 64 x 1024 tokens take 61.5 ms; the rest by hand."""
    works = work(GPT2, 64, 1, "bfloat16", clip=True)
    products = works["linear"].flops + works["head and loss"].flops
    assert f"{products / 790e12 * 1e3:.1f}" == "61.5"
    N, C, L, P = 65536, 768, 12, 123_587_328 + 1024 * 768
    assert works["linear"].flops == 6 * N * L * 12 * C * C
    assert works["head and loss"].flops == 6 * N * 50304 * C
    assert works["attention"].flops == 14 * N * L * C * 512.5
    assert works["attention"].bytes == 2 * N * L * 12 * C
    assert works["norms and elementwise"].bytes == 2 * N * C * 8 * 25
    assert works["optimizer"].bytes == 32 * P
    assert works["embedding"].bytes == N * C * 8 + 8 * C * 50304
    by_bytes = {k for k, w in works.items() if w.limit(PEAK, H200) == "bytes"}
    assert by_bytes == {"norms and elementwise", "optimizer", "embedding"}
    best = parts.at_roofline(works, GPT2, 64, PEAK, H200, PEAK)
    assert f"{best['ms']:.2f}" == "58.66"
    assert best["mfu"] == pytest.approx(854.77e6 * N / (best["ms"] / 1e3) / 989.4e12, rel=1e-5)
    slower = parts.at_roofline(works, GPT2, 64, 790, H200, PEAK)
    assert f"{best['mfu']:.3f} {slower['mfu']:.3f}" == "0.965 0.785"


@pytest.mark.parametrize("kv_head, window", [(None, None), (2, None), (4, 3)])
def test_the_flops_of_the_parts_are_those_of_mfu(kv_head, window):
    """but for norm gains, which MFU counts, and QK^T once more, which it does not."""
    config = GPTConfig(16, 77, 3, 4, 32, kv_head, bias=False, attention_window=window)
    works = work(config, 5, 1, "float32", clip=False)
    model = works["linear"].flops + works["head and loss"].flops
    model += works["attention"].flops * 12 / 14
    gains = (2 * 3 + 1) * 32
    a_token = flops.flops_per_token(config, 16, causal=True) - 6 * gains
    assert model == pytest.approx(5 * 16 * a_token, rel=1e-12)


# --- real steps ---


def profiled(worker: train.Training) -> list[Any]:
    """The events of one step, in its ranges."""
    scopes = Scopes(worker.who.model)
    worker.step(*worker.batch)
    with scopes.modules(), kineto(worker.device.type) as looking:
        with record_function(RANGE + "data"):
            pass
        with record_function(RANGE + "head and loss"):
            worker.step(*worker.batch, scopes.mark)
    return list(looking.events())


OPERATORS = {
    "linear": {"aten::mm", "aten::addmm"},
    "attention": {"aten::bmm", "aten::_softmax", "aten::_softmax_backward_data"},
    "norms and elementwise": {
        "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::gelu",
        "aten::gelu_backward",
    },
    "head and loss": {"aten::mm", "aten::addmm_", "aten::_log_softmax"},
    "embedding": {"aten::embedding", "aten::embedding_dense_backward"},
    "optimizer": {"aten::_foreach_norm", "aten::_fused_adamw_"},
}


def wrong_parts(found: Any) -> list[tuple[str, str]]:
    """The telling operators that were attributed to a part where they do not occur."""
    telling = set().union(*OPERATORS.values())
    seen = [(part, name) for part, names in found.names.items() for name in names]
    return [(part, name) for part, name in seen
            if name in telling and name not in OPERATORS.get(part, ())]


def test_every_operator_of_a_step_belongs_to_the_part_that_it_works_for():
    worker = train.Training(job("train", "manual", gradient_accumulation_steps=2))
    events = profiled(worker)
    found = read(events, "cpu")
    assert set(found.ms) == set(parts.PARTS) - {"gaps", "unattributed"}
    assert wrong_parts(found) == []
    for part, names in OPERATORS.items():
        assert names - {"aten::addmm", "aten::addmm_"} <= set(found.names[part]), part
    top = [e for e in events if e.cpu_parent is None]
    inside = sum(e.self_cpu_time_total for e in events if e.scope == parts.USER
                 and e.name != RANGE + "data")
    assert sum(found.ms.values()) == pytest.approx(
        (sum(e.cpu_time_total for e in top) - inside) / 1e3
    )


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16", "backend": "sdpa"}, {"gradient_checkpointing": True},
     {"dropout": 0.1, "bias": True, "onednn": True}, {"dtype": "float16"}],
    ids=lambda c: " ".join(c),
)
def test_nothing_is_left_over_in_other_kinds_of_steps(changes):
    changes = dict(changes)
    worker = train.Training(job("train", changes.pop("backend", "manual"), **changes))
    events = profiled(worker)
    found = read(events, "cpu")
    assert set(found.ms) == set(parts.PARTS) - {"gaps", "unattributed"}
    names = [e.name for e in events if e.name.startswith(RANGE)]
    again = 2 if changes.get("gradient_checkpointing") else 1  # a block's modules run twice
    assert names.count(RANGE + "attention") == 2 * again


def test_a_model_of_transformers_has_the_same_parts():
    pytest.importorskip("transformers", reason="package 'transformers' is missing")
    worker = train.Training(job("train", "", "hf=sdpa"))
    events = profiled(worker)
    found = read(events, "cpu")
    assert set(found.ms) == set(parts.PARTS) - {"gaps", "unattributed"}
    assert wrong_parts(found) == []


# --- CUDA's events ---


class Event:
    """One of Kineto's; what is not given is zero or empty."""

    def __init__(self, name: str, start: float, end: float, **given: Any) -> None:
        self.given = {"name": name, "start_ns": int(start * 1e3), "end_ns": int(end * 1e3),
                      "device_type": DeviceType.CPU, "sequence_nr": -1, "start_thread_id": 1,
                      **given}
        self.given.setdefault("end_thread_id", self.given["start_thread_id"])
        self.given["duration_ns"] = self.given["end_ns"] - self.given["start_ns"]

    def __getattr__(self, name: str) -> Any:
        empty: Any = [] if name in ("shapes", "stack", "concrete_inputs", "dtypes") else 0
        if name in ("kwinputs", "extra_meta"):
            empty = {}
        if name in ("metadata_json", "overload_name"):
            empty = ""
        return lambda: self.given.get(name, empty)


def kernel(name: str, start: float, end: float, of: int = 0, **given: Any) -> Event:
    """A kernel on the device that the operator with the correlation id `of` launched."""
    return Event(name, start, end, device_type=DeviceType.CUDA, linked_correlation_id=of,
                 correlation_id=1000 + int(start), device_resource_id=7, **given)


def linked(*events: Event) -> EventList:
    """PyTorch's own events from Kineto's: kernels linked to operators, operators nested."""
    result = SimpleNamespace(events=lambda: list(events), trace_start_ns=lambda: 0)
    made = autograd_profile._parse_kineto_results(SimpleNamespace(use_device=None), result)
    tree = EventList(made, use_device="cuda", profile_memory=False, with_flops=False)
    tree._build_tree()
    return tree


def scope(part: str, start: float, end: float, **given: Any) -> Event:
    return Event(RANGE + part, start, end, scope=parts.USER, is_user_annotation=True, **given)


def eager() -> EventList:
    """A linear layer forward and backward, the update, and a batch copied on another stream.

    The backward runs in a thread of its own; ranges have shadows on the device.
    """
    back = {"start_thread_id": 2}
    return linked(
        scope("head and loss", 0, 100),
        Event("aten::view", 2, 4, sequence_nr=5),  # before the node of this number is made
        scope("linear", 5, 30),
        Event("aten::linear", 6, 29, sequence_nr=4),
        Event("aten::t", 7, 8, sequence_nr=4),
        Event("aten::mm", 10, 20, sequence_nr=5, correlation_id=11),
        Event("cudaLaunchKernel", 12, 14, linked_correlation_id=11, correlation_id=501),
        Event("aten::div", 40, 45, sequence_nr=6, correlation_id=12),
        Event(parts.ENGINE + "MmBackward0", 50, 70, sequence_nr=5, fwd_thread_id=1, **back),
        Event("MmBackward0", 51, 69, sequence_nr=5, fwd_thread_id=1, scope=1, **back),
        Event("aten::mm", 52, 60, correlation_id=13, **back),
        Event("aten::mm", 61, 68, correlation_id=14, **back),
        Event(parts.ENGINE + "torch::autograd::AccumulateGrad", 71, 75, scope=0, **back),
        Event("aten::add_", 72, 74, correlation_id=15, **back),
        Event(parts.ENGINE + "LostBackward0", 76, 80, sequence_nr=99, fwd_thread_id=1, **back),
        Event("aten::mul", 77, 79, correlation_id=16, **back),
        scope("optimizer", 80, 95),
        Event("aten::_fused_adamw_", 82, 90, correlation_id=17),
        # on the device
        kernel(RANGE + "linear", 100, 110, is_user_annotation=True),
        kernel("nvjet_gemm", 100, 110, of=11),
        kernel("elementwise", 110, 111, of=12),
        kernel("nvjet_gemm", 120, 128, of=13),
        kernel("nvjet_gemm", 128, 140, of=14),
        kernel("add", 140, 143, of=15),
        kernel("mul", 143, 144, of=16),
        kernel("multi_tensor_adam", 150, 170, of=17),
        kernel("Memcpy HtoD (Pinned -> Device)", 155, 157),  # on another stream
        kernel("a kernel that nobody launched", 170, 171),
    )


def test_kernels_are_linked_to_operators_and_backward_to_forward():
    found = read(eager(), "cuda")
    us = {part: round(ms * 1e3) for part, ms in found.ms.items()}
    assert us == {"linear": 10 + 8 + 12, "head and loss": 1, "optimizer": 3 + 20, "data": 2,
                  "unattributed": 1 + 1}
    assert set(found.names["unattributed"]) == {"mul", "a kernel that nobody launched"}
    assert found.names["linear"] == {"nvjet_gemm": pytest.approx(0.030)}
    # from 100 to 111, 120 to 144 and 150 to 171: what two streams do at once counts once
    assert found.busy_ms == pytest.approx((11 + 24 + 21) / 1e3)
    # in whatever order the profiler gives them
    backwards = read(eager()[::-1], "cuda")
    assert backwards.ms == pytest.approx(found.ms) and backwards.busy_ms == found.busy_ms


# --- the report ---


def test_the_largest_gap_comes_first():
    found = {"steps": 3, "by": "modules", "of": "kernels", "plain_ms": 120.0, "seen_ms": 130.0,
             "parts": {"linear": 40.0, "head and loss": 35.0, "attention": 12.0, "optimizer": 1.0,
                       "norms and elementwise": 22.0, "embedding": 1.0, "gaps": 9.0},
             "names": {"linear": [["nvjet", 38.0]]}}
    here = {"name": "x", "dtype": "bfloat16", "peak_tflops": PEAK, "bandwidth": H200,
            "bandwidth_source": "b"}
    config = BenchConfig(bandwidth_gbs=H200 / 1e9, products_tflops=790)
    bench: Any = SimpleNamespace(config=config, part={"machine": here}, model=GPT2)
    row = parts.beside_roofline(bench, found, 64, 1)
    order = [p["part"] for p in row["parts"]]
    assert order[:3] == ["head and loss", "norms and elementwise", "gaps"]
    assert row["ms"] == 120.0 and "data" not in order and "unattributed" not in order
    first, gaps = row["parts"][0], row["parts"][2]
    assert first["over_ms"] == pytest.approx(35 - 15.35, abs=0.01)
    assert first["times"] == pytest.approx(35 / 15.354, rel=1e-4) and first["limit"] == "FLOPs"
    assert gaps["times"] is None and gaps["over_ms"] == 9.0
    assert row["ceiling"]["ms"] == pytest.approx(58.66, abs=0.01)
    assert row["reachable"]["mfu"] == pytest.approx(0.785, abs=0.001)
    last = parts.table(row)[1][-2:]
    assert [line[3] for line in last] == ["58.7", "72.2"] and "96.5%" in last[0][-1]


def test_a_profile_without_its_sums_is_left_out():
    """A stopped run has the parts as numbers; the report of `qualify` failed on them."""
    row = {"mode": "train", "backend": "sdpa", "status": "stopped", "point": {}, "why": ["stopped"],
           "profile": {"steps": 3, "parts": {"linear": 40.0}}}
    content = {"mode": "train", "machine": {"peak_source": "measured"}, "rows": [row]}
    assert [name for name, _ in record.sections(content)] == ["Not measured"]


def test_a_profile_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_process.use(monkeypatch)
    code, out = run([*SMALL, "--backends=manual", "--gradient_accumulation_steps=3", "--profile",
                     "--record=p", f"--records_dir={tmp_path}"])
    (written,) = tmp_path.glob("*_cpu_p/record.json")
    found = json.loads(written.read_text(encoding="utf-8"))["rows"][0]["profile"]
    assert code == 0 and "(largest gap)" in out
    assert sum(p["ms"] for p in found["parts"]) == pytest.approx(found["ms"])
    works = work(MODEL, 4, 1, "float32", clip=True)
    for p in found["parts"]:
        w = works[p["part"]]
        assert p["roofline_ms"] == pytest.approx(max(w.flops / 0.5e9, w.bytes / 8e6))
