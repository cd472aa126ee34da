"""A person's own kernel: the file is a backend, and `python -m attention check` finds its bugs."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attention
import checkpoint
import train
from attention import Partial, Refusal, Spec, check, get, matrix, own, promises
from attention.check import Item, items
from bench.config import load_config, names
from core.settings import UserError
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
HONEST = ROOT / "tests" / "planted" / "honest.py"

FIRST = "grouped heads"  # of the first case

# What is changed in tests/planted/honest.py, and a feature that fails then.
BUGS = {
    "causal, but top-left": (
        "visible(i, seen_at, Tk - Tq,", "visible(i, seen_at, 0,", "lengths"),
    "window off by one": (
        "Tk - Tq, spec.window,", "Tk - Tq, spec.window and spec.window + 1,", "window"),
    "segments ignored": (
        "spec.window, seg_i, seg_j)", "spec.window)", "segments"),
    "softcap ignored, by a wrong name": (
        "if spec.softcap is not None:", 'if getattr(spec, "soft_cap", None):', "softcap"),
    "sinks in the numerator": (
        "out = torch.zeros_like(Q)\n",
        "out = torch.zeros_like(Q) if sinks is None else V[:, :1] + 0 * Q\n", "sinks"),
    "wrong group of grouped heads": (
        "t.repeat_interleave(H // t.shape[2], dim=2)",
        "t.repeat(1, 1, H // t.shape[2], 1)", "grouped heads"),
    "dQ of rows that see nothing": (
        "p = torch.exp(s - L)",
        "p = torch.exp(s.clamp(min=torch.finfo(s.dtype).min) - L)", "blind rows"),
    "not rescaled to the new maximum": (
        "            out = out * rescale.transpose(1, 2)\n", "", FIRST),
    "another dropout mask in the backward pass": (
        "spec, H, dtype = ctx.spec,", "keep = kept(q, k, ctx.spec.dropout)\n"
        "        spec, H, dtype = ctx.spec,", "dropout"),
    "scores overflow in float16": (
        '"bihd,bjhd->bhij", q, k[:, at]) *',
        '"bihd,bjhd->bhij", *(t.to(getattr(torch, spec.dtype)) for t in (q, k[:, at]))) *',
        "large scores"),
    "the padding of a tile leaks": (
        "yield j, j.clamp(max=Tk - 1)",
        "yield j.clamp(max=Tk - 1), j.clamp(max=Tk - 1)", FIRST),
    "long texts see one key more": (
        "visible(i, seen_at, Tk - Tq,", "visible(i, seen_at, Tk - Tq + (Tk > 1100),", "canary"),
    "another order of the tiles each time": (
        "for first in range(0, Tk, TILE):",
        "for first in __import__('random').sample(range(0, Tk, TILE), -(-Tk // TILE)):",
        "determinism"),
}  # fmt: skip


def planted(bug: str, folder: Path) -> tuple[Path, str]:
    """The kernel with that bug, and the feature that shows it."""
    old, new, feature = BUGS[bug]
    text = HONEST.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    path = folder / "kernel.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path, feature


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code of python -m attention check, and what it prints."""
    code = check.main([str(word) for word in words])
    return code, capsys.readouterr().out


# --- the proof ---


@pytest.mark.slow
def test_a_kernel_without_a_bug_passes_all(capsys) -> None:
    code, said = ask(capsys, HONEST, "--quick", "--dtype=float32", "--device=cpu")
    assert code == 0 and "All that it declares is right. Without --quick" in said, said
    reasons = said.partition("Refused, as its Caps declare:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^ +\d+  (.*)", reasons, re.M) == [
        "it has no 'static' cache", "it has no 'paged' cache",
        "it does not return the log-sum-exp, which --context_parallel needs"]  # fmt: skip
    rows = dict(re.findall(r"^([^\d\n]+?)  +([\d-]+) +- +[\d-]+$", said, re.M))
    assert {*check.FEATURES, "in all"} <= set(rows)
    assert [name for name, n in rows.items() if n == "-"] == ["parts"]  # refused


@pytest.mark.slow
def test_a_kernel_without_a_bug_passes_every_case_in_every_dtype(capsys) -> None:
    code, said = ask(capsys, HONEST)
    assert code == 0, said


@pytest.mark.parametrize(
    "bug", [pytest.param(b, marks=pytest.mark.slow) if "long texts" in b else b for b in BUGS]
)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, capsys) -> None:
    path, feature = planted(bug, tmp_path)
    dtype = "float16" if "float16" in bug else "float32"
    words = [path, "--quick", f"--dtype={dtype}", "--device=cpu", "--json"]
    code, said = ask(capsys, *words, "--first")
    report = json.loads(said)
    assert code == 1 and report["features"][feature]["failed"] == 1, report["failures"]
    assert len(report["failures"]) == 1 and report["script"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["window off by one", "another order of the tiles each time"])
