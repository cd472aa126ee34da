"""The board: an honest record of a real run is accepted, each of twelve lies is refused by name.

A liar has this repository too: unless the lie is about the hash itself, the record is sealed anew
after the edit, and whatever follows from it is computed anew where the lie would do so.
"""

from __future__ import annotations

import copy
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_process
import pytest
import torch
from test_bench import SMALL, run, write_tokens

import attention
from attention.machine.gpus import datasheet_tflops
from bench import board, records
from bench.verify import FROZEN, OTHERS, SHOWS, _kernel, figures, verify
from core import flops
from model import GPTConfig

Content = dict[str, Any]
PROOF = {"error": 2e-7, "allowed": 3e-6, "grad_error": 4e-7, "grad_allowed": 6e-6, "canary": True}


def honest(mode: str, folder: Path, *more: str) -> Content:
    """The record of a real run, made small, and proven."""
    argv = [mode, *SMALL, "--rounds=3", "--backends=manual,sdpa,sdpa_math", "--record=x", *more]
    with pytest.MonkeyPatch.context() as patch:
        in_process.use(patch)
        assert run([*argv, f"--records_dir={folder}"])[0] == 0
    (made,) = folder.glob("*/record.json")
    content: Content = json.loads(made.read_text(encoding="utf-8"))
    for row in content["rows"]:
        if row["status"] == "ok":
            row["proof"] = row.get("proof") or dict(PROOF)
    return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Content:
    folder = tmp_path_factory.mktemp("train")
    return honest("train", folder, "--lengths=16,32", "--batch_sizes=1,2")


@pytest.fixture(scope="module")
def converged(tmp_path_factory: pytest.TempPathFactory) -> Content:
    folder = tmp_path_factory.mktemp("converge")
    words = ("--dataset=tiny", "--steps=10", "--backends=sdpa")
    return honest("converge", folder, f"--data_dir={write_tokens(folder)}", *words)


@pytest.fixture
def content(trained: Content) -> Content:
    return copy.deepcopy(trained)


def row(content: Content, backend: str, mode: str = "train") -> Content:
    return next(r for r in content["rows"] if (r["backend"], r["mode"]) == (backend, mode))


def seal(content: Content) -> Content:
    """As records.write does, after all figures were computed anew from what is there now."""
    for r in content["rows"]:
        if r["status"] == "ok":
            r |= {k: v for k, v in figures(r, content).items() if k in r}
    return records.seal(content)


def check(content: Content) -> list[str]:
    return verify(json.loads(json.dumps(content)), Path("nowhere"))


def on_a_gpu(content: Content) -> Content:
    """The same rounds as if they were an H200's, of which the table of GPUs knows the peak."""
    known = datasheet_tflops("NVIDIA H200", "float32", tf32=True)
    assert known is not None
    here = {"name": "NVIDIA H200", "about": "NVIDIA H200", "kind": "cuda"}
    content["machine"] |= here | {"peak_tflops": known[0], "peak_source": known[1]}
    for r in content["rows"]:
        for one in r.get("rounds", []):
            one["machine"] = "NVIDIA H200, run 0"
    return seal(content)


# ----------------------------------------------------------------------------- what is honest


def test_an_honest_record_is_accepted(trained: Content, converged: Content) -> None:
    assert len({r["mode"] for r in trained["rows"] if r["status"] == "ok"}) == 2
    assert check(trained) == check(converged) == []
    assert check(on_a_gpu(copy.deepcopy(trained))) == []


@pytest.mark.slow
def test_generation_is_accepted_and_its_figures_are_computed_anew(tmp_path: Path) -> None:
    made = honest("decode", tmp_path, "--prompts=4", "--new_tokens=4", "--batch_sizes=1",
                  "--kv_caches=dynamic,paged")  # fmt: skip
    for r in made["rows"]:
        if r["status"] == "ok":
            r["proof"] = {k: v for k, v in PROOF.items() if not k.startswith("grad")}
    assert check(made) == []
    row(made, "sdpa", "decode")["mbu"] *= 1.01
    assert any("decode sdpa" in why and "mbu is" in why for why in check(made))


