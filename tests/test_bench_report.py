"""What is made of a record: the answers in words, the comparison, tables and pictures."""

from __future__ import annotations

import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import bench_mfu
from bench import pictures, records, roofline, tables
from bench.config import BenchConfig
from bench.roofline import Work
from bench.verify import OTHERS
from core.settings import UserError
from train import TrainConfig


def row(backend: str, times: list[float], mode: str = "train", **more: Any) -> dict[str, Any]:
    """A row whose rounds took these milliseconds."""
    s = sorted(times)
    middle, q1, q3 = s[len(s) // 2], s[len(s) // 4], s[-1 - len(s) // 4]
    base = {
        "mode": mode, "backend": backend, "point": {}, "status": "ok", "title": backend,
        "kernels": [], "events": [], "setup_s": 1.0, "warm_up_s": 2.0,
        "rounds": [{"ms": t} for t in times], "ms": middle, "q1_ms": q1, "q3_ms": q3,
        "spread": (q3 - q1) / middle if len(times) > 1 else None, "noisy": False,
        "forward_ms": middle / 3, "backward_ms": middle / 2, "memory_bytes": 2.5e9,
    }  # fmt: skip
    if mode == "train":
        base |= {"batch_size": 8, "tokens_a_step": 8000, "tokens_per_s": 8e6 / middle,
                 "mfu": 40 / middle, "mfu_causal": 36 / middle, "loss_difference": 1e-6,
                 "gradient_norm_difference": -2e-6}  # fmt: skip
    return base | more


def attention_row(backend: str, T: int, ms: float, B: int = 1, **more: Any) -> dict[str, Any]:
    point = {"B": B, "T": T, "H": 4, "Hkv": 4, "D": 64, "window": None}
    figures = {"tflops_causal": 0.1, "tflops_full": 0.2, "share": 1 / (10 * ms), "error_out": 3e-7,
               "error_grad": 9e-7, "memory_bytes": 1e6 * T}  # fmt: skip
    times = [ms, ms * 1.01, ms * 0.99]
    return row(backend, times, "kernel", **{"point": point, **figures, **more})


def content(table: list[dict[str, Any]], mode: str = "train", **machine: Any) -> dict[str, Any]:
    """A record with these rows."""
    here = {
        "device": "cuda", "kind": "cuda", "name": "NVIDIA X1", "about": "NVIDIA X1", "threads": 8,
        "capability": [9, 0], "driver": "570.1", "cuda": "12.8", "cpu": "a CPU",
        "dtype": "bfloat16",
        "system": "Linux 6", "python": "3.11.7", "packages": {"torch": "2.13.0"},
        "peak_tflops": 989.4, "peak_source": "datasheet: a sheet", "peak_measured": False,
        "bandwidth": 3.2e12, "bandwidth_source": "measured: copies of 1 GB",
        "free_memory": 80e9, "memory_limit": 80e9,
    }  # fmt: skip
    made = {
        "format": records.FORMAT, "mode": mode, "command": "python bench_mfu.py train",
        "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "dirty": False,
        "seconds": 60.0, "machine": here | machine, "vocab_size": 50304,
        "settings": json.loads(json.dumps(BenchConfig(train=TrainConfig(block_size=1000)).flat())),
        "fresh_rounds": False, "flops_per_token": {"mfu": 8.5e8, "mfu_causal": 8e8},
        "reference": {"loss": 10.9, "gradient_norm": 1.0, "flops_per_token": 8.4e8},
        "rows": table, "answers": [],
    }  # fmt: skip
    made["answers"] = tables.answers(made)
    return made


SLOW, FAST = [100.0, 101, 99, 100, 102], [50.0, 50.5, 49.5, 50, 51]
TRAIN = [
    row("manual", SLOW),
    row("sdpa", FAST, kernels=["flash"]),
    row("sdpa_flash", [50.4, 50.2, 49.9, 49.6, 51.3]),
    {"mode": "train", "backend": "flex", "point": {}, "status": "failed",
     "why": ["out of memory: CUDA out of memory"], "batch_size": 8},
    {"mode": "train", "backend": "triton", "point": {}, "status": "unavailable",
     "why": ["a <reason> & another"], "batch_size": 8},
]  # fmt: skip
KERNEL = [
    attention_row("manual", 128, 1.0), attention_row("sdpa", 128, 2.0),
    attention_row("manual", 1024, 20.0), attention_row("sdpa", 1024, 10.0),
    attention_row("manual", 4096, 400.0), attention_row("sdpa", 4096, 90.0),
    attention_row("manual", 128, 4.0, 8), attention_row("sdpa", 128, 3.0, 8),
]  # fmt: skip


# ----------------------------------------------------------------------------- the answers


def test_fastest_names_who_is_level_and_where_the_crossover_lies():
    said = content([*TRAIN, *KERNEL])["answers"]
    assert said[0] == "Fastest: train: sdpa (level: sdpa_flash)"
    assert said[1] == ("Fastest: kernel B=1 H=4 D=64: manual from 128 tokens on, then sdpa from "
                       "1,024 tokens on")  # fmt: skip
    assert said[2] == "Fastest: kernel B=8 H=4 D=64: sdpa from 128 tokens on"
    larger = row("tiled", [90.0, 90, 90, 90, 90], batch_size=16, tokens_a_step=16000)
    assert content([row("sdpa", FAST), larger])["answers"][0] == "Fastest: train: tiled"


def test_a_peak_that_is_too_low_is_told():
    assert not any("Peak" in a for a in content(TRAIN)["answers"])
    unknown: dict[str, Any] = {"mfu": None, "mfu_causal": None, "mfu_why": "more than the peak"}
    made = content([row("sdpa", [30.0, 30, 30], **unknown), row("b", [40.0, 40, 40], **unknown)])
    assert made["answers"][1] == "Peak: mfu not known of sdpa, b: more than the peak."
    (_, (head, lines)) = records.sections(made)[0]
    assert [dict(zip(head, line))["mfu"] for line in lines] == ["-", "-"]


def test_the_best_mfu_is_told_with_its_own_rate():
    """Of training steps: neither another mode's, nor one that is not known."""
    said = content([
        row("a", FAST, mfu=0.4, mfu_causal=0.35), row("b", SLOW, mfu=None, mfu_causal=None),
        row("c", [400.0] * 3, mfu=0.5, mfu_causal=0.45), row("d", FAST, "converge", mfu=0.9),
    ])["answers"]  # fmt: skip
    assert "MFU: the best is c's: mfu 50.0% (causal 45.0%), 20,000 tok/s." in said


def test_agreement_names_who_disagrees():
    assert content(TRAIN)["answers"][-1].startswith("Agreement: all agree with manual")
    off = [*TRAIN, row("flash_attn_3", FAST, loss_difference=0.2)]
    assert "flash_attn_3 DISAGREES with manual in float32" in content(off)["answers"][-1]
    # of the reference's loss, 10.9, and of the norm itself: rounding as much as bfloat16 may have
    for dtype, loss, norm in (("bfloat16", 0.109, 0.05), ("float32", 0.00109, 0.001)):
        for times, judged in ((0.999, "all agree"), (1.001, "flash_attn_3 DISAGREES")):
            for sign in (1, -1):
                for name, most in (("loss_difference", loss), ("gradient_norm_difference", norm)):
                    one = row("flash_attn_3", FAST, **{name: sign * times * most})
                    said = content([TRAIN[0], one], dtype=dtype)["answers"][-1]
                    assert judged in said
    off = [*TRAIN, row("flash_attn_3", FAST, gradient_norm_difference=0.1)]
    assert "flash_attn_3 DISAGREES" in content(off)["answers"][-1]
    apart = [*KERNEL, attention_row("tiled", 64, 1.0, error_out=4e-7, error_grad=1e-7)]
    fine = content(apart, "kernel", dtype="float32")["answers"][-1]
    assert fine.startswith("Agreement: all agree")
    wrong = [*KERNEL, attention_row("flex", 128, 1.0, error_grad=1e-2)]
    said = content(wrong, "kernel", dtype="float32")["answers"][-1]
    # manual's own error twice, in the gradients three times, and 32 roundings of the dtype
    for dtype, eps in (("float32", 2.0**-23), ("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        for name, most in (("error_out", 2 * 3e-7), ("error_grad", 3 * 9e-7)):
            for times, judged in ((0.999, "all agree"), (1.001, "flex is WRONG")):
                one = attention_row("flex", 128, 1.0, **{name: times * (most + 32 * eps)})
                assert judged in content([*KERNEL, one], "kernel", dtype=dtype)["answers"][-1]
    assert "flex is WRONG against float64 (error_grad 1.0e-02 at 128 tokens)" in said


# ----------------------------------------------------------------------------- comparing


def compare(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], capsys: Any) -> str:
    for name, made in (("a", a), ("b", b)):
        records.write(tmp_path / name, made, whole=False)
    assert (
        bench_mfu.main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "record.json")]) == 0
    )
    return capsys.readouterr().out


