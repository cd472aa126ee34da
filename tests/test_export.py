# ruff: noqa: F401, F811 (fixtures)
"""Models and tokenizers in transformers' format: the same logits, ids and texts there and here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_data import gpt2, small_tokenizer
from test_model import transformers
from test_train import TEXT, enter, make_data, refusal, run

import checkpoint
import data
import sample
from checkpoint import __main__ as export
from checkpoint import families, store
from core.settings import UserError
from inference import engine
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 500.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 7,
                             "use_sliding_window": True, "max_window_layers": 2}),
    "gpt2": ("GPT2", {"n_inner": 100, "tie_word_embeddings": False}),
}
ROPE = {"position": "rope", "norm": "rms", "mlp": "swiglu"}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": True}, "llama": {**ROPE, "tied": False},
    "qwen3": {**ROPE, "qk_norm": True, "n_kv_head": 1},
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_transformers(name, sharded, transformers, tmp_path, monkeypatch):
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    load, idx = transformers.AutoModelForCausalLM, torch.randint(97, (2, 40))
    them = load.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in them.parameters():  # biases and norms are not zeros and ones
            p += 0.05 * torch.randn_like(p)
        them.save_pretrained(tmp_path / "in", max_shard_size="50KB" if sharded else "5GB")
        saved = json.loads((file := tmp_path / "in" / "config.json").read_text())
        saved.pop("layer_types", None)  # older files have max_window_layers only
        file.write_text(json.dumps(saved))
        us = checkpoint.load_hf(str(tmp_path / "in"), attention_backend="manual").eval()
        torch.testing.assert_close(us(idx)[0], want := them(idx).logits, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(families, "SHARD", 50_000 if sharded else families.SHARD)
        checkpoint.save_hf(us, tmp_path / "out")
        for folder in ("in", "out"):
            assert (tmp_path / folder / "model.safetensors.index.json").exists() == sharded
        again = load.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
        assert again.config.model_type == config.model_type
        torch.testing.assert_close(again(idx).logits, want, rtol=1e-5, atol=1e-5)
        back = checkpoint.load_hf(str(tmp_path / "out"), attention_backend="manual").eval()
        assert torch.equal(back(idx)[0], us(idx)[0]) and back.config.windows == us.config.windows


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_a_missing_window_is_that_of_transformers(family, transformers):
    unused = {"activation_function": "relu"}  # GPT-2's name
    more = {"model_type": family.lower(), "max_position_embeddings": 8192, **unused}
    for first in ({"max_window_layers": 0}, {}):
        saved = {**SIZES, "use_sliding_window": True, "num_hidden_layers": 30, **first}
        config = getattr(transformers, f"{family}Config")(**saved)
        begin = 0 if family == "Mistral" else config.max_window_layers
        windows = families.read_config({**saved, **more}, "here").windows
        assert windows == (None,) * begin + (config.sliding_window,) * (30 - begin)


REFUSED: dict[str, dict[str, Any]] = {
    "rope_type.*'yarn'": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "rope_type.*'linear'": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "full_attention": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "rope_scaling": {"rope_scaling": "linear"}, "rope_parameters.*3": {"rope_parameters": 3},
    "model_type": {"model_type": ["llama"]}, "layer_types.*5": {"layer_types": 5},
    "max_window_layers": {"max_window_layers": "a"}, "num_hidden": {"num_hidden_layers": 2**70},
    "high_freq": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
    "rotary": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True},
    "hidden_act": {"hidden_act": "gelu"}, "layer_types": {"layer_types": ["full_attention"]},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "chunked": {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
    "activation_function.*None": {"model_type": "gpt2", "activation_function": None},
    "'mixtral'": {"model_type": "mixtral"}, "'qwen3_moe'": {"model_type": "qwen3_moe"},
}


def test_a_head_of_its_own_is_no_tied_one(transformers, tmp_path):
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=False)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert not checkpoint.load_hf(str(tmp_path)).config.tied
    saved = json.loads((path := tmp_path / "config.json").read_text())
    path.write_text(json.dumps(saved | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        checkpoint.load_hf(str(tmp_path))


def test_what_gpt_has_not_is_refused(tmp_path):
    """As are indexes with names of no files."""
    for word, changes in REFUSED.items():
        content = {**SIZES, "num_hidden_layers": 2, "model_type": "llama", **changes}
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"{tmp_path}.*{word}"):
            checkpoint.load_hf(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"\*\.bin"):
        checkpoint.load_hf(str(tmp_path))
    for file in (5, None, ["a"], ""):
        listed = {"weight_map": {"x": "model.safetensors", "y": file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
        with pytest.raises(UserError, match=str(tmp_path)):
            checkpoint.load_hf(str(tmp_path))


def prepare(dataset: str, out_dir: Path, **how: Any) -> None:
    data.prepare(data.PrepareConfig(dataset, out_dir=str(out_dir), workers=1, **how))


def exported(out: Path, to: Path) -> str:
    code, said, err = enter(export.main, ["export", str(out), f"--to={to}"])
    assert code == 0 and str(to) in said, err
    return str(to)


def here(source: str, ids: list[int], n: int, eot: int | None) -> list[int]:
    model = checkpoint.init_model(source).eval()
    return engine.generate(model, torch.tensor([ids]), n, temperature=0, stop=eot)[0].tolist()


@pytest.mark.parametrize("tokenizer", ["char", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_is_the_same_there(shape, tokenizer, gpt2, transformers, tmp_path):
    kind, text = {"char": "shakespeare", "gpt2": "text"}[tokenizer], str(tmp_path / "text.txt")
    make_data(tmp_path)
    if tokenizer == "gpt2":
        prepare(kind, tmp_path / "tiny", source=text, force=True)
    out, sizes = tmp_path / "out", {"max_iters": 1, "block_size": 32}
    assert run(tmp_path, out, **SHAPES[shape], **sizes).code == 0
    ours = data.from_meta(checkpoint.tokenizer_meta(str(out)))
    prompt, n, file = "The king keeps", 12, checkpoint.latest(out) / "model.safetensors"
    ids = ours.encode(prompt)
    torch.manual_seed(1)  # random weights give varied texts
    weights = {k: w + 0.3 * torch.randn_like(w) for k, w in load_file(file).items()}
    store.save_weights(weights, file)
    file.with_name("checksums.json").unlink()
    if ours.eot is not None:  # a token of the text and the end trade places
        row = here(str(out), ids, n, None)
        at = next(at for at in range(len(ids) + 3, len(row)) if row[at] not in row[:at])
        for name in {"transformer.wte.weight", "lm_head.weight"} & weights.keys():
            weights[name][[row[at], ours.eot]] = weights[name][[ours.eot, row[at]]]
        store.save_weights(weights, file)
        n = at + 1 - len(ids) + 5
    source = exported(out, tmp_path / "to")
    want = here(source, ids, n, ours.eot)
    assert here(str(out), ids, n, ours.eot) == want
    assert ours.eot is None or (want[-1] == ours.eot and len(want) == at + 1)

    theirs = transformers.AutoTokenizer.from_pretrained(source)
    assert theirs.eos_token_id == ours.eot and theirs.model_max_length == 32
    for part in (TEXT, prompt, *["don't \n\n  stop, été 日本 🙂\t12345"] * (tokenizer == "gpt2")):
        assert theirs.encode(part) == ours.encode(part)
        assert theirs.decode(theirs.encode(part)) == part
    them, idx = transformers.AutoModelForCausalLM.from_pretrained(source), torch.tensor([ids])
    how = {"max_new_tokens": n, "do_sample": False, "pad_token_id": 0}
    assert them.generate(idx, attention_mask=idx >= 0, **how)[0].tolist() == want
    (answer,) = transformers.pipeline("text-generation", source)(prompt, **how)
    assert answer["generated_text"] == theirs.decode(want, skip_special_tokens=True)
    read = data.FileTokenizer.read(Path(source))
    assert (read.vocab_size, read.eot, read.begin) == (ours.vocab_size, ours.eot, [])
    prepare(kind, tmp_path / "again", source=text, tokenizer=source)
    for file in ("train.bin", "val.bin"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "tiny" / file).read_bytes()
    assert run(tmp_path, tmp_path / "tuned", init_from=source, dataset="again").code == 0
    if ours.eot is None:
        (less := tmp_path / "less.txt").write_text(TEXT.replace("w", "v"))
        prepare("shakespeare_char", tmp_path / "other", source=str(less))
        said = refusal(run(tmp_path, tmp_path / "no", init_from=source, dataset="other"))
        assert "--dataset=other" in said and f"--tokenizer={source}" in said
        with pytest.raises(UserError, match="ends a document"):
            prepare("text", tmp_path / "no", tokenizer=source, source=text)


def test_what_no_family_has_is_not_exported(tmp_path):
    for words, changes in {
        "--bias=False": {**ROPE, "bias": True}, "--norm=rms --mlp=swiglu": {"position": "rope"},
        "--position=rope": {"qk_norm": True}, "--qk_norm": {**ROPE, "head_size": 6, "bias": "qkv"},
        "several sizes": {**ROPE, "attention_window": (4, 8)},
        "some layers.*--qk_norm": {**ROPE, "attention_window": (4, None)},
        "n_kv_head.*--position": {"n_kv_head": 1}, "window.*--position": {"attention_window": 4},
        "position": {"position": "alibi"}, ".*position": {**ROPE, "position": "alibi"},
    }.items():
        model = GPT(GPTConfig(16, 9, 2, 2, 8, **{"bias": False, **changes}))
        with pytest.raises(UserError, match=words):
            checkpoint.save_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_each_of_several_end_tokens_ends_a_text(transformers, tmp_path):
    """All logits are 0: id 0 is an ordinary token, or an end."""
    small_tokenizer(tmp_path, "bytelevel")
    for ends, said in (([1, 0], "stop"), ([1, 5], "length")):
        config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 300, "eos_token_id": 1})
        them = transformers.LlamaForCausalLM(config)
        torch.nn.init.zeros_(them.model.norm.weight)
        them.generation_config.eos_token_id = ends
        them.save_pretrained(tmp_path)
        out, ids = tmp_path / "out.jsonl", torch.tensor([[3, 4]])
        words = [f"--init_from={tmp_path}", "--start=a", "--temperature=0", "--max_new_tokens=9"]
        assert enter(sample.main, [*words, f"--out={out}"])[0] == 0
        row = json.loads(out.read_text())
        assert row["finish"] == said and row["tokens"] == (0 if said == "stop" else 9)
        made = them.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert made.shape[1] - 2 == (1 if said == "stop" else 9)


@pytest.mark.slow
def test_a_vocabulary_above_65536(tmp_path):
    """Ids with a gap, a first token, a stored truncation."""
    tk = pytest.importorskip("tokenizers")
    vocab = {f"w{i}": i for i in range(69_998)} | {"</s>": 69_998, "<s>": 70_005}
    made = tk.Tokenizer(tk.models.WordLevel(vocab, unk_token="w0"))
    made.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>", "<s>"])
    start = {"single": "<s> $A", "special_tokens": [("<s>", 70_005)]}
    made.post_processor = tk.processors.TemplateProcessing(**start)
    made.enable_truncation(3)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": [69998, 7]}')
    (source := tmp_path / "text.jsonl").write_text('{"text": "w69997 w5 w3 w69996 w1"}\n' * 60)
    prepare("text", tmp_path / "tiny", source=str(source), tokenizer=str(tmp_path))
    found = data.load(tmp_path / "tiny", "val", 8, 70_016)
    assert found.dtype == np.uint32 and data.read_meta(tmp_path / "tiny")["vocab_size"] == 70_006
    assert found[:].tolist() == [70_005, 69_997, 5, 3, 69_996, 1, 69_998] * 6
    assert run(tmp_path, tmp_path / "out", vocab_size=70_016, **SHAPES["llama"]).code == 0
    folder = Path(exported(tmp_path / "out", tmp_path / "to"))
    names, ids = (json.loads((folder / f"{name}_config.json").read_text())
                  for name in ("tokenizer", "generation"))
    assert (names["bos_token"], names["eos_token"]) == ("<s>", "</s>")
    assert (ids["bos_token_id"], ids["eos_token_id"]) == (70_005, [69_998, 7])
    assert ids["suppress_tokens"] == [*range(69_999, 70_005)]
