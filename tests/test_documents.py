"""--document_mask=True: no token sees another document of its sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import build, names_here
from test_shards import prepare, write
from test_train import Run, run

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


@pytest.mark.parametrize("name, position, begins", [
    pytest.param(*backend.values, *kind, marks=backend.marks)
    for backend in names_here(segments=True) for kind in (("learned", True), ("rope", False))])
def test_a_document_is_computed_as_if_it_were_alone(
    name: str, position: Any, begins: bool
) -> None:
    """Positions begin at 0, and other documents' tokens change nothing."""
    model: Any = build(attention_backend=name, position=position, n_layer=2).eval()
    model.packed, documents = True, Documents(EOT, begins)
    idx = torch.randint(36, (2, 16), generator=torch.Generator().manual_seed(3))
    idx[(0, 0, 0, 1, 1, 1), (4, 5, 11, 0, 7, 15)] = EOT

    def starts_of(idx: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(documents.starts(idx.numpy().astype(np.uint16)))

    starts = starts_of(idx)
    logits = model(idx, segments=starts)[0]
    for row in range(2):
        for start in starts[row].unique():
            inside = starts[row] == start
            alone = model(idx[row, inside][None])[0][0]
            torch.testing.assert_close(logits[row, inside], alone)
            changed = idx.clone()
            last = inside.nonzero()[-1 if idx[row, inside][0] == EOT else 0]
            changed[row, last] = (changed[row, last] + 1) % EOT
            if torch.equal(starts_of(changed), starts):  # else that token was a border
                moved = (model(changed, segments=starts)[0] != logits).any(-1)
                assert moved[row, inside].any() and moved.sum() == moved[row, inside].sum()


# --- whole runs ---


@pytest.fixture(scope="module")
def fw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of documents of about nine tokens."""
    folder, draw = tmp_path_factory.mktemp("fw"), np.random.default_rng(0)
    for name in ("fw_val_0", "fw_train_1", "fw_train_2"):
        tokens = draw.integers(5, size=700)
        write(folder / f"{name}.bin", np.where(draw.random(700) < 0.1, 50256, tokens))
    assert prepare(folder / "fw_*.bin", folder / "fw")[0] == 0
    return folder


TINY: dict[str, Any] = {"dataset": "fw", "n_layer": 2, "n_embd": 8, "max_iters": 6,
                        "document_mask": True, "attention_window": "5,none",
                        "eval_on_start": True}  # fmt: skip


def seen(out: Path) -> dict[int, float]:
    rows = metrics.read(out / "metrics.jsonl")
    return {row["iter"]: row["mfu_causal"] / row["mfu"] for row in rows if "mfu" in row}


@pytest.mark.slow
def test_a_run_its_resumption_and_its_mfu(fw: Path, tmp_path: Path) -> None:
    def two(name: str, **more: Any) -> Run:
        return run(fw, tmp_path / name, **{**TINY, "gradient_accumulation_steps": 2, **more})

    straight = two("a")
    assert straight.losses()[6] != two("b", document_mask=False).losses()[6]
    two("c", max_iters=3, lr_decay_iters=6)
    assert two("c", lr_decay_iters=6, init_from="resume").losses() == straight.losses()

    # By hand: each token sees its own document.
    documents = Documents(50256, True)
    tokens = data.load(fw / "fw", "val", 16, 50257)
    model: Any = checkpoint.load(checkpoint.latest(tmp_path / "a")).model().eval()
    model.packed = True
    ((x, y, starts),) = data.eval_batches(tokens, 16, 1, 8, documents=documents)
    assert starts.tolist() == [by_hand(row, 50256, True) for row in x.tolist()]
    with torch.no_grad():
        loss = float(model(x, y, starts)[1])
    assert straight.evaluations()[6][1] == pytest.approx(loss, rel=1e-5)

    # mfu counts all pairs, mfu_causal the visible ones.
    batches = data.Batches(data.load(fw / "fw", "train", 16, 50257), 16, 8, 1337,
                           documents=documents)  # fmt: skip
    i, N, want = torch.arange(16), model.get_num_params(), {}
    for step in seen(tmp_path / "a"):
        starts = batches.get(step - 1)[2]
        pairs = sum(
            float(visible(i[:, None], i[None, :], 0, window, s[:, None], s[None, :]).sum())
            for s in starts for window in (5, None)
        ) / starts.numel()  # fmt: skip
        want[step] = (6 * N + 12 * 8 * pairs) / (6 * N + 12 * 8 * 2 * 16)
    assert len(want) > 2 and seen(tmp_path / "a") == pytest.approx(want, rel=1e-6)
    two("d", max_iters=4, log_interval=4)  # from the first timed step on
    assert seen(tmp_path / "d") == pytest.approx({4: (want[3] + want[4]) / 2}, rel=1e-6)
