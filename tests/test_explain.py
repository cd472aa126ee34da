"""explain.py: every number that is shown, against the formula with the model's own q, k and v."""

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
from attention import visible
from core.settings import UserError
from data.tokenizer import CharTokenizer
from explain import ExplainConfig
from model import GPT, GPTConfig
from viewer.document import Document, maps, pack, token_of, unpack, watched
from viewer.page import as_text as render

PROMPT = "to be or not to be that is it"
TOKENIZER = CharTokenizer([*map(chr, range(32, 127)), "\n", "\u2028"])
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa-window-segments": {"attention_window": (5, None), "n_kv_head": 2, "segments": "|",
                            "prompt": "to be|or not to be|it"},
    "one token": {"prompt": "a"},
    "full": {"prompt": (PROMPT * 3)[:48], "attention_window": 6},
    "bfloat16": {"dtype": "bfloat16", "n_kv_head": 1},
}


def tiny(**changes: Any) -> GPT:
    torch.manual_seed(0)
    config = {"block_size": 48, "vocab_size": 100, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**{**config, **changes})).eval()  # type: ignore[arg-type]
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 15
    return model


def explained(model: GPT, config: ExplainConfig) -> Document:
    return explain.explain(model, TOKENIZER, config, "a tiny model")


def made(shape: str = "plain", **more: Any) -> tuple[GPT, ExplainConfig]:
    changes = {"prompt": PROMPT, **SHAPES[shape]}
    names = {"prompt", "segments", "dtype"} & changes.keys()
    config = ExplainConfig(**{name: changes.pop(name) for name in names}, **more)
    return tiny(**changes).to(getattr(torch, config.dtype)), config


Layer = tuple[Tensor, Tensor, Tensor, Tensor]  # S and P (H, T, T), v (Hkv, T, D), the kernel's out


