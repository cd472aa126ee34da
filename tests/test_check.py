"""`python -m attention check` finds the bugs that are planted in a kernel, and names them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, python

from attention import Spec, select
from attention.check import command as check

HONEST = ROOT / "tests" / "planted" / "honest.py"

# Lines of tests/planted/honest.py that several bugs change.
SEE, CALL, MASK = "visible(i, seen_at, Tk - Tq,", "return Attention.apply(", "seg_j, spec.right)"
WITH = CALL + "q, k, v,"
RAND = "torch.rand(shape, device=q.device)"
BACK = "\n        spec, H, dtype = ctx.spec,"  # the backward pass begins
HEADS = "t.repeat_interleave(H // t.shape[2], dim=2)"
PRODUCT = '"bihd,bjhd->bhij", q, k[:, at])'
# The change, the row that must name it, and a word of the mistake's name, if any.
BUGS: dict[str, tuple[str, ...]] = {
    "mask off by one: sees the next token": (SEE, SEE[:-1] + " + 1,", "causal", "too many"),
    "causal, but aligned top-left": (SEE, "visible(i, seen_at, 0,", "lengths", "top-left"),
    "window off by one": (
        f"{SEE} spec.window,", f"{SEE} spec.window and spec.window - 1 or None,", "window",
        "too small"),
    "the window is ignored": (f"{SEE} spec.window,", f"{SEE} None,", "window", "ignored"),
    "right ignored": (f"seg_i, {MASK}", "seg_i, seg_j)", "right", "masked"),
    "not causal": (MASK, "seg_j, None)", "causal", "not masked"),
    "queries before the first segment": (" & (i + Tk - Tq >= 0)", "", "masked rows", "no key"),
    "the mask is inverted": ("(seen, s,", "(~seen & (seen_at < Tk), s,", "causal", "inverted"),
    "scores in half precision": ("(seen, s,", "(seen, s.half().to(s.dtype),", "causal", "float16"),
    "segments ignored": (f"seg_i, {MASK}", "right=spec.right)", "segments", "segments"),
    "segments by order": (
        f"seg_i, {MASK}", "right=spec.right) & (True if seg_i is None else seg_i <= seg_j)",
        "segments", "order"),
    "segments as float32": ("segments[:, at][", "segments.float()[:, at][", "segments"),
    "segments of the first row": ("segments[:, at]", "segments[:1, at]", "segments"),
    "softcap ignored, by a wrong name": (
        "if spec.softcap is not None:", 'if getattr(spec, "soft_cap", None):', "softcap",
        "softcap"),
    "sinks ignored": ("m = sinks.to(dtype)[:, None, None].expand_as(m)", "pass", "sinks", "sinks"),
    "sinks refused in another dtype": (
        CALL, f"assert sinks is None or sinks.dtype == q.dtype\n    {CALL}", "sinks"),
    "not scaled": (" * spec.softmax_scale\n    slope", "\n    slope", "causal", "not scaled"),
    "wrong group of grouped heads": (
        HEADS, "t.repeat(1, 1, H // t.shape[2], 1)", "grouped heads", "h % Hkv"),
    "dK and dV of a group's first head": (
        "(k.shape[2], -1)).sum(dim=3)", "(k.shape[2], -1))[:, :, :, 0]", "grouped heads", "sums"),
    "head dimensions in fours": (
        PRODUCT,
        '"bihd,bjhd->bhij", q[..., : q.shape[-1] // 4 * 4], k[:, at, :, : q.shape[-1] // 4 * 4])',
        "causal", "dimensions"),
    "NaN in fully masked rows": (
        "l = torch.where(l == 0, 1.0, l)", "l = l", "masked rows", "no key"),
    "not rescaled to the new maximum": (
        "            out = out * rescale.transpose(1, 2)\n", "", "causal", "rescaled"),
    "a finite first maximum": ("torch.finfo(dtype).min)", "-65504)", "unusual scores"),
    "no maximum": ("torch.maximum(m, s.amax(dim=-1, keepdim=True))", "0 * m", "large scores"),
    "scores cut off": ("(seen, s,", "(seen, s.clamp(max=30),", "large scores"),
    "no dK": ("dK.to(k.dtype), dV", "0 * dK.to(k.dtype), dV", "causal", "gradient of k"),
    "dS without the sum": ("(dp - rest) *", "dp *", "causal", "rowsum"),
    "gradient assumed dense": (
        "dO = dout.to(dtype)",
        "dO = dout.as_strided(dout.shape, q.new_empty(q.shape).stride()).to(dtype)", "strides"),
    "no gradients if q is frozen": (
        "        dO = dout.to(dtype)\n", "        if not ctx.needs_input_grad[0]:\n"
        "            return (None,) * 7\n        dO = dout.to(dtype)\n", "gradients"),
    "backward once only": (
        "        dsinks = None\n", "        dsinks = None\n        k.data.zero_()\n", "causal"),
    "writes to the gradient": ("dO = dout.to(dtype)", "dO = dout.mul_(2).to(dtype) / 2", "causal"),
    "keys of the last call": (
        WITH, "old = globals().setdefault('kept_keys', {})\n"
        "    at = k.data_ptr(), k.shape, k.stride()\n"
        "    was = old.setdefault(at, (k, k.detach().clone()))[1]\n"
        f"    {CALL}q, was + (k - k.detach()), v,", "repeated calls"),
    "no empty batch": (CALL, f"assert len(q)\n    {CALL}", "lengths"),
    "another order of the tiles each time": (
        "for first in range(0, Tk, TILE):",
        "for first in __import__('random').sample(range(0, Tk, TILE), -(-Tk // TILE)):",
        "determinism"),
    "another dropout mask in the backward pass": (
        BACK, f"\n        keep = kept(q, k, ctx.spec.dropout){BACK}", "dropout"),
    "the mask of the backward pass is shifted": (
        BACK, f"\n        keep = keep.roll(k.shape[1] - q.shape[1], 2){BACK}", "dropout"),
    "one dropout mask for all heads": (
        RAND, "torch.rand(shape[0], 1, *shape[2:]).expand(shape)", "dropout"),
    "the dropout mask repeats every 64 queries": (
        RAND, "torch.rand(*shape[:2], 64, shape[3]).repeat(1, 1, 9, 1)[:, :, : shape[2]]",
        "dropout"),
    "the seed is batch + head": (
        RAND,
        "torch.rand(99, *shape[2:])[torch.arange(shape[0])[:, None] + torch.arange(shape[1])]",
        "dropout"),
    "what dropout keeps is not scaled": (".to(dtype) / (1 - p)", ".to(dtype)", "dropout", "1 - p"),
}


def planted(bug: str, folder: Path) -> tuple[Path, str]:
    """The kernel with that bug, and its row."""
    old, new, row, *_ = BUGS[bug]
    text = HONEST.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    path = folder / "kernel.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path, row


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = check.main(["--quick", "--device=cpu", *map(str, words)])
    return code, capsys.readouterr().out


def report_of(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code, said = ask(capsys, "--json", *words)
    return code, json.loads(said)


@pytest.mark.slow
def test_a_kernel_without_a_bug_passes_every_test(capsys) -> None:
    code, said = ask(capsys, HONEST, "--dtype=float32,bfloat16", "--length=600")
    assert code == 0 and "To repeat" not in said, said
    rows = dict(re.findall(r"^([^\d\n]+?)  +([\d-]+) +- +[\d-]+$", said, re.M))
    assert len(rows) > 20 and f"sample of {rows['total']} cases" in said
    assert [name for name, n in rows.items() if n == "-"] == ["alibi", "parts"]  # refused


FAST = 3  # bugs of the fast tests


@pytest.mark.parametrize("bug", [
    pytest.param(bug, marks=[pytest.mark.slow] if n >= FAST else []) for n, bug in enumerate(BUGS)
])
def test_a_planted_bug_is_found_and_named(bug: str, tmp_path: Path, capsys) -> None:
    """The first failure names the broken property."""
    path, row = planted(bug, tmp_path)
    code, report = report_of(capsys, path, "--dtype=float32", "--first")
    failed = {name for name, n in report["features"].items() if n["failed"]}
    assert code == 1 and len(report["failures"]) == 1
    assert row in failed, report["failures"]
    assert ("grouped heads" in failed) == (row == "grouped heads")
    said = " ".join(report["mistake"])
    if row == "dropout":
        said = report["failures"][0]["why"]
    assert all(word in said for word in BUGS[bug][3:])
    assert row == "dropout" or ("The mistake" in said) == (len(BUGS[bug]) > 3)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["window off by one", "gradient assumed dense"])
def test_the_script_of_a_case_prints_both_results_anywhere(bug, tmp_path: Path, capsys) -> None:
    path, _ = planted(bug, tmp_path)
    _, report = report_of(capsys, path, "--dtype=float32", "--first")
    run = python("-", input=report["script"], cwd=tmp_path, PYTHONPATH="")
    assert run.returncode == 0 and "q (2, " in run.stdout, run.stderr
    found = re.findall(r"^(\w+) at (\[.*\]): the kernel (\S+), the truth (\S+)$", run.stdout, re.M)
    off = re.findall(r"(\w+) is off by (\S+) at (\[[\d, ]+\])", report["failures"][0]["why"])
    values = {name: (at, abs(float(got) - float(want))) for name, at, got, want in found}
    assert off and {"out", "dq", "dk", "dv"} == {*values}
    for name, error, at in off:
        assert values[name] == (at, pytest.approx(float(error), rel=0.01))


def wrapped(folder: Path, caps: str, line: str = "") -> Path:
    """manual's kernel after that line."""
    path = folder / "wrapped.py"
    path.write_text(
        "from nanoattn import Backend, Caps, get\n"
        f"def attend(q, k, v, spec, **more):\n    {line}\n"
        "    return get('manual').compute(q, k, v, spec, **more)\n"
        f"BACKEND = Backend('wrapped', 'a draft', attend, (Caps({caps}),), 'sdpa')\n")
    return path


