"""explain.py: every number that is shown, held against the thing itself."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train import enter
from torch import Tensor

import checkpoint
import explain
from attention import Policy, visible
from core.settings import UserError
from data.tokenizer import CharTokenizer
from explain import ExplainConfig, forward, prompt_of
from model import GPT, GPTConfig
from viewer.document import Document, pack, token_of, unpack
from viewer.maps import Call, maps, watched, weights
from viewer.text import render

PROMPT = "to be or not to be that is it"

TOKENIZER = CharTokenizer([chr(c) for c in range(ord(" "), ord("~") + 1)])

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa-window-segments": {
        "attention_window": (5, None), "n_kv_head": 2, "segments": "|",
        "prompt": "to be|or not to be|it",
    },
    "one token": {"prompt": "a"},
    "full": {"prompt": (PROMPT * 3)[:48], "attention_window": 6},
    "bfloat16": {"dtype": "bfloat16", "n_kv_head": 1},
}


def tiny(**changes: Any) -> GPT:
    """Two layers, four heads of 8; weights so large that heads look somewhere."""
    torch.manual_seed(0)
    config = {"block_size": 48, "vocab_size": 100, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**{**config, **changes})).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "c_attn.weight" in name:
                p.mul_(15)
    return model


@cache
def made(shape: str) -> tuple[GPT, ExplainConfig]:
    changes = dict(SHAPES[shape])
    names = ("prompt", "segments", "dtype")
    knobs = {name: changes.pop(name) for name in names if name in changes}
    config = ExplainConfig(**{"prompt": PROMPT, **knobs})
    return tiny(**changes).to(getattr(torch, config.dtype)), config


def explained(model: GPT, config: ExplainConfig) -> Document:
    return explain.explain(model, TOKENIZER, config, "a tiny model")


@cache
def document(shape: str) -> Document:
    return explained(*made(shape))


def calls_of(shape: str) -> list[Call]:
    model, config = made(shape)
    return forward(model, prompt_of(config, TOKENIZER, model.config.block_size))


def sees(call: Call) -> Tensor:
    """(T, T) bool, by visible() for each pair."""
    T, seg = call.q.shape[1], None if call.segments is None else call.segments[0].tolist()
    rows = [
        [
            bool(visible(i, j, 0, call.spec.window, *((seg[i], seg[j]) if seg else ())))
            for j in range(T)
        ]
        for i in range(T)
    ]
    return torch.tensor(rows)


def softmax_by_hand(call: Call) -> Tensor:
    """(H, T, T) float64, straight from the formula."""
    q, k = (t[0].double() for t in (call.q, call.k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    return torch.softmax(scores.masked_fill(~sees(call), -torch.inf), dim=-1)


def by_hand(call: Call) -> Tensor:
    """The output (T, H, D) float64, straight from the formula."""
    v = call.v[0].double().repeat_interleave(call.q.shape[2] // call.v.shape[2], dim=1)
    return torch.einsum("hij,jhd->ihd", softmax_by_hand(call), v)


# --- the q, k and v of the model, and its maps ---


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_caught_is_what_the_model_computed(shape):
    (model, config), calls = made(shape), calls_of(shape)
    prompt = prompt_of(config, TOKENIZER, 48)
    idx, block = torch.tensor([prompt.ids]), model.transformer.h[0]
    assert [call.spec.window for call in calls] == list(model.config.windows)
    with torch.no_grad():
        x = model.transformer.wte(idx) + model.transformer.wpe(torch.arange(idx.shape[1]))
        qkv = block.attn.c_attn(block.ln_1(x))
        caught = [t.flatten(2) for t in (calls[0].q, calls[0].k, calls[0].v)]
        assert torch.equal(torch.cat(caught, dim=2), qkv)
        before = model.hidden(idx)
        with watched(model) as again:
            assert torch.equal(model.hidden(idx), before)
        model.hidden(idx)  # no longer watched
    assert len(again) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_maps_are_the_softmax_of_the_models_own_q_and_k(shape):
    m, calls = document(shape)["maps"], calls_of(shape)
    T = calls[0].q.shape[1]
    packed = unpack(m["weights"])
    assert packed.shape == (2, 4, T * (T + 1) // 2) and packed.dtype == np.uint16
    assert m["levels"] == 65535
    rounding = 0.5 / 65535
    rows, cols = np.tril_indices(T)
    for layer, call in enumerate(calls):
        P = torch.zeros(4, T, T, dtype=torch.float64)
        P[:, rows, cols] = torch.from_numpy(packed[layer] / m["levels"])
        torch.testing.assert_close(P, softmax_by_hand(call), rtol=0, atol=rounding + 2e-6)
        assert (P.sum(dim=-1) - 1).abs().max() <= T * rounding + 1e-6
        assert not P[:, ~sees(call)].any()
    if T > 8:  # the heads look somewhere: a wrong mask would be seen
        assert weights(calls[0]).amax(dim=-1).median() > 0.3
        i = torch.arange(T)
        for call, seen in zip(calls, m["seen"], strict=True):
            assert [[*range(a, b)] for a, b in seen] == [i[row].tolist() for row in sees(call)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_backend_agrees(shape):
    assert document(shape)["about"]["backend"] == "sdpa"
    for layer, call in zip(document(shape)["maps"]["layers"], calls_of(shape), strict=True):
        exact = by_hand(call)
        assert layer["agrees"] and layer["error"] == max(layer["heads"]) <= layer["allowed"]
        assert layer["allowed"] < (0.1 if shape == "bfloat16" else 2e-5) * float(exact.abs().max())
        heads = (call.out[0] - exact).abs().amax(dim=(0, 2))
        assert layer["heads"] == pytest.approx(heads.tolist(), rel=1e-6, abs=1e-14)


def test_an_output_that_is_off_does_not_agree():
    """One number, of one head of the second layer, off by a thousandth."""
    first, second = calls_of("plain")
    wrong = second.out.clone()
    wrong[0, 7, 2, 3] += 1e-3
    good, bad = maps([first, replace(second, out=wrong)])["layers"]
    assert good["agrees"] and not bad["agrees"]
    assert bad["error"] == pytest.approx(1e-3, rel=0.01)
    assert [e > 1e-4 for e in bad["heads"]] == [False, False, True, False]
    found = json.loads(json.dumps(document("plain")))
    assert "NOT" not in render(found)
    found["maps"]["layers"][1]["agrees"] = False
    assert "NOT agree in layer 1" in render(found)


def test_an_output_that_is_no_number_is_refused():
    for place, named in (("attn.c_attn", "layer 1"), ("mlp.c_proj", "last layer")):
        model = tiny()
        torch.nn.init.constant_(model.transformer.h[1].get_submodule(place).bias, torch.inf)
        with pytest.raises(UserError, match=named):
            explained(model, made("plain")[1])


# --- the document and the prompt ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_document_is_json(shape):
    found, (model, config) = document(shape), made(shape)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    about, c = found["about"], model.config
    assert "".join(t["text"] for t in about["tokens"]) == about["prompt"].replace("|", "")
    names = ("n_layer", "n_head", "n_kv_head", "windows", "dtype")
    sizes = (c.n_layer, c.n_head, c.kv_heads, list(c.windows), config.dtype)
    assert tuple(about[name] for name in names) == sizes  # type: ignore[literal-required]
    assert (about["segments"] is None) == ("segments" not in shape) and about["refused"] == []
    assert about["n_params"] == sum(p.numel() for p in model.parameters())


def test_pack_and_unpack():
    for a in (np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([0, 1, 258, 65535], np.uint16)):
        back = unpack(pack(a))
        assert np.array_equal(back, a) and back.dtype == a.dtype
    assert pack(np.array([258], np.uint16))["data"] == "AgE="  # the low byte first


def test_tokens_as_they_are_shown():
    pieces = [b" the", "é".encode(), b"\xe2\x80", b"\r\n\t", b"", b"<b>"]
    shown = [token_of(id_, pieces) for id_ in range(6)]
    assert [t["id"] for t in shown] == [*range(6)]
    assert [t["text"] for t in shown] == [" the", "é", "<E2 80>", "\r\n\t", "<end of text>", "<b>"]
    assert [t["label"] for t in shown] == [
        "␣the", "é", "<E2␣80>", "␍⏎⇥", "<end␣of␣text>", "<b>"]


def test_a_refused_backend_is_told():
    model = tiny(attention_backend="flash_attn_3")
    found = explained(model, made("plain")[1])
    about, text = found["about"], " ".join(render(found).split())
    assert about["backend"] == "sdpa"
    assert about["refused"][0]["name"] == "flash_attn_3"
    for refused in about["refused"]:
        assert refused["name"] in text and all(why in text for why in refused["why"])
    strict = tiny(attention_backend="flash_attn_3")
    strict.plans.policy = Policy(fallback=False)
    with pytest.raises(ValueError, match="flash_attn_3"):
        explained(strict, made("plain")[1])


def test_a_mark_cuts_the_prompt_into_documents():
    prompt = prompt_of(ExplainConfig(prompt="ab|c||de", segments="|"), TOKENIZER, 48)
    assert TOKENIZER.decode(prompt.ids) == "abcde" and prompt.segments == [0, 0, 1, 2, 2]
    assert prompt_of(ExplainConfig(prompt="ab"), TOKENIZER, 48).segments is None


def test_a_long_prompt_is_shown_in_part():
    config = ExplainConfig(prompt=(PROMPT * 10)[:280])
    found = explained(tiny(block_size=300), config)
    assert len(found["about"]["tokens"]) == 256 and "280" in found["about"]["notes"][0]


def test_a_prompt_past_block_size_is_cut_with_a_note(run, caplog):
    code, out, err = command(f"--out_dir={run}", f"--prompt={PROMPT * 2}", "--text")
    note = re.search(r"first 48 of .* 58 tokens", " ".join(out.split()))
    assert code == 0 and note and note[0] in caplog.text and "block_size" in caplog.text, err


@pytest.mark.parametrize("layer, head", [(None, None), (1, None), (None, 3), (0, 2)])
def test_it_begins_with_the_head_of_lowest_entropy(layer, head):
    model, config = made("plain")
    about = explained(model, replace(config, layer=layer, head=head))["about"]
    P = torch.stack([softmax_by_hand(call) for call in calls_of("plain")])[:, :, 8:]
    entropy = -torch.where(P > 0, P * P.log(), 0).sum(dim=-1).mean(dim=-1)  # (layers, heads)
    torch.testing.assert_close(
        torch.tensor(document("plain")["maps"]["entropy"]).double(), entropy, rtol=1e-4, atol=1e-5
    )
    least = min((float(entropy[n, m]), n, m) for n in range(2) for m in range(4)
                if layer in (None, n) and head in (None, m))  # fmt: skip
    assert (about["layer"], about["head"]) == least[1:]


# --- the terminal ---


@pytest.mark.parametrize("shape", SHAPES)
def test_80_columns_are_enough(shape):
    lines = render(document(shape)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments"])
def test_the_map_in_characters(shape):
    model, config = made(shape)
    text = render(explained(model, replace(config, layer=1, head=2)))
    call = calls_of(shape)[1]
    P, T = softmax_by_hand(call)[2], call.q.shape[1]
    rows = re.findall(r"^ *\d+ \S .*", text[text.index("MAP of layer 1, head 2") :], re.M)[:T]
    lows = {"@": 0.7, "#": 0.4, "*": 0.2, "+": 0.1, "=": 0.05, "-": 0.02, ".": 0.0}
    for i, line in enumerate(rows):
        cells, rest = line[5 : 5 + T], line[5 + T :].split()
        assert [c != " " for c in cells] == sees(call)[i].tolist()
        for c, p in zip(cells, P[i]):
            if c != " ":
                above = min([low for low in lows.values() if low > lows[c]], default=2)
                assert lows[c] - 1e-4 <= p < above + 1e-4
        j = int(P[i].argmax())
        assert int(rest[0]) == j and float(rest[-1]) == pytest.approx(float(P[i, j]), abs=0.0051)


# --- the command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of the tiny model."""
    out = tmp_path_factory.mktemp("run")
    model = tiny()
    checkpoint.save(
        out, weights=model.state_dict(), optimizer={}, keep=1,
        settings={"train": {}, "model": asdict(model.config), "tokenizer": TOKENIZER.to_meta()},
        state={"step": 7, "val_loss": 1.0},
    )
    return out


