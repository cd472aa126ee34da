"""bench_mfu.py converge: the verdict, and the training paths beside the plain one."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import in_process
import pytest
import torch
from test_bench import SMALL, job, last_line, run, write_tokens

from bench import candidates, modes, rows, tables, training
from bench.bench import Bench
from bench.config import BenchConfig
from bench.job import Job
from bench.process import Failure, Outcome
from core.settings import UserError
from train import TrainConfig


def argv(tmp_path: Path, *more: str) -> list[str]:
    return ["converge", *SMALL, "--dataset=tiny", f"--data_dir={write_tokens(tmp_path)}", "--json",
            "--learning_rate=0.01", *more]  # fmt: skip


def test_the_training_paths_beside_a_plain_one(tmp_path, monkeypatch):
    in_process.use(monkeypatch)
    steps = 20
    more = [f"--steps={steps}", "--seeds=2", "--record=p", f"--records_dir={tmp_path}"]
    code, out = run(argv(tmp_path, "--paths=float32,bfloat16,bfloat16-residual", *more))
    content = last_line(out)
    table = {r["backend"]: r for r in content["rows"]}
    assert list(table) == ["plain", "float32", "bfloat16", "bfloat16-residual"]
    assert all(r["status"] == "ok" and len(r["losses"]) == steps for r in table.values())
    base, exact, half = (table[n]["losses"] for n in ("plain", "float32", "bfloat16-residual"))
    # float32 differs by the order of sums alone, bfloat16 by its rounding: both really ran
    assert exact == pytest.approx(base, abs=2e-4) and base[-1] < base[0] - 0.1
    assert half == pytest.approx(base, abs=0.1) and half != pytest.approx(base, abs=2e-4)
    assert table["bfloat16"]["losses"] != half
    for row in table.values():
        assert len(row["rounds"]) == 20 and len(row["final_losses"]) == 2
        assert row["final_losses"][0] == pytest.approx(sum(row["losses"][-2:]) / 2)
        assert row["final_loss"] == pytest.approx(sum(row["final_losses"]) / 2)
    first, second = table["plain"]["final_losses"]
    noise = abs(first - second) / 2**0.5  # the standard deviation of two
    assert table["float32"]["seed_noise"] == pytest.approx(noise)
    assert table["plain"]["verdict"] == "baseline" and table["float32"]["verdict"] == "ok"
    failed = any(r["verdict"] == "FAIL" for r in table.values())
    assert code == int(failed)
    (folder,) = tmp_path.glob("*_cpu_p")
    assert json.loads((folder / "record.json").read_text(encoding="utf-8")) == content
    assert (folder / "loss.png").is_file() and "as far as the seeds scatter" in out


def judged(base: list[float], other: list[float], **how: Any) -> tuple[str, bool]:
    """The verdict on runs that end at these losses, a seed each."""

    def row(name: str, finals: list[float]) -> dict[str, Any]:
        losses = [x for final in finals for x in [5.0] * 18 + [final] * 2]
        rounds = [{"ms": 2.0, "losses": losses[i : i + 4]} for i in range(0, len(losses), 4)]
        return {"backend": name, "status": "ok", "ms": 2.0, "rounds": rounds}

    table = [row("plain", base), row("fast", other)]
    passed = rows.of_convergence(table, "plain", seeds=len(base), **how)
    if len(base) > 1:  # the noise that all are held against
        assert [r["seed_noise"] for r in table] == pytest.approx([statistics.stdev(base)] * 2)
    return table[1]["verdict"], passed


def test_the_verdict_of_several_seeds_is_their_scatter():
    base = [2.00, 2.02, 2.04]  # their standard deviation is 0.02
    assert judged(base, [2.01, 2.01, 2.05], tolerance=1e-9) == ("ok", True)
    assert judged(base, [2.01, 2.03, 2.079], tolerance=1e-9) == ("ok", True)  # by 0.0197
    assert judged(base, [2.01, 2.03, 2.081], tolerance=1) == ("FAIL", False)  # by 0.0203
    # another curve is no proof, even a lower one
    assert judged(base, [1.97, 1.99, 2.01], tolerance=1) == ("FAIL", False)


def test_the_verdict_of_one_seed_is_the_tolerance_both_ways():
    assert judged([2.0], [2.019], tolerance=0.01) == ("ok", True)
    assert judged([2.0], [2.021], tolerance=0.01) == ("FAIL", False)
    assert judged([2.0], [1.979], tolerance=0.01) == ("FAIL", False)


def test_the_losses_that_are_kept_are_the_first_seeds():
    """And the final ones of every seed: each the mean of its last tenth."""
    parts = [[float(10 * part + i) for i in range(10)] for part in range(4)]  # two seeds of 20
    table = [{"backend": "manual", "status": "ok", "ms": 1.0,
              "rounds": [{"ms": 1.0, "losses": part} for part in parts]}]  # fmt: skip
    assert rows.of_convergence(table, "manual", 0.01, seeds=2)
    (row,) = table
    assert row["losses"] == [*map(float, range(20))]
    assert row["final_losses"] == [18.5, 38.5] and row["final_loss"] == 28.5
    assert row["seed_noise"] == pytest.approx(math.sqrt(2 * 10**2))
    assert row["rounds"] == [{"ms": 1.0}] * 4 and row["verdict"] == "baseline"


def test_what_a_backend_saves():
    table = [{"backend": "manual", "status": "ok", "ms": 4.0, "memory_bytes": 100,
              "rounds": [{"ms": 4.0, "losses": [2.0]}]},
             {"backend": "sdpa", "status": "ok", "ms": 1.0, "memory_bytes": 80,
              "rounds": [{"ms": 1.0, "losses": [2.0]}]}]  # fmt: skip
    assert rows.of_convergence(table, "manual", 0.01)
    assert table[1]["time_saved"] == 0.75 and table[1]["memory_saved"] == pytest.approx(0.2)
    assert table[1]["difference"] == 0.0
    for row, gone in zip(table, ("memory_bytes", "memory_saved"), strict=True):
        row |= {"rounds": [{"ms": 4.0, "losses": [2.0]}]}
        del row[gone]  # the baseline's is not known: nothing to be saved
    assert rows.of_convergence(table, "manual", 0.01) and "memory_saved" not in table[1]


def test_the_verdict_in_words_is_of_what_ran():
    def said(*rows: dict[str, Any]) -> list[str]:
        settings = {"tolerance": 0.015}
        made = tables.answers({"mode": "converge", "rows": [*rows], "settings": settings})
        return [text for text in made if text.startswith("Agreement")]

    ok = {"mode": "converge", "status": "ok", "point": {}, "ms": 1.0, "rounds": [{"ms": 1.0}] * 2}
    base = {**ok, "backend": "plain", "verdict": "baseline"}
    good, bad = ({**ok, "backend": n, "verdict": v} for n, v in (("a", "ok"), ("b", "FAIL")))
    assert said({**base, "status": "stopped"}) == said() == []
    assert said(base, good) == ["Agreement: Every final loss is within 1.50% of plain's."]
    assert said(base, bad, good, {**bad, "backend": "c"}) == [
        "Agreement: FAIL: b, c ended further than 1.50% from plain."]  # fmt: skip
    seeds = [{**r, "seed_noise": 0.01234} for r in (base, bad)]
    (text,) = said(*seeds)
    assert text.endswith("b ended further than 0.0123, as far as the seeds scatter, from plain.")


def test_a_path_that_fails_the_verdict_is_exit_code_1(tmp_path, monkeypatch):
    in_process.use(monkeypatch)

    step = candidates.Ours.step
    monkeypatch.setattr(candidates.Ours, "step", lambda self, *args: 1.5 * step(self, *args))
    code, out = run(argv(tmp_path, "--paths=float32", "--steps=10"))
    assert code == 1 and "FAIL: float32 ended further than 1.00% from plain." in out


def test_the_plain_step_is_the_seeds_and_unfused():
    losses = []
    for seed in (3, 3, 4):
        told = job("train", "plain", seed=seed, grad_clip=0.1, attention_backend="manual")
        plain = candidates.build("plain", Job(told))
        assert isinstance(plain, candidates.Plain)
        plain.for_training(plain.setup.scaler())
        assert [g["fused"] for g in plain.optimizer.param_groups] == [False, False]
        assert [g["weight_decay"] for g in plain.optimizer.param_groups] == [0.1, 0.0]
        x, y = Job(told).random_tokens(4)
        losses.append([float(plain.step(x, y, 1, lambda part: None)) for _ in range(3)])
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][2] < losses[0][0]


def asked_of(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Any, list[Any], list[Any]]:
    """A converge run of two seeds whose rounds are made up: its settings, what each seed asks of
    the rounds, and the rows of jobs that give `parts` of them."""
    train = TrainConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, dtype="bfloat16", seed=7,
                        gradient_accumulation_steps=5, attention_backend="sdpa", compile=True,
                        residual_dtype="autocast", data_dir="d", dataset="t")  # fmt: skip
    settings = BenchConfig(train=train, batch_size=3, steps=40, seeds=2, rounds=4, **config)
    here = {"peak_tflops": 1.0, "peak_source": "given", "peak_measured": False}
    bench = Bench("converge", settings, "cpu", 64, ["flex", "sdpa"], None, print, here)
    monkeypatch.setattr(modes.data, "load", lambda *told: asked.append(told))
    asked: list[Any] = []
    tables: list[Any] = []

    def measure(self: Any, found: Any, jobs: Any, points: Any, row: Any, **how: Any) -> list[Any]:
        judge, made = how.pop("judge"), []
        asked.append((jobs, points, how))
        for i, name in enumerate(jobs):
            final = [2.0, 2.01, 2.5, 2.5][i]
            outcome = found[name, ""]
            part = {"ms": 4.0, "losses": [final] * 4}
            outcome.about = {"base_bytes": 1, "compiled": False, "dtype": "float32"}
            outcome.rounds += [part] * (9 if i == 1 and len(outcome.rounds) == 10 else 10)
            made.append(row(name, "", outcome))
        gone = row("flex", "", Outcome(failure=Failure("failed", ["no"])))  # it is not "stopped"
        assert (gone["status"], gone["why"]) == ("failed", ["no"])
        judge(made)
        tables.append(made)
        return made

    monkeypatch.setattr(Bench, "measure", measure)
    assert modes.converge(bench) is tables[-1]
    return train, asked, tables


def test_every_seed_is_a_training_of_its_own_on_the_same_schedule(monkeypatch):
    train, (loaded, *seeds), tables = asked_of(monkeypatch)
    assert loaded == (Path("d/t"), "train", 16, 64) and len(seeds) == 2
    for n, (jobs, points, how) in enumerate(seeds):
        assert list(jobs) == ["manual", "flex", "sdpa"] and points == {"": {"steps": 4}}
        assert how == {"rounds": 10, "fresh": False}
        for name, told in jobs.items():
            assert (told["job"], told["name"], told["baseline"]) == ("converge", name, "")
            schedule = {"seed": 7 + n, "max_iters": 40, "lr_decay_iters": 40, "warmup_iters": 4}
            own = {"batch_size": 3, "attention_backend": name, "attention_fallback": False}
            assert told["train"] == {**vars(train), **schedule, **own}
    # after the first seed there is no final loss yet; after both, of all who did every part
    assert [(r["status"], r["why"]) for r in tables[0]] == [("stopped", ["10 of 20 parts"])] * 3
    manual, flex, sdpa = tables[1]
    assert (flex["status"], flex["why"]) == ("stopped", ["19 of 20 parts"])
    assert "verdict" not in flex and manual["verdict"] == "baseline" and sdpa["verdict"] == "FAIL"
    assert manual["final_losses"] == [2.0, 2.0] and len(manual["losses"]) == 40
    assert manual["tokens_a_step"] == 3 * 5 * 16
    assert manual["tokens_per_s"] == pytest.approx(3 * 5 * 16 / 4e-3)


def test_the_paths_are_trained_beside_a_plain_one_in_all(monkeypatch):
    paths = ("float32", "bfloat16", "bfloat16-residual")
    train, (_, (jobs, _, _), _), tables = asked_of(monkeypatch, paths=paths)
    assert {name: told["baseline"] for name, told in jobs.items()} == {
        "plain": "plain", "float32": "", "bfloat16": "", "bfloat16-residual": ""}  # fmt: skip
    names = ("dtype", "tf32", "attention_backend", "compile", "residual_dtype", "onednn")
    kept = (train.tf32, "sdpa", True)
    assert {name: tuple(told["train"][n] for n in names) for name, told in jobs.items()} == {
        "plain": ("float32", False, "manual", False, "float32", train.onednn),
        "float32": ("float32", *kept, "autocast", train.onednn),
        "bfloat16": ("bfloat16", *kept, "autocast", train.onednn),
        "bfloat16-residual": ("bfloat16", *kept, "autocast", train.onednn),
    }
    assert tables[1][0]["verdict"] == "baseline" and tables[1][0]["backend"] == "plain"


def test_what_converge_cannot_do_is_told_at_once(monkeypatch):
    for config, says in (
        ({"steps": 45}, "must be a multiple of 10, got 45"),
        ({"steps": 5}, "must be a multiple of 10, got 5"),
        ({"batch_size": "auto", "steps": 10}, "has no place in converge"),
    ):
        bench = Bench("converge", BenchConfig(**config), "cpu", 64, ["sdpa"], None, print)
        with pytest.raises(UserError, match=says):
            modes.converge(bench)


def test_compiling_a_converge_run_is_no_step_of_it(tmp_path):
    """The pass that compiles leaves no gradient, no moment and no weight behind."""
    told = job("converge", "manual", dataset="tiny", data_dir=str(write_tokens(tmp_path)))
    losses = []
    for compiled in (False, True):
        worker = training.Training(told)
        worker.compiled = compiled
        before, passes = [p.clone() for p in worker.who.model.parameters()], []
        some = next(worker.who.model.parameters())
        some.register_post_accumulate_grad_hook(lambda _, to=passes: to.append(1))
        assert worker.warm_up({})["peak_bytes"] > 0
        assert len(passes) == compiled
        assert all(map(torch.equal, before, worker.who.model.parameters()))
        assert all(p.grad is None for p in worker.who.model.parameters())
        losses.append(worker.round({"steps": 3})["losses"])
    assert losses[0] == losses[1]
