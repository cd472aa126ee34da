"""The arithmetic of the bench by hand: errors and free memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention import Spec, manual
from attention.truth import Inputs
from bench import kernel, machine

CPU = torch.device("cpu")


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


def test_the_errors_of_a_call_by_hand():
    """Of the first sequence and the first two query heads, which share a head of keys."""
    torch.manual_seed(0)
    shapes = [(2, 6, h, 8) for h in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    spec = Spec(4, 2, 8, "float64", window=3)
    out = manual.attend(q, k, v, spec)
    true = [t.detach() for t in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    for n, heads in enumerate((2, 2, 1, 1)):  # of the output, and the gradients of q, k, v
        most = 0.25 / float(true[n][:1, :, :heads].abs().max())
        for at, off in (((0, 4, heads - 1, 5), most), ((1, 4, 0, 5), 0.0), ((0, 4, heads, 5), 0.0)):
            got = [t.clone() for t in true]
            got[n][at] += 0.25
            found = kernel.errors(got, Inputs(q, k, v, dout.detach()), spec)
            assert found == pytest.approx((off, 0.0) if n == 0 else (0.0, off), abs=1e-12)
