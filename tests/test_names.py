"""Kernels by name: files, modules, entry points, registered backends, the hub, masks. No config,
checkpoint or record runs code."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import kernels
import pytest
import torch

import attention
import checkpoint
import train
from attention import BACKENDS, Backend, BackendUnavailable, Caps, Policy, Spec, get, select
from attention.__main__ import main
from attention.machine.system import import_version
from attention.masks import Mods
from attention.proof import Inputs, truth
from model import GPT, GPTConfig

F32 = Spec(4, 2, 16, "float32")
KERNEL = """from nanoattn import Backend, Caps, get
print("it ran")
BACKEND = Backend("mine", "a test's", get("manual").attend, (Caps(),), "sdpa", ("mine_too",))
"""
ENTRY = """[nanoattn.backends]
offered = offered_kernels.mine:BACKEND
broken = offered_kernels.no:X
"""
COMMIT = "0123456789abcdef" * 2 + "01234567"
HUB = f"hub:somebody/kernels@{COMMIT}"
PREFIX = "def mask_mod(b, h, q_idx, kv_idx):\n    return (kv_idx <= q_idx) | (kv_idx < 5)\n"
MINE = ("mine.py", "offered_kernels.mine:BACKEND", "offered")  # the ways to name KERNEL
CODE = (*MINE, HUB, "flex:prefix.py")
SIZES: dict[str, Any] = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 32}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernel files, and a package with an entry point next to a broken one."""
    folder, info = tmp_path / "offered_kernels", tmp_path / "offered_kernels-1.0.dist-info"
    folder.mkdir(), info.mkdir(), (tmp_path / "data").mkdir()
    for path in (tmp_path / "mine.py", folder / "mine.py"):
        path.write_text(KERNEL)
    (folder / "named_sdpa.py").write_text(KERNEL.replace('"mine"', '"sdpa"'))
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: offered-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    (tmp_path / "prefix.py").write_text(PREFIX)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for module in [name for name in sys.modules if name.startswith("offered_kernels")]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


@pytest.mark.parametrize("name", MINE)
def test_a_kernel_runs_once_a_process_when_it_is_used(name, package, capsys) -> None:
    model = GPT(GPTConfig(vocab_size=16, attention_backend=name, **SIZES))
    train.TrainConfig(attention_backend=name)
    assert capsys.readouterr().out == ""
    chosen = model.plan()[0].chosen
    assert (chosen.backend.name, chosen.requested) == ("mine", name)
    others = [name, "./mine.py", str(package / "mine.py")] if name == "mine.py" else [MINE[1]]
    assert {id(get(other)) for other in others} == {id(chosen.backend)}
    ran = capsys.readouterr().out
    assert ran == "it ran\n" or (ran == "" and name != "mine.py")


@pytest.mark.parametrize("name, text, words", [
    ("offered_kernels.no:X", "", "offered_kernels.no"), ("offered_kernels.mine:X", "", "'X'"),
    ("offered_kernels.mine:get", "", "BACKEND"), ("a b:c", "", "package.module:BACKEND"),
    ("offered_kernels.named_sdpa:BACKEND", "", "'sdpa'"), ("broken", "", "offered_kernels.no"),
    ("flex:no.py", "", "no.py"), ("none.py", "", "none.py"), *(("bad.py", text, f"bad.py {why}")
     for text, why in (
        ("x = 1", "BACKEND"), ("BACKEND = {}", "BACKEND"),
        *((KERNEL.replace(old, new), word) for old, new, word in (
            ('"mine"', '"auto"', "auto"), ('"sdpa"', '"auto"', "auto"), ("(),)", "())", "caps"))),
        ("def f():\n  return 1 / 0\n\nx = f()", "line 2: ZeroDivisionError"),
        ("def f():\n  return [\n", "line 2: SyntaxError"),
        ("import sys\nsys.exit('bye')", "line 2: SystemExit")))])
def test_what_is_no_kernel_is_an_error_of_one_line(name, text, words, package) -> None:
    if text:
        (package / name).write_text(text, encoding="utf-8")
    with pytest.raises(BackendUnavailable) as e:
        select(name, F32, "cpu")
    assert all(word in str(e.value) for word in words.split(" ", 1)) and "\n" not in str(e.value)