@pytest.mark.parametrize("caps, names", [
    ("caches=('static',), segments=False", ["dropout", "grad", "deterministic"]),
    ("caches=('static',), grad=False, dropout=False", ["segments"]),
    ("caches=('static',), grad=False, dropout=False, segments=False, window=False", []),
    ("caches=('static',), grad=False, dropout=False, segments=False, lse=True", ["lse"]),
    ("caches=('paged', 'static'), grad=False, dropout=False, segments=False, page_multiple=512,"
     "head_dim_multiple=128, head_dim_max=256", []),
])
def test_what_is_declared_and_not_tested_is_a_failure(caps, names, tmp_path, capsys) -> None:
    path = wrapped(tmp_path, "dtypes=('float32', 'float16'), " + caps,
                   "if spec.cache == 'paged': k, v = (t.new_zeros(t.shape) for t in (k, v))")
    code, report = report_of(capsys, path, "--dtype=float32")
    assert report["untested"] == [f"{name} on cpu" for name in names]
    assert code == bool(names or report["failures"])


def test_what_a_kernel_raises_and_what_it_refuses(tmp_path: Path, capsys) -> None:
    """It declares softcap and raises, has no backward pass, and one dtype."""
    path = wrapped(tmp_path, "devices=('cpu',), dtypes=('float32',), softcap=True, grad=False",
                   "if spec.softcap: raise NotImplementedError('one day')")
    code, report = report_of(capsys, path, "--dtype=float32,float16")
    features = report["features"]
    assert code == 1
    assert {f["why"] for f in report["failures"]} == {"NotImplementedError: one day"}
    assert features["softcap"]["failed"] and not features["softcap"]["passed"]
    assert features["causal"]["passed"] and not features["gradients"]["passed"]
    assert any("backward" in why for why in report["refusals"])
    text = ask(capsys, path, "--dtype=float32,float16")[1].partition("Refused")[2]
    lines = text.partition("\n\n")[0].splitlines()[1:]  # a reason a line, whatever its numbers
    for word in ("cache", "float16", "sinks"):
        assert sum(word in line for line in lines) == 1, lines
    assert features["float16, cpu"]["passed"] == 0
    assert features["float16, cpu"]["refused"] == sum(
        n for why, n in report["refusals"].items() if "not float16" in why)


