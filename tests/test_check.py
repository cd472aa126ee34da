"""A user kernel: the file is a backend, and `python -m attention check` finds its bugs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attention
import checkpoint
import train
from attention.check import command as check
from bench.job import names
from bench.settings import load_config
from core.settings import UserError
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
HONEST = ROOT / "tests" / "planted" / "honest.py"

# Lines of tests/planted/honest.py that several bugs change.
SEE, CALL, MASK = "visible(i, seen_at, Tk - Tq,", "return Attention.apply(", "seg_j, spec.right)"
WITH = CALL + "q, k, v,"
RAND = "torch.rand(shape, device=q.device)"
BACK = "\n        spec, H, dtype = ctx.spec,"  # the backward pass begins
HEADS = "t.repeat_interleave(H // t.shape[2], dim=2)"
PRODUCT = '"bihd,bjhd->bhij", q, k[:, at])'
KEPT = "kept(q, k, spec.dropout)"
# What is changed, the row of the report that must name it, and a word of the mistake's name, if
# `check` gives it one.
BUGS: dict[str, tuple[str, ...]] = {
    "mask off by one: sees the next token": (SEE, SEE[:-1] + " + 1,", "causal", "too many"),
    "mask off by one: does not see itself": (SEE, SEE[:-1] + " - 1,", "causal", "too few"),
    "causal, but aligned top-left": (SEE, "visible(i, seen_at, 0,", "lengths", "top-left"),
    "window off by one": (
        f"{SEE} spec.window,", f"{SEE} spec.window and spec.window - 1 or None,", "window",
        "too small"),
    "the window is ignored": (f"{SEE} spec.window,", f"{SEE} None,", "window", "ignored"),
    "right ignored": (f"seg_i, {MASK}", "seg_i, seg_j)", "right", "masked"),
    "right off by one": (MASK, "seg_j, spec.right and spec.right + 1)", "right", "too many"),
    "all later keys, none of them": (MASK, "seg_j, spec.right or 0)", "right", "masked"),
    "not causal": (MASK, "seg_j, None)", "causal", "not masked"),
    "keys past the end": (" & (seen_at < Tk)", "", "right"),
    "queries before the first segment": (" & (i + Tk - Tq >= 0)", "", "masked rows", "no key"),
    "the mask is inverted": ("(seen, s,", "(~seen & (seen_at < Tk), s,", "causal", "inverted"),
    "a bias of its own": ("(seen, s,", "(seen, s + 0.01 * seen_at,", "causal"),
    "scores in half precision": ("(seen, s,", "(seen, s.half().to(s.dtype),", "causal", "float16"),
    "segments ignored": (f"seg_i, {MASK}", "right=spec.right)", "segments", "segments"),
    "segments by order": (
        f"seg_i, {MASK}", "right=spec.right) & (True if seg_i is None else seg_i <= seg_j)",
        "segments", "order"),
    "segments as int8": ("segments[:, at][", "segments.char()[:, at][", "segments"),
    "segments as float32": ("segments[:, at][", "segments.float()[:, at][", "segments"),
    "segments assumed dense": (
        "segments[:, at]", "segments.as_strided(segments.shape, (Tk, 1))[:, at]", "strides"),
    "segments of the first row": ("segments[:, at]", "segments[:1, at]", "segments"),
    "softcap ignored, by a wrong name": (
        "if spec.softcap is not None:", 'if getattr(spec, "soft_cap", None):', "softcap",
        "softcap"),
    "softcap after the mask": (
        "return torch.where(seen, s, -torch.inf), slope",
        "s = torch.where(seen, s, -(spec.softcap or torch.inf))\n"
        "    return torch.where(seen_at < Tk, s, -torch.inf), slope", "softcap", "after the mask"),
    "sinks ignored": ("m = sinks.to(dtype)[:, None, None].expand_as(m)", "pass", "sinks", "sinks"),
    "sinks in the numerator": (
        "out = torch.zeros_like(Q)\n",
        "out = torch.zeros_like(Q) if sinks is None else V[:, :1] + 0 * Q\n", "sinks"),
    "sinks refused in another dtype": (
        CALL, f"assert sinks is None or sinks.dtype == q.dtype\n    {CALL}", "sinks"),
    "not scaled": (" * spec.softmax_scale\n    slope", "\n    slope", "causal", "not scaled"),
    "divided by D": (
        " * spec.softmax_scale\n    slope", " / q.shape[-1]\n    slope", "causal", "twice"),
    "wrong group of grouped heads": (
        HEADS, "t.repeat(1, 1, H // t.shape[2], 1)", "grouped heads", "h % Hkv"),
    "up to four heads in a group": (
        HEADS, "t.repeat_interleave(min(4, H // t.shape[2]), 2).repeat(1, 1, 2, 1)[:, :, :H]",
        "grouped heads"),
    "dK and dV of a group's first head": (
        "(k.shape[2], -1)).sum(dim=3)", "(k.shape[2], -1))[:, :, :, 0]", "grouped heads", "sums"),
    "up to three texts": (
        "        return out.to(q.dtype)", "        out[3:] = 0\n        return out.to(q.dtype)",
        "causal"),
    "head dimensions in fours": (
        PRODUCT,
        '"bihd,bjhd->bhij", q[..., : q.shape[-1] // 4 * 4], k[:, at, :, : q.shape[-1] // 4 * 4])',
        "causal", "dimensions"),
    "up to 128 head dimensions": (
        PRODUCT, '"bihd,bjhd->bhij", q[..., :128], k[:, at, :, :128])', "causal"),
    "dQ of fully masked rows": (
        "p = torch.exp(s - L)", "p = torch.exp(s.clamp(min=torch.finfo(s.dtype).min) - L)",
        "masked rows", "no key"),
    "NaN in fully masked rows": (
        "l = torch.where(l == 0, 1.0, l)", "l = l", "masked rows", "no key"),
    "not rescaled to the new maximum": (
        "            out = out * rescale.transpose(1, 2)\n", "", "causal", "rescaled"),
    "a finite first maximum": ("torch.finfo(dtype).min)", "-65504)", "unusual scores"),
    "no dK": ("dK.to(k.dtype), dV", "0 * dK.to(k.dtype), dV", "causal", "gradient of k"),
    "dS without the sum": ("(dp - rest) *", "dp *", "causal", "rowsum"),
    "gradient assumed dense": (
        "dO = dout.to(dtype)",
        "dO = dout.as_strided(dout.shape, q.new_empty(q.shape).stride()).to(dtype)", "strides"),
    "keys assumed dense": (
        WITH, f"{CALL}q, k if k.is_contiguous() else k.transpose(1, 2).reshape(k.shape), v,",
        "strides"),
    "innermost stride of v ignored": (
        WITH, f"{CALL}q, k, v.as_strided(v.shape, (*v.stride()[:3], 1)),", "strides"),
    "expanded batch of q": (WITH, f"{CALL}q * (2 - (q.stride(0) > 0)), k, v,", "strides"),
    "no gradients if q is frozen": (
        "        dO = dout.to(dtype)\n", "        if not ctx.needs_input_grad[0]:\n"
        "            return (None,) * 7\n        dO = dout.to(dtype)\n", "gradients"),
    "no gradient of v alone": (
        "dV.to(v.dtype), dsinks,", "dV.to(v.dtype) * ctx.needs_input_grad[1], dsinks,",
        "gradients"),
    "backward once only": (
        "        dsinks = None\n", "        dsinks = None\n        k.data.zero_()\n", "causal"),
    "writes to the gradient": ("dO = dout.to(dtype)", "dO = dout.mul_(2).to(dtype) / 2", "causal"),
    "writes to the segments": (
        CALL, f"segments is None or segments.add_(1)\n    {CALL}", "segments"),
    "keys of the last call": (
        WITH, "old = globals().setdefault('kept_keys', {})\n"
        "    at = k.data_ptr(), k.shape, k.stride()\n"
        "    was = old.setdefault(at, (k, k.detach().clone()))[1]\n"
        f"    {CALL}q, was + (k - k.detach()), v,", "repeated calls"),
    "no empty batch": (CALL, f"assert len(q)\n    {CALL}", "lengths"),
    "no queries refused": (CALL, f"q.max()\n    {CALL}", "lengths"),
    "another order of the tiles each time": (
        "for first in range(0, Tk, TILE):",
        "for first in __import__('random').sample(range(0, Tk, TILE), -(-Tk // TILE)):",
        "determinism"),
    "another dropout mask in the backward pass": (
        BACK, f"\n        keep = kept(q, k, ctx.spec.dropout){BACK}", "dropout"),
    "with sinks another mask in the backward pass": (
        BACK, f"\n        keep = keep if sinks is None else kept(q, k, ctx.spec.dropout){BACK}",
        "dropout"),
    "the mask of the backward pass is shifted": (
        BACK, f"\n        keep = keep.roll(k.shape[1] - q.shape[1], 2){BACK}", "dropout"),
    "the second tile of the backward pass has the first's mask": (
        BACK, f"\n        keep = torch.cat([keep[..., :64], keep[..., :-64]], 3){BACK}",
        "dropout"),
    "one dropout mask for the batch": (RAND, "torch.rand(1, *shape[1:]).expand(shape)", "dropout"),
    "one dropout mask for all heads": (
        RAND, "torch.rand(shape[0], 1, *shape[2:]).expand(shape)", "dropout"),
    "one dropout mask for all queries": (
        RAND, "torch.rand(*shape[:2], 1, shape[3]).expand(shape)", "dropout"),
    "the dropout mask repeats every 64 queries": (
        RAND, "torch.rand(*shape[:2], 64, shape[3]).repeat(1, 1, 9, 1)[:, :, : shape[2]]",
        "dropout"),
    "the dropout mask repeats every 32 keys": (
        RAND, "torch.rand(*shape[:3], 32).repeat(1, 1, 1, 19)[..., : shape[3]]", "dropout"),
    "the seed is batch + head": (
        RAND,
        "torch.rand(99, *shape[2:])[torch.arange(shape[0])[:, None] + torch.arange(shape[1])]",
        "dropout"),
    "no dropout of later keys": (
        KEPT, "kept(q, k, 0 if spec.right is None else spec.dropout)", "dropout", "ignored"),
    "dV divided by p": (
        "p * keep[..., at], dO))",
        "p * keep[..., at] * (1 - spec.dropout) / (spec.dropout or 1), dO))", "dropout"),
    "what dropout keeps is not scaled": (".to(dtype) / (1 - p)", ".to(dtype)", "dropout", "1 - p"),
    "dropped before the sum": (
        "l = l * rescale +", "p = p * (keep[..., at] != 0)\n            l = l * rescale +",
        "dropout"),
}


def planted(bug: str, folder: Path) -> tuple[Path, str]:
    """The kernel with that bug, and the row that shows it."""
    old, new, row, *_ = BUGS[bug]
    text = HONEST.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    path = folder / "kernel.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path, row


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code of python -m attention check, and its output."""
    code = check.main([str(word) for word in words])
    return code, capsys.readouterr().out


