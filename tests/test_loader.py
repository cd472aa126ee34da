"""data/loader.py: batches as a pure function of (seed, step, split), and every loading check."""

from __future__ import annotations

import collections
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from core.settings import UserError


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
])  # fmt: skip
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


def test_a_split_of_one_window_gives_it_always() -> None:
    batches = data.Batches(tokens_up_to(9), 8, 5, seed=1)
    x, y = batches.get(7)
    assert torch.equal(x, torch.arange(8).expand(5, 8))
    assert torch.equal(y, torch.arange(1, 9).expand(5, 8))


def test_a_batch_depends_on_seed_and_step_only() -> None:
    """Not on the object, nor on what it was asked before: a resumed run needs no loader state."""
    tokens = tokens_up_to(1000)
    run = data.Batches(tokens, 8, 12, seed=5)
    seen = [run.get(step)[0] for step in range(40)]
    for step in (39, 0, 17, 17, 3):
        assert torch.equal(data.Batches(tokens, 8, 12, seed=5).get(step)[0], seen[step])
        assert torch.equal(run.get(step)[0], seen[step])
    assert not torch.equal(data.Batches(tokens, 8, 12, seed=6).get(0)[0], seen[0])


def test_no_two_seeds_share_an_epoch() -> None:
    """Not even the second epoch of one and the first of the next."""
    runs = [data.Batches(tokens_up_to(2000), 8, 1, seed=seed) for seed in (5, 6)]
    n = runs[0].windows
    epochs = [[run.starts(e * n + i)[0] for i in range(n)] for run in runs for e in range(3)]
    assert len(set(map(tuple, epochs))) == 6


def test_epochs_differ_in_order_and_offset() -> None:
    batches = data.Batches(tokens_up_to(2000), 16, 1, seed=0)
    n = batches.windows
    epochs = [np.concatenate([batches.starts(e * n + i) for i in range(n)]) for e in range(8)]
    assert len({int(epoch.min()) for epoch in epochs}) > 2
    assert not np.array_equal(np.argsort(epochs[0]), np.argsort(epochs[1]))


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


@pytest.mark.parametrize("device, told", [("cuda:1", [1]), ("cuda", []), ("mps:0", [])])
def test_the_thread_is_on_its_own_gpu(device: str, told: list[int], monkeypatch) -> None:
    """A new thread begins on the first one."""
    at: list[tuple[int, str]] = []
    here = threading.current_thread
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: at.append((d.index, here().name)))
    batches = data.Batches(tokens_up_to(500), 8, 6, seed=3, device=device)
    monkeypatch.setattr(batches, "get", lambda *a: None)
    assert list(batches.prefetch(0, 2)) == [None, None]
    assert at == [(index, "batches_0") for index in told]


def test_an_error_in_the_thread_reaches_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = data.Batches(tokens_up_to(500), 8, 6, seed=3)
    get = batches.get

    def broken(step: int, *rest: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 2:
            raise OSError("the disk is gone")
        return get(step, *rest)

    monkeypatch.setattr(batches, "get", broken)
    ahead = batches.prefetch(0, 10)
    next(ahead), next(ahead)
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert not batch_threads()


# --- evaluation ---


def windows_of(tokens: np.ndarray, n: int, world: int) -> list[int]:
    """The first tokens of all windows that `world` processes evaluate, sorted."""
    return sorted(
        int(first)
        for rank in range(world)
        for x, _, counted in data.eval_batches(tokens, 8, n, 4, rank, world)
        for first in x[:counted, 0]
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
    for x, y, _ in data.eval_batches(tokens, 8, 6, 4):
        assert torch.equal(y, x + 1)


def test_evaluation_of_a_short_split_takes_each_window_once() -> None:
    assert windows_of(tokens_up_to(9), 50, 1) == [0]
    assert windows_of(tokens_up_to(33), 50, 1) == [0, 8, 16, 24]
    assert windows_of(tokens_up_to(32), 50, 1) == [0, 11, 23]  # the last of four lacks its target


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
    assert tokens.dtype == np.uint16 and tokens.tolist() == list(range(10)) * 90
    assert data.load(folder, "val", block_size=99, vocab_size=10).tolist() == list(range(10)) * 10


def refusal(folder: Path, split: str = "train", block_size: int = 8, vocab_size: int = 10) -> str:
    """The sentence of a load that is refused; always one line that names what to run."""
    with pytest.raises(UserError) as error:
        data.load(folder, split, block_size=block_size, vocab_size=vocab_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_dataset(tmp_path: Path) -> None:
    told = refusal(tmp_path / "shakespeare")
    assert "no meta.json" in told and "python -m data shakespeare" in told


def test_a_dataset_of_hours_names_a_quick_one_too(tmp_path: Path) -> None:
    told = refusal(tmp_path / "openwebtext")
    small = tmp_path / "shakespeare"
    assert f"python -m data openwebtext --out_dir={tmp_path / 'openwebtext'} (hours" in told
    assert (
        f"python -m data shakespeare --out_dir={small}, then train with --dataset=shakespeare"
        in told
    )
    assert "--dataset=shakespeare" not in refusal(tmp_path / "shakespeare_char")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"tokenizer": {}}', "\xff"])
def test_a_meta_that_is_none(folder: Path, content: str) -> None:
    (folder / "meta.json").write_bytes(content.encode("latin-1"))
    assert "python -m data shakespeare_char" in refusal(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_missing_file(folder: Path, split: str) -> None:
    (folder / f"{split}.bin").unlink()
    told = refusal(folder, split)
    assert f"{split}.bin is missing" in told and "python -m data shakespeare_char" in told


def test_half_a_token(folder: Path) -> None:
    with (folder / "train.bin").open("ab") as f:
        f.write(b"\0")
    told = refusal(folder)
    assert "1,801 bytes, 2 a token" in told and "900 tokens" in told and "python -m data" in told


def test_a_truncated_file(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as f:
        f.truncate(1000)
    told = refusal(folder)
    assert "1,000 bytes, 2 a token" in told and "900 tokens" in told and "python -m data" in told


def test_too_few_tokens_for_a_window(folder: Path) -> None:
    data.load(folder, "val", block_size=99, vocab_size=10)
    told = refusal(folder, "val", block_size=100)
    assert "100 tokens" in told and "101" in told and "--block_size" in told


def test_a_token_beyond_the_vocabulary(folder: Path) -> None:
    told = refusal(folder, vocab_size=9)
    assert "token 9" in told and "ends at 8" in told and "python -m data" in told


def test_the_last_token_is_looked_at_too(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as f:
        f.seek(-2, 2)
        f.write(np.array([5000], dtype="<u2").tobytes())
    assert "5000" in refusal(folder)


@pytest.mark.parametrize("place", [0, 2**16 - 1, 2**17 + 4999])
def test_a_large_file_is_looked_at_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """In 256 places of 2**16 tokens, which here overlap and cover it all."""
    monkeypatch.setattr(data.loader, "SCAN_ALL", 1000)
    tokens = np.zeros(2**17 + 5000, dtype="<u2")
    tokens[place] = 7
    assert data.loader._largest(tokens) == 7


def test_a_smaller_file_is_looked_at_as_a_whole() -> None:
    """256 places would be half of it, and not this one."""
    tokens = np.zeros(2**25, dtype="<u2")
    tokens[100_000] = 7
    assert data.loader._largest(tokens) == 7


def test_the_command_of_the_sentence_keeps_the_options(folder: Path) -> None:
    """Running it makes the same dataset again."""
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "val.bin").unlink()
    told = refusal(folder, "val")
    assert f"--source={meta['options']['source']}" in told and f"--out_dir={folder}" in told