def test_the_script_of_the_first_failure_runs_and_fails_so(bug, tmp_path: Path, capsys) -> None:
    """One of a case and one of a promise."""
    path, feature = planted(bug, tmp_path)
    code, said = ask(capsys, path, "--dtype=float32", "--device=cpu", "--quick", "--first")
    script = said.partition("The first as a script:\n\n")[2]
    assert code == 1 and script.count("\n") < 14
    run = subprocess.run([sys.executable, "-"], input=script, cwd=ROOT, capture_output=True,
                         text=True)  # fmt: skip
    (why,) = [line for line in said.splitlines() if line.startswith("  ") and ", cpu: " in line]
    raised = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and raised.startswith("AssertionError: "), run.stderr
    if feature == "window":
        assert why.endswith(raised.partition(": ")[2]) and "error of each query" in run.stdout


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
    assert report["features"]["softcap"] == {"passed": 0, "failed": 2, "refused": 1}
    assert report["features"]["causal"]["passed"] and "gradients" not in report["features"]
    assert report["refusals"]["it has no backward pass"]
    assert report["features"]["float16, cpu"]["passed"] == 0
    assert (
        report["refusals"]["it takes float32, not float16 (--dtype=float32)"]
        == (report["features"]["float16, cpu"]["refused"])
    )


# --- a wrong kernel for each thing that is required beside a case's numbers ---

MANUAL, TILED = get("manual").attend, get("tiled").partial
assert TILED is not None


def like(q: Any, t: Any) -> Any:
    """The mean of t for each sequence."""
    return t.mean(dim=(1, 2, 3)).view(-1, 1, 1, 1).to(q.dtype)


def sent(t: Any) -> Any:
    """0, with a gradient of 1 to each entry of t."""
    return (t - t.detach()).sum(dim=(1, 2), keepdim=True)


def once_more(q: Any, k: Any, v: Any, spec: Spec, at: list[int], n: int, **more: Any) -> Any:
    """The n-th call gives other bits."""
    at.append(0)
    return MANUAL(q, k, v, spec, **more) * (1 + 1e-6 * (len(at) == n))


def other_gradient(q: Any, k: Any, v: Any, spec: Spec, at: list[int], **more: Any) -> Any:
    at.append(0)
    out = MANUAL(q, k, v, spec, **more)
    return out + 1e-6 * (len(at) == 2) * (out - out.detach())


def longer(t: Any) -> bool:
    """Is it the beginning of a longer buffer?"""
    return t.stride(0) > t.shape[1] * t.stride(1)