def test_a_record_that_was_cut_off_says_so_and_may_have_fewer_rounds(content: Content) -> None:
    for r in content["rows"]:
        r["rounds"] = r.get("rounds", [])[:2]
    content |= {"complete": False, "incomplete": "stopped by Ctrl-C"}
    assert check(seal(content)) == []
    del content["complete"]  # nothing said is a claim to be whole
    assert any("it has 2 of " in why for why in check(content))


def test_a_qualify_record_is_checked_part_by_part(trained: Content, converged: Content) -> None:
    shared = {k: v for k, v in trained.items() if k in records.SHARED}
    parts = [{k: v for k, v in c.items() if c is converged or k not in ("commit", "machine")}
             for c in (trained, converged)]  # fmt: skip
    stages = [{"name": name, "status": "done", "seconds": 1.0, "why": "", "record": part}
              for name, part in zip(("training", "converge"), copy.deepcopy(parts))]  # fmt: skip
    stages.append({"name": "proof", "status": "cut", "record": {"rows": [{"backend": "x"}]}})
    whole: Content = {**shared, "mode": "qualify", "stages": stages, "complete": False}
    records.seal(whole)
    assert [part["mode"] for part in records.parts(whole)] == ["train", "converge"]
    assert check(whole) == []
    row(stages[1]["record"], "sdpa", "converge")["verdict"] = "FAIL"
    assert any("did not converge" in why for why in check(whole))


# ----------------------------------------------------------------------------- twelve lies


def another_kernel(c: Content) -> None:
    row(c, "sdpa_math")["kernels"] = ["flash (CPU)"]


def a_sparse_peak(c: Content) -> None:
    on_a_gpu(c)
    c["machine"]["peak_tflops"] *= 2
    seal(c)


def an_unlabelled_peak(c: Content) -> None:
    c["machine"]["peak_source"] = ""


def more_than_the_peak(c: Content) -> None:
    c["machine"]["peak_tflops"] /= 1e6  # and with it every share
    seal(c)
    for r in c["rows"]:
        if r["status"] == "ok" and r["mode"] == "train":
            model = GPTConfig(32, 64, 2, 2, 32, bias=False)
            full = flops.flops_per_token(model, 32) * r["tokens_per_s"]
            r["mfu"] = full / (c["machine"]["peak_tflops"] * 1e12)


def missing_rounds(c: Content) -> None:
    del row(c, "sdpa")["rounds"][2]
    seal(c)


def a_time_edited(c: Content) -> None:
    sdpa = row(c, "sdpa")
    sdpa["ms"] *= 0.9


def another_head_dim(c: Content) -> None:
    sdpa = row(c, "sdpa", "kernel")
    sdpa["point"]["D"] *= 2  # and with it the TFLOP/s
    seal(c)


def no_canary(c: Content) -> None:
    del row(c, "sdpa")["proof"]["canary"]


def typed_by_hand(c: Content) -> None:
    row(c, "sdpa")["mfu"] = 0.6


def a_round_edited(c: Content) -> None:
    for one in row(c, "sdpa")["rounds"]:
        one["ms"] *= 0.9
    sealed = c["rounds_sha256"]
    seal(c)["rounds_sha256"] = sealed


LIES: list[tuple[Callable[[Content], None], str]] = [
    (another_kernel, "train sdpa_math: another kernel than sdpa_math's ran: flash (CPU)"),
    (a_sparse_peak, "but datasheet: NVIDIA H200 datasheet has 494.7"),
    (an_unlabelled_peak, "has no source"),
    (more_than_the_peak, "is more than the peak"),
    (missing_rounds, "train sdpa: it has 2 of 3 rounds"),
    (a_time_edited, "train sdpa: ms is"),
    (another_head_dim, "it has D=32, but a round ran D=16"),
    (no_canary, "train sdpa: its causality test did not pass"),
    (typed_by_hand, "train sdpa: mfu is 0.6, but its rounds and sizes give"),
    (a_round_edited, "its raw rounds do not match their hash"),
]


def test_the_peak_is_that_of_the_products_that_ran(content: Content) -> None:
    on_a_gpu(content)["settings"]["tf32"] = False
    said = "its peak is 494.7 TFLOP/s, but datasheet: NVIDIA H200 datasheet has 66.9"
    assert said in check(content)


def test_a_canary_holds_only_if_it_says_so(content: Content) -> None:
    row(content, "sdpa")["proof"]["canary"] = "not run"
    assert any("train sdpa: its causality test did not pass" in why for why in check(content))