# --- the command ---


@pytest.mark.slow
def test_a_kernel_without_a_bug_passes_every_test(capsys) -> None:
    options = "--quick", "--dtype=float32,bfloat16", "--device=cpu", "--length=600"
    code, said = ask(capsys, HONEST, *options)
    assert code == 0 and "To repeat" not in said, said
    rows = dict(re.findall(r"^([^\d\n]+?)  +([\d-]+) +- +[\d-]+$", said, re.M))
    assert len(rows) > 20 and f"sample of {rows['total']} cases" in said
    assert [name for name, n in rows.items() if n == "-"] == ["alibi", "parts"]  # refused


FAST = 3  # bugs of the fast tests


@pytest.mark.parametrize("bug", [
    pytest.param(bug, marks=[pytest.mark.slow] if n >= FAST else []) for n, bug in enumerate(BUGS)
])
def test_a_planted_bug_is_found_and_named(bug: str, tmp_path: Path, capsys) -> None:
    """The first failure names the property that is broken: with a wrong mask not the heads."""
    path, row = planted(bug, tmp_path)
    words = [path, "--quick", "--dtype=float32", "--device=cpu", "--json", "--first"]
    code, said = ask(capsys, *words)
    report = json.loads(said)
    failed = {name for name, n in report["features"].items() if n["failed"]}
    assert code == 1 and len(report["failures"]) == 1
    assert row in failed, report["failures"]
    assert ("grouped heads" in failed) == (row == "grouped heads")
    said = " ".join(report["mistake"])
    if row == "dropout":  # a property names its mistake itself
        said = report["failures"][0]["why"]
    assert all(word in said for word in BUGS[bug][3:])
    assert row == "dropout" or ("The mistake" in said) == (len(BUGS[bug]) > 3)
    spec = (ROOT / "attention" / "spec.py").read_text(encoding="utf-8")
    assert all(quote in " ".join(spec.split()) for quote in re.findall('"([^"]+)"', said))
    nan = "out is off by nan" in report["failures"][0]["why"]
    assert ("not finite" in " ".join(report["mistake"])) == nan


