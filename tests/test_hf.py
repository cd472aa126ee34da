"""Models of transformers with our kernels, against their eager attention.

With NANOATTN_OLD_TRANSFORMERS=FOLDER (pip install --target FOLDER) all but slow tests run again
with the transformers in FOLDER.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hf_table
import kernels
import pytest
import torch
from checkout import python
from conftest import every
from hf_table import CASES, ENCODERS, MODELS, build, cell, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BackendUnavailable, Policy, hf, visible
from attention.hf.mask import Mask, Proof

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("triton", reason="package 'triton' is not installed")

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
OWN_MASK = (4, 56)  # GPT-2 made its mask itself before
# gpt_oss came with 4.55; bloom is refused, below.
HERE = [m for m in MODELS if m in transformers.CONFIG_MAPPING and m != "bloom"]
IDS, LEFT = (t[:2] for t in hf_table.batch("left-padded"))


@pytest.fixture(autouse=True)
def registered(remembered_probes: None) -> None:
    hf.register()


# --- every model, kernel and case ---


@pytest.mark.parametrize("backend", [
    "sdpa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("manual", "tiled"))])
@pytest.mark.parametrize("name", every(2, HERE))
def test_a_model_is_right_or_refused(name: str, backend: str) -> None:
    page = hf_table.PAGE.read_text(encoding="utf-8")
    row = re.search(rf"^\|[\w, ]*\b{name}\b[\w, ]*\| (.+) \|$", page, re.M)
    notes = dict(re.findall(r"^\[(\d+)\] refused: (.+)$", page, re.M))
    for case, told in zip(CASES, row[1].split(" | ") if row else [], strict=True):
        why, note = cell(name, backend, case), re.search(rf"(?:none|{backend}) \[(\d+)\]", told)
        if VERSION < OWN_MASK:
            own = name == "gpt2" and case in ("right-padded", "packed")
            assert bool(why) == (own or bool(note)), (case, why)
        else:
            assert why == (notes[note[1]] if note else ""), case


@pytest.mark.slow
@pytest.mark.parametrize("case", ["left-padded", "static cache", "training"])
def test_our_triton_kernels_run_in_a_model(case: str) -> None:
    assert cell("mistral", "triton", case) == ""


@pytest.mark.slow
def test_the_oldest_transformers() -> None:
    folder = os.environ.get("NANOATTN_OLD_TRANSFORMERS")
    if not folder:
        pytest.skip("NANOATTN_OLD_TRANSFORMERS is not set")
    code = "import transformers as t; print(t.__version__, t.__file__)"
    found = python("-c", code, PYTHONPATH=folder)
    assert folder in found.stdout and found.stdout[0] == "4", found.stdout
    ran = python("-m", "pytest", __file__, "-m", "not slow", "-p", "no:xdist", PYTHONPATH=folder)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-3000:]


# --- masks ---


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_any_4_d_mask_is_honoured_or_refused(name: str) -> None:
    """Causal masks with left padding are never refused."""
    own, ours = build(name, "eager"), build(name, "nanoattn:manual")
    i, j = torch.arange(20)[:, None], torch.arange(20)
    window = MODELS[name].get("sliding_window")

    @settings(max_examples=80, deadline=None)
    @given(st.sampled_from([None, 0, 1, 3, 7]), st.tuples(st.integers(0, 9), st.integers(0, 9)),
           st.sampled_from(["bool", "least", "-inf", "bias", "int"]),
           st.sampled_from([0, 0, 1, 19]),
           st.booleans(), st.sets(st.tuples(*[st.integers(0, n) for n in (1, 19, 19)]), max_size=2))
    def check(width: int | None, pads: Any, form: str, right: int, segments: bool,
              flips: Any) -> None:
        pad = torch.tensor(pads)[:, None, None]
        ids = torch.arange(20) // 6 if segments else torch.zeros(20)
        seen = visible(i, j, 0, width or window, ids[:, None], ids, right) & (j >= pad)
        for at in flips:
            seen[at] ^= True
        seen, real = seen[:, None], j >= pad[:, 0]
        if not seen.any(-1)[:, 0][real].all():
            return  # a query that sees nothing sees everything in eager attention
        added = torch.where(seen, 0.0, torch.finfo().min)
        mask = {"bool": seen, "least": added, "-inf": torch.where(seen, 0.0, -torch.inf),
                "bias": torch.where(seen, -0.5, -torch.inf), "int": seen.long()}[form]
        usual = form not in ("bias", "int") and not flips and not right and (
            (width or window) == window)
        with torch.no_grad():
            try:
                got = ours(IDS, attention_mask=mask).logits[real]
            except ValueError:
                assert not usual
                return
            assert form not in ("bias", "int")
            torch.testing.assert_close(got, own(IDS, attention_mask=added).logits[real],
                                       rtol=1e-4, atol=1e-4)

    check()


def test_positions_that_numpy_changes_are_read_again() -> None:
    model, at = build("llama", "nanoattn:manual"), torch.arange(20)[None]
    asked = {"position_ids": at, "attention_mask": torch.ones(1, 1, 20, 20).bool().tril()}
    with torch.no_grad():
        model(IDS, **asked)
        at.numpy()[:, 9:] -= 9
        with pytest.raises(BackendUnavailable, match="position_ids"):
            model(IDS, **asked)


FORMS: dict[str, Callable[[Tensor], Tensor | None]] = {  # position_ids of a 2-D mask
    "generate()": lambda m: (m.cumsum(-1) - 1).masked_fill(m == 0, 1),
    "clamped": lambda m: (m.cumsum(-1) - 1).clamp(min=0),
    "minus the mask": lambda m: m.cumsum(-1) - m,
    "0 for padding": lambda m: (m.cumsum(-1) - 1) * m,
    "of the places": lambda m: torch.arange(20).expand(2, -1),
    "of the places, once": lambda m: torch.arange(20)[None],
    "the model's own": lambda m: None,
    "three texts": lambda m: torch.arange(20).remainder(8).expand(2, -1),
}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_attention_heads": 4,
       "num_hidden_layers": 2, "vocab_size": 61, "pad_token_id": 1, "init_std": 0.3}


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "gpt2", "opt"])
def test_padding_on_any_side_and_any_positions_of_it(name: str) -> None:
    """Or refused where positions of real tokens restart, or one of them is hidden."""
    if VERSION < OWN_MASK and name in ("gpt2", "opt"):
        pytest.skip(f"{name} makes its mask itself in transformers {transformers.__version__}")
    changes = OPT if name == "opt" else {}
    own, ours = (build(name, how, **changes) for how in ("eager", "nanoattn:manual"))

    @settings(max_examples=25, deadline=None)
    @given(form=st.sampled_from([*FORMS]), masked=st.booleans(), wide=st.booleans(),
           hole=st.sampled_from([None, None, None, 7]),
           ends=st.tuples(*[st.tuples(st.integers(0, 19), st.integers(0, 19))] * 2))
    def check(form: str, masked: bool, wide: bool, hole: int | None, ends: Any) -> None:
        j = torch.arange(20)
        mask = torch.stack([(j >= min(span)) & (j <= max(span)) & (j != hole) for span in ends])
        mask, hidden = mask.long(), hole and any(min(span) < hole < max(span) for span in ends)
        at, asked = FORMS[form](mask), {"attention_mask": mask if masked else None}
        real = mask.bool() if masked else torch.ones_like(mask).bool()
        refused = bool(masked and hidden)
        if at is not None:
            asked["position_ids"] = at = at.long() if wide else at.int()
            refused |= bool(((at.diff() <= 0) & real[:, 1:] & real[:, :-1]).any())
        with torch.no_grad():
            if refused:
                with pytest.raises(BackendUnavailable, match=r"position_ids|mask"):
                    ours(IDS, **asked)
                return
            got, want = (model(IDS, **asked).logits[real] for model in (ours, own))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    check()


# --- names, chunks ---


def test_names() -> None:
    names = hf.names()
    assert names["tiled"] == "nanoattn:tiled" and names["sdpa"] == "nanoattn:SDPA"
    assert {"manual", "triton", "auto", "fastest"} <= names.keys()
    assert hf.implementation("flash_attention_2") == names["flash_attn_2"]
    with pytest.raises(ValueError, match="tritn"):
        hf.implementation("tritn")
    if hasattr(transformers.PreTrainedModel, "get_correct_attn_implementation"):
        for name in ("nanoattn:sdpa", "nanoattn:SDPA", "NanoAttn:Sdpa"):
            assert build("llama", name).config._attn_implementation == "nanoattn:SDPA"
        with pytest.raises(ValueError, match=r"'nanoattn:spda'.*nanoattn:SDPA"):
            build("llama", "nanoattn:spda")


def test_a_downloaded_config_runs_no_code(tmp_path: Path, capsys) -> None:
    """transformers takes attn_implementation from config.json, too."""
    path = tmp_path / "evil.py"
    path.write_text("print('it ran')")
    build("llama", "eager").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation"):
        for name in (f"nanoattn:{path}", "nanoattn:evil:BACKEND", f"nanoattn:flex:{path}"):
            (tmp_path / "config.json").write_text(json.dumps(config | {key: name}))
            if VERSION < (4, 57):  # one of the keys is ignored, the other an error
                with suppress(ValueError):
                    transformers.AutoModel.from_pretrained(tmp_path)
                continue
            with pytest.warns(UserWarning, match="evil"):
                model = transformers.AutoModel.from_pretrained(tmp_path)
            assert model.config._attn_implementation == "sdpa"
    assert "it ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name, cache", [
    ("llama", "dynamic"), ("mistral", "dynamic"), ("mistral", "static"), ("gemma2", "static")])
def test_a_prompt_in_three_parts(name: str, cache: str) -> None:
    """And a query after a hole."""
    ids, tokens = hf_table.batch("left-padded")
    model = build(name, "nanoattn:tiled" if cache == "dynamic" else "nanoattn:manual")
    old = {"max_batch_size": 4} if VERSION < (5, 0) else {}
    kept = transformers.DynamicCache() if cache == "dynamic" else transformers.StaticCache(
        config=model.config, max_cache_len=32, **old)

    def step(part: Tensor, seen: Tensor) -> Tensor:
        at = torch.arange(seen.shape[1] - part.shape[1], seen.shape[1])
        more: dict[str, Any] = {"cache_position": at} if old else {}
        with torch.no_grad():
            return model(part, attention_mask=seen, past_key_values=kept,
                         position_ids=at.expand(4, -1), **more).logits

    parts = zip(ids.split([9, 7, 4], dim=1), (9, 16, 20), strict=True)
    logits = torch.cat([step(part, tokens[:, :end]) for part, end in parts], dim=1)
    hf_table.check(name, "left-padded", {"logits": logits[tokens.bool()]})
    holes = torch.cat((tokens, tokens[:, -1:]), dim=1).index_fill(1, torch.tensor([17]), 0)
    with pytest.raises(BackendUnavailable, match="mask"):
        step(ids[:, :1], holes)


# --- how models are used ---


@pytest.mark.slow
def test_fastest_measures_and_a_model_is_compiled() -> None:
    model = build("llama", "nanoattn:fastest")
    hf_table.check("llama", "full", run(model, "full"))
    assert hf.report(model)[0].ran[0][1].requested == "fastest"
    model = build("mistral", "nanoattn:manual")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for asked in ({}, {"attention_mask": LEFT}):
            torch.testing.assert_close(compiled(IDS, **asked).logits, model(IDS, **asked).logits)


def test_dropout_is_of_the_probabilities_and_in_training_only() -> None:
    model, found = build("llama", "nanoattn:manual", attention_dropout=0.5), []
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, model(IDS).logits)
        model.train()
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            found.append(model(IDS).logits)
    assert torch.equal(found[0], found[2]) and not torch.equal(*found[:2])
    assert {spec.dropout for spec, *_ in hf.report(model)[0].ran} == {0.0, 0.5}


def test_under_autocast_the_kernel_gets_its_dtype_and_checkpointing_calls_it_twice() -> None:
    own, model = build("gemma2", "eager"), build("gemma2", "nanoattn:manual")
    with torch.no_grad():
        exact = own(IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            got, usual = model(IDS).logits.float(), own(IDS).logits.float()
    assert [spec.dtype for spec, *_ in hf.report(model)[0].ran] == ["bfloat16"]
    assert (got - exact).abs().max() <= 2 * (usual - exact).abs().max()
    model = build("mistral", "nanoattn:tiled")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hf_table.check("mistral", "training", run(model, "training"))
    assert hf.report(model)[0].ran[0][2] == 2  # forward, and again in the backward


def test_a_kernel_file_is_an_attention_implementation(tmp_path: Path) -> None:
    file = kernels.as_file(tmp_path, kernels.Recorder())
    name = f"nanoattn:{file}"
    if not hasattr(transformers.PreTrainedModel, "get_correct_attn_implementation"):
        hf.register(extra=[file])
        name = hf.names()[file]
    model = build("llama", name)
    run(model, "full")
    assert {c.backend.name for layer in hf.report(model) for _, c, _ in layer.ran} == {"mine"}
    hf.register(policy=Policy(fallback=False))  # it knows the file still
    assert hf.names()[file] == "nanoattn:mine"


def test_the_report_names_layers_kernels_calls_and_refusals() -> None:
    model = build("llama", "nanoattn:FLASH_ATTN_2")
    run(model, "dynamic cache")
    layers = hf.report(model)
    assert [layer.name for layer in layers] == [f"model.layers.{n}.self_attn" for n in (0, 1)]
    for layer in layers:
        assert sum(calls for *_, calls in layer.ran) == hf_table.NEW
        assert {chosen.backend.name for _, chosen, _ in layer.ran} == {"sdpa"}
    assert "flash_attn_2 refused" in str(layers)
    hf.register(policy=Policy(fallback=False))
    with pytest.raises(BackendUnavailable, match="flash_attn_2"):
        run(build("llama", "nanoattn:FLASH_ATTN_2"), "full")
    model = build("gemma2", "nanoattn:manual")
    run(model, "full")
    first, second = str(hf.report(model)).splitlines()  # equal layers share a line
    assert "layers.0.self_attn" in first and "window" in first
    assert "layers.1.self_attn" in second and "window" not in second
    if hasattr(model, "set_attn_implementation"):
        for backend in ("tiled", "manual", "tiled"):
            model.set_attn_implementation(f"nanoattn:{backend}")
            run(model, "full")
        for layer in hf.report(model):
            ran = {chosen.backend.name: n for _, chosen, n in layer.ran}
            assert ran == {"manual": 2, "tiled": 2}


# --- encoders and cross-attention ---

encoders = pytest.mark.skipif(VERSION < (5, 0), reason="transformers before 5 refuses encoders")


@encoders
@pytest.mark.parametrize("name", every(2, [
    n for n in ENCODERS if n.partition(",")[0] in transformers.CONFIG_MAPPING]))
def test_encoders_and_cross_attention(name: str) -> None:
    for case in ("full", "left-padded", "right-padded", "training"):
        assert cell(name, "sdpa", case) == ""


@encoders
def test_attention_weights_of_a_model() -> None:
    for name, key in (("bert", "attentions"), ("bart", "cross_attentions"),
                      ("llama, both sides", "attentions")):
        eager = build(name, "eager")
        asked = hf_table.inputs(eager, "right-padded")
        want = eager(**asked, output_attentions=True)[key]
        with pytest.warns(UserWarning, match="output_attentions"):
            got = build(name, "nanoattn:auto")(**asked, output_attentions=True)[key]
        assert len(got) == len(want) == 2
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- refusals ---

T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
UNABLE: dict[str, dict[str, Any]] = {
    "t5": T5, "mpt": {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2},  # biases
    "bloom": MODELS["bloom"],  # it computes with the mask
    # Their attention classes are looked up by our name.
    "gptj": SMALL, "falcon": SMALL,
    "gpt_neo": SMALL | {"num_layers": 1, "attention_types": [[["global"], 1]]},
    **({n: ENCODERS[n] for n in ("bert", "modernbert")} if VERSION < (5, 0) else {}),
}


@pytest.mark.parametrize("name", UNABLE)
def test_a_model_that_cannot_be_right_is_refused_at_the_latest_by_the_report(name: str) -> None:
    config = transformers.AutoConfig.for_model(name, **UNABLE[name])
    more = {"decoder_input_ids": IDS[:, :7]} if name == "t5" else {}
    for asked in ({}, {"attention_mask": LEFT}):
        with pytest.raises((ValueError, RuntimeError, KeyError)), torch.no_grad():
            model = transformers.AutoModel.from_config(config, attn_implementation="nanoattn:auto")
            model(IDS, **asked, **more)
            hf.report(model)


@pytest.mark.parametrize(("asked", "why"), [
    ({"position_bias": torch.zeros(1)}, "position_bias"),
    ({"s_aux": torch.zeros(3)}, "sinks"),
    ({"value": torch.zeros(1, 2, 4, 16)}, "refuses Linear: value heads of 16, key heads of 8"),
    ({"key": torch.zeros(1, 2, 4, 8).double()}, "float64"),
    ({"sliding_window": 2}, "window is 2"),
    ({"attention_mask": None}, "without a mask"),
    ({"attention_mask": Mask.of(Proof(4, 9), (1, 1, 4, 9))}, "does not fit"),
    ({"softcap": -1.0}, "softcap"),
])
def test_what_cannot_be_honoured_is_refused(asked: dict[str, Any], why: str) -> None:
    attend = transformers.AttentionInterface()["nanoattn:manual"]
    q, kv = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
    mask = Mask.of(Proof(4, 4), (1, 1, 4, 4))
    call = {"module": torch.nn.Linear(1, 1), "query": q, "key": kv, "value": kv,
            "attention_mask": mask, "position_ids": torch.arange(4), "new": None}
    assert attend(**call)[0].shape == (1, 4, 4, 8)
    with pytest.raises(ValueError, match=why):  # BackendUnavailable is one
        attend(**call | asked)
