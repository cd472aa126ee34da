"""Every mode's rows against closed forms; records: an edited field or figure is refused."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benches import MODEL, by_backend, rival, run, shown, small, write_tokens
from checkout import files
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import board, record
from bench.record import verify
from core.flops import datasheet_peak, flops_per_token

Content = dict[str, Any]
Made = dict[str, Content]
Lie = Callable[[Content], Any]
MODES = {  # a record of each
    "train": ["--backends=eager,sdpa,sdpa_cudnn", "--rounds=3", "--profile",
              "--bandwidth_gbs=8", "--gradient_accumulation_steps=3"],
    "kernel": ["--backends=manual,sdpa", "--rounds=3", "--lengths=16,40", "--batch_sizes=2"],
    "decode": ["--backends=sdpa", "--rounds=3", "--prompts=5", "--new_tokens=4", "--batch_sizes=2",
               "--kv_caches=none,dynamic", "--constraint=none,regex", "--n_kv_head=1"],
    "converge": ["--backends=sdpa", "--dataset=tiny", "--steps=10", "--learning_rate=0.01"],
}
RECORDS = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))
           for path in files("bench/records/*/record.json")}
OLD = {name: whole for name, whole in RECORDS.items() if {"rows", "stages"} & whole.keys()}
SHOWN: dict[str, str] = {}  # what the runs print


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = write_tokens(tmp_path_factory.mktemp("data"))
    more = {"train": [rival(folder), "--record=tiny", f"--records_dir={folder}"],
            "converge": [f"--data_dir={folder}"]}
    contents = {}
    for mode, argv in MODES.items():
        code, SHOWN[mode], contents[mode] = shown(*small(mode), *argv, *more.get(mode, []))
        assert code == 0
    return contents


def row(content: Content, backend: str) -> Content:
    return next(r for r in content["rows"] if r["backend"] == backend)


def holds(r: Content, **want: Any) -> bool:
    return {name: r[name] for name in want} == pytest.approx(want)


def sealed(content: Content) -> Content:
    """Digest of the JSON with sorted keys."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True)
    return json.loads(text) | {"digest": hashlib.sha256(text.encode()).hexdigest()}


def on_a_gpu(content: Content) -> Content:
    """As if an H200's."""
    known = datasheet_peak("NVIDIA H200", "float32", tf32=True)
    assert known is not None
    here = {"name": "NVIDIA H200", "about": "NVIDIA H200", "kind": "cuda"}
    here |= {"peak_tflops": known.tflops, "peak_source": known.source}
    return record.complete(content | {"machine": content["machine"] | here})


# --- rows ---


def test_a_row_has_the_median_of_its_rounds_and_is_accepted(made: Made) -> None:
    for mode, content in made.items():
        assert verify(content) == verify(sealed(content)) == [], mode
        for r in (r for r in content["rows"] if "rounds" in r):
            q1, ms, q3 = np.quantile([one["ms"] for one in r["rounds"]], [0.25, 0.5, 0.75])
            assert holds(r, q1_ms=q1, ms=ms, q3_ms=q3, spread=(q3 - q1) / ms)
            assert r["noisy"] == (r["spread"] > 0.05)
            assert mode == "kernel" or r["memory_bytes"] > 2**26
            assert len(r["rounds"]) == (10 if mode == "converge" else 3)
    assert verify(on_a_gpu(made["kernel"])) == []
    for name, kernel in (("flex", "by torch.compile"), ("flash_attn_2", "_flash_attn_forward")):
        rows = [r | {"backend": name, "kernels": [kernel]} for r in made["decode"]["rows"]]
        assert verify(record.complete(made["decode"] | {"rows": rows})) == []