def lines_of(out: str) -> dict[str, str]:
    return {line.strip("| ").split()[0]: line for line in out.splitlines() if line.strip("| ")}


def test_compare_says_which_differences_exceed_the_noise(tmp_path, capsys):
    later = copy.deepcopy(TRAIN)
    later[1] = row("sdpa", [40.0, 40.4, 39.6, 40, 40.8])  # from 50
    out = compare(tmp_path, content(TRAIN), content(later), capsys)
    lines = lines_of(out)
    assert "B faster" in lines["sdpa"] and "160,000" in lines["sdpa"] and "1.250" in lines["sdpa"]
    assert "within noise" in lines["sdpa_flash"] and "flex" not in lines and "manual" not in lines
    back = compare(tmp_path, content(later), content(TRAIN), capsys)
    assert "B slower" in back


def slower(table: list[dict[str, Any]], times: float) -> list[dict[str, Any]]:
    """The same on a day when every round took so many times as long."""
    made = []
    for r in table:
        if r["status"] == "ok":
            r = row(r["backend"], [times * one["ms"] for one in r["rounds"]], r["mode"])
        made.append(r)
    return made


def test_compare_divides_the_drift_of_the_machine_out(tmp_path, capsys):
    rival = row("nanogpt", [80.0, 81, 79, 80, 82])
    a, b = [*TRAIN, rival], slower([*TRAIN, rival], 1.25)
    out = compare(tmp_path, content(a), content(b), capsys)
    lines = lines_of(out)
    assert "B / A, is divided out: 0.800 in train by nanogpt" in " ".join(out.split())
    assert all("within noise" in lines[name] and "1.000" in lines[name]
               for name in ("manual", "sdpa")), out  # fmt: skip
    assert "nanogpt" not in lines  # the yardstick has no line of its own
    b[1] = row("sdpa", FAST)  # as fast as before on a machine that became slower
    said = lines_of(compare(tmp_path, content(a), content(b), capsys))["sdpa"]
    assert "B faster" in said and "1.250" in said and "160,000" in said