def test_the_rounds_that_a_record_must_have(content: Content, converged: Content) -> None:
    """As many as were asked for: fewer than a sweep's three, and a converge run's of each seed."""
    content["settings"]["rounds"] = 1
    for r in content["rows"]:
        if r["status"] == "ok":
            del r["rounds"][1:]
    assert check(seal(content)) == []
    made = copy.deepcopy(converged)
    made["settings"]["seeds"] = 2
    assert "converge sdpa: it has 10 of 20 rounds" in check(made)


@pytest.mark.parametrize("lie, says", LIES, ids=[lie.__name__ for lie, _ in LIES])
def test_a_lie_is_refused_with_a_sentence_that_names_it(
    lie: Callable[[Content], None], says: str, content: Content
) -> None:
    lie(content)
    found = check(content)
    assert any(says in why for why in found), found


def worse(row: Content) -> Content:
    """Figures of a run that ended half a percent above its baseline."""
    loss = 1.005 * row["final_loss"] / (1 + row["difference"])
    return {"losses": [loss] * 10, "final_losses": [loss], "final_loss": loss}


@pytest.mark.parametrize(
    "edit, says",
    [
        ({"verdict": "FAIL"}, "converge sdpa did not converge"),
        ({"final_losses": [9.0]}, "final_loss"),
        ({"losses": [9.0] * 10, "final_losses": [9.0], "final_loss": 9.0, "difference": 0.0},
         "difference is 0.0, but"),
        (lambda r: dict(worse(r), difference=-0.005), "difference is -0.005, but"),
        (lambda r: {"time_saved": -r["time_saved"]}, "time_saved is "),
        (lambda r: {"memory_saved": r["memory_saved"] + 1e-6}, "memory_saved is "),
        (lambda r: {"final_loss": r["final_loss"] + 1e-6}, "final_loss is"),
    ],
)  # fmt: skip
def test_a_failed_converge_is_refused(edit: Any, says: str, converged: Content) -> None:
    made = copy.deepcopy(converged)
    sdpa = row(made, "sdpa", "converge")
    sdpa.update(edit(sdpa) if callable(edit) else edit)
    assert any(says in why for why in check(made)), check(made)


def test_a_row_that_failed_is_one_sentence_and_the_noise_of_seeds_is_the_baselines(
    converged: Content,
) -> None:
    made = copy.deepcopy(converged)
    sdpa, base = (row(made, name, "converge") for name in ("sdpa", "manual"))
    base["final_losses"] = [base["final_loss"] + d for d in (-1, 1)]
    sdpa["status"] = "unavailable"  # refused, which is no failure
    assert not any("converge sdpa did not" in why for why in check(made))
    sdpa["status"] = "failed"
    del sdpa["final_losses"]
    found = [why for why in check(made) if "converge sdpa" in why]
    assert "converge sdpa did not converge" in found and len(found) == 1, found


def test_a_failed_converge_is_refused_whatever_its_verdict_and_tolerance(
    converged: Content,
) -> None:
    made = copy.deepcopy(converged)
    base = row(made, "manual", "converge")["final_loss"]
    for times, off in ((1.05, "+5.00%"), (0.95, "-5.00%")):  # too good is wrong as well
        row(made, "sdpa", "converge").update({
            "losses": [times * base] * 10, "final_losses": [times * base],
            "final_loss": times * base, "difference": times * base / base - 1,
        })  # fmt: skip
        assert any(f"did not converge: its final loss is {off} off" in why for why in check(made))
    row(made, "manual", "converge")["verdict"] = "ok"
    assert "converge has no baseline" in check(made)
    row(made, "manual", "converge")["verdict"] = "baseline"
    made["settings"]["tolerance"] = 0.1
    assert "its tolerance is 10%, at most 1% is allowed" in check(made)


def test_the_hash_is_of_all_that_was_measured() -> None:
    row = {"mode": "kernel", "backend": "sdpa", "point": {"B": 1}, "rounds": [{"ms": 1.0}], "ms": 1}
    hashes = {records.rounds_sha256({"rows": [row]})}
    for name in ("mode", "backend", "point", "rounds"):
        hashes.add(records.rounds_sha256({"rows": [row | {name: "other"}]}))
    assert len(hashes) == 5
    assert records.rounds_sha256({"rows": [row | {"ms": 2}]}) in hashes  # which follows from them


