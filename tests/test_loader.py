"""data/loader.py: batches as a pure function of (seed, step, split), and every loading check."""

from __future__ import annotations

import collections
import errno
import json
import re
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
from core.loss import IGNORE
from core.settings import UserError
from data.__main__ import main


def tokens_up_to(n: int) -> np.ndarray:
    """n tokens, each its own position, so that a batch tells where it was cut."""
    return np.arange(n, dtype=np.uint16)


def stream(batches: data.Batches, steps: int) -> torch.Tensor:
    return torch.cat([batches.get(step)[0] for step in range(steps)])


# --- batches ---

sizes = st.tuples(st.integers(1, 9), st.integers(0, 200), st.integers(1, 20), st.integers(0, 99))


@pytest.mark.parametrize("N, T, windows", [
    (9, 8, 1),  # one window, and no other place for it
    (12, 8, 1),  # one that may begin at 0, 1, 2 or 3
    (17, 8, 1),  # two would fit, but only at 0
    (17, 4, 3),  # (N - 1) % T is 0: without the room of a window, every epoch would be the same
    (18, 4, 3),
    (20, 4, 3),
    (21, 4, 4),
    (6, 1, 4),
])
def test_over_the_epochs_every_place_is_a_start(N: int, T: int, windows: int) -> None:
    """By hand: how many windows an epoch has. Of the N - T places that a sequence can begin at,
    each is taken in some epoch, so every token is seen, first and last ones included."""
    batches = data.Batches(tokens_up_to(N), T, windows, seed=3)  # a step is an epoch
    epochs = [batches.starts(step) for step in range(400)]
    assert set(np.concatenate(epochs).tolist()) == set(range(N - T))
    assert all(len(set(epoch.tolist())) == windows for epoch in epochs)
    first, last = (collections.Counter(int(f(e)) for e in epochs) for f in (np.min, np.max))
    offsets = N - T - (windows - 1) * T  # where the first window can begin
    assert len(first) == len(last) == offsets
    assert min(first.values()) > 400 / offsets / 2  # none is rare