def test_a_leak_within_the_tolerance_is_found(tmp_path: Path, capsys) -> None:
    """Only causality fails."""
    path = wrapped(tmp_path, "dtypes=('float32',)", "return get('manual').compute("
                   "q, k, v, spec, **more) * (1 + 4e-7 * v[:, -1:].detach().mean())")
    for test, code in (("33", 1), ("33-gqa", 1), ("97", 0), ("packed", 0)):
        name = f"causality, {test}" if code else test
        assert ask(capsys, path, f"--test={name}", "--dtype=float32")[0] == code, name


def test_the_warning_of_a_rejected_file_names_the_command(tmp_path: Path) -> None:
    path = wrapped(tmp_path, "dtypes=('float32',)", "v = 2 * v")
    chosen = select(str(path), Spec(2, 2, 16, "float32"), "cpu")
    assert chosen.backend.name == "sdpa" and f"check {path}" in str(chosen)


def test_a_quick_check_ends_in_time(monkeypatch) -> None:
    """Each look at the clock takes ten seconds."""
    clock = itertools.count(0, 10)
    monkeypatch.setattr(check.time, "monotonic", lambda: next(clock))
    report = check.check("manual", ["cpu"], quick=True)
    total = report.features["total"]
    assert 0 < total["passed"] < 20 and not total["failed"] and report.code == 0
    assert report.left_out > 1000 and report.untested == []