# ----------------------------------------------------------------------------- other lies


@pytest.mark.parametrize(
    "edit, says",
    [
        (lambda c: row(c, "sdpa").update(backend="flash_attn_9"), "unknown backend"),
        (lambda c: row(c, "manual").update(backend="triton"), "saw no kernel of this backend"),
        (lambda c: row(c, "manual").update(device_kernels=["flash_fwd_kernel"]), "another kernel"),
        (lambda c: row(c, "manual").update(backend="flex", device_kernels=["flash_fwd_kernel"]),
         "train flex: another kernel than flex's ran: flash_fwd_kernel"),
        (lambda c: on_a_gpu(c)["machine"].update(peak_tflops=990.0), ", but datasheet"),
        (lambda c: row(on_a_gpu(c), "manual", "kernel").update(backend="flash_attn_2"),
         "kernel flash_attn_2 B=1 T=16 H=2 Hkv=2 D=16: the profiler saw no kernel"),
        (lambda c: row(on_a_gpu(c), "manual", "kernel").update(
            backend="flash_attn_2", device_kernels=["pytorch_flash::flash_fwd_kernel"]),
         "another kernel than flash_attn_2's ran: pytorch_flash::flash_fwd_kernel"),
        (lambda c: row(c, "sdpa").update(kernels=["flash (our Triton)"]),
         "another kernel than sdpa's ran: flash (our Triton)"),
        (lambda c: row(c, "sdpa")["proof"].update(error=math.nan), "its error is nan"),
        (lambda c: row(c, "sdpa")["proof"].update(error=1.0), "its error is 1, and"),
        (lambda c: row(c, "sdpa")["proof"].update(grad_error=float("nan")), "its grad_error is"),
        (lambda c: row(c, "sdpa")["proof"].update(canary=False), "its causality test"),
        (lambda c: row(c, "sdpa", "kernel").update(error_out=0.1), "sdpa is WRONG against float64"),
        (lambda c: row(c, "sdpa").update(loss_difference=0.0, loss=99.0), "loss_difference is 0.0"),
        (lambda c: row(c, "sdpa").update(dtype="bfloat16"), "it ran in bfloat16"),
        (lambda c: c["settings"].update(n_layer=3), "parameters, its settings give"),
        (lambda c: c["settings"].update(block_size=64), "it has T=64"),
        (lambda c: c["settings"].update(n_layer="x"), "its settings are invalid"),
        (lambda c: (c["machine"].update(peak_tflops=1e-9), row(c, "sdpa").update(mfu=0.9)),
         "train sdpa: mfu is 0.9, but its rounds and sizes give None"),
        (lambda c: c.update(rows=None), "it is malformed"),
        (lambda c: c.pop("rounds_sha256"), "it is malformed (KeyError"),
        (lambda c: c.update(format=1), "its format is not 2"),
    ],
)  # fmt: skip
def test_other_lies_and_mistakes_are_refused_too(
    edit: Callable[[Content], Any], says: str, content: Content, tmp_path: Path
) -> None:
    edit(content)
    (tmp_path / "record.json").write_text(json.dumps(content), encoding="utf-8")
    found = verify(content, tmp_path)
    assert any(says in why for why in found), found


# What a row of a record tells that nothing in it can prove: how long the worker took to begin and
# how much memory it took. `batch_size` is checked by the size of every round.
FREE = {"setup_s", "warm_up_s", "memory_bytes", "base_bytes", "batch_size"}


