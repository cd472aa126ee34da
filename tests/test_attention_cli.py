"""python -m attention: the table, one decision explained, machines that are described, mistakes.

The tables are measured in float64 where they may be: flex, which takes seconds to compile, refuses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Caps, Machine, Spec, gpus, support
from attention import __main__ as cli
from attention.probing import Probe
from core.runtime import pick_dtype
from core.settings import UserError

ROOT = Path(__file__).parent.parent
SMALL = ["--device=cpu", "--seq_len=32", "--n_head=2", "--head_dim=16"]
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cli, "median_ms", lambda call, device: call() or 1.25)  # runs it once


median_ms = cli.median_ms


@pytest.mark.parametrize("times, ms, calls", [
    ((1, 2, 3, 4, 5), 4000, 5), ((0.03,) * 30, 30, 17), ((1e-6,) * 200, 1e-3, 102)])  # fmt: skip
def test_a_time_is_the_median_in_milliseconds_after_two_for_warming_up(
    times, ms, calls, monkeypatch
) -> None:
    left = list(times)
    monkeypatch.setattr(cli, "seconds", lambda call, device: left.pop(0))
    assert median_ms(lambda: None, "cpu") == pytest.approx(ms)
    assert len(times) - len(left) == calls


def measured(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[dict[str, cli.Row], Spec]:
    """What the table would show: a row for each backend, and what was asked of them."""
    shown: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(cli, "show", lambda *what: shown.append(what))
        cli.main(list(argv))
    rows, spec, *_ = shown[0]
    return {row.name: row for row in rows}, spec


def test_the_table_has_every_backend(capsys) -> None:
    cli.main([*SMALL, "--dtype=float64"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "(cpu), torch " in lines[0]
    assert lines[1].strip() == "batch 1, 32 tokens, 2 heads of 16, float64, causal"
    rows = {line.split()[0]: line for line in lines[2:] if line.strip() and line[0] != " "}
    assert set(rows) == {"runs", "does", *BACKENDS}
    assert rows["sdpa_math"].split()[1:4] == ["math", "1.25", "1.25"]
    assert float(rows["sdpa_math"].split()[4]) < 1e-6
    assert rows["sdpa_cudnn"].split(maxsplit=1)[1].strip() == "it runs on cuda, not on cpu"


def test_every_option_reaches_the_backends(capsys) -> None:
    cli.main([*SMALL, "--dtype=bfloat16", "--n_kv_head=1", "--window=8", "--dropout=0.1",
              "--segments", "--batch_size=3", "--deterministic", "--scale=0.5", "--softcap=20",
              "--sinks"])  # fmt: skip
    out = capsys.readouterr().out
    assert " ".join(line.strip() for line in out.splitlines()[1:3]) == (
        "batch 3, 32 tokens, 2 heads over 1 key/value heads of 16, bfloat16, causal, window 8, "
        "dropout 0.1, 2 segments, scale 0.5, softcap 20, sinks, deterministic"
    )
    assert "it has no dropout, and 0.1 is asked (--dropout=0)" in out
    assert "it does not cap scores" in out and "it has no attention sinks" in out


def test_a_row_has_every_reason(monkeypatch) -> None:
    rows, spec = measured(monkeypatch, *SMALL, "--dropout=0.5", "--dtype=float64")
    assert spec == Spec(2, 2, 16, "float64", dropout=0.5)
    assert list(rows) == list(BACKENDS)
    assert rows["sdpa_flash"].why == ("it has no dropout, and 0.5 is asked (--dropout=0)",)
    assert rows["sdpa_math"].kernels == ("math",) and rows["sdpa_math"].why == ()
    error = rows["sdpa_math"].error
    assert error is not None and error < 1e-6 and rows["sdpa_math"].forward_backward_ms == 1.25


def test_one_decision_explained(capsys) -> None:
    cli.main(["sdpa_flash", *SMALL, "--dropout=0.1"])
    assert capsys.readouterr().out == (
        "WARNING: sdpa_flash requested but it has no dropout, and 0.1 is asked (--dropout=0).\n"
        "         Falling back to 'sdpa'.\n"
        "INFO: Attention backend: sdpa (PyTorch scaled_dot_product_attention; kernel: math)\n"
    )
    cli.main(["eager", *SMALL])
    assert capsys.readouterr().out == (
        "INFO: Attention backend: manual (softmax(QK^T)V written out, O(S^2) memory)\n"
    )
    cli.main(["--dtype", "float32", "auto", *SMALL])
    assert capsys.readouterr().out.startswith("INFO: Attention backend: sdpa")


@pytest.mark.parametrize("argv, words", [
    (["sdpa_flsh"], "unknown attention backend 'sdpa_flsh'; did you mean 'sdpa_flash'?"),
    (["manual", "sdpa"], "give one backend, got manual sdpa"),
    (["--hed_dim=8"], "unknown setting '--hed_dim'; did you mean '--head_dim'?"),
    (["--head_dim=wide"], "--head_dim must be an integer, got 'wide'"),
    (["--n_head"], "--n_head needs a value"),
    (["--n_head=3", "--n_kv_head=2"], "n_head must be a positive multiple of n_kv_head"),
    (["--batch_size=0"], "batch_size must be at least 1, got 0"),
    (["--seq_len=-1"], "seq_len must be at least 1, got -1"),
    (["--window=0"], "window must be at least 1, got 0"),
    (["--softcap=0"], "softcap must be positive, got 0"),
    (["--scale=-1"], "scale must be positive, got -1"),
    (["--dtype=int8"], "--dtype must be one of float16, bfloat16, float32, float64"),
    (["--page_size=16"], "page_size belongs to the paged cache (--kv_cache=paged)"),
    (["--kv_cache=big"], "--kv_cache must be one of none, dynamic, static, paged, got 'big'"),
    (["--device=gpu"], "there is no device 'gpu' here; there is cpu"),
    (["--device=mps"], "there is no device 'mps' here; there is cpu"),
    (["--device=cuda:99"], "there is no device 'cuda:99' here; there is cpu"),
    (["--as=h100", "--device=cpu"], "--device is of this machine; leave it out with --as"),
    (["--as=gtx"], "'gtx' could be NVIDIA GeForce GTX 1080 Ti (6.1), "),
    (["--as=Voodoo 2"], "unknown machine 'Voodoo 2'; known: P100, "),
    (["--as="], "unknown machine ''; known: "),
    (["--as=cpu", "sdpa_flsh"], "unknown attention backend 'sdpa_flsh'; did you mean"),
    (["--as=cpu", "fastest"], "what is fastest has to be measured there"),
    (["paged", "--as=cpu", "--kv_cache=paged", "--segments"],
     "attention backend 'paged' cannot run here. "),
])  # fmt: skip
def test_a_mistake_is_one_sentence(argv, words, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError) as e:
        cli.main(argv)
    assert words in str(e.value) and "\n" not in str(e.value)
    assert capsys.readouterr().out == ""


def test_long_reasons_stand_below_one_another_and_are_not_cut(capsys) -> None:
    path = "/usr/lib/python3/dist-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so"
    why = (f"package 'flash_attn' is installed but does not import ({path}: undefined symbol: _Z)",
           "it takes float16 and bfloat16, not float32 (--dtype=bfloat16)")  # fmt: skip
    rows = [cli.Row("flash_attn_2", "", why, notes=("of what does not run",)),
            cli.Row("sdpa", "", (), ("of[f16]",), 1.0, 2.0, 1e-3, ("of what runs",))]  # fmt: skip
    cli.show(
        rows, Spec(2, 2, 16, "float32"), Machine("cuda", "GPU", (9, 0)), cli.Options(batch_size=1)
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert path in "".join(line[14:].strip() for line in lines)
    assert f"{'':14}{why[1]}" in [line.rstrip() for line in lines]
    assert "compute capability 9.0" in lines[0]
    assert any(line.startswith("sdpa ") and " of[f16] " in line for line in lines)
    assert "- sdpa: of what runs" in lines and not any("of what does not" in x for x in lines)


def test_all_that_was_asked_is_said(capsys) -> None:
    asked = {"n_head": 8, "head_dim": 32, "seq_len": 96, "batch_size": 3, "window": 64}
    options = cli.Options(
        **asked, n_kv_head=2, dropout=0.25, segments=True, scale=0.5, softcap=20.0, sinks=True,
        lse=True, kv_cache="paged", page_size=16, compiled=True)  # fmt: skip
    machine = Machine("cuda", "GPU", (9, 0), "2.13.0", "12.8", deterministic=True)
    cli.say_where(machine, options.spec("float16"), options)
    assert " ".join(capsys.readouterr().out.split()) == (
        "GPU (cuda), compute capability 9.0, torch 2.13.0, CUDA 12.8 batch 3, 96 tokens, 8 heads "
        "over 2 key/value heads of 32, float16, causal, window 64, dropout 0.25, 2 segments, scale "
        "0.5, softcap 20, sinks, in parts, inference, paged cache of 16, one query, deterministic, "
        "compiled"
    )
    options = cli.Options(**asked | {"window": None})
    cli.say_where(Machine("cpu", "A"), options.spec("float32"), options)
    assert " ".join(capsys.readouterr().out.split()) == (
        "A (cpu), torch 0 batch 3, 96 tokens, 8 heads of 32, float32, causal"
    )


def test_the_backward_pass_is_in_the_second_time_alone(monkeypatch) -> None:
    """Also of a single token, for which the probe would be too short."""
    monkeypatch.setattr(cli, "work", lambda backend, spec, inputs: spec.grad)
    monkeypatch.setattr(cli, "median_ms", lambda backward, device: 3.0 if backward else 1.0)
    for cache, times in (("none", (1.0, 3.0)), ("static", (1.0, None))):
        asked = cli.Options(device="cpu", batch_size=1, seq_len=1, kv_cache=cache)  # type: ignore
        row = cli.measure(BACKENDS["manual"], asked.spec("float32"), Machine.here("cpu"), asked)
        assert row.why == () and (row.forward_ms, row.forward_backward_ms) == times
    broken = replace(BACKENDS["manual"], attend=lambda *_, **__: 1 / 0)
    row = cli.measure(broken, asked.spec("float32"), Machine.here("cpu"), asked)
    assert row.why == ("it failed when it was tried (ZeroDivisionError: division by zero)",)


def test_deterministic_is_the_switch_of_this_process(monkeypatch, capsys) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # put back as it was
    cli.main(["manual", *SMALL])
    assert told == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    cli.main(["manual", *SMALL, "--deterministic"])
    assert told == [True] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_running_out_of_memory_is_a_reason(monkeypatch) -> None:
    def boom(call: object, device: str) -> float:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB\nmore")

    monkeypatch.setattr(cli, "median_ms", boom)
    rows, _ = measured(monkeypatch, *SMALL, "--dtype=float64")
    why = rows["manual"].why
    assert why == ("at this shape: CUDA out of memory. Tried to allocate 1 GiB",)


def test_help_names_every_option_and_backend(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-m attention"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m attention [backend] [--name=value ...]\n")
    assert all(name in out for name in BACKENDS)
    joined = " ".join(out.split())
    assert "auto, fastest, manual, " in joined and "also --as]" in joined
    assert all(f"--{name}=" in out for name in cli.Options.__dataclass_fields__)
    assert max(map(len, out.splitlines()[:-1])) <= 80


# --- what has no backward, what is interpreted, what reads a cache ---


def made_up(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let manual and a changed copy of it be all backends there are."""
    other = replace(BACKENDS["manual"], name="made_up", **changes)
    monkeypatch.setattr(cli, "BACKENDS", {"manual": BACKENDS["manual"], "made_up": other})
    monkeypatch.setitem(sys.modules["attention.select"]._BY_ANY_NAME, "made_up", other)


