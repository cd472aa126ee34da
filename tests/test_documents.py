"""--document_mask=True: no token sees another document of its sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import build, names_here
from test_parallel import ended_well, losses, trained
from test_shards import prepare, write
from test_train import argv, refusal, run
from torch import Tensor

import checkpoint
import data
from attention import visible
from core import metrics
from data.loader import Documents

EOT = 36  # of test_model's vocabulary of 37


def by_hand(row: list[int], eot: int, begins: bool) -> list[int]:
    start, found = 0, []
    for i, token in enumerate(row):
        if token == eot and begins:
            start = i
        found.append(start)
        if token == eot and not begins:
            start = i + 1
    return found


rows = st.integers(1, 12).flatmap(
    lambda T: st.lists(st.lists(st.integers(0, 3), min_size=T, max_size=T), min_size=1, max_size=4)
)


@given(rows, st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_documents_of_a_batch(rows: list[list[int]], begins: bool) -> None:
    found = Documents(3, begins).starts(np.array(rows, np.uint16))
    assert found.tolist() == [by_hand(row, 3, begins) for row in rows]


def packed(begins: bool) -> tuple[Tensor, Tensor, Documents]:
    """Two sequences of several documents, their starts, and the borders."""
    torch.manual_seed(3)
    idx = torch.randint(36, (2, 16))
    for place in ((0, 4), (0, 5), (0, 11), (1, 0), (1, 7), (1, 15)):
        idx[place] = EOT
    documents = Documents(EOT, begins)
    return idx, torch.from_numpy(documents.starts(idx.numpy().astype(np.uint16))), documents


KINDS = [
    pytest.param(*backend.values, *kind, marks=backend.marks)
    for backend in names_here(segments=True) for kind in (("learned", True), ("rope", False))
]  # fmt: skip


@pytest.mark.parametrize("name, position, begins", KINDS)
def test_a_document_is_computed_as_if_it_were_alone(
    name: str, position: Any, begins: bool
) -> None:
    """In every backend: its positions begin at 0, and another one's token moves nothing in it."""
    model: Any = build(attention_backend=name, position=position, n_layer=2).eval()
    idx, starts, documents = packed(begins)
    model.packed = True
    logits = model(idx, segments=starts)[0]
    for row in range(2):
        for start in starts[row].unique():
            inside = starts[row] == start
            alone = model(idx[row, inside][None])[0][0]
            torch.testing.assert_close(logits[row, inside], alone)
            changed = idx.clone()
            last = inside.nonzero()[-1 if idx[row, inside][0] == EOT else 0]
            changed[row, last] = (changed[row, last] + 1) % EOT
            again = torch.from_numpy(documents.starts(changed.numpy().astype(np.uint16)))
            if torch.equal(again, starts):  # else that token was a border
                moved = (model(changed, segments=starts)[0] != logits).any(-1)
                assert moved[row, inside].any() and moved.sum() == moved[row, inside].sum()


@pytest.fixture(scope="module")
def fw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset "fw" of shards, whose documents have about nine tokens."""
    folder, draw = tmp_path_factory.mktemp("fw"), np.random.default_rng(0)
    for name in ("fw_val_0", "fw_train_1", "fw_train_2"):
        tokens = draw.integers(5, size=700)
        write(folder / f"{name}.bin", np.where(draw.random(700) < 0.1, 50256, tokens))
    assert prepare(folder / "fw_*.bin", folder / "fw")[0] == 0
    return folder


TINY: dict[str, Any] = {"dataset": "fw", "n_layer": 2, "n_embd": 8, "max_iters": 6,
                        "document_mask": True, "attention_window": "5,none",
                        "eval_on_start": True}  # fmt: skip


@pytest.mark.slow
def test_a_run_its_resumption_and_its_mfu(fw: Path, tmp_path: Path) -> None:
    straight = run(fw, tmp_path / "a", **TINY, gradient_accumulation_steps=2)
    assert straight.code == 0, straight.err
    plain = run(fw, tmp_path / "b", **TINY | {"document_mask": False},
                gradient_accumulation_steps=2)  # fmt: skip
    assert straight.losses()[6] != plain.losses()[6]
    half = TINY | {"max_iters": 3, "lr_decay_iters": 6, "gradient_accumulation_steps": 2}
    run(fw, tmp_path / "c", **half)
    again = run(fw, tmp_path / "c", **half | {"max_iters": 6}, init_from="resume")
    assert again.losses() == straight.losses()

    # The first evaluation by hand: each token sees its own document.
    documents = Documents(50256, True)
    tokens = data.load(fw / "fw", "val", 16, 50257)
    model: Any = checkpoint.load(checkpoint.latest(tmp_path / "a")).model().eval()
    model.packed = True
    (x, y, starts), *more = data.eval_batches(tokens, 16, 1, 8, documents=documents)
    assert not more
    assert starts.tolist() == [by_hand(row, 50256, True) for row in x.tolist()]
    with torch.no_grad():
        loss = float(model(x, y, starts)[1])
    assert straight.evaluations()[6][1] == pytest.approx(loss, rel=1e-5)

    # mfu counts all pairs, mfu_causal those that are seen, of the step that was timed.
    batches = data.Batches(data.load(fw / "fw", "train", 16, 50257), 16, 8, 1337,
                           documents=documents)  # fmt: skip
    i = torch.arange(16)
    timed = [row for row in straight.rows if "mfu" in row]
    assert timed
    N = model.get_num_params()
    for row in timed:
        starts = batches.get(row["iter"] - 1)[2]
        seen = sum(
            float(visible(i[:, None], i[None, :], 0, window, s[:, None], s[None, :]).sum())
            for s in starts for window in (5, None)
        ) / starts.numel()  # fmt: skip
        share = (6 * N + 12 * 8 * seen) / (6 * N + 12 * 8 * 2 * 16)
        assert row["mfu_causal"] / row["mfu"] == pytest.approx(share, rel=1e-6)


def test_a_dataset_without_the_end_of_a_document_is_refused(tmp_path: Path) -> None:
    from test_train import make_data

    folder = make_data(tmp_path / "data")
    assert "--document_mask" in refusal(run(folder, tmp_path / "out", document_mask=True))


@pytest.mark.slow
def test_any_number_of_processes_masks_the_same(fw: Path, tmp_path: Path) -> None:
    # Five sequences: two processes have three and two.
    how: dict[str, Any] = {**TINY, "attention_backend": "tiled", "batch_size": 5}
    assert run(fw, tmp_path / "one", **how).code == 0
    want = losses(tmp_path / "one")

    def seen(out: Path) -> dict[int, float]:
        rows = metrics.read(out / "metrics.jsonl")
        return {row["iter"]: row["mfu_causal"] / row["mfu"] for row in rows if "mfu" in row}

    kinds: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel": "fsdp"},
                                        "ring": {"context_parallel": 2}}  # fmt: skip
    runs = {name: argv(fw, tmp_path / name, **how, **kind) for name, kind in kinds.items()}
    ended_well(processes.run(trained, 2, runs, timeout=300))
    for name in runs:
        found = losses(tmp_path / name)
        assert found.keys() == want.keys()
        for key, loss in want.items():
            assert abs(found[key] - loss) < 1e-5, (name, key)
        assert seen(tmp_path / name) == pytest.approx(seen(tmp_path / "one"), rel=1e-5)
