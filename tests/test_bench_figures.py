"""The arithmetic of the bench by hand: errors, the reference, the steps of a rival, memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import job

from attention import Spec
from attention.truth import Inputs
from bench import converge, kernel, machine, reference
from bench.job import Job

CPU = torch.device("cpu")


# --- the machine ---


def files(folder: Path, **content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="ascii")


def test_the_free_memory_of_a_container_is_what_its_limit_leaves(tmp_path, monkeypatch):
    files(tmp_path, meminfo="MemTotal: 9 kB\nMemAvailable:   5000000 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory(CPU) == 5_000_000 * 1024
    files(tmp_path, memory__max="max\n", memory__current="7\n")
    assert machine.free_memory(CPU) == 5_000_000 * 1024
    files(tmp_path, memory__max="3000000000\n", memory__current="1200000000\n")
    assert machine.free_memory(CPU) == 1_800_000_000
    files(tmp_path, memory__max="30000000000\n")  # more than the machine has
    assert machine.free_memory(CPU) == 5_000_000 * 1024


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_micro_batches_make_the_step_of_the_whole_batch(clip):
    """Of a rival's loop: the same loss, gradients and weights, and the marks of each part."""
    ends = []
    for micro in (1, 2, 4):
        sent = job("train", "plain", attention_backend="manual", grad_clip=clip)
        plain = converge.Plain(Job(sent))
        plain.for_training(plain.setup.scaler())
        marks: list[str] = []
        norms: list[float] = []

        def note(part: str, plain: Any = plain, marks: Any = marks, norms: Any = norms) -> None:
            marks.append(part)
            if part == "update":
                norms.append(reference.gradient_norm(plain.model.parameters()))

        x, y = Job(sent).random_tokens(4)
        loss = plain.step(x, y, micro, note).detach()
        assert marks == ["forward", "backward"] * micro + ["update", "end"]
        assert all(p.grad is None for p in plain.model.parameters())
        logits = Job(sent).model()(x)[0]
        own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        assert float(loss) == pytest.approx(own.item(), rel=1e-5)
        ends.append((norms[0], plain.model.state_dict()))
    for norm, weights in ends[1:]:
        assert norm == pytest.approx(ends[0][0], rel=1e-4) and norm > 0.05
        for name, w in weights.items():
            torch.testing.assert_close(w, ends[0][1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_the_errors_of_a_call_by_hand(window):
    """Of the first sequence and the first two query heads, which share a head of keys."""
    torch.manual_seed(0)
    B, T, H, Hkv, D = 2, 6, 4, 2, 8
    q, k, v, dout = (torch.randn(B, T, h, D, dtype=torch.float64) for h in (H, Hkv, Hkv, H))
    for t in (q, k, v):
        t.requires_grad_()
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (j <= i) & (j > i - (window or T))
    keys, values = (t.repeat_interleave(2, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / D**0.5
    probs = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", probs, values)
    truth = [t.detach() for t in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    spec = Spec(H, Hkv, D, "float64", window=window)

    def errors(bumped: int, *at: int) -> tuple[float, float]:
        got = [t.clone() for t in truth]
        got[bumped][at] += 0.25
        return kernel.errors(got, Inputs(q, k, v, dout), spec)

    for n, heads in enumerate((2, 2, 1, 1)):  # of the output, and the gradients of q, k, v
        most = 0.25 / float(truth[n][:1, :, :heads].abs().max())
        found = errors(n, 0, 4, heads - 1, 5)
        want = (most, 0.0) if n == 0 else (0.0, most)
        assert found == pytest.approx(want, abs=1e-12)
        for elsewhere in ((1, 4, 0, 5), (0, 4, heads, 5)):
            assert errors(n, *elsewhere) == pytest.approx((0.0, 0.0), abs=1e-12)
