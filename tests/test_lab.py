"""The variants of course/lab against transformers, closed forms and slow formulas."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import attention
from core.settings import UserError
from course.lab.__main__ import main
from course.lab.training import PLAYS, RECALL, VOCABULARY, build, recalled, sequences
from course.lab.variants import VARIANTS, chunked, recurrent
from model import GPT, GPTConfig, rope_rates

C, H, D, T = 32, 4, 8, 11
SIZES: dict[str, Any] = {
    "block_size": 64, "vocab_size": 16, "n_layer": 4, "n_head": H, "n_embd": C, "bias": False,
    "position": "rope", "norm": "rms", "n_hidden": 24, "norm_eps": 1e-6,
}
F64 = torch.float64
X = torch.randn(2, T, C, dtype=F64, generator=torch.Generator().manual_seed(1))


def layer(name: str, number: int = 0, first: Any = None, **changes: Any) -> Any:
    torch.manual_seed(number)
    variant = VARIANTS[name]
    made = variant(GPTConfig(**SIZES | variant.settings | changes), number, first)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return made.double()


def run(made: Any, backend: str = "manual", rope: Any = None, attend: Any = None) -> Tensor:
    spec = made.request(attention.Spec(H, made.kv_size // D, D, "float64", made.window))
    chosen = attention.select(backend, spec, "cpu", attention.Policy(fallback=False))
    return made(X, attend or chosen.backend.attend, spec, None, rope)


def angles() -> tuple[Tensor, Tensor]:
    turn = torch.arange(T)[:, None, None] * rope_rates(GPTConfig(**SIZES), torch.device("cpu"))
    return turn.cos().double(), turn.sin().double()


def by_their_names(name: str, made: Any) -> dict[str, Tensor]:
    if name == "mla":
        q, c = made.c_attn.weight.split([H * (D + made.R), made.rank + made.R])
        found = {"q_proj": q, "kv_a_proj_with_mqa": c, "kv_a_layernorm": made.c_norm.weight,
                 "kv_b_proj": made.c_up.weight}
    else:
        found = dict(zip(("q_proj", "k_proj", "v_proj"), made.c_attn.weight.chunk(3), strict=True))
    if name == "gate":  # q and gate of a head next to one another, norms 1 less
        q, gate = (w.unflatten(0, (H, D)) for w in (found["q_proj"], made.c_gate.weight))
        found |= {"q_proj": torch.stack([q, gate], dim=1).flatten(0, 2),
                  "q_norm": made.q_norm.weight - 1, "k_norm": made.k_norm.weight - 1}
    named = {f"{key}.weight": w for key, w in (found | {"o_proj": made.c_proj.weight}).items()}
    if name == "differential":
        named |= dict(zip(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), made.lam))
    return named | ({"sinks": made.sinks} if name == "window" else {})


MLA_SIZES = {"q_lora_rank": None, "kv_lora_rank": C // 2, "qk_nope_head_dim": D,
             "qk_rope_head_dim": D // 2, "v_head_dim": D, "rope_interleave": False}
GPT_OSS = {"head_dim": D, "sliding_window": 4, "attention_bias": False}
MODELS: list[tuple[Any, ...]] = [  # our layer; the layer of transformers
    ("window", 0, {"attention_window": 4}, "gpt_oss", "GptOss", GPT_OSS),
    ("gate", 3, {"qk_norm": True}, "qwen3_next", "Qwen3Next", {"head_dim": D}),
    ("differential", 0, {}, "diffllama", "DiffLlama", {}),
    ("differential", 3, {}, "diffllama", "DiffLlama", {}),
    ("mla", 0, {}, "deepseek_v3", "DeepseekV3", MLA_SIZES),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, number, changes, family, prefix, sizes", MODELS)
def test_a_variant_is_that_of_transformers(name, number, changes, family, prefix, sizes) -> None:
    made, (cos, sin) = layer(name, number, **changes), angles()
    config = getattr(import_module("transformers"), f"{prefix}Config")(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=H, num_hidden_layers=4,
        attn_implementation="eager", **sizes)
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, f"{prefix}Attention")(config, number).double().eval()
    theirs.load_state_dict(by_their_names(name, made))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    hidden = (j > i) | (j <= i - changes.get("attention_window", T))
    mask = torch.zeros(1, 1, T, T, dtype=F64).masked_fill(hidden, -torch.inf)
    rope = (cos[..., ::2], sin[..., ::2]) if name == "mla" else (cos, sin)
    rope = tuple(t.repeat(1, 1, 1 + (name != "window"))[None, :, 0] for t in rope)
    out = theirs(X, rope, mask)[0]  # parts of it in float32
    assert torch.allclose(run(made, rope=(cos, sin)), out, atol=1e-6)


@pytest.mark.parametrize("backend", ["manual", "tiled", "sdpa"])
def test_absorbing_changes_nothing(backend) -> None:
    made = layer("mla")
    naive = run(made, backend, angles())
    made.absorbed = True
    assert torch.allclose(run(made, backend, angles()), naive, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["manual", "tiled", "sdpa", "sdpa_math"])
def test_forgetting_is_its_formula_on_any_backend(backend) -> None:
    made = layer("forgetting")
    q, k, v = (t.unflatten(2, (H, D)).transpose(1, 2) for t in made.c_attn(X).chunk(3, dim=2))
    f = torch.sigmoid(made.c_forget(X)).mT  # (B, H, T)
    weight = torch.zeros(2, H, T, T, dtype=F64)
    for i in range(T):
        for j in range(i + 1):  # the gates of the tokens after j, up to i
            score = (q[:, :, i] * k[:, :, j]).sum(-1) / D**0.5
            weight[:, :, i, j] = score.exp() * f[:, :, j + 1 : i + 1].prod(-1)
    out = weight / weight.sum(-1, keepdim=True) @ v
    want = made.c_proj(out.transpose(1, 2).flatten(2))
    assert torch.allclose(run(made, backend), want, atol=1e-12)


def test_value_residual_mixes_the_first_layers_values() -> None:
    first, plain = layer("value_residual"), layer("mha")
    made = layer("value_residual", 1, first)
    run(first)
    a, b = made.mix.detach()
    q, k, v = made.c_attn.weight.chunk(3)
    v = a * v + b * first.c_attn.weight.chunk(3)[2]  # the same x: one matrix does it
    plain.load_state_dict({"c_attn.weight": torch.cat([q, k, v]),
                           "c_proj.weight": made.c_proj.weight})
    assert torch.allclose(run(made), run(plain), atol=1e-12)


def inputs(length: int) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    q, k, v = torch.randn(3, 2, 3, length, D, dtype=F64)
    g, beta = -torch.rand(2, 3, length, dtype=F64), torch.rand(2, 3, length, dtype=F64)
    return q, torch.nn.functional.normalize(k, dim=3), v, g, beta


@pytest.mark.parametrize("length", [1, 31, 32, 70])
def test_the_delta_rule_in_chunks_is_the_recurrent_one(length) -> None:
    slow, fast = (f(*inputs(length)) for f in (recurrent, chunked))
    assert torch.allclose(slow, fast, atol=1e-12)


@pytest.mark.slow
def test_the_delta_rule_is_qwen3_nexts() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    q, *rest = inputs(70)
    theirs = [t.transpose(1, 2).float() for t in (q * D**0.5, *rest)]  # which scales q
    out = qwen.torch_recurrent_gated_delta_rule(*theirs)[0].transpose(1, 2).double()
    assert torch.allclose(out, chunked(q, *rest), atol=1e-4)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "delta"])
def test_products_are_counted_and_a_cache_stores_what_the_kernel_reads(name) -> None:
    """manual's products are the only batched ones."""
    made, read = layer(name), set()
    with FlopCounterMode(display=False) as counted:
        run(made)
    batched = counted.get_flop_counts()["Global"][torch.ops.aten.bmm]
    # v is padded to the width of k, or the scores are computed for both halves of V.
    wasted = {"forgetting": H, "mla": H * D // 2, "differential": H * D}.get(name, 0)
    if name != "window":
        assert batched == 2 * (made.products(T) + wasted * T) * 2 * T  # 2 sequences
    made.absorbed = True

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        read.add(k[0, 0].numel() + (0 if v is k else v[0, 0].numel()))
        return attention.get("manual").attend(q, k, v, *args, **options)

    if name in ("mha", "gqa", "mqa", "window", "gate", "mla"):
        run(made, attend=attend)
        assert read == {made.cached}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("task", [RECALL, PLAYS])
def test_all_variants_have_as_many_parameters(name, task) -> None:
    mha, own = (build(n, task).get_num_params() for n in ("mha", name))
    assert abs(own / mha - 1) < 0.01


@settings(max_examples=30)
@given(st.integers(1, 16), st.integers(0, 40), st.integers(0, 2**31))
def test_each_key_returns_once_and_its_value_is_the_target(pairs, more, seed) -> None:
    T = 3 * pairs + more
    idx, targets = sequences(3, pairs, T, torch.Generator().manual_seed(seed))
    for row, wanted in zip(idx.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        later = [(key, v) for key, v in zip(row, wanted) if v >= 0]
        assert sorted(later) == sorted(value.items()) and len(value) == pairs
        assert all(v == -1 for v in wanted[: 2 * pairs])
        assert [key for key in row[2 * pairs :] if key in value] == [key for key, _ in later]


class LooksUp(GPT):
    """Repeats what came after a key, from key number `lost` on."""

    lost = 0

    def hidden(self, idx: Tensor, *_: Any, **__: Any) -> Tensor:
        first = (idx[:, :, None] == idx[:, None]).int().argmax(dim=2)
        found = idx.gather(1, (first + 1).clamp(max=idx.shape[1] - 1)) * (idx >= self.lost)
        return torch.nn.functional.one_hot(found, VOCABULARY)

    head = staticmethod(lambda x: x)


def test_recall_is_the_part_of_values_that_are_returned() -> None:
    model = LooksUp(GPTConfig(block_size=128, vocab_size=256, n_layer=1, n_head=1, n_embd=8))
    assert recalled(model) == {"4": 1.0, "8": 1.0, "16": 1.0}
    model.lost = 64  # half of the 127 keys
    assert all(0.4 < part < 0.6 for part in recalled(model).values())


@pytest.mark.slow
def test_the_command_writes_rows_and_does_not_repeat_them(tmp_path, capsys) -> None:
    words = ["--variants=mha,delta", "--seeds=1", "--scale=0.005", f"--out_dir={tmp_path}"]
    assert main([*words, "--tasks=recall,speed"]) == 0
    saved = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [sorted(row["recalled"]) for row in saved["rows"]] == [["16", "4", "8"]] * 2
    assert saved["speed"].keys() == {"mha", "delta"}
    assert "| gated delta rule |" in capsys.readouterr().out
    assert main([*words, "--tasks=recall"]) == 0
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == saved
    for more, named in ((["--tasks=recall", "--scale=0.01"], "scale"),
                        (["--variants=detla"], "delta"), (["--tasks=spede"], "speed")):
        with pytest.raises(UserError, match=named):
            main([*words, *more])
