"""python -m attention check --cs336: an answer to CS336's assignment 2, and its mistakes named."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from attention.check import command, cs336
from attention.check.named import mistaken

ROOT = Path(__file__).resolve().parent.parent
GETTERS = "\n".join(
    f"def get_flashattention_autograd_function_{kind}(): {{{kind}}}" for kind in cs336.KINDS
)
# Independent of tiled.py: other tiles (32 x 64), -1e6 for hidden scores, rows not blocked backward.
ANSWER = """import math, torch
class FA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal=False):
        ctx.causal, O, L = causal, torch.empty_like(q), q.new_empty(q.shape[:2])
        for i in range(0, q.shape[1], 32):
            Q = q[:, i : i + 32]
            m, o = Q.new_full(Q.shape[:2], -math.inf), torch.zeros_like(Q)
            l = torch.zeros_like(m)
            for j in range(0, k.shape[1], 64):
                S = scores(Q, k[:, j : j + 64], causal, i, j)
                m_new = torch.maximum(m, S.amax(-1))
                P, r = torch.exp(S - m_new[..., None]), torch.exp(m - m_new)
                l = r * l + P.sum(-1)
                o = r[..., None] * o + P @ v[:, j : j + 64]
                m = m_new
            O[:, i : i + 32], L[:, i : i + 32] = o / l[..., None], m + l.log()
        ctx.save_for_backward(q, k, v, O, L)
        return O
    @staticmethod
    def backward(ctx, dO):
        q, k, v, O, L = ctx.saved_tensors
        delta, s = (O * dO).sum(-1, keepdim=True), q.shape[2] ** -0.5
        dQ, dK, dV = (torch.zeros_like(t) for t in (q, k, v))
        for j in range(0, k.shape[1], 64):
            J = slice(j, j + 64)
            P = torch.exp(scores(q, k[:, J], ctx.causal, 0, j) - L[..., None])
            dV[:, J] = P.mT @ dO
            dS = P * (dO @ v[:, J].mT - delta)
            dQ += dS @ k[:, J] * s
            dK[:, J] = dS.mT @ q * s
        return dQ, dK, dV, None
def scores(q, k, causal, i, j):
    S = q @ k.mT / math.sqrt(q.shape[2])
    a, b = torch.arange(q.shape[1])[:, None] + i, torch.arange(k.shape[1]) + j
    return torch.where(a >= b, S, -1e6) if causal else S
"""
MISTAKES = {  # a text of ANSWER, the wrong one, words of the hint
    "no scale": (" / math.sqrt(q.shape[2])", "", "1 / sqrt(D)"),
    "inverted": ("a >= b", "a < b", "inverted"),
    "transposed": ("a >= b", "a <= b", "transposed"),
    "is_causal ignored": (" if causal else S", " if False else S", "is_causal is ignored"),
    "no rescale": ("o = r[..., None] * o", "o = o", "Rescale O"),
    "no maximum": ("torch.maximum(m, S.amax(-1))", "torch.zeros_like(m)", "overflows"),
    "L": ("m + l.log()", "l.log()", "m is missing"),
    "base 2": ("m + l.log()", "(m + l.log()) / math.log(2)", "base 2"),
    "no delta": (" - delta)", ")", "row sums of dO * O"),
    "delta of a tile": ("dO @ v[:, J].mT - delta",
                        "(d := dO @ v[:, J].mT) - (P * d).sum(-1, keepdim=True)", "not over"),
    "dQ": ("dQ += ", "dQ = ", "dQ is overwritten"),
    "float32": ("S = q @ k.mT", "S = (q.float() @ k.mT.float()).to(q.dtype)", "to float32 only"),
    "L not saved": ("(q, k, v, O, L)\n        return O", "(q, k, v, O, L[None])\n        return O",
                    "found 0"),
}  # fmt: skip


def adapters(folder: Path, text: str = ANSWER, pytorch: str = "return FA",
             triton: str = "raise NotImplementedError") -> Path:
    path = folder / "adapters.py"
    getters = GETTERS.format(pytorch=pytorch, triton=triton)
    path.write_text(f"{text}\n{getters}\n", encoding="utf-8")
    return path


def check(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[int, str, str]:
    code = command.main(["--cs336", str(path), "--device=cpu", *words])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_right_answer_passes_every_test(tmp_path, capsys) -> None:
    code, out, err = check(capsys, adapters(tmp_path), "--json")
    report = json.loads(out)["pytorch"]
    assert code == 0 and not report["failures"], report["failures"]
    assert report["features"]["total"]["passed"] == 2 * len(cs336.CASES)
    assert "triton" in err and "not written" in err


FAST = ("no scale", "inverted", "base 2")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in MISTAKES
])
def test_a_mistake_is_named(name, tmp_path, capsys) -> None:
    old, new, words = MISTAKES[name]
    path = adapters(tmp_path, mistaken(ANSWER, (old, new, "")))
    code, out, _ = check(capsys, path, "--first", "--json")
    (failure,) = json.loads(out)["pytorch"]["failures"]
    assert code == 1 and words in failure["why"], failure


@pytest.mark.slow
def test_the_script_fails_too(tmp_path, capsys) -> None:
    path = adapters(tmp_path, ANSWER.replace("dQ += ", "dQ = "))
    script = json.loads(check(capsys, path, "--first", "--json")[1])["pytorch"]["script"]
    command_line = [sys.executable, "-c", script]
    run = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "dQ is overwritten" in run.stderr.splitlines()[-1]


@pytest.mark.skipif(find_spec("triton") is None, reason="package 'triton' is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's would run on the GPU")
def test_both_functions_are_checked(tmp_path, capsys) -> None:
    """Triton's takes float32 only; here it is the same class."""
    code, out, _ = check(capsys, adapters(tmp_path, triton="return FA"), "--quick", "--json")
    counts = json.loads(out)["triton"]["features"]
    assert code == 0 and counts["float64, cpu"]["refused"] == counts["float32, cpu"]["passed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("before", ["import math", "        delta, s ="])
def test_an_endless_loop_is_found(before, tmp_path) -> None:
    """The process ends and prints its line, in the file or in a function."""
    loop = " " * (len(before) - len(before.lstrip())) + "while True: pass\n"
    path = adapters(tmp_path, ANSWER.replace(before, loop + before, 1))
    run = ("import sys, torch._dynamo; from attention.check import command, cs336; "
           "cs336.LIMIT_S = 4; "
           f"sys.exit(command.main(['--cs336', {str(path)!r}, '--device=cpu']))")
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    line = next(n for n, x in enumerate(path.read_text().splitlines(), 1) if "while True" in x)
    assert done.returncode == 1 and f'adapters.py", line {line}' in done.stderr


@pytest.mark.parametrize("changes, words", [
    ({"text": "import cs336_systems"}, "No module named 'cs336_systems'"),
    ({"pytorch": "import cs336_systems.flash"}, "No module named 'cs336_systems'"),
    ({"pytorch": "return 3"}, "got 3"), ({"pytorch": "raise NotImplementedError"}, "not written"),
])
def test_what_cannot_be_checked_is_one_sentence(changes, words, tmp_path, capsys) -> None:
    code, _, err = check(capsys, adapters(tmp_path, **changes))
    assert code == 2 and words in err and err.count("\n") == 1
