"""bench/curves.py: the loss curves of the fast training paths beside the plain one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_train import TINY, enter, make_data

import train
from bench import curves
from bench.curves import Curve, CurvesConfig, judge, plain, smooth

STEPS = 12


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A config file of a tiny model, and the text it learns from."""
    folder = tmp_path_factory.mktemp("curves")
    settings = {**TINY, "dataset": "tiny"}
    del settings["device"]  # the command's own
    config = folder / "tiny.py"
    config.write_text("".join(f"{k} = {v!r}\n" for k, v in settings.items()), encoding="utf-8")
    data_dir = make_data(folder / "data")
    return [f"--config={config}", f"--data_dir={data_dir}", f"--steps={STEPS}", "--seeds=2",
            "--device=cpu"]  # fmt: skip


def in_this_process(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """train.py as the command says, without starting Python anew."""
    code, out, err = enter(train.main, command[2:])
    return subprocess.CompletedProcess(command, code, out, err)


def test_a_whole_comparison_and_its_record(args, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(curves, "subprocess", SimpleNamespace(run=in_this_process))
    argv = [*args, "--paths=float32,bfloat16-residual", "--record=tiny",
            f"--records_dir={tmp_path}"]  # fmt: skip
    code, out, err = enter(curves.main, argv)
    assert code == 0, err
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("_cpu_tiny") and str(folder) in out
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    found = record["curves"]
    assert set(found) == {"plain", "float32", "bfloat16-residual"}
    for seed in range(2):
        base, exact, half = (found[name][seed]["losses"] for name in found)
        assert len(base) == len(exact) == len(half) == STEPS
        # float32 differs by the order of sums alone, bfloat16 by its rounding: both really ran
        assert exact == pytest.approx(base, abs=2e-5)
        assert half == pytest.approx(base, abs=2e-2) and half != pytest.approx(base, abs=2e-5)
        assert base[-1] < base[0] - 0.1
        vals = [found[name][seed]["val_loss"] for name in found]
        assert vals[1] == pytest.approx(vals[0], abs=2e-4)
    assert found["plain"][0]["losses"] != found["plain"][1]["losses"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "| bfloat16-residual | " in text and out.splitlines()[2] in text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def runs(*finals: float) -> list[Curve]:
    return [Curve([5.0] * 18 + [final] * 2, final + 1) for final in finals]


def test_the_verdict() -> None:
    base = runs(2.00, 2.02, 2.04)  # their standard deviation is 0.02
    (good,) = judge({"plain": base, "fast": runs(2.01, 2.01, 2.05)})
    assert good.noise == pytest.approx(0.02) and good.val_noise == pytest.approx(0.02)
    assert good.differences == pytest.approx([0.01, -0.01, 0.01]) and good.passes
    (bad,) = judge({"plain": base, "fast": runs(2.03, 2.05, 2.07)})
    assert not bad.passes and "**FAIL**" in bad.row()
    (better,) = judge({"plain": base, "fast": runs(1.97, 1.99, 2.01)})
    assert not better.passes  # another curve is no proof, even a lower one
    (lower,) = judge({"plain": base, "fast": [Curve(b.losses[:18] + [1.9] * 2, b.val_loss)
                                              for b in base]})  # fmt: skip
    assert not lower.passes  # nor where only the training loss is lower
    worse_val = [Curve(run.losses, run.val_loss + 0.05) for run in base]
    (overfits,) = judge({"plain": base, "fast": worse_val})
    assert not overfits.passes and "+0.0500" in overfits.row()


def test_a_path_that_fails_the_verdict_is_exit_code_1(args, monkeypatch) -> None:
    monkeypatch.setattr(curves, "plain", lambda config, seed: runs(2.0, 2.1)[seed])
    monkeypatch.setattr(curves, "fast", lambda *asked: runs(3.0)[0])
    code, out, _ = enter(curves.main, [*args, "--paths=float32"])
    assert code == 1 and "**FAIL**" in out


def test_the_plain_path_is_the_seeds(args) -> None:
    config = CurvesConfig(config=args[0].partition("=")[2], data_dir=args[1].partition("=")[2],
                          steps=10, device="cpu")  # fmt: skip
    once, again, other = (plain(config, seed) for seed in (3, 3, 4))
    assert once == again and once.losses[0] != other.losses[0]


def test_smoothing() -> None:
    assert smooth([1.0, 2.0, 3.0, 6.0], over=2) == [1.0, 1.5, 2.5, 4.5]


@pytest.mark.parametrize("change, words", [
    ("--steps=9", "steps must be at least 10, got 9"),
    ("--seeds=1", "seeds must be at least 2, got 1"),
    ("--paths=fp8", "paths must be some of float32, bfloat16, bfloat16-residual, got 'fp8'"),
    ("--config=config/finetune_shakespeare.py", "starts from gpt2-xl, and scratch is meant"),
    ("--data_dir=nowhere", "python -m data"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(args, change, words) -> None:
    code, _, err = enter(curves.main, [*args, change])
    assert code and words in err and len(err.strip().splitlines()) == 1


def test_a_run_that_fails_says_why(args, tmp_path) -> None:
    config = Path(args[0].partition("=")[2])
    broken = tmp_path / "broken.py"
    broken.write_text(
        config.read_text(encoding="utf-8") + "peak_tflops = 1.0\ncompile_mode = 'x'\n"
    )
    code, _, err = enter(curves.main, [*args, f"--config={broken}", "--paths=float32"])
    assert code and "compile_mode" in err