def numbers_of(one: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all numbers in it."""
    if isinstance(one, dict | list):
        inside = one.items() if isinstance(one, dict) else enumerate(one)
        return [found for key, value in inside for found in numbers_of(value, (*path, key))]
    return [path] if isinstance(one, int | float) else []


def edited(content: Content, path: tuple[Any, ...]) -> Content:
    """The record with this number a twentieth larger (a truth turned round), sealed anew."""
    made = json.loads(json.dumps(content))
    *way, last = path
    place = made
    for key in way:
        place = place[key]
    value = place[last]
    place[last] = not value if isinstance(value, bool) else value + max(1, abs(value) // 20) if (
        isinstance(value, int)) else value * 1.05 + 1e-12  # fmt: skip
    return records.seal(made)


def unseen(content: Content) -> set[Any]:
    """The numbers of its rows that can be edited, and the check says nothing: but for its rounds,
    of which only the sizes are looked at, and for its proof, which has limits.
    """
    assert check(content) == []
    paths = [p for p in numbers_of(content["rows"]) if "proof" not in p]
    paths = [p for p in paths if "rounds" not in p or ("shape" in p and p[2] == 1)]
    return {path[1:] for path in paths if not check(edited(content, ("rows", *path)))}


def only(content: Content, *chosen: tuple[str, str]) -> Content:
    """The record with one row of each backend and mode that is named."""
    made = copy.deepcopy(content)
    return records.seal(made | {"rows": [row(made, *names) for names in chosen]})


def test_no_figure_of_a_row_can_be_edited(trained: Content, converged: Content) -> None:
    base = [("manual", "converge"), ("sdpa", "converge")]
    for whole, chosen, free in (
        (trained, [("sdpa", "train")], {"first_step_s", "compiled"}),
        (trained, [("sdpa", "kernel")], {"error_out", "error_grad"}),
        (converged, base, {"compiled", "losses"}),  # before the last tenth of the steps
    ):
        found = unseen(only(whole, *chosen))
        assert {path[0] for path in found} - FREE <= free, found
        assert ("losses", 9) not in found


def test_generation_by_hand_is_accepted_and_no_figure_of_it_can_be_edited(content: Content) -> None:
    C, L, V, B, P, new = 32, 2, 64, 3, 4, 8
    products = V * C + L * 12 * C * C
    N = products + C + L * 2 * C  # and the gains of the norms
    where = {"B": B, "P": P, "cache": "dynamic", "new_tokens": new}
    shape = {**{k: v for k, v in where.items() if k != "cache"}, "parameters": N}
    run = row(content, "sdpa")["rounds"][0]["machine"]
    always = {"shape": shape, "machine": run}
    rounds = [{"ms": ms, "first_ms": 10 * ms, "cache_bytes": 100 * i, **always}
              for i, ms in enumerate((2.0, 4.0, 3.0))]  # fmt: skip
    keys = B * (P + new / 2) * 2 * L * C * 4  # bytes of keys and values, of a mean text
    made = {
        "mode": "decode", "backend": "sdpa", "point": where, "status": "ok", "title": "x",
        "kernels": ["math"], "events": [], "device_kernels": [], "setup_s": 1.0, "warm_up_s": 1.0,
        "proof": {k: v for k, v in PROOF.items() if not k.startswith("grad")}, "rounds": rounds,
        "ms": 3.0, "first_ms": 30.0, "q1_ms": 2.5, "q3_ms": 3.5, "spread": 1 / 3, "noisy": True,
        "tokens_per_s": B / 0.003, "cache_bytes": 200, "mbu": (4 * N + keys) / 0.003 / 8e9,
    }  # fmt: skip
    content |= {"mode": "decode", "rows": [made]}
    content["machine"]["bandwidth"] = 8e9
    found = unseen(records.seal(content))
    assert found == {("setup_s",), ("warm_up_s",)}
    # with our matrices, and the head beside the embedding, in int8
    content["settings"]["weights"] = "int8"
    shape["int8_parameters"] = products
    made["mbu"] = (4 * (N - products) + products + keys) / 0.003 / 8e9
    assert check(records.seal(content)) == []


# ----------------------------------------------------------------------------- the page


def test_every_record_here_is_what_it_says_and_the_board_is_up_to_date(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert board.main(["--check"]) == 0, capsys.readouterr().err
    with pytest.raises(SystemExit):
        board.main(["--help"])
    assert "usage: python -m bench.board [-h] [--check]\n" in capsys.readouterr().out


def test_old_records_are_accepted_as_the_very_files_only(tmp_path: Path) -> None:
    names = [line.split()[1] for line in FROZEN.read_text(encoding="ascii").splitlines()]
    assert len(names) == 11
    old = (board.FOLDER / names[-1]).read_text(encoding="utf-8")
    (tmp_path / "record.json").write_text(old, encoding="utf-8")
    assert verify(json.loads(old), tmp_path) == []
    (tmp_path / "record.json").write_text(old + " ", encoding="utf-8")
    assert FROZEN.name in verify(json.loads(old), tmp_path)[0]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records, and of pages, of its own."""
    for name in ("FOLDER", "PAGE"):
        monkeypatch.setattr(board, name, tmp_path / name)
    board.FOLDER.mkdir()
    return tmp_path


def test_the_pages_hold_every_row_and_the_check_sees_a_change(
    own: Path, content: Content, capsys: pytest.CaptureFixture[str]
) -> None:
    content |= {"commit": None, "dirty": True}  # nothing of this checkout matters here
    records.write(board.FOLDER / "mine", content, whole=False)
    assert board.main(["--check"]) == 1 and not board.PAGE.exists()
    assert "PAGE is out of date" in capsys.readouterr().err
    assert board.main([]) == 0 and board.main(["--check"]) == 0
    text, sdpa = board.PAGE.read_text(encoding="utf-8"), row(content, "sdpa")
    assert f"{sdpa['tokens_per_s']:,.0f}" in text and f"{sdpa['mfu']:.1%}" in text
    assert f"{sdpa['proof']['error']:.1e}" in text and "| given |" in text
    assert "2 layers, 32 wide, 2 heads, vocabulary 64, float32" in text
    ok = [r for r in content["rows"] if r["status"] == "ok"]
    assert text.count("](../bench/records/mine/README.md)") == len(ok)  # the slowest, too
    board.PAGE.write_text(text + "x", encoding="utf-8")
    assert board.main(["--check"]) == 1
    assert "PAGE is out of date" in capsys.readouterr().err
    typed_by_hand(content)
    records.write(board.FOLDER / "mine", content, whole=False)
    (board.FOLDER / "empty").mkdir()
    (board.FOLDER / "list").mkdir()
    (board.FOLDER / "list" / "record.json").write_text("[]", encoding="utf-8")
    assert board.main([]) == 1  # and nothing is written
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and told[0].startswith("empty: cannot read record.json")
    assert told[1].startswith("list: cannot read record.json (not an object)")
    assert told[2].startswith("mine: train sdpa: mfu is 0.6")


def test_the_command_ends_with_what_the_check_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench" / "records").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(records, "ROOT", tmp_path)
    for words, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["board", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(board.__file__, run_name="__main__")
        assert ended.value.code == code


def test_the_heading_of_a_table_is_all_that_its_lines_have_in_common(content: Content) -> None:
    point = {"B": 1, "T": 16, "H": 8, "Hkv": 2, "D": 64, "window": None}
    alone: Content = {"mode": "kernel", "point": point}
    assert board.heading(alone, content) == "8 heads of 64 (2 for keys), float32"
    point |= {"Hkv": 8, "window": 128}
    assert board.heading(alone, content) == "8 heads of 64, window 128, float32"
    row: Content = {"mode": "train", "point": {}}
    said = "2 layers, 32 wide, 2 heads, vocabulary 64, float32"
    assert board.heading(row, content) == said
    content["settings"] |= {
        "n_kv_head": 1, "attention_window": 5, "bias": True, "dropout": 0.1, "steps": 70,
        "gradient_checkpointing": True, "residual_dtype": "autocast",
    }  # fmt: skip
    said = ("2 layers, 32 wide, 2 heads (1 for keys), vocabulary 64, window 5, float32, biases, "
            "dropout 0.1, gradient checkpointing, residual in autocast")  # fmt: skip
    assert board.heading(row, content) == said
    assert board.heading({**row, "mode": "converge"}, content) == said + ", 70 steps"


def test_how_far_a_line_of_the_board_can_be_trusted() -> None:
    machine = {"peak_source": "datasheet: NVIDIA H200 datasheet"}
    part: Content = {"machine": machine, "dirty": False, "commit": "0" * 40, "format": 2}
    row = {"proof": {"error": 1.24e-6}}
    assert board.trust(row, part) == ["datasheet", "1.2e-06", "checked"]
    for more, says in (
        ({"complete": True}, "checked"), ({"complete": False}, "checked, incomplete"),
        ({"dirty": True}, "checked, uncommitted code"), ({"commit": None}, "checked, no commit"),
        ({"dirty": None, "commit": None, "complete": False}, "checked, incomplete, no commit"),
        ({"dirty": True, "commit": None}, "checked, uncommitted code"),
        ({"format": 1, "dirty": True, "complete": False}, "before proofs were kept"),
    ):  # fmt: skip
        assert board.trust(row, {**part, **more})[2] == says
    for source, says in (("--peak_tflops", "given"), ("measured: products", "measured"),
                         ("measured then; now 3", "measured")):  # fmt: skip
        assert board.trust(row, {**part, "machine": {"peak_source": source}})[0] == says
    assert board.trust({**row, "error_out": 3e-7}, part)[1] == "3.0e-07"  # at this very shape
    assert board.trust({"proof": None}, part)[1] == board.trust({}, part)[1] == "-"


def test_machines_stand_together_only_where_they_did_the_same(content: Content) -> None:
    gpu, other = on_a_gpu(copy.deepcopy(content)), copy.deepcopy(content)
    other["settings"]["block_size"] = 64
    sections, _, _ = board.board({"a": content, "b": gpu, "c": other})
    ((_, (head, lines)),) = sections["Training steps"].items()
    work = [tuple(line[: head.index("machine")]) for line in lines]
    assert work == sorted(work) and {w[0] for w in work} == {"32", "64"}
    machines = [line[head.index("machine")] for line in lines if line[0] == "32"]
    assert machines == sorted(machines) and len(set(machines)) == 2
    peaks = {line[head.index("machine")]: line[head.index("peak")] for line in lines}
    assert peaks["NVIDIA H200"] == "datasheet"


def test_a_line_of_the_board_says_how_many_sequences_a_step_had(content: Content) -> None:
    """Of all micro-batches together; where each backend had a batch of its own, of that one."""
    content["settings"] |= {"gradient_accumulation_steps": 5}  # of 4 sequences each

    def tokens_and_sequences() -> set[tuple[str, ...]]:
        (made,) = board.board({"a": content})[0]["Training steps"].values()
        return {tuple(line[:3]) for line in made[1]}

    assert tokens_and_sequences() == {("32", "20", "no")}
    content["settings"]["batch_size"] = "auto"
    for r in content["rows"]:
        r["batch_size"] = 7
        r["compiled"] = True  # as the worker found, whatever the settings leave open
    assert tokens_and_sequences() == {("32", "7", "yes")}


def test_the_columns_of_the_board(content: Content, converged: Content) -> None:
    """Every cell of a line, and the quickest first where the work and the machine are the same."""
    found = board.board({"a": content, "b": converged})[0]
    here, dates = content["machine"]["about"], (content["date"][:10], converged["date"][:10])
    tables_ = {title: dict(zip(made[0], zip(*made[1]), strict=True))
               for title, by in found.items() for made in by.values()}  # fmt: skip
    train, kernel = tables_["Training steps"], tables_["Attention alone, forward and backward"]
    assert list(train) == ["tokens", "sequences", "compiled", "machine", "kernel", "tok/s",
                           "ms/step", "quartiles", "mfu", "causal", "peak", "error", "record",
                           "date"]  # fmt: skip
    assert list(kernel) == ["tokens", "sequences", "machine", "kernel", "TFLOP/s", "of peak",
                            "both ms", "quartiles", "peak", "error", "record", "date"]  # fmt: skip
    final = tables_["Final losses and the baseline's"]
    assert list(final)[:7] == ["tokens", "sequences", "machine", "kernel", "final loss", "off",
                               "verdict"]  # fmt: skip
    names = {name: row(content, name)["ms"] for name in ("manual", "sdpa", "sdpa_math")}
    quickest = sorted(names, key=names.__getitem__)
    assert [seen.partition(":")[0] for seen in train["kernel"]] == quickest
    assert set(train["tokens"]) == {"32"} and set(train["sequences"]) == {"4"}
    for title, made in (("train", train), ("converge", final)):
        assert set(made["machine"]) == {here} and set(made["peak"]) == {"given"}, title
    assert set(train["date"]) == {f"[{dates[0]}](../bench/records/a/README.md)"}
    assert set(kernel["tokens"]) == {"16", "32"} and set(kernel["sequences"]) == {"1", "2"}
    content["rows"].reverse()
    assert board.board({"a": content, "b": converged})[0] == found


def test_what_was_refused_or_failed_is_on_the_board(content: Content) -> None:
    lost = {"mode": "train", "backend": "flex", "point": {}, "status": "failed", "why": ["it fell"]}
    content["rows"].append(lost)
    about = content["machine"]["about"]
    _, (_, lines), _ = board.board({"a": content})
    assert [
        about,
        "flex",
        "failed (train)",
        "it fell",
        "[1](../bench/records/a/README.md)",
    ] in lines


def test_the_hash_of_the_rounds_needs_no_order_of_keys(content: Content) -> None:
    turned = json.loads(json.dumps(content), object_pairs_hook=lambda p: dict(reversed(p)))
    assert records.rounds_sha256(turned) == records.rounds_sha256(content)
    assert torch.get_num_threads() == content["machine"]["threads"]


def test_every_backend_has_names_to_be_known_by() -> None:
    assert set(attention.BACKENDS) | OTHERS == set(SHOWS)
    assert {"nanogpt", "hf_eager", "hf_sdpa", "hf_flash_attention_2"} == OTHERS


# The short names that a backend's rows have, and the device's kernels on a GPU.
SEEN: list[tuple[str, list[str], list[str]]] = [
    ("manual", [], ["ampere_sgemm_32x128_tn"]), ("tiled", [], []), ("hf_eager", [], []),
    *((name, [short], [device]) for name in ("sdpa", "hf_sdpa") for short, device in (
        ("flash", "pytorch_flash::flash_fwd_kernel"), ("efficient", "fmha_cutlassF_bf16_aligned"),
        ("cudnn", "cudnn_generated_fort_native_sdpa_sm90"), ("overrideable", "attn_fwd"))),
    ("sdpa_flash", ["flash (FA3)"], ["flash_fwd_sm90"]),
    ("sdpa_efficient", ["efficient"], ["fmha_cutlassB_f16"]),
    ("sdpa_cudnn", ["cudnn"], ["cudnn_generated_fort_native_sdpa_sm90"]),
    ("sdpa_math", ["math"], []), ("flex", [], ["triton_tem_fused_flex_attention_3"]),
    ("triton", ["flash (our Triton)"], ["forward_kernel", "dkdv_kernel", "dq_kernel"]),
    ("flash_attn_2", [], ["void flash::flash_fwd_kernel<64>"]),
    ("flash_attn_3", [], ["cutlass::device_kernel<flash::FlashAttnFwdSm90>"]),
    ("flash_attn_4", [], ["kernel_cutlass_FlashAttentionForwardSm100"]),
    ("hf_flash_attention_2", [], ["flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"]),
    ("paged", ["paged decode (Triton)"], []), ("paged", ["flash (CPU)"], []), ("paged", [], []),
    ("nanogpt", ["flash"], []), ("nanogpt", [], []),
]  # fmt: skip
NAMELESS = {"manual", "tiled", "hf_eager", "sdpa_math", "paged", "nanogpt"}  # on the device


@pytest.mark.parametrize("name, short, device", SEEN)
def test_the_kernels_that_a_row_may_show(name: str, short: list[str], device: list[str]) -> None:
    def found(*seen: list[str], cuda: bool = True, mode: str = "train") -> list[str]:
        row = {"backend": name, "mode": mode, "kernels": seen[0], "device_kernels": seen[1]}
        return list(_kernel(row, cuda))

    another = f"another kernel than {name}'s ran: "
    assert found(short, device) == [] == found(short, [], cuda=False, mode="decode")
    foreign = "flash (our Triton)" if name != "triton" else "cudnn"
    assert found([*short, foreign], device) == [another + foreign]
    if name not in NAMELESS:
        assert found(short, ["ampere_sgemm_32x128_tn"]) == [another + "ampere_sgemm_32x128_tn"]
    if not short and name in ("manual", "tiled", "hf_eager"):
        (why,) = found([], ["x", "void fmha_cutlassF", "cudnn::sdpa", "flash_fwd"])
        assert why == another + "void fmha_cutlassF, cudnn::sdpa, flash_fwd"
    nothing = ["the profiler saw no kernel of this backend"]
    plain = name in ("manual", "tiled", "hf_eager", "paged", "nanogpt")
    assert found([], []) == ([] if plain else nothing)
    assert found([], [], mode="decode") == (nothing if short and not plain else [])