def test_without_a_baseline_manual_tells_the_drift_and_is_said_to(tmp_path, capsys):
    a, b = content(TRAIN), content(slower(TRAIN, 1.25))
    out = " ".join(compare(tmp_path, a, b, capsys).split())
    assert "0.800 in train by manual, whose code may have changed" in out
    a["source_sha256"] = b["source_sha256"] = "5" * 64
    assert "may have changed" not in compare(tmp_path, a, b, capsys)
    alone = [content([row("sdpa", times)]) for times in (FAST, SLOW)]
    out = " ".join(compare(tmp_path, *alone, capsys).split())
    assert "the machine's drift is not known in train" in out and "B slower" in out


def test_the_noise_is_what_is_left_when_the_drift_is_divided_out(tmp_path, capsys):
    """Every round half as fast or twice as fast, and sdpa a tenth faster in each: that is sure."""
    clock = [1.0, 2.0, 0.5, 1.5, 0.7]

    def made(ms: float) -> dict[str, Any]:
        rival, mine = ([t * c for c in clock] for t in (80.0, ms))
        return content([row("nanogpt", rival), row("sdpa", mine)])

    a, b = made(50.0), made(45.0)
    b["machine"]["packages"] = {"torch": "2.14.0"}
    out = compare(tmp_path, a, b, capsys)
    cells = [cell.strip() for cell in lines_of(out)["sdpa"].split("|")]
    assert cells[5:8] == ["1.111", "0.0%", "B faster"]
    assert "not only the code differs: versions" in out


def test_two_qualify_records_are_compared_stage_by_stage(tmp_path, capsys):
    def whole(table: list[dict[str, Any]]) -> dict[str, Any]:
        made = content(table)
        stages = [
            {"name": "training", "status": "done", "record": made},
            {"name": "proof", "status": "done", "record": {"rows": [{"backend": "sdpa"}]}},
        ]
        shared = {k: v for k, v in made.items() if k in records.SHARED}
        return {**shared, "mode": "qualify", "stages": stages}

    for name, times in (("a", FAST), ("b", SLOW)):
        made = whole([row("manual", SLOW), row("sdpa", times)])
        records.write(tmp_path / name, made, whole=False)
    assert bench_mfu.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "B slower" in lines_of(capsys.readouterr().out)["sdpa"]


@pytest.mark.parametrize("name", sorted(OTHERS - {"nanogpt"}))
def test_another_version_of_transformers_is_no_yardstick(name, tmp_path, capsys):
    table = [*TRAIN, row(name, SLOW)]
    a = content(table, packages={"torch": "2.13.0", "transformers": "5.0"})
    b = content(table, packages={"torch": "2.13.0", "transformers": "5.1"})
    assert f"by {name}" in " ".join(compare(tmp_path, a, a, capsys).split())
    assert "by manual" in " ".join(compare(tmp_path, a, b, capsys).split())


