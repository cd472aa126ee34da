"""Pages 6 to 9 of docs/course: their figures against closed forms, their exercises against the
backends, and every mistake that a checker names against what it says.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_course import ANSWERS, COURSE, TEXT, cells, written

from attention import BACKENDS, Machine, Spec, oracle, resolve, visible
from attention.__main__ import main as attention_main
from attention.views import PagedView
from core import flops
from core.settings import UserError
from docs import figures
from docs import figures_fused as fused
from docs.exercises import ex6, ex7, ex8, ex9
from docs.exercises.check import Wrong, examine
from model import GPTConfig

ROOT = COURSE.parents[1]


# --- page 6 ---


def test_what_is_kept_has_the_sizes_of_the_formulas() -> None:
    T, H, D = 96, 3, 8
    rows = cells(figures.draw(["kept_for_backward", "--T=96", "--n_head=3", "--D=8"]))
    manual = [row for row in rows if row[0] == "manual"]
    tiled = [row for row in rows if row[0] == "tiled"]
    assert tiled[-1] == ["tiled", "all", "", f"{(4 * H * T * D + H * T) * 4 / 1e6:.2f}", "x 2"]
    assert len(tiled) == 6  # q, k, v, out and L
    P = next(row for row in manual if row[1] == f"({H}, {T}, {T})")
    assert P[2:] == ["float32", f"{H * T * T * 4 / 1e6:.2f}", "x 4"]
    mask = next(row for row in manual if row[2] == "bool")
    assert mask[1] == f"(1, 1, 1, {T}, {T})" and mask[4] == "x 4"


@pytest.mark.parametrize("T", [64, 200, 256])
def test_the_operations_are_counted_in_the_tiles_that_are_visited(T) -> None:
    manual, tiled = cells(figures.draw(["backward_flops", f"--T={T}", "--D=16"]))
    assert manual == ["manual", "all", "4", "8"]
    blocks = [(t, min(t + 64, T)) for t in range(0, T, 64)]
    sizes = [[(b - a) * (d - c) for c, d in blocks if c <= b - 1] for a, b in blocks]
    share = sum(map(sum, sizes)) / T**2
    visited = sum(map(len, sizes))
    of = f"{visited} of {len(blocks) ** 2}"
    assert tiled == ["tiled", of, f"{4 * share:.3g}", f"{10 * share:.3g}"]


# The exercises' own truths, against the oracle and the backends.


@pytest.mark.parametrize("R, Tq, Tk", [(1, 4, 4), (3, 5, 9)])
def test_the_gradients_of_exercise_6_are_the_oracles(R, Tq, Tk) -> None:
    draw = torch.Generator().manual_seed(Tq)
    q, dout = torch.randn(2, R, Tq, 8, generator=draw, dtype=torch.float64)
    k, v = torch.randn(2, Tk, 8, generator=draw, dtype=torch.float64)
    q_, dout_ = (t.transpose(0, 1)[None] for t in (q, dout))
    truth = oracle.attention(q_, k[None, :, None], v[None, :, None], dout_)
    for block in (2, 100):
        dq, dk, dv = ex6.gradients(q, k, v, dout, block)
        torch.testing.assert_close(dq.transpose(0, 1)[None], truth.dq)
        torch.testing.assert_close(dk[None, :, None], truth.dk)
        torch.testing.assert_close(dv[None, :, None], truth.dv)
    out, L = ex6.kept(q, k, v)
    torch.testing.assert_close(out.transpose(0, 1)[None], truth.out)
    assert L.shape == (R, Tq)


def complaint(exercise: Any, answer: Any) -> str:
    with pytest.raises(Wrong) as caught:
        exercise.check(answer)
    return str(caught.value)


@pytest.mark.parametrize("slip", ex6.MISTAKES)
def test_exercise_6_names_each_mistake(slip) -> None:
    def backward(q, k, v, out, L, dout, block):
        return ex6.gradients(q, k, v, dout, block, slip)

    assert ex6.MISTAKES[slip] in complaint(ex6, SimpleNamespace(backward=backward))


@pytest.mark.parametrize("n, name", list(enumerate(("dq", "dk", "dv"))))
def test_exercise_6_looks_at_each_gradient(n, name) -> None:
    def backward(q, k, v, out, L, dout, block):
        got = ex6.gradients(q, k, v, dout, block)
        got[n].view(-1)[-1] += 0.01
        return got

    assert complaint(ex6, SimpleNamespace(backward=backward)).startswith(f"{name}[")


def test_exercise_6_looks_at_the_size_of_what_is_made() -> None:
    def backward(q, k, v, out, L, dout, block):
        return ex6.gradients(q, k, v, dout, block)

    told = complaint(ex6, SimpleNamespace(backward=backward))
    assert told.startswith("the gradients are right, but a tensor of shape (")


# --- page 7 ---


def test_the_pairs_of_lines_stand_in_the_files_in_this_order() -> None:
    for name, functions in (
        ("forward_line_by_line", ("forward_tiles", "forward_kernel")),
        ("backward_line_by_line", ("backward_tiles", None)),
    ):
        drawn = figures.draw([name]).splitlines()[1:-1]
        assert len(drawn) % 3 == 2
        for n, (who, file) in enumerate((("tiled", "tiled"), ("triton", "triton_kernels"))):
            text = (ROOT / "attention" / f"{file}.py").read_text(encoding="utf-8")
            if functions[n]:
                text = text[text.index(f"def {functions[n]}(") :]
            text = re.sub(r"\s+", " ", text)
            at = 0
            for line in drawn[n::3]:
                assert line.startswith(who)
                code = line.removeprefix(who).strip()
                assert code in text, code
                if functions[n]:
                    assert text.index(code) > at, f"{code} is out of order"
                    at = text.index(code)


def test_a_line_that_is_gone_is_told() -> None:
    with pytest.raises(UserError, match=r"no statement of forward_tiles .* begins 'no_such ='"):
        fused.statement("attention/tiled.py", "forward_tiles", "no_such =")


class Kernel:
    """What exercise 7 launches, but in Python: O and L with a mistake."""

    def __init__(self, slip: str = "", L: str = "") -> None:
        self.slip, self.L, self.run = slip, L, None

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(Q, K, V, O, L, Tq, Tk, scale, D, BLOCK_M, BLOCK_N):
            assert grid == (math.ceil(Tq / BLOCK_M),)
            out, right = ex7.online(Q, K, V, self.slip)
            O.copy_(out)
            L.copy_({"m": ex7.maxima(Q, K), "natural": right * math.log(2)}.get(self.L, right))

        return launch


cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the checker takes the CUDA device")


@cpu
def test_exercise_7_takes_what_is_right() -> None:
    ex7.check(SimpleNamespace(forward=Kernel()))
    for Tq, Tk in ((5, 5), (40, 70)):
        draw = torch.Generator().manual_seed(Tq)
        q, k, v, dout = (torch.randn(T, ex7.D, generator=draw) for T in (Tq, Tk, Tk, Tq))
        truth = oracle.attention(*(t[None, :, None] for t in (q, k, v, dout)))
        out, _ = ex7.online(q, k, v)
        torch.testing.assert_close(out[None, :, None].double(), truth.out, atol=1e-5, rtol=1e-5)


@cpu
@pytest.mark.parametrize("slip", ex7.MISTAKES)
def test_exercise_7_names_each_mistake(slip) -> None:
    assert ex7.MISTAKES[slip] in complaint(ex7, SimpleNamespace(forward=Kernel(slip)))


@cpu
@pytest.mark.parametrize("slip", ex7.L_MISTAKES)
def test_exercise_7_names_each_mistake_of_L(slip) -> None:
    assert ex7.L_MISTAKES[slip] in complaint(ex7, SimpleNamespace(forward=Kernel(L=slip)))


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("tl.exp2(m_i - m_new)", "tl.exp2(m_j - m_new)", "NameError at line "),
        ("rescale[:, None] * O_i", "rescale * O_i[:8]", "Error at line "),
        ("O, L, Tq, Tk, scale,", "O, L, Tq, scale,", "TypeError: forward() got multiple values"),
    ],
)
@cpu
def test_a_kernel_that_does_not_run_is_told_why(old, new, told, tmp_path) -> None:
    pytest.importorskip("triton", reason="package 'triton' is not installed")
    text = (ANSWERS / "ex7.py").read_text(encoding="utf-8")
    assert old in text
    complaint_ = examine(ex7, written(tmp_path, text.replace(old, new)))
    assert complaint_ is not None
    assert complaint_.startswith("the kernel does not run. ") and told in complaint_


def test_exercise_7_without_triton_is_one_clear_sentence(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ex7, "find_spec", lambda name: None)
    for path in (ANSWERS / "ex7.py", written(tmp_path, "def forward(): pass")):
        told = examine(ex7, path)
        assert told is not None
        assert told.startswith("exercise 7 needs the package 'triton', which is not installed here")


@cpu
def test_exercise_7_asks_for_the_interpreter_before_triton_is_there(monkeypatch) -> None:
    monkeypatch.setattr(ex7, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Wrong, match="set TRITON_INTERPRET=1"):
        ex7.prepare()
    monkeypatch.delitem(sys.modules, "triton")
    ex7.prepare()
    assert os.environ["TRITON_INTERPRET"] == "1"


# --- page 8 ---


def test_the_choices_are_those_of_resolve() -> None:
    rows = {row[0]: row for row in cells(figures.draw(["choices"]))}
    assert len(rows) == len(fused.MACHINES)
    for name, (_, capability, dtype, everything, nothing, *can) in rows.items():
        device = "cuda" if capability else "mps" if "Apple" in name else "cpu"
        at = tuple(map(int, capability.split("."))) if capability else None
        bare = Machine(device, name, at, "2.13.0")
        assert resolve("auto", Spec(12, 12, 64, dtype), bare).backend.name == nothing
        assert everything == nothing or everything.startswith("flash_attn_"), name
        assert set(can) <= {"yes", ""}
    assert rows["NVIDIA A100"][3] == "flash_attn_2" and rows["cpu"][3] == "sdpa"
    assert rows["Apple M3"][3] == "manual"


def test_lazy_rescaling_counts_rows_of_all_scores() -> None:
    """Again from the whole matrix of scores, row by row."""
    T, D, threshold = 320, 8, 0.5
    words = ["lazy_rescaling", f"--T={T}", f"--D={D}", f"--threshold={threshold}"]
    for spread, visits, grew, past in cells(figures.draw(words)):
        draw = torch.Generator().manual_seed(int(spread))
        q, k, _ = (torch.randn(1, T, 1, D, generator=draw)[0, :, 0] for _ in range(3))
        S = int(spread) * q @ k.T / math.sqrt(D) / math.log(2)
        seen = eager = lazy = 0
        for i in range(T):
            maxima = [S[i, j : min(j + 64, i + 1)].max() for j in range(0, i // 64 * 64 + 1, 64)]
            # A row of a block is visited up to the last tile that any row of the block sees.
            m = top = maxima[0]
            for new in maxima[1:]:
                seen += 1
                eager += int(new > top)
                top = max(top, new)
                if top - m > threshold:
                    lazy, m = lazy + 1, top
        assert (visits, grew, past) == (
            f"{seen:,}", f"{eager:,} ({eager / seen:.1%})", f"{lazy:,} ({lazy / seen:.1%})"
        )  # fmt: skip


def test_is_causal_of_pytorch_is_aligned_top_left() -> None:
    """As page 8 says."""
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    i, j = torch.arange(2)[:, None], torch.arange(5)
    got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for offset, equal in ((0, True), (3, False)):
        want = F.scaled_dot_product_attention(q, k, v, visible(i, j, offset))
        assert torch.allclose(got, want, atol=1e-5) == equal


def test_the_machines_of_page_8_answer(capsys) -> None:
    for words, said in (
        (["flash_attn_3", "--as=NVIDIA A100"], "it needs compute capability 9.0, NVIDIA A100 has"),
        (["auto", "--as=RTX 4090"], "INFO: Attention backend: flash_attn_2"),
        (["sdpa_cudnn", "--as=h100", "--dropout=0.1"], "dropout must be a multiple of 0.0625"),
    ):
        line = f"python -m attention {' '.join(words)}"
        assert line in TEXT["8_flash_attention.md"].replace('"', ""), line
        attention_main(words)
        assert said in capsys.readouterr().out.replace("\n", " ")


def test_the_softmax_of_exercise_8_is_softmax() -> None:
    draw = torch.Generator().manual_seed(0)
    S, V = 5 * torch.randn(9, 32, generator=draw), torch.randn(32, 3, generator=draw)
    counts = []
    for threshold in (0.0, 4.0, 8.0, 1e9):
        out, L, rescaled = ex8.online(S, V, 4, threshold)
        P = torch.softmax(S.double() * math.log(2), dim=1)
        torch.testing.assert_close(out.double(), P @ V.double(), atol=1e-5, rtol=1e-5)
        want = (S.double() * math.log(2)).logsumexp(1) / math.log(2)
        torch.testing.assert_close(L.double(), want, atol=1e-5, rtol=1e-5)
        counts.append(rescaled)
    assert counts[0] > counts[1] > counts[2] > counts[3] == 0


@pytest.mark.parametrize("slip", ex8.MISTAKES)
def test_exercise_8_names_each_mistake(slip) -> None:
    def attend(S, V, block, threshold):
        return ex8.online(S, V, block, threshold, slip)

    assert ex8.MISTAKES[slip] in complaint(ex8, SimpleNamespace(attend=attend))


# --- page 9 ---


def test_the_bytes_of_a_token() -> None:
    for row in cells(figures.draw(["cache_bytes"])):
        n_layer, Hkv, D = map(int, row[1:4])
        assert int(row[4].replace(",", "")) == 2 * n_layer * Hkv * D * 2
        assert row[5] == f"{1024 * 2 * n_layer * Hkv * D * 2 / 1e6:.1f}"


@pytest.mark.parametrize("lengths, size", [((30, 100, 500, 1000), 16), ((7, 65), 64), ((3,), 1)])
def test_places_of_three_caches(lengths, size) -> None:
    rows = cells(figures.draw(["three_caches", f"--lengths={lengths}", f"--page_size={size}"]))
    longest = max(lengths)
    places = (
        len(lengths) * 1025,
        len(lengths) * min(1024, 1 << longest.bit_length()),
        sum(math.ceil(n / size) * size for n in lengths),
    )
    for row, n in zip(rows, places, strict=True):
        assert row[1] == f"{n:,}"
        assert row[2] == f"{n * 36864 / 1e6:.1f}"
        assert row[3] == f"{sum(lengths) / n:.0%}"


def test_mfu_of_the_record_is_what_the_record_says() -> None:
    content = json.loads((ROOT / fused.TRAINING / "record.json").read_text(encoding="utf-8"))
    text = figures.draw(["mfu_of_a_record"])
    numbers = [int(n.replace(",", "")) for n in re.findall(r"^[N61p].*?\s([\d,]{6,})", text, re.M)]
    N, weights, attention, peak = numbers
    assert weights == 6 * N and peak == round(content["machine"]["peak_tflops"] * 1e12)
    assert weights + attention == content["flops_per_token"]["mfu"]
    rows = {r["backend"]: r for r in content["rows"] if r["mode"] == "train"}
    shown = cells(text)
    assert {row[0] for row in shown} == set(fused.SHOWN)
    for name, rate, ms, quartiles, mfu, causal, memory in shown:
        row = rows[name]
        assert (mfu, causal) == (f"{row['mfu']:.1%}", f"{row['mfu_causal']:.1%}")
        assert rate == f"{row['tokens_per_s']:,.0f}" and ms == f"{row['ms']:.0f}"
        assert quartiles == f"{row['q1_ms']:.0f} to {row['q3_ms']:.0f}"
        assert memory == f"{row['memory_bytes'] / 1e6:.0f}"


def test_what_page_9_says_of_the_record_is_so() -> None:
    page = " ".join(TEXT["9_caches_and_mfu.md"].split())
    content = json.loads((ROOT / fused.TRAINING / "record.json").read_text(encoding="utf-8"))
    train = {r["backend"]: r for r in content["rows"] if r["mode"] == "train"}
    assert train["sdpa"]["kernels"] == ["flash (CPU)"] and "`sdpa` was `flash (CPU)`" in page
    assert "Those of `sdpa` and `nanogpt` overlap" in page
    assert train["nanogpt"]["q1_ms"] <= train["sdpa"]["q3_ms"]
    share = f"{100 * train['sdpa']['mfu']:.1f} % and {100 * train['sdpa']['mfu_causal']:.1f} %"
    assert f"T = {content['settings']['block_size']} of which half is masked: {share}" in page
    config = GPTConfig(vocab_size=content["vocab_size"], n_layer=4, n_head=4, n_embd=256,
                       block_size=512, bias=False)  # fmt: skip
    attention = 1 - 6 * flops.n_params(config) / content["flops_per_token"]["mfu"]
    assert 0.2 < attention < 0.25 and "less than a quarter of the operations" in page
    kernels = (r for r in content["rows"] if r["mode"] == "kernel" and r["status"] == "ok")
    alone = {r["backend"]: r["ms"] for r in kernels if r["point"]["T"] == 2048}
    assert f"`manual` takes {alone['manual'] / alone['sdpa']:.0f} times as long as `sdpa`" in page
    assert "Four texts of 30, 100, 500 and 1,000 tokens" in page
    assert fused.LENGTHS == (30, 100, 500, 1000)


def test_generation_of_the_record() -> None:
    """Against the table that the bench itself wrote into the record's page."""
    page = (ROOT / fused.GENERATION / "README.md").read_text(encoding="utf-8")
    rows = cells(figures.draw(["caches_of_a_record"]))
    assert len(rows) == 6
    for B, cache, rate, *_, mbu in rows:
        line = next(r for r in page.splitlines() if r.startswith(f"| sdpa | {B} | 64 | {cache} "))
        told = [cell.strip() for cell in line.strip("|").split("|")]
        assert float(told[5]) == pytest.approx(float(rate), rel=0.01) and mbu in told


