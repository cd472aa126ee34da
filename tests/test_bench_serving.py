"""bench/serving.py, tiny: all contenders write the same texts, and the record holds every round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_train import enter

from bench import serving
from bench.serving import Round, Serving, ServingConfig

TINY = ["--prompts=5", "--n_layer=1", "--n_head=2", "--n_embd=16", "--vocab_size=64",
        "--block_size=48", "--prompt_tokens=2,9", "--new_tokens=2,12", "--batch_size=2",
        "--device=cpu", "--rounds=2", "--page_size=4"]  # fmt: skip


def tiny(**changes: Any) -> Serving:
    sizes = {"prompts": 5, "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64,
             "block_size": 48, "prompt_tokens": (2, 9), "new_tokens": (2, 12), "batch_size": 2,
             "device": "cpu", "page_size": 4}  # fmt: skip
    return Serving(ServingConfig(**{**sizes, **changes}))


@pytest.mark.parametrize("kv", ["dynamic", "static", "paged"])
@pytest.mark.parametrize("shared", [0, 9])
def test_all_write_the_same_texts_of_the_wanted_lengths(kv, shared) -> None:
    bench = tiny(kv_cache=kv, shared=shared)
    wanted = bench.wanted
    assert len(set(wanted)) > 2 and len({len(p) for p in bench.prompts}) > 2
    assert shared == 0 or len({tuple(p[:9]) for p in bench.prompts}) == 1
    batches, in_order, serve = (bench.round(name) for name in ("batches", "sorted", "serve"))
    assert batches.texts == in_order.texts == serve.texts
    assert [len(text) for text in serve.texts] == wanted
    for got in (batches, in_order, serve):
        assert 0 < got.finished <= got.seconds and got.cache_bytes > 0
    # Rows of decode steps: in a batch those of its longest text, in serve those that were wanted.
    pairs = [wanted[0:2], wanted[2:4], wanted[4:]]
    assert batches.rows == sum(len(pair) * (max(pair) - 1) for pair in pairs)
    ordered = sorted(wanted)
    pairs = [ordered[0:2], ordered[2:4], ordered[4:]]
    assert in_order.rows == sum(len(pair) * (max(pair) - 1) for pair in pairs)
    assert serve.rows == sum(wanted) - 5 < in_order.rows <= batches.rows


def test_a_common_beginning_is_stored_once() -> None:
    plain, shared = tiny(prompt_tokens=(12, 12)), tiny(prompt_tokens=(4, 4), shared=8)
    assert [len(p) for p in plain.prompts] == [len(p) for p in shared.prompts]
    assert shared.wanted == plain.wanted or len(set(shared.wanted)) > 1
    assert shared.round("serve").cache_bytes < plain.round("serve").cache_bytes


def test_the_table() -> None:
    bench = tiny()
    text = [[1]] * 5
    a = [Round(s, 1.0, 100, 2_000_000, text) for s in (1.0, 1.0, 1.0)]
    b = [Round(s, 0.5, sum(bench.wanted) - 5, 10**6, [*text[1:], [2]]) for s in (0.5, 0.4, 0.5)]
    head, (first, second) = serving.summary(bench, {"batches": a, "serve": b})
    got = dict(zip(head, second))
    assert got["ratio"] == "2.00 (2.00 to 2.25)" and got["rows wanted"] == "100%"
    assert got["mean finish s"] == "0.50" and got["KV cache"] == "1.0 MB"
    assert got["same"] == "4 of 5" and first[head.index("ratio")] == ""
    _, (_, even) = serving.summary(bench, {"batches": a, "serve": a[:]})
    assert "within the noise" in even[head.index("ratio")]


def test_the_command_prints_a_table_and_writes_a_record(tmp_path: Path) -> None:
    words = [*TINY, "--record=x", f"--records_dir={tmp_path}"]
    code, out, _ = enter(serving.main, words)
    assert code == 0
    assert "1 layers, 16 wide, float32; 5 prompts of 2 to 9 tokens, 2 to 12 new ones" in out
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert [line.split(" ")[1] for line in lines[2:]] == ["batches", "sorted", "serve"]
    assert sum("5 of 5" in line for line in lines) == 2
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("_cpu_x")
    record = json.loads((folder / "record.json").read_text())
    assert record["command"].startswith("python -m bench.serving --prompts=5")
    assert {name: len(r) for name, r in record["rounds"].items()} == {
        "batches": 2, "sorted": 2, "serve": 2}  # fmt: skip
    assert record["settings"]["batch_size"] == 2 and record["wanted_tokens"] > 10
    readme = (folder / "README.md").read_text()
    assert lines[-1] in readme and record["command"] in readme


@pytest.mark.parametrize("word, said", [
    ("--prompts=0", "prompts must be at least 1"),
    ("--prompt_tokens=9,2", "prompt_tokens must be two numbers, from and to"),
    ("--new_tokens=3", "new_tokens must be two numbers, from and to"),
    ("--shared=30", "texts of 51 tokens do not fit into 48"),
    ("--candidates=serve,vllm", "--candidates must be a list (each one of batches, sorted, serve)"),
    ("--kv_cache=none", "--kv_cache must be one of dynamic, static, paged"),
    ("--record=a/b", "--record must be letters"),
])  # fmt: skip
def test_mistakes_are_one_sentence(word, said) -> None:
    code, out, err = enter(serving.main, [*TINY, word])
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1 and not out