def test_a_point_is_the_same_in_any_order(tmp_path, capsys):
    turned = copy.deepcopy(KERNEL)
    for r in turned:
        r["point"] = dict(reversed(r["point"].items()))
    out = compare(tmp_path, content(KERNEL, "kernel"), content(turned, "kernel"), capsys)
    assert "nothing to compare" not in out and "only in" not in out


def test_what_was_not_measured_to_its_end_is_not_compared(tmp_path, capsys):
    cut = {**row("sdpa", [5.0, 5.0, 5.0]), "status": "stopped", "why": ["9 of 10 parts"]}
    out = compare(tmp_path, content(TRAIN), content([TRAIN[0], cut]), capsys)
    assert "sdpa" not in lines_of(out) and "only in A: sdpa, sdpa_flash" in out


def test_a_record_says_which_is_a_and_which_is_b(tmp_path, capsys):
    out = compare(tmp_path, content(TRAIN), content(TRAIN), capsys).splitlines()
    assert out[:2] == [f"A: {tmp_path / 'a'}", f"B: {tmp_path / 'b' / 'record.json'}"]


def test_the_records_are_the_projects_wherever_a_command_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(records.__file__)
    assert (found["ROOT"] / "bench_mfu.py").is_file() and found["source_sha256"]()


def test_compare_takes_two_records_no_fewer_and_no_more():
    for paths in ([], ["a"], ["a", "b", "c"]):
        with pytest.raises(UserError, match="compare takes two records"):
            bench_mfu.main(["compare", *paths])


def test_compare_of_two_machines_is_of_ratios(tmp_path, capsys):
    # The other machine is ten times faster, and sdpa gains less there: 1.6 x manual, not 2 x.
    other = [row("manual", [10.0, 10.1, 9.9, 10, 10.2]), row("sdpa", [6.25, 6.3, 6.2, 6.25, 6.4])]
    out = compare(tmp_path, content(TRAIN), content(other, name="NVIDIA X2"), capsys)
    assert "two machines" in out and "A/s" not in out
    lines = lines_of(out)
    assert [c.strip() for c in lines["sdpa"].split("|")][3:6] == ["2", "1.6", "0.800"]
    assert "B slower" in lines["sdpa"] and "A ratio | B ratio" in out and "manual" not in lines
    assert "only in A: sdpa_flash" in out
    alone = content([row("sdpa", FAST)], threads=3)
    assert "nothing to compare" in compare(tmp_path, content(TRAIN), alone, capsys)


def test_compare_tells_what_else_differs(tmp_path, capsys):
    b = content(TRAIN, packages={"torch": "2.14.0"})
    b["settings"]["n_layer"] = 24
    out = " ".join(compare(tmp_path, content(TRAIN), b, capsys).split())
    assert "not only the code differs: n_layer (12 / 24), versions" in out
    b["settings"]["n_layer"] = 12
    del b["settings"]["beta1"]  # as if it were a setting of a later day
    out = " ".join(compare(tmp_path, content(TRAIN), b, capsys).split())
    assert "not only the code differs: versions" in out
    one = content([row("sdpa", [50.0])])
    assert "noise unknown" in compare(tmp_path, content(TRAIN), one, capsys)