@pytest.mark.parametrize("bug", ["window off by one", "gradient assumed dense",
                                 pytest.param("segments assumed dense", marks=pytest.mark.slow)])
def test_the_script_of_a_case_prints_both_results_anywhere(bug, tmp_path: Path, capsys) -> None:
    words = [planted(bug, tmp_path)[0], "--dtype=float32", "--device=cpu", "--first", "--json"]
    report = json.loads(ask(capsys, *words)[1])
    assert "check." not in report["script"]  # public names alone
    run = subprocess.run([sys.executable, "-"], input=report["script"], cwd=tmp_path,
                         capture_output=True, text=True)
    assert run.returncode == 0 and "q (2, " in run.stdout, run.stderr
    found = re.findall(r"^(\w+) at (\[.*\]): the kernel (\S+), the truth (\S+)$", run.stdout, re.M)
    off = re.findall(r"(\w+) is off by (\S+) at (\[[\d, ]+\])", report["failures"][0]["why"])
    values = {name: (at, abs(float(got) - float(want))) for name, at, got, want in found}
    assert off and {"out", "dq", "dk", "dv"} == {*values}
    for name, error, at in off:
        assert values[name] == (at, pytest.approx(float(error), rel=0.01))


@pytest.mark.slow
def test_the_command_of_a_property_fails_too(tmp_path: Path, capsys) -> None:
    path, _ = planted("another order of the tiles each time", tmp_path)
    words = path, "--dtype=float32", "--device=cpu", "--first", "--json"
    report = json.loads(ask(capsys, *words)[1])
    command = report["script"].replace("python -m", f"{sys.executable} -m") + " --json"
    run = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    again = json.loads(run.stdout)
    assert run.returncode == 1 and again["features"]["total"]["failed"] == 1
    assert again["failures"][0]["what"] == report["failures"][0]["what"]