@given(sizes)
@settings(max_examples=200, deadline=None)
def test_an_epoch_visits_each_window_once(size: tuple[int, int, int, int]) -> None:
    """Consecutive windows from one offset, all of them before any comes again, batches that
    straddle epochs and batches larger than an epoch included."""
    T, more, G, seed = size
    batches = data.Batches(tokens_up_to(T + 1 + more), T, G, seed=seed)
    n = max(1, more // T)  # of the windows after the first T tokens, which is the most it shifts
    assert batches.windows == n
    steps = -(-3 * n // G)
    starts = np.concatenate([batches.starts(step) for step in range(steps)])
    for epoch in range(3):
        drawn = np.sort(starts[epoch * n : (epoch + 1) * n])
        assert np.array_equal(drawn, drawn[0] + T * np.arange(n))
        assert drawn[0] >= 0 and drawn[-1] + T + 1 <= T + 1 + more


@given(sizes)
@settings(max_examples=50, deadline=None)
def test_targets_are_the_inputs_shifted(size: tuple[int, int, int, int]) -> None:
    T, more, G, seed = size
    x, y = data.Batches(tokens_up_to(T + 1 + more), T, G, seed=seed).get(3)
    assert x.shape == y.shape == (G, T) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)


def test_a_batch_depends_on_seed_and_step_only() -> None:
    """Not on the object, nor on what it was asked before: a resumed run needs no loader state."""
    tokens = tokens_up_to(1000)
    run = data.Batches(tokens, 8, 12, seed=5)
    seen = [run.get(step)[0] for step in range(40)]
    for step in (39, 0, 17, 17, 3):
        assert torch.equal(data.Batches(tokens, 8, 12, seed=5).get(step)[0], seen[step])
        assert torch.equal(run.get(step)[0], seen[step])
    assert not torch.equal(data.Batches(tokens, 8, 12, seed=6).get(0)[0], seen[0])


@given(sizes, st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), max_size=4))
@settings(max_examples=50, deadline=None)
def test_a_run_resumed_with_other_batches_sees_the_same_sequences(
    size: tuple[int, int, int, int], parts: list[tuple[int, int]]
) -> None:
    """parts: (sequences a step, steps) of each part of the run."""
    T, more, _, seed = size
    tokens, step, seen, found = tokens_up_to(T + 1 + more), 0, 0, [np.zeros(0, np.int64)]
    for G, steps in parts:
        batches = data.Batches(tokens, T, G, seed, seen=(step, seen))
        found += [batches.starts(s) for s in range(step, step + steps)]
        step, seen = step + steps, seen + steps * G
    straight = data.Batches(tokens, T, 1, seed)
    assert np.concatenate(found).tolist() == [straight.starts(k)[0] for k in range(seen)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_take_slices_of_the_global_batch(world: int) -> None:
    batches = data.Batches(tokens_up_to(3000), 8, 12, seed=2)
    for step in (0, 5, 31):
        x, y = batches.get(step)
        parts = [batches.get(step, rank, world) for rank in range(world)]
        assert all(part[0].shape == (12 // world, 8) for part in parts)
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)


# --- prefetch ---


@pytest.mark.parametrize("start", [0, 7])
def test_prefetch_is_the_stream(start: int) -> None:
    batches = data.Batches(tokens_up_to(500), 8, 6, seed=3)
    ahead = list(batches.prefetch(start, 20, rank=1, world=2))
    assert len(ahead) == 20 - start
    for step, (x, y) in enumerate(ahead, start):
        assert torch.equal(x, batches.get(step, 1, 2)[0])
        assert torch.equal(y, batches.get(step, 1, 2)[1])


def batch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("batches")]


def test_prefetch_stops_its_thread_when_left() -> None:
    before = batch_threads()
    ahead = data.Batches(tokens_up_to(500), 8, 6, seed=3).prefetch(0, 10**9)
    next(ahead)
    assert len(batch_threads()) == len(before) + 1
    ahead.close()  # type: ignore[attr-defined]
    assert batch_threads() == before


def test_prefetch_goes_only_a_few_batches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = data.Batches(tokens_up_to(500), 8, 6, seed=3)
    get, made = batches.get, []
    monkeypatch.setattr(batches, "get", lambda *a: made.append(a) or get(*a))
    ahead = batches.prefetch(0, 1000)
    next(ahead)
    last = -1
    while len(made) != last:  # until it waits for room
        last = len(made)
        time.sleep(0.1)
    ahead.close()  # type: ignore[attr-defined]
    assert 1 < last < 10


# --- evaluation ---


def windows_of(tokens: np.ndarray, n: int, world: int) -> list[int]:
    """The first tokens of all windows that `world` processes evaluate, sorted."""
    return sorted(
        int(first)
        for rank in range(world)
        for x, y in data.eval_batches(tokens, 8, n, 4, rank, world)
        for first in x[y[:, 0] >= 0, 0]
    )


@pytest.mark.parametrize("world", [2, 3, 4])
def test_evaluation_takes_the_same_windows_for_any_world(world: int) -> None:
    tokens = tokens_up_to(5000)
    alone = windows_of(tokens, 6, 1)
    assert len(alone) == 24
    assert windows_of(tokens, 6, world) == alone == windows_of(tokens, 6, 1)


def test_evaluation_windows_are_spread_over_the_whole_split() -> None:
    tokens = tokens_up_to(5000)
    starts = np.array(windows_of(tokens, 6, 1))
    assert starts[0] == 0 and starts[-1] == 5000 - 9
    assert np.diff(starts).max() - np.diff(starts).min() <= 1
    for x, y in data.eval_batches(tokens, 8, 6, 4):
        assert torch.equal(y, x + 1)


def test_evaluation_of_a_short_split_takes_each_window_once() -> None:
    assert windows_of(tokens_up_to(9), 50, 1) == [0]
    assert windows_of(tokens_up_to(33), 50, 1) == [0, 8, 16, 24]
    assert windows_of(tokens_up_to(32), 50, 1) == [0, 11, 23]  # the last of four lacks its target


@given(st.integers(9, 400), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_evaluation_batches_have_one_shape_and_one_number(
    N: int, batches: int, B: int, world: int
) -> None:
    tokens = tokens_up_to(N)
    ranks = [[*data.eval_batches(tokens, 8, batches, B, rank, world)] for rank in range(world)]
    assert len({len(found) for found in ranks}) == 1
    real = 0
    for x, y in (pair for found in ranks for pair in found):
        assert x.shape == y.shape == (B, 8)
        counted = (y != IGNORE).all(1)
        assert torch.equal(y[counted], x[counted] + 1) and bool((y[~counted] == IGNORE).all())
        real += int(counted.sum())
    assert real == min(batches * B, (N - 1) // 8)


# --- the loading checks ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prepared dataset of ten different tokens."""
    source = tmp_path / "source.txt"
    source.write_text("0123456789" * 100)
    folder = tmp_path / "shakespeare_char"
    data.prepare("shakespeare_char", data.PrepareConfig(source=str(source), out_dir=str(folder)))
    return folder


def test_load_gives_the_tokens(folder: Path) -> None:
    tokens = data.load(folder, "train", block_size=8, vocab_size=10)
    assert tokens.dtype == np.uint16 and tokens[:].tolist() == list(range(10)) * 90
    val = data.load(folder, "val", block_size=99, vocab_size=10)
    assert val[:].tolist() == list(range(10)) * 10


def interrupted(folder: Path) -> None:
    """As an interrupted preparation leaves it."""
    (folder / "meta.json").unlink()
    (folder / ".partial").mkdir()


def a_folder(folder: Path) -> None:
    (folder / "train.bin").unlink()
    (folder / "train.bin").mkdir()


LARGE = bytes(1798) + (5000).to_bytes(2, "little")  # as many tokens, the last too large


@pytest.mark.parametrize("damage, named, repaired", [
    (interrupted, "meta.json", None),
    (lambda f: (f / "meta.json").write_text("[]"), "meta.json", None),
    (lambda f: (f / "train.bin").unlink(), "train.bin", True), (a_folder, "train.bin", None),
    (lambda f: (f / "train.bin").write_bytes(bytes(1801)), "1,801", True),
    (lambda f: (f / "train.bin").write_bytes(LARGE), "5000", None),
    (lambda f: (f / "train.bin").write_bytes(b""), "train.bin", True),
])
def test_a_damaged_dataset_is_an_error(folder: Path, damage: Any, named: str, repaired: Any
                                       ) -> None:  # fmt: skip
    """And the command in it, if there is one, repairs it."""
    damage(folder)
    with pytest.raises(UserError, match=named) as error:
        data.load(folder, "train", 8, 10)
    if command := re.search("python -m data (.* --force=True)", str(error.value)):
        assert main(shlex.split(command[1])) == 0
        assert len(data.load(folder, "train", 8, 10)) == 900
    assert command or not repaired


def test_what_may_not_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(self: Path, *args: Any, **how: Any) -> Any:
        if self.suffix == ".bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *args, **how)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"train\.bin.*Permission denied"):
        data.load(folder, "train", 8, 10)


words = st.none() | st.integers() | st.text() | st.lists(st.integers())
metas = st.fixed_dictionaries({"tokenizer": words, "vocab_size": words, "tokens": words})


@given(st.recursive(words | metas, lambda d: st.dictionaries(st.text(), d), max_leaves=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_other_json_is_a_dataset(folder: Path, content: Any) -> None:
    (folder / "meta.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"meta\.json"):
        data.load(folder, "train", 8, 10)


def test_a_dataset_smaller_than_the_run(folder: Path) -> None:
    data.load(folder, "val", 99, 10)
    with pytest.raises(UserError, match="--block_size=100"):
        data.load(folder, "val", 100, 10)
    with pytest.raises(UserError, match="token 9"):
        data.load(folder, "val", 8, 9)


WIDTHS = [("uint32", 50257), ("int32", 65), ("int64", 50257), ("uint64", 65), ("uint32", 128_256)]


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("dtype, V", WIDTHS)
def test_ids_of_another_width_are_refused(tmp_path: Path, dtype: str, V: int, header: bool) -> None:
    draw = np.random.default_rng(0)
    head = np.array([20240520, 1, 3000, *[0] * 253], "<i4").tobytes() if header else b""
    for name in ("train", "val"):
        ids = draw.integers(V, size=3000).astype(dtype)
        (tmp_path / f"{name}.bin").write_bytes(head + ids.tobytes())
    width = f"{np.dtype(dtype).itemsize} bytes"
    with pytest.raises(UserError, match=rf"train\.bin.*{'llm' if header else width}"):
        data.load(tmp_path, "train", 8, V)
    with pytest.raises(UserError, match=rf"\.bin.*{width}"):
        main(["shards", f"--source={tmp_path}", f"--out_dir={tmp_path / 'out'}"])
    np.save(tmp_path / "train.npy", draw.integers(V, size=99).astype("<u2"))
    with pytest.raises(UserError, match=r"\.npy"):
        main(["shards", f"--source={tmp_path}/*.npy", f"--out_dir={tmp_path / 'out'}"])


def test_a_separator_makes_a_path_and_a_file_is_no_dataset(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "data/mine"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert data.find("mine").samefile("data/mine")
    for name in ("./mine", "mine/", str(tmp_path / "mine"), "data/../mine"):
        assert data.find(name).samefile("mine")
    assert data.find(".").samefile(tmp_path)
    Path("my text.txt").write_text("0123456789" * 100)
    with pytest.raises(UserError, match=r"my text\.txt") as error:
        data.read_meta(data.find("my text.txt"))
    words = shlex.split(str(error.value).partition("python -m data text ")[2])
    assert main(["chars", *words[:2]]) == 0
    assert data.read_meta(data.find(words[-1].removeprefix("--dataset=")))["vocab_size"] == 10