def command(*words: str) -> tuple[int, str, str]:
    return enter(explain.main, ["--device=cpu", *words])


def test_text_and_json_from_a_checkpoint(run, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    path = tmp_path / "numbers.json"
    words = f"--out_dir={run}", f"--prompt=FILE:{tmp_path}/prompt.txt", "--window=6"
    code, out, err = command(*words, "--text", f"--json={path}", "--layer=1", "--head=3",
                             "--attn_implementation=eager")
    assert code == 0, err
    found = json.loads(path.read_text())
    assert out == render(found) + "\n"
    about = found["about"]
    assert (about["source"], about["prompt"]) == (str(run / "step-00000007"), PROMPT)
    assert (about["layer"], about["head"], about["windows"]) == (1, 3, [6, 6])
    assert about["backend"] == "manual"
    config = replace(made("plain")[1], layer=1, head=3)
    want = json.loads(
        json.dumps(explained(tiny(attention_window=6, attention_backend="manual"), config))
    )
    assert found["maps"] == want["maps"]
    assert not (run / "explain.html").exists()


def test_the_page_is_written(run, tmp_path, monkeypatch):
    """In the run's folder; here with --init_from; where --html says."""
    monkeypatch.chdir(tmp_path)
    for words, path in (([f"--out_dir={run}"], run / "explain.html"),
                        ([f"--init_from={run}"], tmp_path / "explain.html"),
                        ([f"--out_dir={run}", "--html=x.html"], tmp_path / "x.html")):
        code, out, err = command(*words, "--prompt=to be")
        assert code == 0, err
        assert path.read_text(encoding="utf-8").lstrip().startswith("<!doctype")
        assert path.name in out
        path.replace(tmp_path / "page")
        path.symlink_to(tmp_path / "page")  # a folder from somebody else may have links
        (tmp_path / "page").write_text("precious")
        code, _, err = command(*words, "--prompt=to be")
        assert code == 2 and path.name in err and (tmp_path / "page").read_text() == "precious"
        path.unlink()


@pytest.mark.parametrize("words, named", [
    (["--layer=2"], "got 2"), (["--head=-1"], "got -1"), (["--prompt=né"], "'é'"),
    (["--prompt="], "prompt"),
    (["--prompt=||", "--segments=|"], "prompt"), (["--window=0"], "window"),
    (["--segments="], "segments"),
    (["--prompt=FILE:no/such.txt"], "no/such.txt"), (["--html=no/x.html"], "no/x.html"),
    (["--promt=a"], "--prompt"), (["--out_dir=no/run"], "no/run"),
    (["--attention_backend=flash_attn_3", "--attention_fallback=False"], "flash_attn_3"),
])
def test_a_wrong_setting_is_named(run, words, named):
    code, out, err = command(f"--out_dir={run}", *words)
    assert code == 2 and not out and "Traceback" not in err and named in err