@cache
def document(shape: str) -> tuple[Document, list[Layer]]:
    """The document, and the formula in float64."""
    model, config = made(shape)
    caught: list[Tensor] = []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda _, x, out: caught.append(out[0].double()))
        block.attn.c_proj.register_forward_pre_hook(lambda _, x: caught.append(x[0][0].double()))
    found, kv, layers = explained(model, config), model.config.kv_heads, []
    seg = found["about"]["segments"] or [0] * len(caught[0])
    for qkv, out, window in zip(caught[::2], caught[1::2], model.config.windows, strict=True):
        q, k, v = qkv.unflatten(1, (-1, 8)).transpose(0, 1).split([4, kv, kv])
        sees = torch.tensor([[bool(visible(i, j, 0, window, a, b)) for j, b in enumerate(seg)]
                             for i, a in enumerate(seg)])
        S = q @ k.repeat_interleave(4 // kv, dim=0).mT / math.sqrt(8)
        S = S.masked_fill(~sees, -torch.inf)
        layers.append((S, S.softmax(-1), v, out.unflatten(1, (4, 8)).transpose(0, 1)))
    return found, layers


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_the_formula_of_the_models_own_q_k_and_v(shape) -> None:
    found, layers = document(shape)
    maps, tiles, T = found["maps"], found["tiles"], layers[0][0].shape[1]
    rows, cols = np.tril_indices(T)
    P = torch.stack([layer[1] for layer in layers])
    assert T < 9 or P.amax(-1).median() > 0.3  # a wrong mask would be seen
    shown = unpack(maps["weights"]) / maps["levels"]
    assert shown == pytest.approx(P[:, :, rows, cols].numpy(), abs=0.5 / 65535 + 2e-6)
    entropy = torch.special.entr(P[:, :, min(8, T // 2) :]).sum(-1).mean(-1)
    assert np.array(maps["entropy"]) == pytest.approx(entropy.numpy(), rel=1e-4, abs=1e-5)
    for n, (S, p, v, out) in enumerate(layers):
        sees = S[0] > -torch.inf
        assert not shown[n][:, ~sees[rows, cols].numpy()].any()
        runs = [[j for j in range(T) if row[j]] for row in sees]
        assert [[*range(a, b)] for a, b in maps["seen"][n]] == runs
        layer = maps["layers"][n]
        assert layer["agrees"] and layer["error"] == max(layer["heads"]) <= layer["allowed"]
        assert layer["allowed"] < (0.4 if shape == "bfloat16" else 1e-4)
        errors = (p @ v.repeat_interleave(4 // len(v), dim=0) - out).abs().amax((1, 2))
        assert layer["heads"] == pytest.approx(errors.tolist(), rel=1e-6, abs=1e-14)
        wanted = {"scores": S[:, rows, cols], "v": v[..., :4], "out": out[..., :4]}
        for name, want in wanted.items():
            got = unpack(tiles[name])[n]  # type: ignore[literal-required]
            assert got == pytest.approx(want.numpy(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_document_has_the_prompt_and_fits_a_terminal(shape) -> None:
    about = (found := document(shape)[0])["about"]
    assert "".join(t["text"] for t in about["tokens"]) == about["prompt"].replace("|", "")
    assert about["segments"] in (None, [0] * 5 + [1] * 12 + [2] * 2)
    text = render(found)
    assert max(map(len, text.splitlines())) <= 80 and not re.search(" $", text, re.M)


@pytest.mark.parametrize("layer, head", [(None, None), (1, None), (None, 3), (0, 2)])
def test_it_begins_with_the_head_of_lowest_entropy(layer, head) -> None:
    about = explained(*made(layer=layer, head=head))["about"]
    entropy = document("plain")[0]["maps"]["entropy"]
    least = min((entropy[n][m], n, m) for n in range(2) for m in range(4)
                if layer in (None, n) and head in (None, m))
    assert (about["layer"], about["head"]) == least[1:]


def test_an_output_that_is_off_does_not_agree() -> None:
    """One number off by a thousandth."""
    with watched(model := tiny()) as calls, torch.no_grad():
        model.hidden(torch.arange(9)[None])
    wrong = calls[1].out.clone()
    wrong[0, 7, 2, 3] += 1e-3
    found = maps([calls[0], replace(calls[1], out=wrong)])
    good, bad = found["layers"]
    assert good["agrees"] and not bad["agrees"]
    assert [e > 1e-4 for e in bad["heads"]] == [False, False, True, False]
    assert bad["error"] == pytest.approx(1e-3, rel=0.01)
    whole = document("plain")[0]
    wrong_layers: Any = {**whole, "maps": {**whole["maps"], "layers": found["layers"]}}
    assert "NOT" not in render(whole) and "NOT" in render(wrong_layers)


@pytest.mark.parametrize("place, named", [("attn.c_attn", "layer 1"), ("mlp.c_proj", "last layer")])
def test_an_output_that_is_no_number_is_refused(place, named) -> None:
    model, config = made()
    torch.nn.init.constant_(model.transformer.h[1].get_submodule(place).bias, torch.inf)
    with pytest.raises(UserError, match=named):
        explained(model, config)


def test_arrays_and_tokens_as_they_are_written() -> None:
    for a in (np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([0, 258], np.uint16)):
        back = unpack(pack(a))
        assert np.array_equal(back, a) and back.dtype == a.dtype
    assert pack(np.array([258], np.uint16))["data"] == "AgE="  # the low byte first
    for piece, text, label in [(b" the", " the", "␣the"), ("é".encode(), "é", "é"),
                               (b"\xe2\x80", "<E2 80>", "<E2␣80>"), (b"\r\n\t", "\r\n\t", "␍⏎⇥"),
                               (b"", "<end of text>", "<end␣of␣text>"), (b"<b>", "<b>", "<b>")]:
        assert token_of(0, [piece]) == {"id": 0, "text": text, "label": label}


def test_a_refused_backend_is_shown_with_its_reasons() -> None:
    model, config = tiny(attention_backend="flash_attn_3"), made()[1]
    found = explained(model, config)
    text, refused = " ".join(render(found).split()), found["about"]["refused"]
    assert found["about"]["backend"] == "sdpa" and refused[0]["name"] == "flash_attn_3"
    for one in refused:
        assert one["name"] in text and all(why in text for why in one["why"])


@pytest.mark.parametrize("size, shown", [(300, 256), (200, 200)])
def test_a_long_prompt_is_shown_in_part(size, shown) -> None:
    about = explained(tiny(block_size=size), ExplainConfig(prompt="x" * 280))["about"]
    assert len(about["tokens"]) == shown and "280" in about["notes"][0]


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments"])
def test_the_map_in_characters(shape) -> None:
    text = render(explained(*made(shape, layer=1, head=2)))
    text = text[text.index("MAP of layer 1, head 2") :]
    lows = {c: float(low) for c, low in re.findall(r"(\S)\s+from\s+(0(?:\.\d+)?)[,.]", text)}
    assert len(lows) == 7
    S, P, *_ = document(shape)[1][1]
    rows = re.findall(r"^ *\d+ \S .*", text, re.M)
    for line, scores, row in zip(rows, S[2].tolist(), P[2].tolist(), strict=True):
        cells, rest = line[5 : 5 + len(row)], line[5 + len(row) :].split()
        assert [c != " " for c in cells] == [s > -math.inf for s in scores]
        for c, p in zip(cells, row):
            if c != " ":
                above = min([low for low in lows.values() if low > lows[c]], default=2)
                assert lows[c] - 1e-4 <= p < above + 1e-4
        assert int(rest[0]) == row.index(max(row))
        assert float(rest[-1]) == pytest.approx(max(row), abs=0.0051)


# --- the command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, model = tmp_path_factory.mktemp("run"), tiny()
    checkpoint.save(
        out, weights=model.state_dict(), optimizer={}, keep=1,
        settings={"train": {}, "model": asdict(model.config), "tokenizer": TOKENIZER.to_meta()},
        state={"step": 7, "val_loss": 1.0},
    )
    return out


def command(*words: str) -> tuple[int, str, str]:
    return enter(explain.main, ["--device=cpu", *words])


def test_text_and_json_from_a_checkpoint(run, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    path = tmp_path / "numbers.json"
    code, out, err = command(f"--out_dir={run}", f"--prompt=FILE:{tmp_path}/prompt.txt",
                             "--window=6", "--text", f"--json={path}", "--layer=1", "--head=3",
                             "--attn_implementation=eager")
    assert code == 0, err
    found = json.loads(path.read_text())
    assert out == render(found) + "\n"
    model = tiny(attention_window=6, attention_backend="manual")
    want = json.loads(json.dumps(explained(model, made(layer=1, head=3)[1])))
    want["about"]["source"] = str(run / "step-00000007")
    assert found == want
    assert not (run / "explain.html").exists()


def test_the_page_is_written_where_asked_and_through_no_link(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, path in (([f"--out_dir={run}"], run / "explain.html"),
                        ([f"--init_from={run}"], tmp_path / "explain.html"),
                        ([f"--out_dir={run}", "--html=x.html"], tmp_path / "x.html")):
        code, out, err = command(*words, "--prompt=to be")
        assert code == 0 and path.name in out and path.read_text().startswith("<!doctype"), err
    path.unlink()
    path.symlink_to(tmp_path / "explain.html")  # a folder from somebody else may have links
    code, _, err = command(*words, "--prompt=or not")
    assert code == 2 and path.name in err and "or not" not in path.read_text()


LONG = "a" * 300  # no file may have this name


@pytest.mark.parametrize("words, named", [
    (["--layer=2"], "got 2"), (["--head=-1"], "got -1"), (["--prompt=né"], "'é'"),
    (["--prompt="], "prompt"), (["--prompt=||", "--segments=|"], "prompt"),
    (["--window=0"], "window"), (["--segments="], "segments"),
    (["--prompt=FILE:no/such.txt"], "no/such.txt"), (["--html=no/x.html"], "no/x.html"),
    (["--promt=a"], "--prompt"), (["--out_dir=no/run"], "no/run"), ([f"--out_dir={LONG}"], LONG),
    (["--attention_backend=flash_attn_3", "--attention_fallback=False"], "flash_attn_3"),
])
def test_a_wrong_setting_is_named(run, words, named) -> None:
    code, out, err = command(f"--out_dir={run}", *words)
    assert code == 2 and not out and "Traceback" not in err and named in err
