"""Page 10 of docs/course: its figures counted anew, its exercise against the oracle."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_course import ANSWERS, TEXT, cells
from test_course_late import complaint

from attention import Spec, oracle, tiled, visible
from core.settings import UserError
from docs import figures
from docs.exercises import ex10
from docs.exercises.check import examine
from viewer.maps import Call
from viewer.ring import played


def call_of(T: int, H: int, Hkv: int, D: int) -> Call:
    q, k, v = (torch.zeros(1, T, heads, D) for heads in (H, Hkv, Hkv))
    return Call(q, k, v, q, Spec(H, Hkv, D, "float32"), None)


@pytest.mark.parametrize("N", [1, 2, 3, 8])
def test_the_rounds_are_those_of_a_ring_that_runs(N) -> None:
    ring, _ = played(call_of(4 * N, 1, 1, 2), N)
    rows = cells(figures.draw(["ring_rounds", f"--N={N}"]))
    for (name, own, *held), process in zip(rows, ring, strict=True):
        pairs = [" and ".join(map(str, process.chunks(home))) for home in process.homes]
        assert name == str(process.rank)
        assert [own, *held] == [pairs[0], *pairs]


@pytest.mark.parametrize("N, window", [(2, None), (4, None), (3, 5), (4, 100)])
def test_the_work_is_counted_pair_by_pair(N, window) -> None:
    T = 8 * N
    rows = cells(figures.draw(["ring_work", f"--N={N}", f"--T={T}", f"--window={window}"]))
    chunk = T // (2 * N)
    for name, place in (
        ("plain", lambda t: t // (2 * chunk)),
        ("zigzag", lambda t: min(t // chunk, 2 * N - 1 - t // chunk)),
    ):
        count = [[0] * N for _ in range(N)]
        for i in range(T):
            for j in range(T):
                if visible(i, j, 0, window):
                    count[place(i)][(place(i) - place(j)) % N] += 1
        total = sum(map(sum, count))
        slowest = [max(row[step] for row in count) for step in range(N)]
        told = {row[1]: row[2:] for row in rows if row[0] == name}
        for r, row in [*enumerate(count), ("slowest", slowest)]:
            want = [n / total for n in (*row, sum(row))]
            got = [float(cell.rstrip("%")) / 100 for cell in told[str(r)]]
            assert got == pytest.approx(want, abs=6e-4)
    if window is None:
        shares = [row[-1] for row in rows if row[0] == "zigzag"]
        assert len(set(shares)) == 1, "zigzag is even"


def test_page_10_says_what_the_figure_says() -> None:
    page = " ".join(TEXT["10_ring.md"].split())
    rows = {tuple(row[:2]): row for row in cells(figures.draw(["ring_work"]))}
    plain, even = (float(rows[k, "slowest"][-1].rstrip("%")) for k in ("plain", "zigzag"))
    assert f"{plain / even:.2f} times as long as needed" in page
    assert plain / even == pytest.approx(2 - 1 / 4, abs=5e-3)
    windowed = {tuple(r[:2]): r for r in cells(figures.draw(["ring_work", "--window=128"]))}
    plain, zigzag = (float(windowed[k, "slowest"][-1].rstrip("%")) for k in ("plain", "zigzag"))
    assert plain < zigzag and "A window spoils it again" in page


@pytest.mark.parametrize("H, Hkv, D", [(32, 8, 128), (4, 4, 16)])
def test_a_step_takes_what_its_bytes_and_pairs_take(H, Hkv, D) -> None:
    """Against the bytes that a ring sends and the pairs that it computes."""
    words = [f"--H={H}", f"--Hkv={Hkv}", f"--D={D}", "--itemsize=4", "--links=(2, 400)"]
    text = figures.draw(["ring_hides", "--tokens=(16, 4096)", *words])
    assert "no peak is known" not in text
    for n, row in zip((16, 4096), cells(text), strict=True):
        sent = 2 * 4 * Hkv * D * n
        if n == 16:
            ring, _ = played(call_of(2 * n, H, Hkv, D), 2)
            assert ring[0].sent[0] == sent
        want: list[float] = []
        for products, size in ((2, sent), (5, 2 * sent)):  # dK and dV are float32, as K and V here
            computing = products * 2 * D * H * (n**2 / 2) / 989.4e12
            want += [computing, size / 2e9, size / 400e9]
        assert row[0] == f"{n:,}"
        told = [float(x.strip("*").replace(",", "")) for x in row[1:]]
        assert told == pytest.approx([1e6 * t for t in want], abs=0.51)
        assert ["**" in x for x in row[1:]] == [t > want[k // 3 * 3] for k, t in enumerate(want)]
    # At the length that is told, a step's computing and sending take the same time.
    least = {(way, link): float(n.replace(",", "")) for n, way, link in
             re.findall(r"([\d,]+) (forward|backward) at (\d+) GB/s", text)}  # fmt: skip
    assert len(least) == 4
    for (way, link), n in least.items():
        products, size = (2, 8) if way == "forward" else (5, 16)
        computing = products * 2 * D * H * n**2 / 2 / 989.4e12
        assert computing == pytest.approx(size * Hkv * D * n / (float(link) * 1e9), rel=0.01)


def test_figures_of_page_10_tell_what_they_take() -> None:
    for words, told in (
        (["ring_work", "--T=100", "--N=8"], "T must be a multiple of 2 N = 16, got 100"),
        (["ring_work", "--T=24", "--N=8"], "T must be a multiple of 2 N = 16, got 24"),
        (["ring_rounds", "--N=0"], "at least 1"),
        (["ring_hides", "--gpu='a toaster'"], "no peak is known for 'a toaster'"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            figures.main(words)


# --- exercise 10 ---


def test_the_truth_of_exercise_10_is_the_oracles() -> None:
    """Three blocks of keys joined, then gone back through, give one process's attention."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 12, 8, generator=draw, dtype=torch.float64)
    truth = oracle.attention(*(t[None, :, None] for t in (q, k, v, dout)))
    blocks = [slice(n, n + 4) for n in (0, 4, 8)]
    out, L = ex10.partial(q, torch.stack([k, v])[:, blocks[0]], 0)
    for J in blocks[1:]:
        out, L = ex10.joined(out, L, *ex10.partial(q, torch.stack([k, v])[:, J], -J.start))
    torch.testing.assert_close(out, truth.out[0, :, 0])
    _, L_tiled = tiled.BACKEND.partial.forward(  # type: ignore[union-attr]
        *(t[None, :, None] for t in (q, k, v)), Spec(1, 1, 8, "float64", lse=True), 0
    )
    torch.testing.assert_close(L, L_tiled[0, 0])
    parts = [ex10.of_block(dout, q, k[J], v[J], out, L, -J.start) for J in blocks]
    torch.testing.assert_close(sum(p[0] for p in parts), truth.dq[0, :, 0])
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), truth.dk[0, :, 0])
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), truth.dv[0, :, 0])


def answer(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"join": ex10.joined, "backward_block": ex10.of_block, **changes})


@pytest.mark.parametrize("slip", ex10.JOINS)
def test_exercise_10_names_each_mistake_in_joining(slip) -> None:
    wrong = answer(join=lambda *given: ex10.joined(*given, slip))
    assert ex10.JOINS[slip] in complaint(ex10, wrong)


@pytest.mark.parametrize("slip", ex10.BLOCKS)
def test_exercise_10_names_each_mistake_in_a_block(slip) -> None:
    wrong = answer(backward_block=lambda *given: ex10.of_block(*given, slip))
    assert ex10.BLOCKS[slip] in complaint(ex10, wrong)


@pytest.mark.parametrize("n, name", list(enumerate(("dq", "dk", "dv"))))
def test_exercise_10_looks_at_each_gradient(n, name) -> None:
    def backward_block(*given: Any) -> Any:
        got = ex10.of_block(*given)
        got[n].view(-1)[-1] += 0.01
        return got

    assert complaint(ex10, answer(backward_block=backward_block)).startswith(f"{name}[")


def test_the_answer_of_10_may_be_run_twice() -> None:
    for _ in range(2):
        assert examine(ex10, ANSWERS / "ex10.py") is None
