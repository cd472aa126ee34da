"""bench_mfu.py train --profile: whose time it is, and how little it could be.

A profile of real steps on the CPU; bench/gpu_day.sh has those of a GPU. No time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import in_process
import pytest
from test_bench import MODEL, SMALL, job, run
from torch.profiler import record_function

from attention.machine.system import kineto
from bench import parts, report, train
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


# --- the report ---


def test_a_profile_without_its_sums_is_left_out():
    """A stopped run has the parts as numbers; the report of `qualify` failed on them."""
    row = {"mode": "train", "backend": "sdpa", "status": "stopped", "point": {}, "why": ["stopped"],
           "profile": {"steps": 3, "parts": {"linear": 40.0}}}
    content = {"mode": "train", "machine": {"peak_source": "measured"}, "rows": [row]}
    assert [name for name, _ in report.sections(content)] == ["Not measured"]


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