def test_a_refused_feature_is_one_line(tmp_path: Path, capsys) -> None:
    caps = "head_dim_max=32, window=False, dropout=False, dtypes=('float32',)"
    words = wrapped(tmp_path, caps), "--quick", "--device=cpu", "--dtype=float32,float16"
    lines = ask(capsys, *words)[1].partition("Refused")[2].partition("\n\n")[0].splitlines()[1:]
    for word in ("head_dim up to", "window", "segments", "dropout", "cache", "float16"):
        assert sum(word in line for line in lines) == (word != "segments"), lines


def wrapped(folder: Path, caps: str, line: str = "") -> Path:
    """A kernel that is manual's after that line."""
    path = folder / "wrapped.py"
    path.write_text(
        "from nanoattn import Backend, Caps, get\n"
        f"def attend(q, k, v, spec, **more):\n    {line}\n"
        "    return get('manual').compute(q, k, v, spec, **more)\n"
        f"BACKEND = Backend('wrapped', 'a draft', attend, (Caps({caps}),), None)\n")
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
    code, said = ask(capsys, path, "--dtype=float32", "--device=cpu", "--json", "--quick")
    report = json.loads(said)
    assert report["untested"] == [f"{name} on cpu" for name in names]
    assert code == bool(names or report["failures"])