def test_without_a_backward_it_is_timed_forward_only(monkeypatch, capsys) -> None:
    made_up(monkeypatch, caps=(Caps(grad=False),))
    cli.main(SMALL)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (row,) = (line for line in lines if line.startswith("made_up"))
    assert row.split()[:4] == ["made_up", "-", "1.25", "-"]
    assert lines[-1] == "- made_up: it has no backward pass"
    plain, forward = measured(monkeypatch, *SMALL)[0].values()
    assert plain.notes == () and plain.forward_backward_ms == 1.25
    assert forward.notes == ("it has no backward pass",) and forward.why == ()
    assert forward.forward_ms == 1.25 and forward.forward_backward_ms is None
    cli.main([*SMALL, "--inference"])
    out = capsys.readouterr().out
    assert out.count("1.25") == 2 and "no backward" not in out and "causal, inference" in out


def test_what_only_an_interpreter_runs_is_not_timed(monkeypatch, capsys) -> None:
    def slow(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        assert q.shape[1] <= 64
        return BACKENDS["manual"].attend(q, k, v, spec, **kw)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made_up(monkeypatch, attend=slow, caps=(Caps(("cuda",)), Caps(("cpu",), interpreted=True)))
    cli.main([*SMALL, "--seq_len=200"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (row,) = (line for line in lines if line.startswith("made_up"))
    assert row.split()[:4] == ["made_up", "-", "-", "-"]
    assert lines[-1] == "- made_up: Triton's interpreter, for tests: not timed"


def test_a_paged_cache_is_measured_while_decoding(monkeypatch, capsys) -> None:
    seen: list[Any] = []
    paged = BACKENDS["paged"]

    def noted(q: Tensor, *args: Any, cache: Any, **kw: Any) -> Tensor:
        k_pages = args[0]
        seen.append((q.shape[:2], k_pages.shape[1], cache.start.tolist(), cache.count.tolist()))
        return paged.attend(q, *args, cache=cache, **kw)

    monkeypatch.setattr(cli, "BACKENDS", {"paged": replace(paged, attend=noted)})
    argv = [*SMALL, "--kv_cache=paged", "--page_size=8", "--batch_size=3"]
    (row,) = measured(monkeypatch, *argv)[0].values()
    assert row.why == () and row.forward_ms == 1.25 and row.forward_backward_ms is None
    assert row.error is not None and row.error < 1e-6
    assert seen[-1] == ((3, 1), 8, [31, 31, 31], [1, 1, 1])
    cli.main([*SMALL, "--kv_cache=paged"])
    line = capsys.readouterr().out.splitlines()[1:3]
    assert "inference, paged cache of 256, one query" in " ".join(x.strip() for x in line)


def test_the_kernels_that_ran_are_named() -> None:
    def named(*events: str, kernels: tuple[str, ...] = ()) -> tuple[str, ...]:
        return cli.kernel_names(Probe(kernels=kernels, events=events))

    assert named("aten::bmm", "detach", "prims::iota") == ()
    assert named("aten::bmm", "flash_attn::_flash_attn_forward") == ("_flash_attn_forward",)
    for of_torch in ("aten::mm", "mkldnn::_is_mkldnn_acl_supported", "inductor::_alloc"):
        assert named("Torch-Compiled Region: 1/0", of_torch) == ("by torch.compile",)
    assert named("aten::x", "nanoattn::y", kernels=("flash",)) == ("flash",)


def test_fastest_is_explained_with_its_table(monkeypatch, capsys, caplog, tmp_path) -> None:
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(cli.autotune, "BUDGET_S", 0.0)
    cli.main(["fastest", *SMALL, "--dtype=float64"])
    assert capsys.readouterr().out.startswith("INFO: Attention backend: ")
    assert "fastest: forward and backward of one attention call, batch 1, 32 tokens" in caplog.text


# --- a machine that is described ---


@pytest.mark.parametrize("text, device, name, capability", [
    ("NVIDIA TITAN RTX", "cuda", "NVIDIA TITAN RTX", (7, 5)),
    ("titan rtx", "cuda", "NVIDIA TITAN RTX", (7, 5)),
    ("4090", "cuda", "NVIDIA GeForce RTX 4090", (8, 9)),
    ("RTX4090", "cuda", "NVIDIA GeForce RTX 4090", (8, 9)),
    ("3090", "cuda", "NVIDIA GeForce RTX 3090", (8, 6)),  # and the 3090 Ti is alike
    ("rtx 3090 ti", "cuda", "NVIDIA GeForce RTX 3090 Ti", (8, 6)),
    ("T4", "cuda", "Tesla T4", (7, 5)),
    ("a10", "cuda", "NVIDIA A10", (8, 6)),  # not the A100
    ("NVIDIA A100-SXM4-80GB", "cuda", "NVIDIA A100-SXM4-80GB", (8, 0)),
    ("h100", "cuda", "NVIDIA H100", (9, 0)),
    ("NVIDIA H100 80GB HBM3", "cuda", "NVIDIA H100 80GB HBM3", (9, 0)),
    ("H200", "cuda", "NVIDIA H200", (9, 0)),
    ("b200", "cuda", "NVIDIA B200", (10, 0)),
    ("gb300", "cuda", "NVIDIA GB300", (10, 3)),
    ("5090", "cuda", "NVIDIA GeForce RTX 5090", (12, 0)),
    ("RTX PRO 6000", "cuda", "NVIDIA RTX PRO 6000 Blackwell", (12, 0)),
    ("rtx 6000 ada", "cuda", "NVIDIA RTX 6000 Ada Generation", (8, 9)),
    ("quadro rtx 6000", "cuda", "Quadro RTX 6000", (7, 5)),
    ("V100", "cuda", "Tesla V100", (7, 0)),
    ("apple m3", "mps", "Apple M3", None),
    ("Apple M3 Max", "mps", "Apple M3 Max", None),
    ("mps", "mps", "Apple mps", None),
    ("cpu", "cpu", "cpu", None),
    ("CPU", "cpu", "cpu", None),
])  # fmt: skip
def test_a_machine_is_known_by_its_distinctive_part(text, device, name, capability) -> None:
    assert gpus.find(text) == (device, name, capability)


def test_every_known_name_is_found_by_itself() -> None:
    for device, name, capability in gpus.KNOWN:
        assert gpus.find(name) == (device, name, capability)
        assert gpus.find(name.upper())[::2] == (device, capability)
    for n in range(1, 6):
        assert gpus.find(f"M{n}") == ("mps", f"Apple M{n}", None)


GENERATIONS = {  # by compute capability, developer.nvidia.com/cuda-gpus; names as KNOWN has them
    (6, 0): "P100", (6, 1): "P40, TITAN Xp, GTX 1080 Ti, GTX 1080, GTX 1070, GTX 1060",
    (7, 0): "V100, TITAN V, V100-SXM2-16GB, V100-PCIE-16GB",
    (7, 5): "T4, TITAN RTX, Quadro RTX 8000, Quadro RTX 6000, RTX 2080 Ti, RTX 2080, RTX 2070, "
            "RTX 2060, GTX 1660, GTX 1650",
    (8, 0): "A100, A800, A100-SXM4-80GB, A100 80GB PCIe, A100-SXM4-40GB, A30",
    (8, 6): "A40, A10, RTX A6000, RTX 3090 Ti, RTX 3090, A16, A2, RTX A5000, RTX A4000, RTX A2000, "
            "RTX 3080, RTX 3070, RTX 3060, RTX 3050",
    (8, 7): "Jetson Orin",
    (8, 9): "L40S, L40, L4, RTX 4090, RTX 6000 Ada Generation, RTX 4080, RTX 4070, RTX 4060",
    (9, 0): "H100, H800, H20, GH200, H100 80GB HBM3, H100 PCIe, H100 NVL, H200, H200 NVL, "
            "GH200 480GB, GH200 144G HBM3e",
    (10, 0): "B200, GB200", (10, 3): "B300, GB300", (11, 0): "Jetson Thor",
    (12, 0): "RTX 5090, RTX PRO 6000 Blackwell, RTX 5080, RTX 5070, RTX 5060", (12, 1): "GB10",
}  # fmt: skip


def test_every_gpu_has_its_generations_capability() -> None:
    found: dict[Any, list[str]] = {}
    for gpu in gpus.GPUS:
        found.setdefault(gpu.capability, []).append(gpu.short)
    assert found.pop(None) == ["MI300X"]
    assert found == {at: names.split(", ") for at, names in GENERATIONS.items()}
    for shared, at in ((64, (7, 5)), (163, (8, 0)), (99, (8, 6)), (99, (8, 9)), (227, (9, 0)),
                       (227, (10, 0)), (99, (12, 0))):  # fmt: skip
        assert gpus.SHARED[at] == shared * 1024


def test_a_server_is_its_makers() -> None:
    """Both directions of NVLink and bits of the network, as they are sold, by 2 and by 8."""
    sold = {
        "Tesla V100-SXM2-16GB": (16, 300, 4 * 100 / 8), "NVIDIA A100-SXM4-40GB": (40, 600, 200),
        "NVIDIA A100-SXM4-80GB": (80, 600, 200), "NVIDIA H100 80GB HBM3": (80, 900, 400),
        "NVIDIA H200": (141, 900, 400), "NVIDIA B200": (180, 1800, 400),
        "AMD Instinct MI300X": (192, 896, None)}  # fmt: skip
    assert {n: (s.memory, 2 * s.nvlink, s.network and 8 * s.network)
            for n, s in gpus.SERVERS.items()} == sold  # fmt: skip
    assert set(sold) <= {gpu.name for gpu in gpus.RATED}


@pytest.mark.parametrize("text, words", [
    ("rtx 6000", ["Quadro RTX 6000 (7.5)", "NVIDIA RTX 6000 Ada Generation (8.9)",
                  "NVIDIA RTX PRO 6000 Blackwell (12.0)"]),
    ("titan", ["NVIDIA TITAN Xp (6.1)", "NVIDIA TITAN V (7.0)", "NVIDIA TITAN RTX (7.5)"]),
])  # fmt: skip
def test_what_could_be_several_is_asked_back(text, words) -> None:
    with pytest.raises(ValueError, match="say more of the name") as e:
        gpus.find(text)
    assert all(word in str(e.value) for word in words)
    assert str(e.value).count("(") == len(words)


def described(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    cli.main(list(argv))
    return capsys.readouterr().out


def test_what_a_cpu_is_assumed_to_have(capsys) -> None:
    """No package makes a difference there: Triton's interpreter is not asked for."""
    assert "Nothing was run: this is what the backends declare.\n" in described(
        "--as=cpu", capsys=capsys)  # fmt: skip


def test_one_decision_on_another_machine(capsys, monkeypatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was run")

    for name in ("probe", "select", "median_ms", "pick_device"):
        monkeypatch.setattr(cli, name, never)
    out = described("flash_attn_2", "--as", "NVIDIA TITAN RTX", capsys=capsys)
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].startswith("NVIDIA TITAN RTX (cuda), compute capability 7.5, torch ")
    assert lines[1] == "batch 16, 1024 tokens, 12 heads of 64, float16, causal"
    assert lines[2].startswith("Nothing was run: this is what the backends declare, with ")
    assert "flash_attn" in " ".join(lines[2:4])
    assert lines[-3] == (
        "WARNING: flash_attn_2 requested but it needs compute capability >= 8.0, NVIDIA TITAN RTX "
        "has 7.5."
    )
    assert lines[-2:] == [
        "         Falling back to 'sdpa'.",
        "INFO: Attention backend: sdpa (PyTorch scaled_dot_product_attention)",
    ]
    assert "flash_attn_2 (" in described("flash_attn_2", "--as=4090", capsys=capsys)


def test_every_backend_on_another_machine(capsys) -> None:
    out = described("--as=h100", "--window=64", capsys=capsys)
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "bfloat16, causal, window 64" in lines[1]
    assert "declare, with triton, flash_attn, " in " ".join(out.split())
    rows = {line.split()[0]: line for line in lines[4:] if line.strip() and line[0] != " "}
    assert {*BACKENDS, "runs", "does"} <= set(rows)
    assert "PyTorch scaled_dot_product_attention" in rows["sdpa"]
    assert "it has no sliding window" in rows["sdpa_flash"]
    assert "FlashAttention-2, package flash-attn" in rows["flash_attn_2"]
    assert lines[-1] == "auto takes flash_attn_4 there."
    for machine, takes in (("mps", "manual"), ("cpu", "sdpa"), ("titan rtx", "sdpa")):
        assert described(f"--as={machine}", capsys=capsys).splitlines()[-1] == (
            f"auto takes {takes} there."
        )
    assert "auto takes sdpa there" in described("--as=mps", "--allow_mps_sdpa", capsys=capsys)


def test_what_is_asked_of_another_machine(capsys) -> None:
    out = described("--as=b200", "--inference", "--kv_cache=paged", "--deterministic",
                    capsys=capsys)  # fmt: skip
    lines = out.splitlines()
    assert lines[0].startswith("NVIDIA B200 (cuda), compute capability 10.0, torch ")
    assert " ".join(line.strip() for line in lines[1:3]) == (
        "batch 16, 1024 tokens, 12 heads of 64, bfloat16, causal, inference, paged cache of 256, "
        "one query, deterministic"
    )
    runs, does_not = out.split("does not")
    assert {line.split()[0] for line in runs.splitlines()[5:] if line.strip()} >= {"paged"}
    rows = {line.split()[0]: line for line in does_not.splitlines() if line.strip()}
    assert rows["manual"].split(maxsplit=1)[1].strip() == "it has no 'paged' cache"
    out = described("auto", "--as=cpu", capsys=capsys)
    assert out.splitlines()[-1] == (
        "INFO: Attention backend: sdpa (PyTorch scaled_dot_product_attention)"
    )


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (12, 0)])
def test_the_dtype_is_the_one_that_a_run_there_picks(capability, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    picked = pick_dtype("auto", torch.device("cuda"))
    assert cli.best_dtype(Machine("cuda", "GPU", capability)) == str(picked).split(".")[1]
    for device in ("cpu", "mps"):
        picked = pick_dtype("auto", torch.device(device))
        assert cli.best_dtype(Machine(device, "x")) == str(picked).split(".")[1]


# --- the support table ---


def test_the_support_table_says_what_caps_say(monkeypatch) -> None:
    rows = (
        Caps(("cuda",), ("float16",), (8, 0), (8, 9), head_dim_max=256, deterministic=False,
             packages=("a>=2.1", "b"), caches=("none", "dynamic", "paged"),
             page_multiple=256),
        Caps(("cuda",), min_capability=(9, 0), max_capability=(9, 0), hub_kernels=True),
        Caps(("cuda",), min_capability=(9, 0), max_capability=(9, 0), window=False, grad=False,
             caches=("none",)),
        Caps(("cuda",), min_capability=(10, 0), dropout_step=0.0625, head_dim_multiple=8,
             scale=True, sinks=True),
        Caps(("cpu",), interpreted=True, caches=("paged",), segments=False, dropout=False),
    )  # fmt: skip
    assert support.place("cuda", [rows[0], rows[2]]) == "cuda 8.0 to 9.0"
    assert support.place("cuda", [rows[2], rows[0]]) == "cuda 8.0 to 9.0"
    made_up(monkeypatch, caps=rows, aliases=("alias",), fallback="manual")
    monkeypatch.setattr(support, "BACKENDS", {"made_up": cli.BACKENDS["made_up"]})
    title, rule, *lines = support.table().splitlines()
    names = [c.strip() for c in title.strip("|").split("|")]
    assert rule == "|---" * len(names) + "|"
    cells = [dict(zip(names, (c.strip() for c in line.strip("|").split("|")))) for line in lines]
    assert len(cells) == 4  # not the one of the hub
    assert {c["name"] for c in cells} == {"`made_up`"}
    assert [c["device"] for c in cells] == [
        "cuda 8.0 to 8.9", "cuda 9.0", "cuda >= 10.0", "cpu (interpreter)"]  # fmt: skip
    assert cells[0] | {"name": ""} == {
        "name": "", "device": "cuda 8.0 to 8.9", "packages": "a >= 2.1, b", "dtypes": "float16",
        "head_dim": "up to 256", "window": "yes", "segments": "yes", "scores": "no", "parts": "no",
        "dropout": "yes", "backward": "yes, not deterministic",
        "caches": "dynamic, paged (pages of 256 n tokens)"}  # fmt: skip
    assert (cells[1]["window"], cells[1]["backward"], cells[1]["caches"]) == ("no", "no", "no")
    assert cells[2]["head_dim"] == "any, multiple of 8"
    assert cells[2]["scores"] == "scale, sinks"
    assert cells[2]["dropout"] == "multiples of 0.0625"
    assert cells[2]["backward"] == "yes"
    assert (cells[3]["caches"], cells[3]["segments"], cells[3]["dropout"]) == (
        "only paged", "no", "no")  # fmt: skip
    title, _, line = support.overview().splitlines()
    names = [c.strip() for c in title.strip("|").split("|")]
    assert dict(zip(names, (c.strip() for c in line.strip("|").split("|")))) == {
        "name": "`made_up` `alias`", "what": BACKENDS["manual"].title,
        "runs on": "cuda >= 8.0, cpu (interpreter)",
        "falls back to": "`manual`"}  # fmt: skip


def test_the_tables_are_written_where_they_stood_and_nothing_else_is(tmp_path, monkeypatch) -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8")
             for name in ("README.md", "docs/SUPPORT.md")}  # fmt: skip
    (tmp_path / "docs").mkdir()
    for name, text in pages.items():
        old = re.sub(r"^\| `tiled`.*\n", "", text, flags=re.M).replace("| `paged`", "| `pages`")
        assert text.count("\n") > old.count("\n")
        (tmp_path / name).write_text(old, encoding="utf-8")
    monkeypatch.setattr(support, "ROOT", tmp_path)
    support.write()
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in pages} == pages


@needs_no_cuda
def test_as_a_user_runs_it() -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "attention", *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    gone = run("sdpa_flash", "--dtype=float32", "--device=cuda")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert gone.stderr.startswith("error: there is no device 'cuda' here; there is cpu")
    assert gone.stderr.count("\n") == 1
    good = run(*SMALL, "--dtype=float64")
    assert good.returncode == 0 and good.stderr == ""
    (manual,) = (line for line in good.stdout.splitlines() if line.startswith("manual "))
    assert all(float(ms) >= 0 for ms in manual.split()[2:4])
