"""bench_mfu.py --hf: tiny models of transformers from their configs, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benches import by_backend, measured, run, small

from bench import hf
from bench.record import verify
from core.settings import UserError

transformers: Any = pytest.importorskip("transformers", reason="package 'transformers' is missing")

# 2 layers of 4 query heads and 2 key heads of 8, 32 wide; an MLP of 3 x 64; a head of its own
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64}
WEIGHTS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 64 * 32  # that a token multiplies


def folder(path: Path, kind: str = "llama", **more: Any) -> str:
    config = transformers.CONFIG_MAPPING[kind](**{**TINY, **more})
    config.save_pretrained(path / kind)
    return f"--hf={path / kind}"


@pytest.mark.slow
def test_a_row_for_every_backend_and_for_transformers_own(tmp_path):
    content = measured(*small("train"), folder(tmp_path), "--gradient_accumulation_steps=2",
                       "--backends=manual,sdpa,tiled,flash_attn_2")
    rows = by_backend(content)
    assert list(rows)[:3] == ["manual", "hf_eager", "hf_sdpa"]
    ours = {"manual": [], "tiled": [], "sdpa": ["flash (CPU)"]}
    assert {n: r["kernels"] for n, r in rows.items() if r.get("proof")} == ours
    assert rows["hf_sdpa"]["kernels"] == ["flash (CPU)"] and rows["hf_eager"]["kernels"] == []
    assert rows["flash_attn_2"]["status"] == "unavailable"
    full, causal = 2 * 12 * 4 * 8 * 32, 2 * 12 * 4 * 8 * 16.5
    for name in (*ours, "hf_eager", "hf_sdpa"):  # the same weights and tokens, so the same loss
        assert abs(rows[name]["loss_difference"]) < 1e-5
        assert abs(rows[name]["gradient_norm_difference"]) < 1e-4
        rate = 2 * 4 * 32 / (rows[name]["ms"] / 1e3)
        assert rows[name]["mfu"] == pytest.approx((6 * WEIGHTS + full) * rate / 0.5e12)
    assert verify(content) == []
    want = {"mfu": 6 * WEIGHTS + full, "mfu_causal": 6 * WEIGHTS + causal}
    assert content["flops_per_token"] == want
    assert content["hf"]["counted"]["parameters"] == WEIGHTS + 5 * 32  # and gains


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_tied_counts_though_its_weights_are_looked_up_too(tied):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    block = 4 * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)  # 2 norms, 4 linears
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=tied)
    N = block + 2 * 8 + 32 * 8  # the last norm, the head
    assert hf.parameters(transformers.GPT2LMHeadModel(config)) == N


def test_what_a_backend_refuses_is_a_row_that_says_so(tmp_path):
    """Gemma 2 has softcap, its own scale, and a window in every second layer."""
    model = folder(tmp_path, "gemma2", sliding_window=8)
    content = measured(*small("train"), model, "--backends=manual,sdpa")
    rows = by_backend(content)
    assert rows["manual"]["status"] == rows["hf_eager"]["status"] == "ok"
    assert abs(rows["manual"]["loss_difference"]) < 1e-5
    assert rows["sdpa"]["status"] == "unavailable" and "rounds" not in rows["sdpa"]
    assert any(word in rows["sdpa"]["why"][0] for word in ("scale", "cap"))
    flop, hidden = content["flops_per_token"], 2 * 32 - 16.5 - (36 + 24 * 8) / 32  # keys
    assert flop["mfu"] - flop["mfu_causal"] == pytest.approx(12 * 4 * 8 * hidden)


@pytest.mark.slow
def test_generation_with_its_caches(tmp_path):
    content = measured(*small("decode"), folder(tmp_path), "--backends=sdpa", "--batch_sizes=2",
                       "--prompts=5", "--new_tokens=4")
    at = {(r["backend"], r["point"]["cache"]): r for r in content["rows"]}
    who = ("sdpa", "hf_eager", "hf_sdpa")
    assert set(at) == {(name, cache) for name in who for cache in hf.CACHES}
    numbers = 2 * 2 * 2 * 8  # keys and values of a token
    for row in at.values():
        assert row["status"] == "ok" and row["cache_bytes"] == 4 * 2 * (5 + 4 - 1) * numbers
        size = 4 * (WEIGHTS + 5 * 32) + 2 * (5 + 4 / 2) * numbers * 4
        assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)
    assert at["sdpa", "dynamic"]["proof"]["canary"] and at["sdpa", "static"]["proof"]["canary"]
    assert verify(content) == []


@pytest.mark.parametrize("argv, kind, more, value", [
    (small("train"), "bert", {}, "causal"), (small("train"), "t5", {}, "T5Config"),
    (small("train"), "llama", {"max_position_embeddings": 16}, "--block_size=32"),
    (small("train"), "BROKEN", None, ""), (small("train"), "NOT_THERE", None, ""),
    (small("kernel"), "x", None, ""), ([*small("train"), "--rival=hf"], "BROKEN", None, ""),
    ([*small("train"), "--profile"], "BROKEN", None, ""),
])
def test_a_mistake_names_the_model(argv, kind, more, value, tmp_path):
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "config.json").write_text("{", encoding="utf-8")
    model = f"--hf={tmp_path / kind}" if more is None else folder(tmp_path, kind, **more)
    with pytest.raises(UserError, match="--hf") as e:
        run([*argv, model, "--backends=sdpa"])
    assert value in str(e.value)
