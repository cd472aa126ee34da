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
from bench.config import load_config, names
from core.settings import UserError
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
HONEST = ROOT / "tests" / "planted" / "honest.py"

# What is changed in tests/planted/honest.py, and the row of the table that must name it.
BUGS = {
    "mask off by one: sees the next token": (
        "visible(i, seen_at, Tk - Tq,", "visible(i, seen_at, Tk - Tq + 1,", "causal"),
    "mask off by one: does not see itself": (
        "visible(i, seen_at, Tk - Tq,", "visible(i, seen_at, Tk - Tq - 1,", "causal"),
    "causal, but aligned top-left": (
        "visible(i, seen_at, Tk - Tq,", "visible(i, seen_at, 0,", "lengths"),
    "window off by one": (
        "Tk - Tq, spec.window,", "Tk - Tq, spec.window and spec.window - 1 or None,", "window"),
    "right ignored": ("seg_i, seg_j, spec.right)", "seg_i, seg_j)", "right"),
    "right off by one": (
        "seg_j, spec.right)", "seg_j, spec.right and spec.right + 1)", "right"),
    "all later keys, none of them": ("seg_j, spec.right)", "seg_j, spec.right or 0)", "right"),
    "keys past the end": (" & (seen_at < Tk)", "", "right"),
    "queries before the first segment": (" & (i + Tk - Tq >= 0)", "", "masked rows"),
    "segments ignored": ("seg_i, seg_j, spec.right)", "right=spec.right)", "segments"),
    "segments by order": ("spec.window, seg_i, seg_j, spec.right)",
        "spec.window, right=spec.right) & (True if seg_i is None else seg_i <= seg_j)", "segments"),
    "segments as int8": ("segments[:, at][", "segments.char()[:, at][", "segments"),
    "segments as float32": ("segments[:, at][", "segments.float()[:, at][", "segments"),
    "segments assumed dense": (
        "segments[:, at]", "segments.as_strided(segments.shape, (Tk, 1))[:, at]", "strides"),
    "segments of the first row": ("segments[:, at]", "segments[:1, at]", "segments"),
    "softcap ignored, by a wrong name": (
        "if spec.softcap is not None:", 'if getattr(spec, "soft_cap", None):', "softcap"),
    "sinks in the numerator": (
        "out = torch.zeros_like(Q)\n",
        "out = torch.zeros_like(Q) if sinks is None else V[:, :1] + 0 * Q\n", "sinks"),
    "sinks refused in another dtype": ("return Attention.apply(",
        "assert sinks is None or sinks.dtype == q.dtype\n    return Attention.apply(", "sinks"),
    "wrong group of grouped heads": (
        "t.repeat_interleave(H // t.shape[2], dim=2)",
        "t.repeat(1, 1, H // t.shape[2], 1)", "grouped heads"),
    "up to four heads in a group": (
        "t.repeat_interleave(H // t.shape[2], dim=2)",
        "t.repeat_interleave(min(4, H // t.shape[2]), 2).repeat(1, 1, 2, 1)[:, :, :H]",
        "grouped heads"),
    "up to three texts": (
        "        return out.to(q.dtype)", "        out[3:] = 0\n        return out.to(q.dtype)",
        "causal"),
    "head dimensions in fours": (
        '"bihd,bjhd->bhij", q, k[:, at])', '"bihd,bjhd->bhij", q[..., : q.shape[-1] // 4 * 4], '
        "k[:, at, :, : q.shape[-1] // 4 * 4])", "causal"),
    "up to 128 head dimensions": (
        '"bihd,bjhd->bhij", q, k[:, at])',
        '"bihd,bjhd->bhij", q[..., :128], k[:, at, :, :128])', "causal"),
    "dQ of fully masked rows": (
        "p = torch.exp(s - L)",
        "p = torch.exp(s.clamp(min=torch.finfo(s.dtype).min) - L)", "masked rows"),
    "not rescaled to the new maximum": (
        "            out = out * rescale.transpose(1, 2)\n", "", "causal"),
    "a finite first maximum": ("torch.finfo(dtype).min)", "-65504)", "causality"),
    "gradient assumed dense": ("dO = dout.to(dtype)",
        "dO = dout.as_strided(dout.shape, q.new_empty(q.shape).stride()).to(dtype)", "strides"),
    "keys assumed dense": ("return Attention.apply(q, k, v,", "return Attention.apply(q, k if "
        "k.is_contiguous() else k.transpose(1, 2).reshape(k.shape), v,", "strides"),
    "innermost stride of v ignored": ("return Attention.apply(q, k, v,", "return Attention.apply("
        "q, k, v.as_strided(v.shape, (*v.stride()[:3], 1)),", "strides"),
    "expanded batch of q": ("return Attention.apply(q, k, v,", "return Attention.apply("
        "q * (2 - (q.stride(0) > 0)), k, v,", "strides"),
    "no gradients if q is frozen": (
        "        dO = dout.to(dtype)\n", "        if not ctx.needs_input_grad[0]:\n"
        "            return (None,) * 7\n        dO = dout.to(dtype)\n", "gradients"),
    "no gradient of v alone": (
        "dV.to(v.dtype), dsinks,", "dV.to(v.dtype) * ctx.needs_input_grad[1], dsinks,",
        "gradients"),
    "backward once only": (
        "        dsinks = None\n", "        dsinks = None\n        k.data.zero_()\n", "causal"),
    "writes to the gradient": ("dO = dout.to(dtype)", "dO = dout.mul_(2).to(dtype) / 2", "causal"),
    "writes to the segments": ("return Attention.apply(", "segments is None or segments.add_(1)\n"
        "    return Attention.apply(", "segments"),
    "keys of the last call": (
        "return Attention.apply(q, k, v,", "old = globals().setdefault('kept_keys', {})\n"
        "    at = k.data_ptr(), k.shape, k.stride()\n"
        "    was = old.setdefault(at, (k, k.detach().clone()))[1]\n"
        "    return Attention.apply(q, was + (k - k.detach()), v,", "repeated calls"),
    "no empty batch": ("return Attention.apply(", "assert len(q)\n    return Attention.apply(",
        "lengths"),
    "no queries refused": ("return Attention.apply(", "q.max()\n    return Attention.apply(",
        "lengths"),
    "another dropout mask in the backward pass": (
        "spec, H, dtype = ctx.spec,", "keep = kept(q, k, ctx.spec.dropout)\n"
        "        spec, H, dtype = ctx.spec,", "dropout"),
    "another order of the tiles each time": (
        "for first in range(0, Tk, TILE):",
        "for first in __import__('random').sample(range(0, Tk, TILE), -(-Tk // TILE)):",
        "determinism"),
}


