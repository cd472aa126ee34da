"""Batches as a pure function of (seed, step, split); documents; every loading check."""

from __future__ import annotations

import collections
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from test_model import build
from test_shards import prepare, write
from test_train import Run, run

import checkpoint
import data
from attention import BACKENDS, Machine, Spec, visible
from core.loss import IGNORE
from core.process import map_ahead
from core.settings import UserError
from data.__main__ import main
from data.loader import document_starts


def tokens_up_to(n: int) -> np.ndarray:
    """Each token is its position."""
    return np.arange(n, dtype=np.uint16)


# --- batches ---


@pytest.mark.parametrize("N, T, windows", [
    (9, 8, 1),  # one window, and no other place for it
    (12, 8, 1),  # one that may begin at 0, 1, 2 or 3
    (17, 8, 1),  # two would fit, but only at 0
    (17, 4, 3),  # (N - 1) % T is 0: without the room of a window, every epoch would be the same
    (18, 4, 3), (20, 4, 3), (21, 4, 4), (6, 1, 4),
])  # fmt: skip
def test_over_the_epochs_every_place_is_a_start(N: int, T: int, windows: int) -> None:
    """Each of the N - T places is taken in some epoch."""
    batches = data.Batches(tokens_up_to(N), T, windows, seed=3)  # a step is an epoch
    epochs = [batches.starts(step) for step in range(400)]
    assert set(np.concatenate(epochs).tolist()) == set(range(N - T))
    assert all(len(set(epoch.tolist())) == windows for epoch in epochs)
    first, last = (collections.Counter(int(f(e)) for e in epochs) for f in (np.min, np.max))
    offsets = N - T - (windows - 1) * T  # where the first window can begin
    assert len(first) == len(last) == offsets
    assert min(first.values()) > 400 / offsets / 2  # none is rare


sizes = st.tuples(st.integers(1, 9), st.integers(0, 200), st.integers(1, 20), st.integers(0, 99))