def rest_read(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
    out = MANUAL(q, k, v, spec, **more)
    place = v.storage_offset() + v.shape[1] * v.stride(1)
    rest = v.as_strided(v[:, :1].shape, v.stride(), place) if longer(v) else v[:, :1]
    return out + 0 * rest.mean()


def dropping(p_more: float, first: bool) -> Any:
    """Where v is the identity: a share p + p_more is dropped; with first never the first key."""

    def attend(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
        out = MANUAL(q, k, v, replace(spec, dropout=0.0), **more)
        keep = torch.rand(out.shape) >= spec.dropout + p_more
        keep[..., 0] |= first
        return out * (keep / (1 - spec.dropout) if spec.dropout else 1)

    return attend


def reseeded(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
    with torch.random.fork_rng([]):
        torch.seed()
        return MANUAL(q, k, v, spec, **more)


def not_advanced(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
    with torch.random.fork_rng([]):
        return MANUAL(q, k, v, spec, **more)


def two_masks(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
    a, b = (MANUAL(q, k, v, spec, **more) for _ in range(2))
    return a.detach() + b - b.detach()


def drawing(q: Any, k: Any, v: Any, spec: Spec, *, backward: bool, **more: Any) -> Any:
    out = MANUAL(q, k, v, spec, **more)
    if backward:
        out.register_hook(lambda g: g + 0 * torch.rand(1))
        return out
    return out + 0 * torch.rand(1)


def recording(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
    """With a gradient where none is asked for."""
    with torch.enable_grad():
        return MANUAL(q if spec.grad else q.detach().requires_grad_(), k, v, spec, **more)


def window_of(more_keys: int) -> Any:
    return lambda q, k, v, s, **m: MANUAL(q, k, v, replace(s, window=s.window + more_keys), **m)


def segments_as(change: Any) -> Any:
    return lambda q, k, v, s, segments, **m: MANUAL(q, k, v, s, segments=change(segments), **m)


def without(what: str) -> Any:
    """It ignores the sinks, the scale, the softcap or the window."""

    def attend(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
        if what == "sinks":
            del more["sinks"]
        return MANUAL(q, k, v, replace(spec, **{what: False if what == "sinks" else None}), **more)

    return attend


def right_but(f: Any) -> Any:
    """manual's output, changed."""
    return lambda q, k, v, s, **m: f(MANUAL(q, k, v, s, **m), q, k, v)


WINDOW, HEADS = ", window 9", ", 4 heads over 2"
MOVED, NOTHING = r"changed at \d+; moved: \[", "moved: nothing"
ANOTHER = "an output of another one moved"
WRONG: list[tuple[str, Any, str]] = [
    *((f"canary, {phase}", right_but(lambda out, q, k, v, n=n: out + 1e-6 * like(q, (q, k, v)[n])),
       f"{'qkv'[n]} {MOVED}")
      for phase, n in itertools.product(("training", "evaluation", "chunked prefill"), range(3))),
    *((f"canary, {phase}", right_but(lambda out, *_: torch.zeros_like(out)), NOTHING)
      for phase in ("training", "evaluation", "chunked prefill")),
    *((f"canary, {phase}{WINDOW}", window_of(1), "keys before the window")
      for phase in ("chunked prefill", "decode")),
    *((f"segments, {phase}{HEADS}{w}", segments_as(change), ANOTHER)
      for phase, w in itertools.product(("training", "chunked prefill"), ("", WINDOW))
      for change in (lambda seg: seg.clamp(max=1), lambda seg: seg.clamp(min=1))),
    (f"segments, evaluation{HEADS}", segments_as(lambda seg: seg % 2), ANOTHER),
    (f"segments, evaluation{HEADS}", right_but(lambda out, *_: torch.zeros_like(out)), "nothing"),
    *((f"huge negative scores, {Tq} of 20, 2 heads over 1, window 5", window_of(n), "the mean of")
      for Tq, n in itertools.product((20, 7, 1), (1, -1))),
    (f"behind the view{HEADS}", rest_read, "NaN behind the last key"),
    (f"behind the view{HEADS}",
     right_but(lambda out, q, k, v: out * (1.001 if longer(v) else 1)), "same keys, copied"),
    *((f"no gradient to later tokens{HEADS}",
       right_but(lambda out, q, k, v, n=n: out + sent((q, k, v)[n])), f"gave d{'qkv'[n]} of later")
      for n in range(3)),
    *((f"no gradient to later tokens{HEADS}{WINDOW}",
       lambda *a, n=n, **m: MANUAL(*(t.detach() + 0 * t if i == n else t
                                     for i, t in enumerate(a[:3])), a[3], **m),
       f"d{'qkv'[n]} of token 19 is zero") for n in range(3)),
    *((f"share dropped, {p}", dropping(n * p / 10, first), words)
      for p in (0.125, 0.5) for n, first, words in (
          (1, False, "are dropped, not"), (-1, False, "are dropped, not"),
          (0, True, "more often than others"))),
    ("share dropped, 0.125",
     lambda q, k, v, s, **m: MANUAL(q, k, v, replace(s, dropout=s.dropout and 0.13), **m),
     "what was not dropped"),
    ("the same mask again", reseeded, "the same seed gives another"),
    ("the same mask again", not_advanced, "the next call has the same"),
    ("the same mask again", two_masks, "d[qkv] by the mask of the forward pass"),
    *(("the same mask again", right_but(lambda out, q, k, v, n=n: out + 1e-3 * sent((q, k, v)[n])),
       f"d{'qkv'[n]} by the mask of the forward pass") for n in range(3)),
    *((f"no random number without{HEADS}", partial(drawing, backward=b), "a random number was")
      for b in (False, True)),
    *((f"the same bits{HEADS}", partial(once_more, at=[], n=n), "out is not the same")
      for n in range(2, 6)),
    (f"the same bits{HEADS}", partial(other_gradient, at=[]), "dq is not the same"),
    *((f"dynamic, left padding, {Tq} of 24{HEADS}", segments_as(lambda seg: seg * 0), "out is off")
      for Tq in (24, 3, 1)),
    *((f"static, scale, softcap and sinks{HEADS}", without(what), "out is off")
      for what in ("sinks", "scale", "softcap")),
    (f"static{HEADS}{WINDOW}", without("window"), "out is off"),
    (f"static{HEADS}", right_but(lambda out, q, k, v: out + 1e-7 * like(q, v)), "a later token"),
    *(("64x17", right_but(lambda out, q, k, v, on=on: F.pad(
        out[:, 47:], (0, 0, 0, 0, 47, 0), value=1e-9 * (out.requires_grad == on))), words)
      for on, words in ((True, "zeros, and have no gradient"), (False, "must give zeros$"))),
    ("64x17", right_but(lambda out, q, k, v: out + 1e-9 * (q - q.detach())), "have no gradient"),
    ("64x17", recording, "the output requires a gradient"),
]  # fmt: skip


def beside(forward: Any = None, backward: Any = None) -> Partial:
    """tiled's parts with one thing changed."""
    assert TILED is not None
    return Partial(
        lambda *a: (forward or (lambda O, L, *_: (O, L)))(*TILED.forward(*a), *a),
        lambda *a: (backward or (lambda *grads: grads))(*TILED.backward(*a)),
    )


def filled(O: Any, L: Any, _q: Any, k: Any, _v: Any, spec: Spec, offset: int, seg: Any, *,
           only: str) -> tuple[Any, Any]:  # fmt: skip
    """1 in a row that sees no key, hidden by causality, by the window or by segments alone."""
    i = torch.arange(O.shape[1]) + offset
    why = torch.full(i.shape, 0)
    why[i < 0] = 1
    if spec.window is not None:
        why[i - spec.window + 1 >= k.shape[1]] = 2
    rows = why == {"segments": 0, "causality": 1, "window": 2}[only]
    blind = L.eq(-torch.inf).transpose(1, 2) & rows[:, None]
    return O.masked_fill(blind[..., None], 1.0), L


PARTS: list[tuple[str, Partial, str]] = [
    ("", beside(lambda O, L, *_: (O.half(), L)), "a part is torch.float16"),
    ("", beside(lambda O, L, *_: (O, L.half())), "its L torch.float16"),
    *((which, beside(partial(filled, only=only)), "a row that sees none of a part's keys")
      for which, only in (("", "causality"), (f"{WINDOW}", "window"), (", segments", "segments"))),
    ("", beside(lambda O, L, *_: (O, L.clamp(min=-1e30))), "its L must be -inf"),
    ("", beside(lambda O, L, *_: (O, L / math.log(2))), "out is off"),
    ("", beside(lambda O, L, *_: (O * 1.01, L)), "out is off"),
    ("", beside(None, lambda dq, dk, dv: (dq.half(), dk, dv)), "a gradient of a part is"),
    *(("", beside(None, lambda *grads, n=n: [g * (1.01 if i == n else 1)
                                             for i, g in enumerate(grads)]),
       f"d{'qkv'[n]} is off") for n in range(3)),
]  # fmt: skip


def asked_alone(name: str) -> Item:
    """That one question, in float32."""
    return next(item for item in items(["float32"]) if item.name == name)


@pytest.mark.parametrize("n", range(len(WRONG)), ids=lambda n: f"{n}, {WRONG[n][0]}")
def test_each_thing_that_is_required_is_looked_at(n: int) -> None:
    name, attend, words = WRONG[n]
    item, backend = asked_alone(name), get("manual")
    with pytest.raises(AssertionError, match=words):
        item.ask(replace(backend, attend=attend), item.spec, "cpu")


@pytest.mark.parametrize("n", range(len(PARTS)), ids=lambda n: f"{n}, {PARTS[n][2]}")
def test_each_thing_that_is_required_of_parts_is_looked_at(n: int) -> None:
    which, parts, words = PARTS[n]
    before, w = (which, "") if which != WINDOW else ("", WINDOW)
    item = asked_alone(f"in parts{before}{HEADS}{w}")
    with pytest.raises(AssertionError, match=words):
        item.ask(replace(get("tiled"), partial=parts), item.spec, "cpu")


def test_the_same_bits_are_asked_under_the_switch() -> None:
    """What has no fixed order without it is right all the same."""
    at: list[int] = []

    def attend(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
        at.append(torch.are_deterministic_algorithms_enabled())
        return MANUAL(q, k, v, spec, **more)

    item = asked_alone(f"the same bits{HEADS}")
    item.ask(replace(get("manual"), attend=attend), item.spec, "cpu")
    assert item.deterministic and at == [True] * 5
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", [f"canary, training{HEADS}", f"static{HEADS}"])
def test_who_rounds_otherwise_once_has_not_leaked(name: str) -> None:
    item, at = asked_alone(name), []  # type: tuple[Item, list[int]]
    n = 2 if "canary" in name else 6
    wrong = replace(get("manual"), attend=partial(once_more, at=at, n=n))
    item.ask(wrong, item.spec, "cpu")
    assert len(at) > n


@pytest.mark.slow
def test_what_is_wrong_only_when_compiled_is_found() -> None:
    attend = right_but(lambda out, *_: out * (1.1 if torch.compiler.is_compiling() else 1))
    item = asked_alone(f"compiled{HEADS}")
    with pytest.raises(AssertionError, match="out is off"):
        item.ask(replace(get("manual"), attend=attend), item.spec, "cpu")


def test_a_kernel_that_writes_into_its_inputs_is_found() -> None:
    def attend(q, k, v, spec, *, segments=None, cache=None):
        out = attention.get("manual").attend(q, k, v, spec, segments=segments)
        v.mul_(2)  # its own result is right
        return out

    backend = attention.Backend("writes", "", attend, (attention.Caps(grad=False),), None)
    case = matrix.Case("writes", 5, 5)
    before = [t.clone() for t in matrix.draw(case, "float32")]
    with pytest.raises(AssertionError, match="it wrote into v"):
        matrix.check(backend, case, "float32", grad=False)
    assert all(map(torch.equal, before, matrix.draw(case, "float32")))  # which others get
    matrix.check(attention.get("manual"), case, "float32")


@pytest.mark.parametrize("wrong", ["q", "k", "v", "sinks"])
def test_a_gradient_that_is_a_tenth_too_large_is_found(wrong: str) -> None:
    """Though the output is right, to the bit; and no gradient is asked of who has none."""

    def attend(q, k, v, spec, *, segments=None, cache=None, sinks=None):
        given = {"q": q, "k": k, "v": v, "sinks": sinks}
        given[wrong] = given[wrong].detach() + 1.1 * (given[wrong] - given[wrong].detach())
        more = {"segments": segments, "sinks": given.pop("sinks")}
        return get("manual").attend(*given.values(), spec, **more)

    backend = replace(get("manual"), attend=attend)
    case = matrix.Case("tenth", 9, 9, sinks=True)
    with pytest.raises(AssertionError, match=f"d{wrong} is off"):
        matrix.check(backend, case, "float32")
    matrix.check(backend, case, "float32", grad=False)


def test_who_declares_no_order_is_not_asked_for_the_same_bits() -> None:
    backend = replace(get("manual"), caps=(attention.Caps(deterministic=False),))
    item, here = asked_alone(f"the same bits{HEADS}"), attention.Machine.here("cpu")
    (why,) = check.judge(backend, item, here, "cpu").why
    assert isinstance(why, Refusal) and why.kind == "deterministic"
    assert check.judge(backend, asked_alone("gqa"), here, "cpu").verdict == "right"


def test_the_devices_that_are_asked(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert check.read(["manual"]).devices == ["cpu", "cuda"]
    for device in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert check.read(["manual", f"--device={device}"]).devices == [device]
    for device in ("cuda:2", "cpu:1", "mps", "gpu"):
        with pytest.raises(SystemExit):
            check.read(["manual", f"--device={device}"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert check.read(["manual"]).devices == ["cpu", "cuda", "mps"]


def test_without_a_backward_pass_a_refusal_still_has_every_reason() -> None:
    """Only what is refused for want of a backward pass alone is asked forward."""
    caps = attention.Caps(grad=False, window=False)
    backend = replace(attention.get("manual"), caps=(caps,))
    (plain,) = (i for i in check.items(["float32"], quick=True) if i.name == "gqa")
    (windowed,) = (i for i in check.items(["float32"], quick=True) if i.name == "window16")
    here = attention.Machine.here("cpu")
    assert check.judge(backend, plain, here, "cpu") == check.Answer("right")
    refused = check.judge(backend, windowed, here, "cpu")
    assert [w.kind for w in refused.why] == ["window", "grad"]  # type: ignore[union-attr]


def test_who_refuses_all_has_shown_nothing(capsys) -> None:
    code, said = ask(capsys, "flash_attn_3", "--dtype=float16", "--device=cpu", "--quick")
    assert code == 1 and "It refuses all: nothing ran." in said


def test_the_report_counts_each_kind_and_keeps_the_first_script(monkeypatch) -> None:
    report = check.Report("manual", "manual", "", {"cpu": "this one"}, "2")
    first, second = asked_alone("gqa"), asked_alone(f"canary, decode{WINDOW}")
    report.add(first, "cpu", check.Answer("right", grad=True))
    report.add(first, "cpu", check.Answer("wrong", ("out is off",)))
    report.add(second, "cpu", check.Answer("wrong", ("it moved",)))
    there = Refusal("it takes float16", "dtype"), Refusal("it has no window", "window")
    report.add(second, "cpu", check.Answer("refused", there))
    for _ in range(2):
        report.add(second, "cpu", check.Answer("refused", there[1:]))
    assert report.features == {
        "float32, cpu": check.Count(1, 2, 3), "grouped heads": check.Count(1, 1),
        "gradients": check.Count(1), "canary": check.Count(0, 1, 2)}  # fmt: skip
    assert report.refusals == {"it takes float16": 1, "it has no window": 3}
    assert report.total == check.Count(1, 2, 3)
    assert [f["what"] for f in report.failures] == ["gqa", second.name]
    assert report.script.startswith("# gqa, float32: out is off\n") and report.code == 1


@pytest.mark.parametrize("name, dtype", [("the same mask again", "float16"), ("gqa", "bfloat16")])
def test_the_script_asks_the_same_question(name: str, dtype: str) -> None:
    """It is run here, on a kernel without the bug: nothing fails."""
    (item,) = (item for item in items([dtype]) if item.name == name)
    said, given = check.script("manual", item, "cpu", "two\nlines"), {}  # type: tuple[str, Any]
    assert said.startswith(f"# {name}, {dtype}: two\n# lines\nfrom ")
    exec(said, given)
    asked = given["promise"].spec if item.case is None else given["case"].spec(given["dtype"])
    assert asked == item.spec and (item.case is None or given["case"] == item.case)


def test_the_script_of_each_promise_finds_that_one() -> None:
    asked = list(items(["float16"]))
    assert len({item.name for item in asked}) == len(asked)  # it is asked for by its name
    for item in (item for item in asked if item.case is None):
        given: dict[str, Any] = {}
        exec(check.script("manual", item, "cpu", "").partition("\nprint(")[0], given)
        assert given["promise"].name == item.name and given["promise"].spec == item.spec


def test_only_in_training_are_there_gradients() -> None:
    phases = ("training", "evaluation", "chunked prefill", "decode")
    asked = [(item, p) for item in items(["float32"]) for p in phases if p in item.name]
    assert {p for _, p in asked} == set(phases) and len(asked) > 20
    for item, phase in asked:
        assert item.spec.grad == (phase == "training"), item.name


def test_pages_are_asked_small_and_as_large_as_flashattentions() -> None:
    sizes = {item.spec.page_size for item in items(["float32"]) if item.case is None}
    assert sizes == {None, 16, 256}


def test_a_promise_is_asked_what_its_name_says() -> None:
    for item in (item for item in items(["float32"]) if item.case is None):
        name, spec = item.name, item.spec
        paged = re.search(r"paged by (\d+)", name)
        cache = "paged" if paged else next((c for c in ("static", "dynamic") if c in name), "none")
        assert (spec.cache, spec.page_size) == (cache, int(paged[1]) if paged else None), name
        assert not (spec.grad and (cache != "none" or "behind" in name)), name
        assert spec.head_dim % 16 == 0, name  # or some kernels would never be asked
        assert spec.lse == ("in parts" in name) and spec.compiled == ("compiled" in name), name
        assert spec.segments == ("segments" in name or "padding" in name), name
        scaled = "scale" in name
        assert (spec.scale, spec.softcap) == ((0.5, 4.0) if scaled else (None, None)), name
        assert spec.sinks == ("sinks" in name), name
        dropped = any(word in name for word in ("share", "same mask", "with dropout"))
        assert (spec.dropout > 0) == dropped and item.deterministic == ("same bits" in name), name
        window = re.search(r", window (\d+)", name)
        assert spec.window == (int(window[1]) if window else None), name
        heads = re.search(r", (\d+) heads over (\d+)", name)
        assert not heads or (str(spec.n_head), str(spec.n_kv_head)) == heads.groups(), name


def test_every_question_asks_the_kernel_for_what_its_spec_says() -> None:
    """Spec, shapes and options of the first call; after it no question goes on."""

    class Asked(Exception):
        pass

    def attend(q: Any, k: Any, v: Any, spec: Spec, **more: Any) -> Any:
        wants = item.spec.dropout * ("share" not in item.name)  # first without, to compare with
        assert spec == replace(item.spec, dropout=wants), item.name
        heads = [spec.n_head, spec.n_kv_head, spec.n_kv_head]
        assert [t.shape[-2] for t in (q, k, v)] == heads and k.shape == v.shape, item.name
        assert {(t.shape[-1], t.dtype) for t in (q, k, v)} == {(spec.head_dim, torch.float32)}
        given = {name: more.get(name) is not None for name in ("segments", "sinks", "cache")}
        cached = spec.cache in ("static", "paged")
        assert given == {"segments": spec.segments, "sinks": spec.sinks, "cache": cached}, item.name
        assert q.requires_grad == (spec.grad and not spec.lse), item.name
        raise Asked

    def forward(q: Any, k: Any, v: Any, spec: Spec, _offset: int, segments: Any) -> Any:
        return attend(q, k, v, spec, segments=segments)

    backend = replace(get("manual"), attend=attend, partial=Partial(forward, forward))
    for item in items(["float32"]):
        if not item.spec.compiled:
            with pytest.raises(Asked):
                item.ask(backend, item.spec, "cpu")


def test_a_check_says_how_far_it_is_and_leaves_the_random_state_alone(monkeypatch) -> None:
    asked = [asked_alone("the same mask again"), asked_alone("1")]
    monkeypatch.setattr(check, "items", lambda *_: asked)
    torch.manual_seed(11)
    before, told = torch.get_rng_state(), []
    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=iter((5.0, 8.5)).__next__))
    report = check.check("eager", ["cpu"], ["float32"], watch=lambda *now: told.append(now))
    assert report.total == check.Count(2) and torch.equal(before, torch.get_rng_state())
    assert (report.name, report.backend, report.seconds) == ("eager", "manual", 3.5)
    assert not report.quick and report.machine == {"cpu": attention.Machine.here("cpu").name}
    assert told == [
        (0, 2, "the same mask again, float32, cpu"), (1, 2, "1, float32, cpu"), (2, 2, "done")
    ]  # fmt: skip


def test_progress_is_a_bar_in_a_terminal_and_else_a_line_every_ten_seconds(
    monkeypatch, capsys
) -> None:
    now = [0.0]
    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = check.progress()
    for now[0] in (9.9, 10.1, 20.0, 20.2):
        watch(int(now[0]), 40, "gqa")
    assert capsys.readouterr().err == "10 of 40: gqa\n20 of 40: gqa\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    watch(10, 40, "gqa, float32, cpu" + "." * 40)
    watch(40, 40, "done")
    bar = "#" * 7 + " " * 23  # a quarter of 30
    text = "gqa, float32, cpu" + "." * 23  # 40 in all
    assert capsys.readouterr().err == f"\r\x1b[K[{bar}] 10/40 {text}\r\x1b[K"


def test_a_report_is_a_table_then_refusals_then_the_verdict() -> None:
    report = check.Report("mine.py", "mine", "a draft", {"cpu": "A", "cuda": "B"}, "2.13", True,
                          check.Count(3, 12, 1), {"canary": check.Count(1, 12), "window":
                          check.Count(2), "float32, cpu": check.Count(3, 12, 1)},
                          {"no": 1, "never": 20}, seconds=7.6)  # fmt: skip
    head = ["mine (a draft)", "cpu: A; cuda: B; torch 2.13", "",
            "              passed  failed  refused",
            "window             2       -        -", "canary             1      12        -",
            "float32, cpu       3      12        1", "in all             3      12        1",
            "", "Refused, as its Caps declare:", "     1  no", "    20  never"]  # fmt: skip
    end = "All that it declares is right. Without --quick more is asked. 8 s."
    assert check.text(report).splitlines() == [*head, "", end]
    assert check.text(replace(report, quick=False)).endswith("declares is right. 8 s.")
    none = replace(report, total=check.Count(refused=5))
    assert check.text(none).endswith("\nIt refuses all: nothing ran. 8 s.")
    found = [{"what": f"c{n}", "dtype": "float32", "device": "cpu", "why": "off"}
             for n in range(12)]  # fmt: skip
    wrong = replace(report, failures=found, script="import this", refusals={})
    assert check.text(wrong).splitlines() == [
        *head[:-4], "", "12 of 15 failed:", *(f"  c{n}, float32, cpu: off" for n in range(10)),
        "  and 2 more (--json has all)", "", "The first as a script:", "", "import this",
    ]  # fmt: skip
    assert "more (--json" not in check.text(replace(wrong, failures=found[:10]))


def test_the_command(tmp_path: Path, capsys) -> None:
    """With -m, as it is typed."""
    words = [sys.executable, "-m", "attention", "check", str(tmp_path / "none.py")]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("error: attention kernel ")
    assert run.stderr.endswith("none.py' cannot be used: there is no such file\n")
    for words, why in ((["manual", "--dtype=int8"], "must be some of"),
                       (["manual", "--device=cuda:9" if torch.cuda.is_available() else
                         "--device=cuda"], "there is no such device"),
                       (["manual", "--device=cpu:one"], "there is no such device"),
                       (["manual", "--device=cpu:-1"], "there is no such device")):  # fmt: skip
        with pytest.raises(SystemExit) as e:
            check.main(words)
        assert e.value.code == 2 and why in capsys.readouterr().err


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
    assert "'no_such_package' is not installed" in packages and "no dropout" in dropout
    with pytest.raises(attention.BackendUnavailable, match="cannot run here"):
        attention.select(path, attention.Spec(2, 2, 16, "float32"), "cpu",
                         attention.Policy(fallback=False))  # fmt: skip


def test_it_may_need_a_package_that_no_other_kernel_does(tmp_path: Path) -> None:
    path = kernel(tmp_path, caps="packages=('numpy',)")
    assert "numpy" not in attention.packages()
    chosen = attention.select(path, attention.Spec(2, 2, 16, "float32"), "cpu")
    assert chosen.backend.name == "mine" and not chosen.rejected


def test_a_probe_finds_it_wrong(tmp_path: Path) -> None:
    path, _ = planted("not rescaled to the new maximum", tmp_path)
    backend = attention.get(str(path))
    why = attention.probe(backend, attention.Spec(2, 2, 16, "float32"), "cpu").why
    assert why and "its numbers are wrong" in why[0]


def test_the_first_of_five_runs_counts() -> None:
    """As where the first call warms something up and is rounded otherwise."""
    calls = []

    def attend(q: Any, k: Any, v: Any, spec: Spec, **kw: Any) -> Any:
        calls.append(0)
        return get("manual").attend(q, k, v, spec, **kw) * (1 + 1e-6 * (len(calls) == 1))

    with pytest.raises(AssertionError, match="out is not the same each time"):
        promises.same_bits(replace(get("manual"), attend=attend), Spec(2, 2, 16, "float32"), "cpu")
    assert len(calls) == 5


def test_the_last_queries_behind_padding_are_asked_alone(monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(matrix, "check", lambda backend, case, *a, **kw: asked.append(case))
    for Tq in (1, 5, 24):
        promises.padded(Tq, get("manual"), Spec(2, 2, 16, "float32", segments=True), "cpu")
    assert [(c.Tq, c.Tk, c.B, c.segments) for c in asked] == [
        (Tq, 24, 3, "left") for Tq in (1, 5, 24)
    ]


def test_a_case_has_what_its_name_says() -> None:
    for case in matrix.CASES:
        words = set(case.name.split("-"))
        assert {case.segments} - {None} == words & {"packed", "padded"}, case
        assert (case.sinks, case.softcap is not None, case.scale is not None) == tuple(
            name in words for name in ("sinks", "softcap", "scale")
        ), case
        assert words & {"split", "BHTD", "mixed"} <= {case.layout}, case
        assert {case.kind} - {"noise"} == words & {"equal", "dominant"}, case
        assert (case.size > 2) == bool({"large", "large4", "overflow"} & words), case
        assert (case.window is not None) == ("window" in case.name), case
        assert not words & {"gqa", "mqa"} or case.Hkv < case.H
        assert case.Tq <= case.Tk or f"{case.Tq}x{case.Tk}" in case.name
        assert ("mqa" in words) <= (case.Hkv == 1)
        for word in words:
            if word.startswith("window") and word != "window":
                assert case.window == int(word.removeprefix("window"))
            if re.fullmatch(r"D\d+", word):
                assert int(word[1:]) == case.D
            if re.fullmatch(r"\d+(x\d+)?", word):
                assert [case.Tq, case.Tk] == [*map(int, word.split("x") * 2)][:2]


@pytest.mark.parametrize("text, why", [
    (None, "there is no such file"),
    ("x = 1", "it defines no BACKEND"),
    ("BACKEND = {}", "its BACKEND is a dict, not a Backend"),
    (OWN.replace('"mine"', '"sdpa"'), "its name 'sdpa' is taken"),
    (OWN.replace('"mine"', '"auto"'), "its name 'auto' is taken"),
    (OWN.replace("(Caps({caps}),)", "(Caps())"), "its caps are no tuple of Caps"),
    (OWN.replace("(Caps({caps}),)", "()"), "its caps are no tuple of Caps"),
    (OWN.replace("{fallback!r}", "'auto'"), "it would fall back to 'auto'"),
    ("a = 1\nb = a / 0", "line 2: ZeroDivisionError: division by zero"),
    ("def f():\n  return 1 / 0\n\nx = f()", "line 2: ZeroDivisionError: division by zero"),
    ("def f():\n  return [\n", "line 2: SyntaxError:"),
    ("import sys\nsys.exit('bye')", "line 2: SystemExit: bye"),
    ("import no_such_thing", "line 1: ModuleNotFoundError: No module named 'no_such_thing'"),
    ("raise ImportError('none', name='attention')",  # as from where pip has installed it
     "line 1: ImportError: none; import it as nanoattn"),
])  # fmt: skip
def test_a_file_that_is_no_backend_is_told_in_a_sentence(text, why, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        text = text.format(caps="", fallback="sdpa", more="") if "from" in text else text
        path.write_text(text, encoding="utf-8")
    with pytest.raises(attention.BackendUnavailable) as e:
        attention.get(str(path))
    assert str(e.value).startswith(f"attention kernel '{path}' cannot be used: {why}")
    assert ("import it as" in str(e.value)) == ("import it as" in why)
    assert "\n" not in str(e.value)


def test_what_is_a_file() -> None:
    assert own.is_file("mine.py") and own.is_file("kernels/mine") and own.is_file("./a/b.py")
    assert not any(own.is_file(name) for name in (*attention.BACKENDS, *attention.RULES, "sdpa2"))


# --- only who names it runs it ---


def test_a_config_is_made_without_running_it(tmp_path: Path, capsys) -> None:
    path = kernel(tmp_path)
    config = GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=32,
                       attention_backend=path)  # fmt: skip
    train.TrainConfig(attention_backend=path)
    GPTConfig(attention_backend=str(tmp_path / "of_another_machine.py"))
    model = GPT(config)
    assert capsys.readouterr().out == ""
    chosen, _ = model.attention()  # here its kernel is chosen
    assert chosen.backend.name == "mine" and capsys.readouterr().out == "it ran\n"


def saved(folder: Path, path: str, **more: Any) -> GPTConfig:
    """A checkpoint of a model that was trained with the kernel in that file, and these settings."""
    config = GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=32,
                       attention_backend=path)  # fmt: skip
    sizes = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 32}
    settings = train.TrainConfig(out_dir=str(folder), attention_backend=path, **sizes, **more)
    checkpoint.save(
        folder, weights=GPT(config).state_dict(), optimizer={}, keep=1, state={"step": 1},
        settings={"model": asdict(config), "train": asdict(settings), "tokenizer": {}},
    )  # fmt: skip
    return config


def test_a_checkpoint_runs_no_file(tmp_path: Path, caplog, capsys) -> None:
    path = kernel(tmp_path)
    config = saved(tmp_path / "out", path)
    there = checkpoint.load(checkpoint.latest(tmp_path / "out"))
    assert there.config() == replace(config, attention_backend="auto")
    assert f"--attention_backend={path}. Without it 'auto' takes its place." in caplog.text
    with torch.no_grad():
        there.model().attention()
    assert capsys.readouterr().out == ""
    assert there.config(attention_backend=path) == config  # who names it again, gets it


def test_a_resumed_run_runs_the_file_only_if_it_is_named_again(tmp_path, caplog, capsys) -> None:
    path, out = kernel(tmp_path), f"--out_dir={tmp_path / 'out'}"
    saved(tmp_path / "out", path)
    words = ["--init_from=resume", out]
    again = checkpoint.resumed(train.read(train.TrainConfig, words)).settings
    assert again.attention_backend == "auto" and len(caplog.records) == 1
    assert "is run only if you name it" in caplog.text
    words.append(f"--attention_backend={path}")
    assert (
        checkpoint.resumed(train.read(train.TrainConfig, words)).settings.attention_backend == path
    )
    assert len(caplog.records) == 1  # who names it need not be told
    assert capsys.readouterr().out == ""


def test_a_resumed_run_downloads_kernels_only_if_it_is_asked_again(tmp_path, caplog) -> None:
    hub, out = {"attention_hub_kernels": True}, f"--out_dir={tmp_path / 'out'}"
    saved(tmp_path / "out", "sdpa", **hub)
    words = ["--init_from=resume", out]
    again = checkpoint.resumed(train.read(train.TrainConfig, words)).settings
    assert not again.attention_hub_kernels and "that is asked for anew" in caplog.text
    words.append("--attention_hub_kernels=True")
    assert checkpoint.resumed(train.read(train.TrainConfig, words)).settings.attention_hub_kernels


# --- in the commands ---


def test_the_bench_measures_it_by_its_path(tmp_path: Path) -> None:
    """A worker is told the path, as every process has to load it."""
    path = kernel(tmp_path)
    for word in (f"--backends=manual,{path}", f"--backends={path}", f"--attention_backend={path}"):
        found, _ = names(load_config(["bench/cpu.py", word]).settings, "cpu")
        assert found == ["manual", path][-1 - ("manual" in word) :]
    with pytest.raises(UserError, match="there is no such file"):
        names(load_config(["bench/cpu.py", "--backends=none.py"]).settings, "cpu")