def test_the_pages_of_exercise_9_are_those_of_paged() -> None:
    draw = torch.Generator().manual_seed(0)
    k_pages, v_pages = torch.randn(2, 6, 4, 1, 8, generator=draw)
    q, k, v = torch.randn(3, 1, 1, 1, 8, generator=draw)
    table, length = torch.tensor([[3, 1, 5]], dtype=torch.int32), 10
    k_pages[table[0, 2], 1], v_pages[table[0, 2], 1] = k[0, 0], v[0, 0]  # the tenth token
    view = PagedView(table, torch.tensor([length - 1]).int(), torch.tensor([1]).int())
    spec = Spec(1, 1, 8, "float32", grad=False, cache="paged", page_size=4)
    out = BACKENDS["paged"].attend(q, k_pages, v_pages, spec, cache=view)
    got = ex9.over_pages(q.flatten(), k_pages[:, :, 0], v_pages[:, :, 0], table[0], length)
    torch.testing.assert_close(got, out.flatten())


def test_the_rate_of_exercise_9_is_that_of_flops() -> None:
    config = GPTConfig(vocab_size=1000, n_layer=3, n_head=2, n_embd=32, block_size=128, bias=True)
    positions = 128 * 32
    given = {"parameters": flops.n_params(config) + positions, "positions": positions,
             "n_layer": 3, "n_head": 2, "head_dim": 16, "T": 128, "tokens_per_second": 1e6,
             "peaks": {"dense": 1e12, "sparse": 2e12}, "recomputes": True}  # fmt: skip
    want, causal = flops.mfu(config, 128, 1e6, flops.Peak(1.0, "here"))
    assert ex9.rate(given) == pytest.approx(want)
    assert ex9.rate(given, "causal") == pytest.approx(causal)