@pytest.mark.parametrize("name", CODE)
def test_a_checkpoint_a_resumed_run_or_a_record_runs_no_code(name, package, caplog, capsys) -> None:
    config = GPTConfig(vocab_size=16, attention_backend=name, **SIZES)
    settings = train.TrainConfig(out_dir="out", attention_backend=name, **SIZES)
    checkpoint.save(
        package / "out", weights=GPT(config).state_dict(), optimizer={}, keep=1, state={"step": 1},
        settings={"model": vars(config), "train": vars(settings), "tokenizer": {}})
    there = checkpoint.load(checkpoint.latest(package / "out"))
    assert there.config().attention_backend == "auto" and name in caplog.text
    assert there.config(attention_backend=name).attention_backend == name
    with torch.no_grad():
        there.model().plan()
    caplog.clear()
    there.config(attention_backend="sdpa")
    assert (name in caplog.text) == name.startswith("flex:")  # a mask is a part of the model
    words = ["--init_from=resume", "--out_dir=out"]
    for asked, want in (([], "auto"), ([f"--attention_backend={name}"], name)):
        caplog.clear()
        again = checkpoint.resumed(train.read(train.TrainConfig, words + asked)).settings
        assert again.attention_backend == want and len(caplog.records) == (not asked)
    assert capsys.readouterr().out == "" and "offered_kernels.mine" not in sys.modules


def test_every_backend_is_in_the_table_with_its_times_or_reasons(
    package, capsys, monkeypatch
) -> None:
    """In text and JSON; entry points too."""
    few = {n: BACKENDS[n] for n in ("manual", "tiled", "paged", "sdpa_cudnn")}
    monkeypatch.setattr("attention.__main__.BACKENDS", few)
    kernels.hurry(monkeypatch)
    words = ["--device=cpu", "--seq_len=16", "--n_head=2", "--head_dim=16", "--window=3"]
    main([*words, "--segments"])
    able, unable = capsys.readouterr().out.split("does not run")
    for name in ("manual", "tiled", "offered"):
        forward, both, error = map(float, able.split(f"\n{name} ")[1].split()[:3])
        assert 0 < forward < both and error < 1e-5
    assert "window 3" in able and "segments" in able and "offered_kernels.no" in unable
    assert "paged" in unable and "sdpa_cudnn" in unable and "cuda" in unable
    main([*words, "--json", "--kv_cache=paged", "--page_size=16"])
    found: Any = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["backends"]}
    assert set(rows) == {*few, "offered", "broken"} and found["spec"]["page_size"] == 16
    assert found["versions"]["torch"] == torch.__version__ and found["shape"]["queries"] == 1
    assert rows["paged"]["ms"]["forward"] > 0 and rows["paged"]["error"] < 1e-5
    assert "paged" in rows["manual"]["why"][0] and "offered_kernels.no" in rows["broken"]["why"][0]


@patch.dict(BACKENDS)
@patch.dict(attention.names._BY_ANY_NAME)
def test_a_registered_backend_has_its_names_in_this_process() -> None:
    ours = Backend("mine", "a test's", get("tiled").attend, (Caps(),), "sdpa", ("mine_too",))
    assert attention.register(ours) is get("mine") is get("mine_too") is BACKENDS["mine"]
    assert select("mine_too", F32, "cpu").backend is ours
    for name in ("sdpa", "auto", "a/b", "a:b"):
        with pytest.raises(ValueError, match=name):
            attention.register(Backend(name, "", ours.attend, ours.caps, None))


# --- the hub ---


def repository(name: str) -> Any:
    """FlashAttention's functions by PyTorch's SDPA: no window; "wrong": of another offset."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        offset = 1 if "wrong" in name else k.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], k.shape[1]).tril(offset).bool() if causal else None
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), mask, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               softmax_scale=None, causal=False):
        cu = cu_seqlens_q, cu_seqlens_k, cu_seqlens_k
        texts = zip(*(t.tensor_split(c[1:-1].long()) for t, c in zip((q, k, v), cu)))
        return torch.cat([flash_attn_func(*(t[None] for t in text), softmax_scale, causal)[0]
                          for text in texts])

    return SimpleNamespace(flash_attn_func=flash_attn_func,
                           flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of get_kernel."""
    import_version.cache_clear()
    yield kernels.hub_of(monkeypatch, repository)
    import_version.cache_clear()