def test_what_is_no_record_is_refused(tmp_path):
    old = records.ROOT / "bench" / "records" / "2026-11-21_cpu_nanogpt"
    with pytest.raises(UserError, match=r"is no record of bench_mfu\.py's"):
        records.read(old)
    (tmp_path / "record.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="no record that can be read"):
        records.read(tmp_path)
    made = content(TRAIN)
    for other in ([made], {**made, "format": 3}, {"format": made["format"], "row": []}):
        (tmp_path / "record.json").write_text(json.dumps(other), encoding="utf-8")
        with pytest.raises(UserError, match=r"is no record of bench_mfu\.py's"):
            records.read(tmp_path)


def test_a_records_folder_tells_date_device_and_name(tmp_path):
    made = content(TRAIN)["machine"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_x1_s", records.folder_of(tmp_path, "s", made).name)
    for name, slug in (("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
                       ("NVIDIA GeForce RTX 4090", "rtx-4090")):  # fmt: skip
        assert records.device_slug({**made, "name": name}) == slug
    assert records.device_slug({**made, "kind": "cpu"}) == "cpu"


@pytest.mark.parametrize(
    "mode, said",
    [
        ("train", "5 rounds; warm-up: a first step and 2 more"),
        ("kernel", "5 rounds; warm-up: a call, and another in each round"),
        ("decode", "5 rounds; warm-up: each text once"),
        ("converge", "100 steps"),
    ],
)
def test_a_record_tells_the_warm_up_of_its_own_mode(mode, said):
    assert dict(records.facts(content([], mode)))["rounds"] == said


def test_the_facts_are_in_the_units_that_they_name():
    facts = dict(records.facts(content(TRAIN, bandwidth=4.8e12, peak_tflops=989.4)))
    counted = "850.00 (mfu), 800.00 (mfu_causal); torch's counter: 840.00"
    assert facts["MFLOP a token"] == counted and facts["peak"].startswith("989.4 TFLOP/s (")
    facts = dict(records.facts(content([], "decode", bandwidth=4.8e12)))
    assert facts["bandwidth"].startswith("4,800 GB/s (") and "peak" not in facts
    assert "1000 tokens" in facts["model"] and "vocabulary 50,304" in facts["model"]


# ----------------------------------------------------------------------------- tables, pictures


def test_a_row_that_is_noisy_or_missing_says_so():
    noisy = row("sdpa", [50.0, 60, 70], noisy=True)
    (line,) = tables.cells("train", [noisy])[1]
    assert "noisy" in line[tables.cells("train", [])[0].index("quartiles")]
    lines = tables.missing(content(TRAIN)["rows"])[1]
    assert lines == [
        ["flex", "failed (train)", "out of memory: CUDA out of memory"],
        ["triton", "unavailable", "a <reason> & another"],
    ]
    device = row("x", FAST, device_kernels=["flash_fwd_kernel<128>"])
    assert tables.kernel_names(device) == "flash_fwd_kernel<128>"
    assert tables.kernel_names(row("manual", FAST)) == "not fused"
    points: Any = [{"B": 1, "P": n, "cache": "static"} for n in (8, 9)]
    at = {"mode": "decode", "backend": "sdpa", "why": ["late", "x"]}
    late = [{**at, "point": p, "status": status}
            for status in ("skipped", "stopped", "unavailable") for p in points]  # fmt: skip
    where = "decode B=1 P=8 cache=static; decode B=1 P=9 cache=static"
    assert tables.missing(late)[1] == [
        ["sdpa", f"skipped ({where})", "late; x"],
        ["sdpa", f"stopped ({where})", "late; x"],
        ["sdpa", "unavailable", "late; x"],
    ]


DECODE = row(
    "paged", [5.0, 6, 4], "decode", kernels=["paged decode (Triton)"], first_ms=71.26,
    point={"B": 8, "P": 64, "cache": "static", "new_tokens": 16, "processor": True},
    tokens_per_s=1599.6, cache_bytes=3.14e6, mbu=0.12345, memory_bytes=4.5e8,
)  # fmt: skip
CONVERGE = row(
    "flex", [51.234], "converge", final_loss=3.14159, difference=-0.00256, seed_noise=0.01234,
    verdict="FAIL", time_saved=0.2501, memory_saved=-0.0333, memory_bytes=2.5e9,
    device_kernels=["triton_tem_fused_flex_attention_0_with_a_long_tail", "x"],
)  # fmt: skip
ALONE: dict[str, Any] = {"window": 256, "B": 2, "T": 4096, "H": 12, "Hkv": 3, "D": 128}


@pytest.mark.parametrize(
    "one, cells",
    [
        (row("sdpa", [50.0, 52, 48, 51, 49], kernels=["flash", "math"], batch_size=8, ms=51.234,
             tokens_per_s=12345.6, mfu=0.4567, mfu_causal=0.4111, forward_ms=10.04, setup_s=1.2,
             backward_ms=20.06, memory_bytes=2.346e9, loss_difference=-1.23e-6, compile_s=3.14),
         {"backend": "sdpa", "batch": "8", "tok/s": "12,346", "ms/step": "51.2",
          "quartiles": "49 to 51", "rounds": "5", "fwd ms": "10", "bwd ms": "20.1", "mfu": "45.7%",
          "causal": "41.1%", "memory": "2.35 GB", "loss diff": "-1.2e-06", "warm-up s": "3.2",
          "compile s": "3.1", "kernel": "flash, math"}),
        (attention_row("tiled", 4096, 100.0, point=ALONE, tflops_causal=1.234, tflops_full=2.345,
                       share=0.0567, error_out=1.23e-3, error_grad=4.56e-3, forward_ms=33.33,
                       backward_ms=None, memory_bytes=7.77e8),
         {"backend": "tiled", "B": "2", "T": "4096", "H": "12", "D": "128", "window": "256",
          "fwd ms": "33.3", "bwd ms": "-", "both ms": "100", "quartiles": "99 to 101",
          "rounds": "3", "TFLOP/s": "1.23", "full": "2.35", "of peak": "5.7%",
          "memory": "777.0 MB", "err out": "1.2e-03", "err grad": "4.6e-03"}),
        (DECODE,
         {"backend": "paged", "B": "8", "prompt": "64", "cache": "static with a processor",
          "tok/s": "1,600", "ms/token": "5", "quartiles": "4 to 6", "rounds": "3",
          "first ms": "71.3", "memory": "450.0 MB", "cache size": "3.1 MB", "mbu": "12.3%",
          "kernel": "paged decode (Triton)"}),
        (CONVERGE,
         {"backend": "flex", "final loss": "3.1416", "off": "-0.256%", "seed noise": "0.0123",
          "verdict": "FAIL", "ms/step": "51.2", "quartiles": "1 round", "rounds": "1",
          "time saved": "25.0%", "memory": "2.50 GB", "memory saved": "-3.3%",
          "kernel": "triton_tem_fused_flex_attention_0_with_a"}),
    ],
)  # fmt: skip
def test_every_cell_of_a_table_is_under_its_title(one, cells):
    head, (line,) = tables.cells(one["mode"], [one, {**TRAIN[3], "mode": one["mode"]}])
    assert dict(zip(head, line, strict=True)) == cells


def test_no_window_is_a_dash():
    head, (line,) = tables.cells("kernel", [attention_row("tiled", 4096, 100.0)])
    assert line[head.index("window")] == "-"


def test_every_cell_of_a_profile():
    linear = {"part": "linear", "ms": 4.0, "share": 0.4, "roofline_ms": 1.234, "times": 3.2415,
              "over_ms": 2.766, "limit": "FLOPs",
              "names": [["n" * 50, 3.21], ["addmm", 0.5], ["third", 0.1]]}  # fmt: skip
    gaps = {"part": "gaps", "ms": 6.0, "share": 0.6, "roofline_ms": 0.0, "times": None,
            "over_ms": 1.0, "limit": "-", "names": []}  # fmt: skip
    best = {"ms": 2.5, "mfu": 0.8, "mfu_causal": 0.7, "tokens_per_s": 4000.0}
    found = {"parts": [linear, gaps], "ms": 10.0, "ceiling": best, "products_tflops": 790.0,
             "reachable": {**best, "ms": 3.0, "mfu": 0.65}}  # fmt: skip
    head, lines = tables.profile(found)
    assert [dict(zip(head, line, strict=True)) for line in lines] == [
        {"part": "linear", "ms": "4", "share": "40.0%", "roofline ms": "1.23", "times": "3.24",
         "over ms": "2.77 (largest gap)", "limit": "FLOPs",
         "mostly": f"{'n' * 40} 3.21, addmm 0.5"},
        {"part": "gaps", "ms": "6", "share": "60.0%", "roofline ms": "0", "times": "-",
         "over ms": "1", "limit": "-", "mostly": ""},
        {"part": "the step", "ms": "10", "share": "100.0%", "roofline ms": "2.5", "times": "4",
         "over ms": "7.5", "limit": "", "mostly": ""},
    ]  # fmt: skip
    found |= {"by": "modules", "seen_ms": 12.345, "plain_ms": 10.0}
    part = "One of 3 micro-batches, and the update,"
    for of, whole in (
        ({}, "A step"),
        ({"micro_batches": 1}, "A step"),
        ({"micro_batches": 3}, part),
    ):
        made = content([row("a", FAST, profile=found | of)])
        assert [title for title, _ in records.sections(made)] == [
            "Training steps",
            f"{whole} of a by its parts, which are told by modules "
            "(12.35 ms under the profiler, 10 without)",
        ]
    said = content([row("sdpa", FAST, profile=found)])["answers"]
    (told,) = [text for text in said if text.startswith("Profile: ")]
    assert told == (
        "Profile: sdpa: if every part ran at its roofline: 2.5 ms, mfu 80.0% (causal 70.0%), "
        "4,000 tok/s; if every part ran at its roofline, with matmuls at 790 TFLOP/s: 3 ms, "
        "mfu 65.0% (causal 70.0%), 4,000 tok/s; the largest gap: linear, 40% of a step under the "
        "profiler."
    )


def test_every_cell_of_a_roofline_and_of_a_proof():
    parts = {"linear": Work(4e12, 1e9), "optimizer": Work(0, 3e9), "data": Work(0, 0)}
    head, lines = tables.rooflines(roofline.lines(parts, 200.0, 1e12))  # of 2e14 FLOP/s: 20 ms
    assert [dict(zip(head, line, strict=True)) for line in lines] == [
        {"part": "linear", "TFLOP": "4", "GB": "1", "roofline ms": "20", "share": "87.0%",
         "limit": "FLOPs"},
        {"part": "optimizer", "TFLOP": "0", "GB": "3", "roofline ms": "3", "share": "13.0%",
         "limit": "bytes"},
    ]  # fmt: skip
    wrong = [{"what": "large", "dtype": "bfloat16", "why": "dq is off"}] * 2
    counts = {"right": 5, "wrong": 2, "refused": 3, "not_reached": 4}
    table = [{"backend": "flex", **counts, "canary": False, "failures": wrong},
             {"backend": "sdpa", **counts, "canary": True, "failures": []},
             {"backend": "paged", **counts, "canary": None, "failures":
              [{"phase": "decode", "dtype": "float16", "why": "it leaks"}]}]  # fmt: skip
    head, lines = tables.proof(table)
    assert head[1:5] == ["right", "wrong", "refused", "not reached"]
    assert lines == [
        ["flex", "5", "2", "3", "4", "LEAKS", "large, bfloat16: dq is off"],
        ["sdpa", "5", "2", "3", "4", "ok", "-"],
        ["paged", "5", "2", "3", "4", "-", "canary, decode, float16: it leaks"],
    ]


def test_all_that_a_record_says_of_its_run():
    made = content([])
    assert records.readme(made, ["speed"]) == "\n\n".join([
        "# Training steps, NVIDIA X1",
        "- command: `python bench_mfu.py train`\n"
        "- date: 2026-01-02T03:04:05+00:00\n"
        "- commit: 0123456789\n"
        "- device: NVIDIA X1\n"
        "- software: torch 2.13.0, driver 570.1, cuda 12.8, python 3.11.7, Linux 6\n"
        "- model: 12 layers, 768 wide, 12 heads, vocabulary 50,304, 1000 tokens, batch 12, "
        "bfloat16\n"
        "- peak: 989.4 TFLOP/s (datasheet: a sheet)\n"
        "- MFLOP a token: 850.00 (mfu), 800.00 (mfu_causal); torch's counter: 840.00\n"
        "- rounds: 5 rounds; warm-up: a first step and 2 more",
        "![speed](speed.png)",
        "Every round is in [record.json](record.json).\n",
    ])  # fmt: skip
    made |= {"dirty": True, "commit": None, "fresh_rounds": True, "complete": False,
             "incomplete": "it was stopped by Ctrl-C", "mode": "decode",
             "answers": ["Fastest: decode B=1: sdpa: really"]}  # fmt: skip
    made["machine"] |= {"driver": None, "cuda": None, "bandwidth": 3.21e12}
    page = records.readme(made, []).split("\n\n")
    assert page[:2] == ["# INCOMPLETE: Generation, NVIDIA X1",
                        "**Incomplete**: it was stopped by Ctrl-C."]  # fmt: skip
    assert page[3] == "- **Fastest**: decode B=1: sdpa: really"
    facts = dict(line[2:].split(": ", 1) for line in page[2].splitlines())
    assert facts["commit"] == "none (with changes)"
    assert facts["software"] == "torch 2.13.0, python 3.11.7, Linux 6"
    assert facts["bandwidth"] == "3,210 GB/s (measured: copies of 1 GB)"
    assert facts["rounds"] == "5 rounds, each in new processes; warm-up: each text once"
    del made["fresh_rounds"]  # as in old records
    assert dict(records.facts(made))["rounds"] == "5 rounds; warm-up: each text once"
    made["settings"] |= {"steps": 200, "seeds": 3}
    assert dict(records.facts(made | {"mode": "converge"}))["rounds"].startswith(
        "200 steps, 3 seeds"
    )


def test_what_the_bars_and_lines_of_the_pictures_stand_for():
    plt = pytest.importorskip("matplotlib.pyplot")
    look = {"sdpa": ("#0000ff", "o"), "manual": ("#ff0000", "s")}
    two = [row("sdpa", [50.0, 40, 80], tokens_per_s=160.0, mfu=0.5, mfu_causal=None),
           row("manual", [100.0], tokens_per_s=80.0, mfu=0.25, mfu_causal=0.2)]  # fmt: skip
    for one, ms, quartiles in zip(two, (50.0, 100.0), ((40.0, 80.0), (100.0, 100.0))):
        one |= {"ms": ms, "q1_ms": quartiles[0], "q3_ms": quartiles[1]}
    figure = pictures.speed(plt, two, look, {"machine": {"peak_measured": True}})
    higher = pictures.speed(plt, two * 4, look, {"machine": {"peak_measured": True}})
    assert higher.get_figheight() - figure.get_figheight() == pytest.approx(6 * 0.42)  # by 6 bars
    plt.close(higher)
    left, right = figure.axes
    plt.close(figure)
    assert [t.get_text() for t in left.get_yticklabels()] == ["manual", "sdpa"]  # the best on top
    assert [bar.get_width() for bar in left.patches] == [80, 160]
    whiskers = left.collections[0].get_segments()  # 8000 tokens a step / its quartiles
    ends = [x for segment in whiskers for x in segment[:, 0]]
    assert ends == pytest.approx([80, 80, 100, 200])
    assert [bar.get_width() for bar in right.patches] == pytest.approx([25, 50, 20, 0])
    assert right.get_title() == "% of measured peak: mfu, mfu_causal"
    assert [t.get_text() for t in right.texts] == ["25.0", "50.0", "20.0", "-"]

    alone = [attention_row("sdpa", T, ms, B, memory_bytes=bytes_)
             for T, ms, B, bytes_ in ((512, 2.0, 1, 3e6), (128, 1.0, 1, None), (512, 9.0, 4, 9e6),
                                      (2048, 8.0, 1, 5e6))]  # fmt: skip
    other = attention_row("manual", 512, 4.0, 1, memory_bytes=7e6)
    figure = pictures.length(plt, [*alone[::-1], other], look, {})
    time, memory = figure.axes
    plt.close(figure)
    assert time.get_legend() and [line.get_label() for line in time.lines] == ["sdpa", "manual"]
    assert [*map(list, time.lines[1].get_data())] == [[512], [4.0]]
    assert [t.get_text() for t in time.get_xticklabels()] == ["128", "512", "2,048"]
    assert [*map(list, time.lines[0].get_data())] == [[128, 512, 2048], [1.0, 2.0, 8.0]]
    assert [*map(list, memory.lines[0].get_data())] == [[512, 2048], pytest.approx([3.0, 5.0])]
    assert memory.get_title().startswith("MB") and time.get_title().startswith("milliseconds")
    assert (
        time.lines[0].get_color() == "#0000ff" and time.get_xscale() == time.get_yscale() == "log"
    )
    assert figure._suptitle.get_text() == "batch 1, 4 heads of 64"


def test_a_backend_looks_the_same_in_every_picture_and_like_no_other():
    assert len({*pictures.COLOURS}) == len({*pictures.MARKERS}) == 14
    seen: list[Any] = []

    def noted(plt: Any, rows: Any, look: Any, content: Any) -> Any:
        seen.append(([r["backend"] for r in rows], look))
        return plt.figure()

    table = [*TRAIN, *KERNEL, {**CONVERGE, "losses": [1.0]}, {**KERNEL[0], "backend": "b"}]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("speed", "length", "loss"):
            patch.setattr(pictures, name, noted)
        assert [*pictures.draw(content(table))] == ["speed", "length", "loss"]
    (speed, look), (length, _), (loss, _) = seen
    assert speed == ["manual", "sdpa", "sdpa_flash"] and loss == ["flex"]
    assert length == ["manual", "sdpa"] * 4 + ["b"]
    assert all([*other.items()] == [*look.items()] for _, other in seen)
    assert [*look] == ["manual", "sdpa", "sdpa_flash", "flex", "triton", "b"]
    assert len(set(look.values())) == 6


def test_a_record_that_cannot_be_written_and_one_without_a_reference(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "record"
    with pytest.raises(UserError, match=f"the record {folder} cannot be written \\(Not a dir"):
        records.write(folder, content(TRAIN), whole=False)
    bench_mfu.show(content(TRAIN) | {"reference": {"why": "out of memory"}})
    assert "\nno reference: out of memory\n" in capsys.readouterr().out


def test_the_pictures_of_a_record(tmp_path):
    records.write(tmp_path, content([*TRAIN, *KERNEL]))
    assert {p.stem for p in tmp_path.glob("*.png")} == {"speed", "length"}
    for lengths, names in ((KERNEL[:1], set()), (KERNEL[:3], {"length"})):
        assert pictures.draw(content(lengths, "kernel")).keys() == names
    for file in tmp_path.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_losses_shows_percents_from_the_baseline():
    plt = pytest.importorskip("matplotlib.pyplot")
    rows = [{"backend": "manual", "losses": [4.0, 2.0], "verdict": "baseline"},
            {"backend": "sdpa", "losses": [4.2, 1.0], "verdict": "ok"}]  # fmt: skip
    look = {"manual": ("black", "o"), "sdpa": ("red", "s")}
    figure = pictures.loss(plt, rows, look, {"settings": {"tolerance": 0.03}})
    left, right = figure.axes
    plt.close(figure)
    assert [list(line.get_ydata()) for line in left.lines] == [[4.0, 2.0], [4.2, 1.0]]
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["manual", "sdpa"]
    assert [line.get_color() for line in left.lines] == ["black", "red"]
    assert left.get_ylabel() == "" and left.get_title() == "loss (nats a token)"
    off, tolerance = right.lines
    assert list(off.get_ydata()) == pytest.approx([5.0, 50.0]) and off.get_color() == "red"
    assert right.get_yscale() == "log" and left.get_yscale() == "linear"
    assert list(off.get_xdata()) == [1, 2] and tolerance.get_ydata()[0] == pytest.approx(3.0)