def test_what_a_kernel_raises_and_what_it_refuses(tmp_path: Path, capsys) -> None:
    """It declares softcap and raises, has no backward pass, and one dtype."""
    path = wrapped(tmp_path, "devices=('cpu',), dtypes=('float32',), softcap=True, grad=False",
                   "if spec.softcap: raise NotImplementedError('one day')")
    words = path, "--dtype=float32,float16", "--quick", "--json", "--device=cpu"
    code, said = ask(capsys, *words)
    report, features = json.loads(said), json.loads(said)["features"]
    assert code == 1
    assert {f["why"] for f in report["failures"]} == {"NotImplementedError: one day"}
    assert features["softcap"]["failed"] and not features["softcap"]["passed"]
    assert features["causal"]["passed"] and not features["gradients"]["passed"]
    assert report["refusals"]["it has no backward pass"]
    assert features["float16, cpu"]["passed"] == 0
    assert features["float16, cpu"]["refused"] == sum(
        n for why, n in report["refusals"].items() if "not float16" in why)


@pytest.mark.parametrize("words, value", [
    (["none.py"], "none.py"), (["no_such_backend"], "no_such_backend"),
    (["manual", "--dtype=float8"], "float8"), (["manual", "--device=tpu"], "tpu"),
    (["manual", "--length=-1"], "-1"), (["auto"], "auto"), (["fastest"], "fastest"),
    (["manual", "--test=none"], "none")])
def test_a_mistake_in_the_command_line(words, value, capsys) -> None:
    try:
        code = check.main(words)
    except SystemExit as e:
        code = e.code
    assert code == 2 and value in capsys.readouterr().err


@pytest.mark.parametrize("line, why", [
    ("import sys; sys.exit(0)", "SystemExit"),
    ("import torch; torch.set_default_dtype(torch.float64)", "default dtype"),
    ("import torch; torch.use_deterministic_algorithms(True)", "deterministic")])
def test_what_a_kernel_does_to_its_process_is_a_failure(line, why, tmp_path, capsys) -> None:
    words = [wrapped(tmp_path, "dtypes=('float32',)", line), "--quick", "--first", "--device=cpu"]
    code, said = ask(capsys, *words)
    assert code == 1 and why in said


# --- the file is a backend ---

OWN = """import sys
from nanoattn import Backend, Caps, get

print("it ran")
BACKEND = Backend("mine", "my own", get("manual").attend, (Caps({caps}),), {fallback!r})
{more}
"""


def kernel(folder: Path, caps: str = "", fallback: str = "sdpa", more: str = "") -> str:
    path = folder / "mine.py"
    path.write_text(OWN.format(caps=caps, fallback=fallback, more=more), encoding="utf-8")
    return str(path)


def test_it_is_run_once_a_process_by_any_path(tmp_path: Path, monkeypatch, capsys) -> None:
    path = kernel(tmp_path)
    monkeypatch.chdir(tmp_path)
    backend = attention.get(path)
    assert attention.get("mine.py") is attention.get("./mine.py") is backend
    assert backend.name == "mine" and capsys.readouterr().out == "it ran\n"


def test_it_goes_through_caps_probe_and_fallback(tmp_path: Path) -> None:
    path = kernel(tmp_path, caps="dropout=False, packages=('no_such_package',)")
    assert "no_such_package" in attention.packages(path)
    chosen = attention.select(path, attention.Spec(2, 2, 16, "float32", dropout=0.1), "cpu")
    assert chosen.backend.name == "sdpa" and chosen.requested == path
    packages, dropout = chosen.rejected["mine"]
    assert "no_such_package" in packages and "dropout" in dropout
    with pytest.raises(attention.BackendUnavailable, match="mine"):
        attention.select(path, attention.Spec(2, 2, 16, "float32"), "cpu",
                         attention.Policy(fallback=False))


def test_a_probe_finds_it_wrong(tmp_path: Path) -> None:
    path, _ = planted("not rescaled to the new maximum", tmp_path)
    backend = attention.get(str(path))
    why = attention.probe(backend, attention.Spec(2, 2, 16, "float32"), "cpu").why
    assert why and "its numbers are wrong" in why[0]