@given(sizes, st.integers(1, 5), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6))))
@settings(max_examples=80, deadline=None)
def test_the_sequences_of_a_run(
    size: tuple[int, int, int, int], world: int, parts: list[tuple[int, int]]
) -> None:
    """Consecutive windows from one offset: batches larger than an epoch, divided, repeated, resized
    after resumptions."""
    T, more, G, seed = size
    world = min(world, G)
    tokens = tokens_up_to(T + 1 + more)
    batches = data.Batches(tokens, T, G, seed=seed)
    n = max(1, more // T)  # of the windows after the first T tokens, which is the most it shifts
    assert batches.windows == n
    steps = -(-3 * n // G)
    order = np.concatenate([batches.starts(step) for step in range(steps)])
    for epoch in range(3):
        drawn = np.sort(order[epoch * n : (epoch + 1) * n])
        assert np.array_equal(drawn, drawn[0] + T * np.arange(n))
        assert drawn[0] >= 0 and drawn[-1] + T + 1 <= T + 1 + more
    step = steps // 2
    x, y = batches.get(step)
    assert x.shape == y.shape == (G, T) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1) and x[:, 0].tolist() == batches.starts(step).tolist()
    ranks = [data.Batches(tokens, T, G, seed=seed).get(step, r, world)[0] for r in range(world)]
    assert torch.equal(torch.cat(ranks), x)
    assert {len(part) for part in ranks} <= {G // world, -(-G // world)}
    ahead = [*batches.prefetch(step, step + 5, 0, world)]
    assert all(torch.equal(a[0], batches.get(step + i, 0, world)[0]) for i, a in enumerate(ahead))
    step = seen = 0
    found = [np.zeros(0, np.int64)]
    for size_now, count in parts:
        part = data.Batches(tokens, T, size_now, seed, seen=(step, seen))
        found += [part.starts(s) for s in range(step, step + count)]
        step, seen = step + count, seen + count * size_now
    others = [data.Batches(tokens, T, n, s).starts(0).tolist() for s in (seed, seed + 1)]
    assert n < 10 or others[0] != others[1]
    one = data.Batches(tokens, T, 1, seed)
    assert np.concatenate(found).tolist() == [one.starts(k)[0] for k in range(seen)]


def test_work_without_end_is_begun_and_keeps_its_order() -> None:
    results = map_ahead(lambda n: -n, itertools.count(), 4)
    assert [next(results) for _ in range(9)] == [*range(0, -9, -1)]


@given(st.integers(9, 400), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_evaluation_takes_the_same_windows_for_any_world(
    N: int, batches: int, B: int, world: int
) -> None:
    """Spread evenly; equal shapes and counts."""
    tokens = tokens_up_to(N)
    ranks = [[*data.eval_batches(tokens, 8, batches, B, rank, world)] for rank in range(world)]
    assert len({len(found) for found in ranks}) == 1
    starts = []
    for x, y in (pair for found in ranks for pair in found):
        assert x.shape == y.shape == (B, 8)
        counted = (y != IGNORE).all(1)
        assert torch.equal(y[counted], x[counted] + 1) and bool((y[~counted] == IGNORE).all())
        starts += x[counted, 0].tolist()
    n = min(batches * B, (N - 1) // 8)
    assert len(starts) == n and min(starts) == 0 and (n == 1 or max(starts) == N - 9)
    assert n == 1 or np.ptp(np.diff(np.sort(starts))) <= 1


# --- the loading checks ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source.txt"
    source.write_text("0123456789" * 100)
    folder = tmp_path / "shakespeare_char"
    data.prepare(data.PrepareConfig("shakespeare_char", str(source), out_dir=str(folder)))
    return folder


def test_load_gives_the_tokens_that_fit_the_model(folder: Path) -> None:
    for split, n in (("train", 900), ("val", 100)):
        tokens = data.load(folder, split, block_size=n - 1, vocab_size=10)
        assert tokens.dtype == np.uint16 and tokens[:].tolist() == [*range(10)] * (n // 10)
        for block_size, V, named in ((n, 10, f"--block_size={n}"), (8, 9, "token 9 is 9")):
            with pytest.raises(UserError, match=named):
                data.load(folder, split, block_size, V)


LARGE = bytes(1798) + (5000).to_bytes(2, "little")  # as many tokens, the last too large


@pytest.mark.parametrize("damage, named, repaired", [
    (lambda f: (f / "meta.json").rename(f / ".partial"), "meta.json", None),
    (lambda f: (f / "train.bin").unlink(), "train.bin", True),
    (lambda f: [(f / "train.bin").unlink(), (f / "train.bin").mkdir()], "train.bin", None),
    (lambda f: (f / "train.bin").write_bytes(bytes(1801)), "1,801", True),
    (lambda f: (f / "train.bin").write_bytes(LARGE), "5000", None),
    (lambda f: (f / "train.bin").write_bytes(b""), "train.bin", True),
])
def test_a_damaged_dataset_is_an_error(folder: Path, damage: Any, named: str, repaired: Any
                                       ) -> None:  # fmt: skip
    damage(folder)
    with pytest.raises(UserError, match=named) as error:
        data.load(folder, "train", 8, 10)
    if command := re.search("python -m data (.* --force=True)", str(error.value)):
        assert main(shlex.split(command[1])) == 0
        assert len(data.load(folder, "train", 8, 10)) == 900
    assert command or not repaired


@pytest.mark.parametrize("header", [False, True])
def test_ids_of_another_width_are_refused(tmp_path: Path, header: bool) -> None:
    draw = np.random.default_rng(0)
    head = np.array([20240520, 1, 3000, *[0] * 253], "<i4").tobytes() if header else b""
    for dtype, V in (("uint32", 50257), ("int32", 65), ("int64", 50257), ("uint32", 128_256)):
        for name in ("train", "val"):
            ids = draw.integers(V, size=3000).astype(dtype)
            (tmp_path / f"{name}.bin").write_bytes(head + ids.tobytes())
        np.save(tmp_path / "train.npy", ids.astype("<u2"))
        with pytest.raises(UserError, match=r"train\.bin"):
            data.load(tmp_path, "train", 8, V)
        for source, named in ((tmp_path, r"\.bin.*bytes"), (f"{tmp_path}/*.npy", r"\.npy")):
            with pytest.raises(UserError, match=named):
                main(["shards", f"--source={source}", f"--out_dir={tmp_path / 'out'}"])
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin.* prepare\.py"):
        data.load(tmp_path, "train", 8, 10)


def test_a_separator_makes_a_path_and_a_file_is_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "data/mine"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.find("mine").samefile("data/mine") and data.find(".").samefile(tmp_path)
    for name in ("./mine", "mine/", str(tmp_path / "mine"), "data/../mine", "~/mine"):
        assert data.find(name).samefile("mine")
    Path("my text.txt").write_text("0123456789" * 100)
    with pytest.raises(UserError, match=r"python -m data text .*my text\.txt"):
        data.read_meta(data.find("my text.txt"))
    with pytest.raises(UserError, match=r"a\\nb\\x1b") as error:  # it steers no terminal
        data.load("a\nb\x1b[2J", "train", 8, 10)
    assert str(error.value).isprintable()


# --- --document_mask=True: no token sees another document of its sequence ---

EOT = 36  # of test_model's vocabulary of 37


def by_hand(row: list[int], eot: int, begins: bool) -> list[int]:
    starts = [i if begins else i + 1 for i, token in enumerate(row) if token == eot]
    return [max([0, *(start for start in starts if start <= i)]) for i in range(len(row))]


@given(arrays(np.uint16, array_shapes(min_dims=2, max_dims=2, max_side=12),
              elements=st.integers(0, 3)), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_documents_of_a_batch(rows: np.ndarray, begins: bool) -> None:
    found = document_starts(rows, 3, begins)
    assert found.tolist() == [by_hand(row, 3, begins) for row in rows.tolist()]


SPEC, HERE = Spec(4, 4, 8, "float32", segments=True), Machine.here("cpu")


@pytest.mark.parametrize("position, begins", [("learned", True), ("rope", False)])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "triton"))
    for name, backend in BACKENDS.items() if not backend.why_not(SPEC, HERE)])
def test_a_document_is_computed_as_if_it_were_alone(name: str, position: Any, begins: bool) -> None:
    """Positions begin at 0."""
    model: Any = build(attention_backend=name, position=position, n_layer=2).eval()
    model.packed = True
    idx = torch.randint(36, (2, 16), generator=torch.Generator().manual_seed(3))
    idx[(0, 0, 0, 1, 1, 1), (4, 5, 11, 0, 7, 15)] = EOT

    starts = torch.from_numpy(document_starts(idx.numpy().astype(np.uint16), EOT, begins))
    logits = model(idx, segments=starts)[0]
    for row in range(2):
        for start in starts[row].unique():
            inside = starts[row] == start
            alone = model(idx[row, inside][None])[0][0]
            torch.testing.assert_close(logits[row, inside], alone)


@pytest.mark.slow
def test_a_run_and_its_mfu(tmp_path: Path) -> None:
    """Of documents of about nine tokens."""
    draw = np.random.default_rng(0)
    for name in ("fw_val_0", "fw_train_1", "fw_train_2"):
        tokens = np.where(draw.random(700) < 0.1, 50256, draw.integers(5, size=700))
        write(tmp_path / f"{name}.bin", tokens)
    assert prepare(tmp_path / "fw_*.bin", tmp_path / "fw")[0] == 0

    def two(name: str, **changes: Any) -> tuple[Run, dict[int, float]]:
        """The run; of each timed step the share of pairs that mfu_causal counts."""
        how = {"dataset": "fw", "n_layer": 2, "n_embd": 8, "max_iters": 6, "document_mask": True,
               "attention_window": "5,none", "gradient_accumulation_steps": 2} | changes
        r = run(tmp_path, tmp_path / name, **how)
        return r, {row["iter"]: row["mfu_causal"] / row["mfu"] for row in r.rows if "mfu" in row}

    straight, seen = two("a")
    assert straight.losses()[6] != two("b", document_mask=False)[0].losses()[6]

    # By hand: each token sees its own document.
    val, train = (data.load(tmp_path / "fw", split, 16, 50257, documents=True)
                  for split in ("val", "train"))
    model: Any = checkpoint.load(checkpoint.latest(tmp_path / "a")).model().eval()
    model.packed = True
    ((x, y, starts),) = data.eval_batches(val, 16, 1, 8)
    assert starts.tolist() == [by_hand(row, 50256, True) for row in x.tolist()]
    with torch.no_grad():
        loss = float(model(x, y, starts)[1])
    assert straight.evaluations()[6][1] == pytest.approx(loss, rel=1e-5)

    # mfu counts all pairs, mfu_causal the visible ones.
    batches = data.Batches(train, 16, 8, 1337)
    i, N, want = torch.arange(16), model.get_num_params(), {}
    for step in seen:
        starts = batches.get(step - 1)[2]
        pairs = sum(
            float(visible(i[:, None], i[None, :], 0, window, s[:, None], s[None, :]).sum())
            for s in starts for window in (5, None)
        ) / starts.numel()
        want[step] = (6 * N + 12 * 8 * pairs) / (6 * N + 12 * 8 * 2 * 16)
    assert len(want) > 2 and seen == pytest.approx(want, rel=1e-6)
    mean = (want[3] + want[4]) / 2  # from the first timed step on
    assert two("d", max_iters=4, log_interval=4)[1] == pytest.approx({4: mean}, rel=1e-6)