def planted(bug: str, folder: Path) -> tuple[Path, str]:
    """The kernel with that bug, and the row that shows it."""
    old, new, row = BUGS[bug]
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
    options = "--quick", "--dtype=float32", "--device=cpu", "--length=600"
    code, said = ask(capsys, HONEST, *options)
    assert code == 0 and "script" not in said, said
    rows = dict(re.findall(r"^([^\d\n]+?)  +([\d-]+) +- +[\d-]+$", said, re.M))
    assert {*check.FEATURES, "total"} <= set(rows)
    assert [name for name, n in rows.items() if n == "-"] == ["parts"]  # refused


@pytest.mark.slow
def test_a_kernel_without_a_bug_passes_every_case_in_bfloat16(capsys) -> None:
    code, said = ask(capsys, HONEST, "--dtype=bfloat16")
    assert code == 0, said


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


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["window off by one", "another order of the tiles each time"])
def test_the_script_of_the_first_failure_fails_too(bug, tmp_path: Path, capsys) -> None:
    """One of a case and one of a property."""
    path, row = planted(bug, tmp_path)
    words = [path, "--dtype=float32", "--device=cpu", "--quick", "--first", "--json"]
    code, said = ask(capsys, *words)
    report = json.loads(said)
    run = subprocess.run([sys.executable, "-"], input=report["script"], cwd=ROOT,
                         capture_output=True, text=True)
    raised = run.stderr.strip().splitlines()[-1]
    assert code == run.returncode == 1 and raised.startswith("AssertionError: "), run.stderr
    if row == "window":
        assert raised.partition(": ")[2] == report["failures"][0]["why"]


def test_what_a_kernel_raises_and_what_it_refuses(tmp_path: Path, capsys) -> None:
    """It declares softcap and raises, has no backward pass, and one dtype."""
    (tmp_path / "raises.py").write_text(
        "from nanoattn import Backend, Caps, get\n"
        "def attend(q, k, v, spec, **more):\n"
        "    if spec.softcap:\n"
        "        raise NotImplementedError('one day')\n"
        "    return get('manual').attend(q, k, v, spec, **more)\n"
        "BACKEND = Backend('raises', 'a draft', attend, fallback=None, caps=(\n"
        "    Caps(devices=('cpu',), dtypes=('float32',), softcap=True, grad=False),))\n",
        encoding="utf-8",
    )
    words = (tmp_path / "raises.py", "--dtype=float32,float16", "--quick", "--json", "--device=cpu")
    code, said = ask(capsys, *words)
    report = json.loads(said)
    assert code == 1
    assert {f["why"] for f in report["failures"]} == {"NotImplementedError: one day"}
    assert report["features"]["softcap"]["failed"] and not report["features"]["softcap"]["passed"]
    assert report["features"]["causal"]["passed"]
    assert not report["features"]["gradients"]["passed"]
    assert report["refusals"]["it has no backward pass"]
    assert report["features"]["float16, cpu"]["passed"] == 0
    assert (
        report["refusals"]["it takes float32, not float16 (--dtype=float32)"]
        == (report["features"]["float16, cpu"]["refused"])
    )


@pytest.mark.parametrize("words, value", [
    (["none.py"], "none.py"), (["no_such_backend"], "no_such_backend"),
    (["manual", "--dtype=float8"], "float8"), (["manual", "--device=tpu"], "tpu"),
    (["manual", "--length=-1"], "-1"), (["auto"], "auto"), (["fastest"], "fastest")])
def test_a_mistake_in_the_command_line(words, value, capsys) -> None:
    try:
        code = check.main(words)
    except SystemExit as e:
        code = e.code
    assert code == 2 and value in capsys.readouterr().err


@pytest.mark.parametrize("line, why", [
    ("import sys; sys.exit(0)", "SystemExit"), ("raise GeneratorExit", "GeneratorExit"),
    ("import torch; torch.set_default_dtype(torch.float64)", "default dtype"),
    ("import torch; torch.use_deterministic_algorithms(True)", "deterministic")])
def test_what_a_kernel_does_to_its_process_is_a_failure(line, why, tmp_path, capsys) -> None:
    (tmp_path / "bad.py").write_text(
        "from nanoattn import Backend, Caps, get\n"
        f"def attend(q, k, v, spec, **more):\n    {line}\n"
        "    return get('manual').attend(q, k, v, spec, **more)\n"
        "BACKEND = Backend('bad', 'bad', attend, (Caps(dtypes=('float32',)),), None)\n")
    words = [str(tmp_path / "bad.py"), "--quick", "--first", "--dtype=float32", "--device=cpu"]
    assert check.main(words) == 1 and why in capsys.readouterr().out


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