def test_train_gives_a_row_for_every_backend_and_rival(made: Made) -> None:
    table, tokens = by_backend(made["train"]), 3 * 4 * 32
    assert list(table) == ["manual", "nanogpt", "sdpa", "sdpa_cudnn"]
    per_token = [flops_per_token(MODEL, 32, causal) for causal in (False, True)]
    assert [*made["train"]["flops_per_token"].values()] == per_token
    refused = table.pop("sdpa_cudnn")
    assert refused["status"] == "unavailable" and "rounds" not in refused
    assert f"| sdpa_cudnn | unavailable | {refused['why'][0]}" in SHOWN["train"]
    for r in table.values():
        rate = tokens / r["ms"] * 1e3
        mfu, causal = (flop * rate / 0.5e12 for flop in per_token)
        assert r["status"] == "ok" and holds(r, tokens_per_s=rate, mfu=mfu, mfu_causal=causal)
        for one in r["rounds"]:
            parts = one["forward_ms"] + one["backward_ms"] + one["optimizer_ms"]
            assert 0 < parts <= one["ms"] * 1.001
        assert r["warm_up_s"] > r["first_step_s"] > 0 and r["setup_s"] > 0
    assert table["sdpa"]["kernels"] == ["flash (CPU)"] and table["manual"]["kernels"] == []
    assert "loss_difference" not in table.pop("nanogpt")  # other weights
    for r in table.values():
        assert abs(r["loss_difference"]) < 1e-5 and abs(r["gradient_norm_difference"]) < 1e-4
    # torch counts the same FLOPs, but for norm gains, which it leaves out
    counted, gains = made["train"]["reference"]["flops_per_token"], (2 * 2 + 1) * 32
    assert per_token[0] == pytest.approx(counted + 6 * gains, rel=1e-12)


def test_a_profile_is_beside_the_rooflines_of_its_step(made: Made) -> None:
    """The formulas of docs/PLAN.md: 12 sequences of 32 in 3 micro-batches, 2 layers, 2 heads of
    16; 0.5 TFLOP/s, 8 GB/s."""
    found = row(made["train"], "sdpa")["profile"]
    N, L, C, V, m = 3 * 4 * 32, 2, 32, 64, 3
    W, S = 12 * C * C, 4 * C + 2 * C + 5 * C + 5 * C
    P = L * (W + 2 * C) + C + (V + 32) * C
    work = {  # FLOPs, bytes
        "products": [(6 * N * L * W, L * (12 * N * S + 12 * m * W)),
                     (6 * N * V * C, 12 * N * C + 12 * m * V * C)],
        "attention": [(14 * N * L * C * 16.5, 4 * N * L * 12 * C)],
        "elementwise": [(0, 32 * N * C * (2 * L + 1)), (0, 12 * N * C + 8 * C * V)],
        "optimizer": [(0, (28 + 4 + 12 * (m - 1)) * P)],
    }
    classes, lines = found["classes"], found["rooflines"]
    for kind, line in lines.items():
        least = sum(max(flop / 0.5e9, size / 8e6) for flop, size in work.get(kind, ()))
        share = classes[kind] / sum(classes.values())
        assert holds(line, roofline_ms=least, ms=classes[kind], share=share), kind
    assert lines.keys() >= {*work, "loss", "gaps"}
    ms = sum(line["roofline_ms"] for line in lines.values())
    assert holds(found["ceiling"], ms=ms, mfu=flops_per_token(MODEL, 32) * N / ms / 0.5e9)
    calls = {name: n for name, _, n in found["names"]["attention"]}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == 3 * 2  # of each layer
    table = SHOWN["train"].rpartition("| kernels ")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert {line[0] for line in shown} >= {*classes, "the step"}
    assert max(len(cell) for line in shown for cell in line) < 80


def test_kernel_times_attention_alone_at_every_point(made: Made) -> None:
    rows = made["kernel"]["rows"]
    points = {(r["point"]["B"], r["point"]["T"]) for r in rows}
    assert points == {(2, 16), (2, 40)} and len(rows) == 4
    for r in rows:
        B, T = r["point"]["B"], r["point"]["T"]
        assert r["status"] == "ok" and 0 < r["error_out"] < 1e-5 > r["error_grad"] > 0
        rate = 12 * B * 2 * 16 / (r["ms"] / 1e3) / 1e12  # of a pair
        causal = rate * T * (T + 1) / 2
        assert holds(r, tflops_causal=causal, tflops_full=rate * T * T, share=causal / 0.5)