def test_the_hub_runs_with_permission_and_at_a_commit(hub) -> None:
    branch = "hub:somebody/kernels"
    for name in (branch, f"{branch}@main", HUB[:-1], HUB.replace("a", "A")):
        with pytest.raises(ValueError, match=name):
            GPTConfig(attention_backend=name)
    refused = select(HUB, F32, "cpu")
    assert refused.backend.name == "sdpa" and "hub_kernels" in refused.rejected[HUB][0]
    with pytest.raises(BackendUnavailable):
        get(HUB).attend(*(torch.zeros(1, 2, h, 16) for h in (4, 2, 2)), F32)
    assert not hub
    permitted = Policy(hub_kernels=True)
    for changes in ({}, {"segments": True}, {"scale": 0.5}, {"right": None}):
        chosen = select(HUB, Spec(4, 2, 16, "float32", **changes), "cpu", permitted)
        assert chosen.backend.name == HUB and chosen.proof["error"] <= chosen.proof["allowed"]
    assert hub == [("somebody/kernels", COMMIT)]
    for changes in ({"window": 4}, {"softcap": 2.0}, {"sinks": True}, {"dropout": 0.5}):
        [why] = select(HUB, Spec(4, 2, 16, "float32", **changes), "cpu", permitted).rejected[HUB]
        assert next(iter(changes)).rstrip("s") in why
    wrong = HUB.replace("kernels", "wrong")
    assert "wrong" in select(wrong, F32, "cpu", permitted).rejected[wrong][0]


# --- a mask of one's own ---


def test_the_truth_has_its_mask_and_its_scores_and_counts_its_pairs() -> None:
    bias = torch.linspace(-2, 2, 50, dtype=torch.float64)
    mods = Mods(lambda b, h, i, j: (j <= i) & ((i + j + b + h) % 3 != 0),
                lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + bias[i - j + 20] * (h + 1))
    spec = Spec(4, 2, 16, "float64", scale=0.6)
    q, k, v, dout = (torch.randn(2, T, h, 16, dtype=torch.float64).requires_grad_()
                     for T, h in ((7, 4), (12, 2), (12, 2), (7, 4)))
    out = torch.zeros_like(q)
    i, j = torch.arange(5, 12)[:, None], torch.arange(12)
    for b, h in itertools.product(range(2), range(4)):
        s = 2 * torch.tanh(q[b, :, h] @ k[b, :, h // 2].T * 0.3) + bias[i - j + 20] * (h + 1)
        seen = (j <= i) & ((i + j + b + h) % 3 != 0)
        out[b, :, h] = torch.softmax(s.masked_fill(~seen, -torch.inf), 1) @ v[b, :, h // 2]
    exact = truth(Inputs(q, k, v, dout), spec, mods=mods)
    wanted = out, *torch.autograd.grad(out, (q, k, v), dout)
    for got, want in zip((exact.out, exact.dq, exact.dk, exact.dv), wanted):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    by_head = Mods(lambda b, h, i, j: (j <= i) & (i - j <= h))
    assert by_head.mean_keys(9, 2) == (9 + 17) / 18


def test_it_trains_on_no_cpu_and_no_other_kernel_replaces_it(package) -> None:
    for spec in (F32, Spec(4, 2, 16, "float32", grad=False, window=3)):
        with pytest.raises(BackendUnavailable, match="window" if spec.window else "cpu"):
            select(f"flex:{package / 'prefix.py'}", spec, "cpu")


@pytest.mark.slow
def test_flex_computes_it(package) -> None:
    """Queries after keys; the last is longer than a tile."""
    spec = Spec(4, 2, 16, "float32", grad=False)
    backend = select(f"flex:{package / 'prefix.py'}", spec, "cpu").backend
    for Tq, Tk in ((1, 9), (4, 4), (150, 160)):
        q, k, v = (torch.randn(2, T, h, 16) for T, h in ((Tq, 4), (Tk, 2), (Tk, 2)))
        i, j = torch.arange(Tk - Tq, Tk)[:, None], torch.arange(Tk)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2).double() for t in (q, k, v)), (j <= i) | (j < 5), enable_gqa=True)
        with torch.no_grad():
            out = backend.attend(q, k, v, spec)
        torch.testing.assert_close(out.double(), wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


# --- launchers ---


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_a_disabled_kernel_is_refused_by_name(name, monkeypatch, caplog) -> None:
    monkeypatch.setenv("NANOATTN_DISABLE", "sdpa, eager,spda")
    with caplog.at_level(logging.DEBUG, "nanoattn"):
        chosen = select(name, F32, "cpu")
    assert chosen.backend.name not in ("sdpa", "manual")
    assert "NANOATTN_DISABLE" in chosen.rejected["sdpa"][0] and "'spda'" in chosen.note
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    found = json.loads(line.partition(": ")[2])
    assert found["backend"] == chosen.backend.name and found["spec"]["head_dim"] == 16
    assert found["versions"]["torch"] == torch.__version__ and "\n" not in line
    with pytest.raises(BackendUnavailable, match="NANOATTN_DISABLE"):
        select("eager", F32, "cpu", Policy(fallback=False))