@pytest.mark.parametrize("slip", [*ex9.MISTAKES, *ex9.RATES])
def test_exercise_9_names_each_mistake(slip) -> None:
    def attend(*given):
        return ex9.over_pages(*given, slip if slip in ex9.MISTAKES else "")

    def mfu(**given):
        recomputed = slip == "recomputed" and not given["recomputes"]
        return ex9.rate(given, "" if recomputed or slip not in ex9.RATES else slip)

    told = complaint(ex9, SimpleNamespace(attend=attend, mfu=mfu))
    assert {**ex9.MISTAKES, **ex9.RATES}[slip] in told


def test_figures_6_to_9_tell_what_they_take() -> None:
    for words, told in (
        (["kept_for_backward", "--T=1"], "T must be at least 2"),
        (["backward_flops", "--D=0"], "at least 1"),
        (["lazy_rescaling", "--T=64"], "T must be more than 64"),
        (["three_caches", "--lengths=(0, 3)"], "lengths must be from 1"),
        (["three_caches", "--lengths=(3, 1025)"], "lengths must be from 1 to 1,024"),
        (["three_caches", "--page_size=0"], "page_size at least 1"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            figures.main(words)


def test_every_answer_of_6_to_9_may_be_run_twice(tmp_path: Path) -> None:
    """Nothing that a checker does stays behind."""
    for number, exercise in ((6, ex6), (8, ex8), (9, ex9)):
        for _ in range(2):
            assert examine(exercise, ANSWERS / f"ex{number}.py") is None


@pytest.mark.parametrize("slip", ex8.COUNTS)
def test_exercise_8_names_each_count(slip) -> None:
    def attend(S: torch.Tensor, V: torch.Tensor, block: int, threshold: float) -> tuple[Any, ...]:
        out, L, _ = ex8.online(S, V, block, threshold)
        return out, L, ex8.counts(S, block, threshold)[slip]

    assert ex8.COUNTS[slip] in complaint(ex8, SimpleNamespace(attend=attend))


def test_a_statement_is_found_by_its_beginning(monkeypatch) -> None:
    lines = ["assert m_i = l_i", "l_i = 1", "l_i = 2"]
    monkeypatch.setattr(fused, "statements", lambda file, function: lines)
    assert fused.statement("a.py", "f", "l_i =") == "l_i = 1"
    with pytest.raises(UserError, match=r"no statement of f in a.py begins 'm_i ='"):
        fused.statement("a.py", "f", "m_i =")