def reads(size: int, of_products: int, B: int, keys: float = 5 + 4 / 2) -> float:
    """Bytes of a step: weights, norm gains, keys and values that it sees; one KV head of two."""
    C, L, V = 32, 2, 64
    products = V * C + L * ((C + C) * C + C * C + 8 * C * C)
    gains = C + L * 2 * C
    return products * of_products + gains * size + B * keys * 2 * L * (C // 2) * size


def test_decode_runs_over_caches_and_constraints(made: Made) -> None:
    rows = made["decode"]["rows"]
    kinds = {(r["point"]["cache"], r["point"]["constraint"]) for r in rows}
    assert len(kinds) == len(rows) == 4
    assert sum("Fastest" in text for text in made["decode"]["answers"]) == 2  # equals compete
    for r in rows:
        assert r["status"] == "ok" and (r["point"]["P"], r["point"]["B"]) == (5, 2)
        s, cached = r["ms"] / 1e3, r["point"]["cache"] == "dynamic"
        size = reads(4, 4, 2) if cached else reads(4, 4, 2, keys=0)
        assert r["first_ms"] > 0 and holds(r, tokens_per_s=2 / s, mbu=size / s / 8e9)
        assert (r["cache_bytes"] > 0) == cached


def test_converge_ends_where_the_baseline_ends(made: Made) -> None:
    table = by_backend(made["converge"])
    base = table["manual"]
    assert {n: r["verdict"] for n, r in table.items()} == {"manual": "baseline", "sdpa": "ok"}
    assert base["losses"][-1] < base["losses"][0] - 0.05
    for r in table.values():
        assert len(r["losses"]) == 10 and holds(r, final_loss=r["losses"][-1])
        off, saved = r["final_loss"] / base["final_loss"] - 1, 1 - r["ms"] / base["ms"]
        assert holds(r, difference=off, time_saved=saved)


def test_a_record_is_complete_and_a_second_leaves_it(made: Made) -> None:
    path = Path(SHOWN["train"].partition("record: ")[2].partition("\n")[0])
    content, written = made["train"], (path / "record.json").read_text(encoding="utf-8")
    assert json.loads(written) == content and path.name.endswith("_cpu_tiny")
    assert content["commit"] and isinstance(content["dirty"], bool)
    assert content["command"].startswith("python bench_mfu.py train --device=cpu")
    page, r = (path / "README.md").read_text(encoding="utf-8"), row(content, "sdpa")
    cells = "sdpa", f"{r['tokens_per_s']:,.0f}", "3", f"{r['mfu']:.1%}", f"{r['mfu_causal']:.1%}"
    heads = "backend", "tok/s", "rounds", "mfu of", "causal of"
    for line in (cells, heads):
        assert re.search(" .*".join(rf"\| {re.escape(cell)}" for cell in line), page)
    argv = [*small("train"), "--backends=sdpa", f"--records_dir={path.parent}", "--record=tiny"]
    assert run(argv)[0] == 0 and (path.parent / f"{path.name}-2" / "record.json").exists()
    assert (path / "record.json").read_text(encoding="utf-8") == written


# --- every record of this checkout ---


def test_every_record_here_is_accepted_and_the_board_is_up_to_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert {1, 2, 3} <= {whole["format"] for whole in OLD.values()}
    page = board.PAGE.read_text(encoding="utf-8")
    for path in board.FOLDER.iterdir():
        if path.name in RECORDS or f"/{path.name}/README.md" in page:
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(board, "FOLDER", tmp_path)
    assert board.main(["--check"]) == 0, capsys.readouterr().err


# --- edited figures ---

FIGURES = """ms q1_ms q3_ms spread noisy forward_ms backward_ms optimizer_ms first_ms tokens_a_step
    tokens_per_s mfu mfu_causal loss_difference gradient_norm_difference tflops_causal tflops_full
    share mbu cache_bytes final_loss final_losses difference verdict time_saved memory_saved"""
PROFILE = """rooflines ceiling reachable bandwidth products_tflops plain_ms
    share roofline_ms times over_ms limit"""  # old profiles'


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON value that hold no further ones."""
    if isinstance(value, (dict, list)):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[name], *path, name)
    elif path:
        yield path


def at(value: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, path, value)


def edit(whole: Content, path: tuple[Any, ...], by: float) -> Content:
    edited, value = copy.deepcopy(whole), at(whole, path)
    other = value + "x" if isinstance(value, str) else not value
    other = value * by or by if type(value) in (int, float) else other
    at(edited, path[:-1])[path[-1]] = other
    return edited


@pytest.mark.parametrize("name", [*MODES, *few([*OLD], 5)])
def test_an_edited_figure_is_refused_with_its_row(name: str, made: Made) -> None:
    """A new record has a digest of the edit."""
    whole, kinds = {**OLD, **made}[name], set()
    for path in (path for path in leaves(whole) if "rows" in path):
        n = path.index("rows") + 2
        r, (field, *more) = at(whole, path[:n]), path[n:]
        kind = (r.get("mode"), *(name for name in path[n:] if isinstance(name, str)))
        computed = {*PROFILE.split()} & {*more} if field == "profile" else field in FIGURES.split()
        # The first records lack the sizes of rivals; old profiles timed steps of their own.
        lacks = (field == "mbu" and whole["format"] == 1) or (name in OLD and "plain_ms" in more)
        if not computed or lacks or kind in kinds or r.get("status") != "ok":
            continue
        kinds.add(kind)
        edited = edit(whole, path, 1.01)
        its, found = at(edited, path[:n]), verify(sealed(edited) if name in MODES else edited)
        assert any(why.startswith(f"{its['mode']} {its['backend']}") for why in found), kind
    assert len(kinds) > 7


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_field_of_a_new_record_can_be_edited(made: Made, data: st.DataObject) -> None:
    """Also fields that no formula uses."""
    whole = made[data.draw(st.sampled_from([*MODES]))]
    path = data.draw(st.sampled_from([*leaves(whole)]))
    edited = edit(whole, path, data.draw(st.sampled_from([0.5, 0.99, 1.01, 2.0])))
    if isinstance(path[-1], str) and data.draw(st.booleans()):
        del at(edited, path[:-1])[path[-1]]
    assert verify(edited), path


# --- lies ---

LIES: list[tuple[str, Lie, str]] = [  # and what a problem names
    ("train", lambda c: row(c, "sdpa")["rounds"].pop(), "train sdpa.*2 of 3"),
    ("kernel", lambda c: row(c, "sdpa")["point"].update(D=32), "sdpa.*shape D.*16.*32"),
    ("decode", lambda c: row(c, "sdpa")["point"].update(P=9), "sdpa.*shape P.*5.*9"),
    ("decode", lambda c: row(c, "sdpa")["rounds"][0]["shape"].update(parameters=9), "is 9"),
    ("train", lambda c: c["settings"].update(batch_size=8), "train sdpa.*batch_size is 4.*8"),
    ("train", lambda c: c["settings"].update(block_size=64), "shape T is 32.*64"),
    ("train", lambda c: c.update(machine=on_a_gpu(c)["machine"] | {"peak_tflops": 989.4}),
     "peak_tflops is 989.4.*494.7"),
    ("train", lambda c: c["machine"].update(peak_source=""), "peak of 0.5 .*source"),
    ("train", lambda c: c["machine"].update(peak_tflops=0.25), "peak_tflops is 0.25.*0.5"),
    ("decode", lambda c: c["machine"].update(bandwidth=4e9), "bandwidth is 4.*8000000000"),
    ("train", lambda c: c["settings"].update(dtype="bfloat16"), "dtype is float32.*bfloat16"),
    ("train", lambda c: c["machine"].update(dtype="float16"), "train sdpa.*dtype is float32"),
    ("train", lambda c: row(c, "sdpa").update(backend="sdpa_math"), r"math.*flash \(CPU"),
    ("train", lambda c: row(c, "sdpa").update(backend="flash_attn_9"), "'flash_attn_9'"),
    ("train", lambda c: row(c, "manual").update(backend="triton"), "train triton.*none"),
    ("train", lambda c: row(c, "manual").update(device_kernels=["flash_fwd"]), "manual.*flash_fwd"),
    ("kernel", lambda c: c["machine"].update(on_a_gpu(c)["machine"]) or row(c, "manual").update(
        backend="flash_attn_2", device_kernels=["pytorch_flash::x"]), "pytorch_flash::x"),
    ("train", lambda c: row(c, "sdpa")["proof"].update(canary=False), "train sdpa.*causality"),
    ("train", lambda c: row(c, "sdpa")["proof"].update(error=math.nan), "sdpa.*error is nan"),
    ("train", lambda c: row(c, "sdpa")["proof"].update(error=0.9, allowed=1.0), "allowed is 1"),
    ("kernel", lambda c: row(c, "sdpa").update(error_out=0.1), "sdpa.*error_out 1.0e-01"),
    ("train", lambda c: row(c, "sdpa").update(loss=9.9), "sdpa DISAGREES"),
    ("train", lambda c: row(c, "sdpa").update(gradient_norm=9e9), "sdpa DISAGREES"),
    ("train", lambda c: row(c, "sdpa").update(memory_bytes=1), "sdpa.*memory_bytes is 1,"),
    ("train", lambda c: row(c, "sdpa").update(status="x"), "train sdpa.*'x'"),
    ("converge", lambda c: row(c, "sdpa").update(losses=[9.0] * 10), r"sdpa.*\+1.*off"),
    ("converge", lambda c: row(c, "sdpa").update(losses=[0.1] * 10), r"sdpa.*-9.*off"),  # is wrong
    ("converge", lambda c: c["settings"].update(tolerance=0.1), "10%"),
]
CLAIMS: list[tuple[str, Lie, str]] = [  # complete() would remove them
    ("train", lambda c: c["flops_per_token"].update(mfu=1.0), "flops_per_token mfu is 1.0"),
    ("train", lambda c: c.update(answers=[]), "'Fastest: train"),
    ("train", lambda c: row(c, "sdpa").update(status="failed"), "'failed', and it has 3 rounds"),
    ("train", lambda c: c["settings"].update(n_layer="x"), "n_layer"),
    ("train", lambda c: c.update(rows=None), "NoneType"),
]


@pytest.mark.parametrize("mode, lie, named", [*LIES, *CLAIMS], ids=[n for *_, n in LIES + CLAIMS])
def test_a_lie_is_refused_by_its_name(mode: str, lie: Lie, named: str, made: Made) -> None:
    """With figures and digest as if it were true."""
    content = copy.deepcopy(made[mode])
    lie(content)
    found = verify(sealed(content) if (mode, lie, named) in CLAIMS else record.complete(content))
    assert any(re.search(named, why) for why in found), found
    assert not any("digest" in why for why in found)


# --- conclusions ---


def concluded(content: Content, *rows: Content) -> list[str]:
    """If rows with these fields and points had taken these ms."""
    like, made = row(content, "sdpa"), []
    for r in rows:
        point = {name: r.get(name, value) for name, value in like["point"].items()}
        timed = [like["rounds"][0] | {"ms": ms} for ms in r["ms"]]
        made.append(like | r | {"point": point, "rounds": timed})
    answers = record.complete(content | {"rows": made})["answers"]
    return [text for text in answers if text.startswith("Fastest")]


def test_the_fastest_is_named_with_those_that_are_level(made: Made) -> None:
    fast = np.array([50.0, 50.5, 49.5, 50, 51])
    times = {"sdpa": fast, "manual": 2 * fast, "tiled": fast + 0.1}
    rows = [{"backend": name, "ms": ms.tolist()} for name, ms in times.items()]
    assert concluded(made["train"], *rows)[0].endswith("train: sdpa (level: tiled)")
    short = [r | {"ms": r["ms"][:2]} for r in rows]
    assert re.search("sdpa .*2 .*noisy.* tiled", concluded(made["train"], *short)[0])
    of_each = [r | {"batch_size": n} for n, r in zip((1, 4, 1), rows)]
    assert concluded(made["train"], *of_each)[0].endswith("train: manual")


def test_the_fastest_depends_on_the_length_and_is_one_of_equals(made: Made) -> None:
    rows = [{"backend": name, "T": T, "ms": [ms] * 3}
            for T, *both in ((128, 1, 2), (256, 2, 4), (1024, 20, 10))
            for name, ms in zip(("sdpa", "manual"), both)]
    (found,) = concluded(made["kernel"], *rows)
    assert re.search(r"sdpa .* 128 .* manual .* 1,024", found) and "256" not in found
    equal: Content = {"backend": "paged", "ms": [1.0] * 3}
    found = concluded(made["decode"], equal, equal | {"constraint": "regex"})
    assert len(found) == 2 and "constraint=regex: paged with cache" in found[1]
    assert len(concluded(made["kernel"], equal, equal | {"Hkv": 1}, equal | {"D": 128})) == 3


# --- the page ---


def test_the_page_holds_every_row_and_the_check_sees_a_change(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("FOLDER", "PAGE"):
        monkeypatch.setattr(board, name, tmp_path / name)
    other = {"commit": None, "dirty": True, "complete": False}  # not of this checkout
    content = record.complete(made["train"] | other)
    record.write(board.FOLDER / "mine", content, whole=False)
    record.write(board.FOLDER / "other", on_a_gpu(content))
    unlike = record.complete(content | {"settings": content["settings"] | {"optimizer": "muon"}})
    record.write(board.FOLDER / "unlike", unlike)
    assert board.main(["--check"]) == 1 and not board.PAGE.exists()
    assert board.main([]) == 0 and board.main(["--check"]) == 0
    text, sdpa = board.PAGE.read_text(encoding="utf-8"), row(content, "sdpa")
    for cell in (f"{sdpa['tokens_per_s']:,.0f}", f"{sdpa['mfu']:.1%}", "--peak_tflops", "datasheet",
                 f"{sdpa['proof']['error']:.1e}"):
        assert f"| {cell} " in text
    for more in ("", "optimizer=muon, "):  # the same work
        assert text.count(f"2 heads, vocabulary 64, float32, {more}3 micro-batches\n") == 1
    assert re.search(r"\[mine\]\[1\]: incomplete, uncommitted", text)
    machines = re.findall(r"\| 32 .*\| (M[12]) ", text)
    assert machines == [*["M1"] * 3, *["M2"] * 3, *["M1"] * 3]
    board.PAGE.write_text(text + "x", encoding="utf-8")
    assert board.main(["--check"]) == 1
    assert board.main([f"--records_dir={board.FOLDER}"]) == 0  # the page is not read
    assert board.main([f"--records_dir={board.FOLDER / 'mine'}"]) == 1  # no record is in it
    sdpa["mfu"] = 0.6
    record.write(board.FOLDER / "mine", content, whole=False)
    for name, broken in {"empty": "", "list": "[]"}.items():
        (board.FOLDER / name).mkdir()
        (board.FOLDER / name / "record.json").write_text(broken, encoding="utf-8")
    capsys.readouterr()
    assert board.main([]) == 1  # and nothing is written
    said = capsys.readouterr().err.splitlines()
    assert {line.partition(":")[0] for line in said} == {"empty", "list", "mine"}
    assert any("sdpa: mfu" in line and "0.6" in line for line in said)