@pytest.mark.parametrize("text, why", [
    (None, "no such file"), ("x = 1", "BACKEND"), ("BACKEND = {}", "BACKEND"),
    (OWN.replace('"mine"', '"sdpa"'), "'sdpa'"), (OWN.replace('"mine"', '"auto"'), "'auto'"),
    (OWN.replace("(Caps({caps}),)", "(Caps())"), "caps"),
    (OWN.replace("{fallback!r}", "'auto'"), "'auto'"),
    ("def f():\n  return 1 / 0\n\nx = f()", "line 2: ZeroDivisionError"),
    ("def f():\n  return [\n", "line 2: SyntaxError"),
    ("import sys\nsys.exit('bye')", "line 2: SystemExit"),
])
def test_a_file_that_defines_no_backend_is_an_error_of_one_line(text, why, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        text = text.format(caps="", fallback="sdpa", more="") if "from" in text else text
        path.write_text(text, encoding="utf-8")
    with pytest.raises(attention.BackendUnavailable) as e:
        attention.get(str(path))
    assert str(path) in str(e.value) and why in str(e.value) and "\n" not in str(e.value)


# --- a file runs only if it is named ---


def test_a_config_is_made_without_running_it(tmp_path: Path, capsys) -> None:
    path = kernel(tmp_path)
    config = GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=32,
                       attention_backend=path)
    train.TrainConfig(attention_backend=path)
    GPTConfig(attention_backend=str(tmp_path / "of_another_machine.py"))
    model = GPT(config)
    assert capsys.readouterr().out == ""
    plan = model.plan()  # here its kernel is chosen
    assert plan[0].chosen.backend.name == "mine" and capsys.readouterr().out == "it ran\n"


def saved(folder: Path, path: str, **more: Any) -> GPTConfig:
    """A checkpoint of a model that was trained with the kernel in that file, and these settings."""
    config = GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=32,
                       attention_backend=path)
    sizes = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 32}
    settings = train.TrainConfig(out_dir=str(folder), attention_backend=path, **sizes, **more)
    checkpoint.save(
        folder, weights=GPT(config).state_dict(), optimizer={}, keep=1, state={"step": 1},
        settings={"model": asdict(config), "train": asdict(settings), "tokenizer": {}},
    )
    return config


def test_a_checkpoint_runs_no_file(tmp_path: Path, caplog, capsys) -> None:
    path = kernel(tmp_path)
    config = saved(tmp_path / "out", path)
    there = checkpoint.load(checkpoint.latest(tmp_path / "out"))
    assert there.config() == replace(config, attention_backend="auto")
    assert f"--attention_backend={path}" in caplog.text
    with torch.no_grad():
        there.model().plan()
    assert capsys.readouterr().out == ""
    assert there.config(attention_backend=path) == config


def test_a_resumed_run_runs_the_file_only_if_it_is_named_again(tmp_path, caplog, capsys) -> None:
    path, out = kernel(tmp_path), f"--out_dir={tmp_path / 'out'}"
    saved(tmp_path / "out", path)
    words = ["--init_from=resume", out]
    again = checkpoint.resumed(train.read(train.TrainConfig, words)).settings
    assert again.attention_backend == "auto" and len(caplog.records) == 1
    assert f"--attention_backend={path}" in caplog.text
    words.append(f"--attention_backend={path}")
    assert (
        checkpoint.resumed(train.read(train.TrainConfig, words)).settings.attention_backend == path
    )
    assert len(caplog.records) == 1  # no second warning
    assert capsys.readouterr().out == ""


def test_the_bench_measures_it_by_its_path(tmp_path: Path) -> None:
    """Each worker process loads the file."""
    path = kernel(tmp_path)
    for word in (f"--backends=manual,{path}", f"--backends={path}", f"--attention_backend={path}"):
        found, _ = names(load_config(["config/bench_cpu.py", word]).settings, "cpu")
        assert found == ["manual", path][-1 - ("manual" in word) :]
    with pytest.raises(UserError, match="no such file"):
        names(load_config(["config/bench_cpu.py", "--backends=none.py"]).settings, "cpu")
