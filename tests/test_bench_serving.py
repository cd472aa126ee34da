"""bench/serving.py, tiny: both write the same texts, and the record holds every round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_train import enter

from bench import serving
from bench.serving import Round, Serving, ServingConfig

TINY = ["--prompts=5", "--n_layer=1", "--n_head=2", "--n_embd=16", "--vocab_size=64",
        "--block_size=48", "--prompt_tokens=9", "--new_tokens=12", "--batch_size=2",
        "--device=cpu", "--rounds=2"]  # fmt: skip


def tiny(**changes: Any) -> Serving:
    sizes = {"prompts": 5, "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64,
             "block_size": 48, "prompt_tokens": 9, "new_tokens": 12, "batch_size": 2,
             "device": "cpu"}  # fmt: skip
    return Serving(ServingConfig(**{**sizes, **changes}))


def test_both_write_the_same_texts_of_the_wanted_lengths() -> None:
    bench = tiny()
    wanted = bench.wanted
    assert len(set(wanted)) > 2 and len({len(p) for p in bench.prompts}) > 2
    batches, serve = (bench.round(name) for name in ("batches", "serve"))
    assert batches.texts == serve.texts
    assert [len(text) for text in serve.texts] == wanted
    for got in (batches, serve):
        assert 0 < got.finished <= got.seconds and got.cache_bytes > 0
    # Rows of decode steps: in a batch those of its longest text, in serve those that were wanted.
    pairs = [wanted[0:2], wanted[2:4], wanted[4:]]
    assert batches.rows == sum(len(pair) * (max(pair) - 1) for pair in pairs)
    assert serve.rows == sum(wanted) - 5 < batches.rows


def test_the_table() -> None:
    bench = tiny()
    text = [[1]] * 5
    a = [Round(s, 1.0, 100, 2_000_000, text) for s in (1.0, 1.0, 1.0)]
    b = [Round(s, 0.5, sum(bench.wanted) - 5, 10**6, [*text[1:], [2]]) for s in (0.5, 0.4, 0.5)]
    head, (_, second) = serving.summary(bench, {"batches": a, "serve": b})
    got = dict(zip(head, second))
    assert got["ratio"] == "2.00 (2.00 to 2.25)" and got["rows wanted"] == "100%"
    assert got["mean finish s"] == "0.50" and got["KV cache"] == "1.0 MB"
    assert got["same"] == "4 of 5"
    _, (_, even) = serving.summary(bench, {"batches": a, "serve": a[:]})
    assert "within the noise" in even[head.index("ratio")]


def test_the_command_prints_a_table_and_writes_a_record(tmp_path: Path) -> None:
    words = [*TINY, "--record=x", f"--records_dir={tmp_path}"]
    code, out, _ = enter(serving.main, words)
    assert code == 0
    assert "float32, 5 prompts, 2 rounds" in out
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert [line.split(" ")[1] for line in lines[2:]] == ["batches", "serve"]
    assert sum("5 of 5" in line for line in lines) == 2
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("_cpu_x")
    record = json.loads((folder / "record.json").read_text())
    assert record["command"].startswith("python -m bench.serving --prompts=5")
    assert {name: len(r) for name, r in record["rounds"].items()} == {
        "batches": 2, "serve": 2}  # fmt: skip
    assert record["settings"]["batch_size"] == 2
    readme = (folder / "README.md").read_text()
    assert lines[-1] in readme and record["command"] in readme


@pytest.mark.parametrize("word, said", [
    ("--prompts=0", "prompts must be at least 1"),
    ("--new_tokens=40", "texts of 49 tokens do not fit into 48"),
    ("--record=a/b", "--record must be letters"),
])  # fmt: skip
def test_mistakes_are_one_sentence(word, said) -> None:
    code, out, err = enter(serving.main, [*TINY, word])
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1 and not out
