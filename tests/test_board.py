"""The board: records of real runs are accepted, wrong ones are refused.

Unless the mistake is about the hash itself, the record is sealed again after the edit.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_process
import pytest
from test_bench import SMALL, run, write_tokens

import attention
from attention.machine.gpus import datasheet_tflops
from bench import board, records
from bench.verify import FROZEN, OTHERS, SHOWS, figures, verify
from core import flops
from model import GPTConfig

Content = dict[str, Any]
PROOF = {"error": 2e-7, "allowed": 3e-6, "grad_error": 4e-7, "grad_allowed": 6e-6, "canary": True}


def honest(mode: str, folder: Path, *more: str) -> Content:
    """The record of a real run, made small, and proven."""
    argv = [mode, *SMALL, "--rounds=3", "--backends=manual,sdpa_math,sdpa", "--record=x", *more]
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
    """Rows of training steps, and of attention alone."""
    made = honest("train", tmp_path_factory.mktemp("train"))
    kernel = honest("kernel", tmp_path_factory.mktemp("kernel"), "--lengths=16", "--batch_sizes=1")
    made["rows"] += kernel["rows"]
    return seal(made)


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
                  "--kv_caches=dynamic,paged")
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
             for c in (trained, converged)]
    stages = [{"name": name, "status": "done", "seconds": 1.0, "why": "", "record": part}
              for name, part in zip(("training", "converge"), copy.deepcopy(parts))]
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


@pytest.mark.parametrize("lie, says", LIES, ids=[lie.__name__ for lie, _ in LIES])
def test_a_lie_is_refused_with_a_sentence_that_names_it(
    lie: Callable[[Content], None], says: str, content: Content
) -> None:
    lie(content)
    found = check(content)
    assert any(says in why for why in found), found


def test_a_failed_converge_is_refused_whatever_its_verdict_and_tolerance(
    converged: Content,
) -> None:
    made = copy.deepcopy(converged)
    base = row(made, "manual", "converge")["final_loss"]
    for times, off in ((1.05, "+5.00%"), (0.95, "-5.00%")):  # too good is wrong as well
        row(made, "sdpa", "converge").update({
            "losses": [times * base] * 10, "final_losses": [times * base],
            "final_loss": times * base, "difference": times * base / base - 1,
        })
        assert any(f"did not converge: its final loss is {off} off" in why for why in check(made))
    row(made, "manual", "converge")["verdict"] = "ok"
    assert "converge has no baseline" in check(made)
    row(made, "manual", "converge")["verdict"] = "baseline"
    made["settings"]["tolerance"] = 0.1
    assert "its tolerance is 10%, at most 1% is allowed" in check(made)


# ----------------------------------------------------------------------------- other lies


@pytest.mark.parametrize(
    "edit, says",
    [
        (lambda c: row(c, "sdpa").update(backend="flash_attn_9"), "unknown backend"),
        (lambda c: row(c, "manual").update(backend="triton"), "saw no kernel of this backend"),
        (lambda c: row(c, "manual").update(device_kernels=["flash_fwd_kernel"]), "another kernel"),
        (lambda c: row(on_a_gpu(c), "manual").update(
            backend="flex", device_kernels=["flash_fwd_kernel"]),
         "train flex: the profiler saw no kernel of this backend, but: flash_fwd_kernel"),
        (lambda c: on_a_gpu(c)["machine"].update(peak_tflops=990.0), ", but datasheet"),
        (lambda c: row(on_a_gpu(c), "manual", "kernel").update(backend="flash_attn_2"),
         "kernel flash_attn_2 B=1 T=16 H=2 Hkv=2 D=16: the profiler saw no kernel"),
        (lambda c: row(on_a_gpu(c), "manual", "kernel").update(
            backend="flash_attn_2", device_kernels=["pytorch_flash::flash_fwd_kernel"]),
         "saw no kernel of this backend, but: pytorch_flash::flash_fwd_kernel"),
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
)
def test_other_lies_and_mistakes_are_refused_too(
    edit: Callable[[Content], Any], says: str, content: Content, tmp_path: Path
) -> None:
    edit(content)
    (tmp_path / "record.json").write_text(json.dumps(content), encoding="utf-8")
    found = verify(content, tmp_path)
    assert any(says in why for why in found), found


def test_generation_by_hand_is_accepted_and_no_figure_of_it_can_be_edited(content: Content) -> None:
    C, L, V, B, P, new = 32, 2, 64, 3, 4, 8
    products = V * C + L * 12 * C * C
    N = products + C + L * 2 * C  # and the gains of the norms
    where = {"B": B, "P": P, "cache": "dynamic", "new_tokens": new}
    shape = {**{k: v for k, v in where.items() if k != "cache"}, "parameters": N}
    run = row(content, "sdpa")["rounds"][0]["machine"]
    always = {"shape": shape, "machine": run}
    rounds = [{"ms": ms, "first_ms": 10 * ms, "cache_bytes": 100 * i, **always}
              for i, ms in enumerate((2.0, 4.0, 3.0))]
    keys = B * (P + new / 2) * 2 * L * C * 4  # bytes of keys and values, of a mean text
    made = {
        "mode": "decode", "backend": "sdpa", "point": where, "status": "ok", "title": "x",
        "kernels": ["math"], "device_kernels": [], "setup_s": 1.0, "warm_up_s": 1.0,
        "proof": {k: v for k, v in PROOF.items() if not k.startswith("grad")}, "rounds": rounds,
        "ms": 3.0, "first_ms": 30.0, "q1_ms": 2.5, "q3_ms": 3.5, "spread": 1 / 3, "noisy": True,
        "tokens_per_s": B / 0.003, "cache_bytes": 200, "mbu": (4 * N + keys) / 0.003 / 8e9,
    }
    content |= {"mode": "decode", "rows": [made]}
    content["machine"]["bandwidth"] = 8e9
    assert check(records.seal(content)) == []
    for name in ("ms", "q1_ms", "first_ms", "tokens_per_s", "cache_bytes", "mbu"):
        wrong = copy.deepcopy(content)
        wrong["rows"][0][name] *= 1.05
        assert any(f"{name} is" in why for why in check(wrong)), name
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
    # Nothing of this checkout matters here.
    content |= {"commit": None, "dirty": True, "complete": False}
    records.write(board.FOLDER / "mine", content, whole=False)
    assert board.main(["--check"]) == 1 and not board.PAGE.exists()
    assert "PAGE is out of date" in capsys.readouterr().err
    assert board.main([]) == 0 and board.main(["--check"]) == 0
    text, sdpa = board.PAGE.read_text(encoding="utf-8"), row(content, "sdpa")
    assert f"{sdpa['tokens_per_s']:,.0f}" in text and f"{sdpa['mfu']:.1%}" in text
    assert f"{sdpa['proof']['error']:.1e}" in text and "| --peak_tflops |" in text
    assert "2 layers, 32 wide, 2 heads, vocabulary 64, float32" in text
    assert "- [mine][1]: incomplete, uncommitted code\n" in text
    assert "| peak " in text and "| error " in text and "| compiled " in text
    ok = [r for r in content["rows"] if r["status"] == "ok"]
    assert text.count("][1] |") == len(ok)  # the slowest, too
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


def test_machines_stand_together_only_where_they_did_the_same(content: Content) -> None:
    gpu, other = on_a_gpu(copy.deepcopy(content)), copy.deepcopy(content)
    other["settings"]["block_size"] = 64
    sections, names, _ = board.board({"a": content, "b": gpu, "c": other})
    ((_, (head, lines)),) = sections["Training steps"].items()
    work = [tuple(line[: head.index("machine")]) for line in lines]
    assert work == sorted(work) and {w[0] for w in work} == {"32", "64"}
    machines = [line[head.index("machine")] for line in lines if line[0] == "32"]
    assert machines == sorted(machines) and len(set(machines)) == 2
    peaks = {line[head.index("machine")]: line[head.index("peak")] for line in lines}
    assert peaks[names["NVIDIA H200"]] == "datasheet"


def test_every_backend_has_names_to_be_known_by() -> None:
    assert set(attention.BACKENDS) | OTHERS == set(SHOWS)
    assert {"nanogpt", "hf_eager", "hf_sdpa", "hf_flash_attention_2"} == OTHERS
