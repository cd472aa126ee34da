"""bench_mfu.py on the CPU with small sizes: kernels, options and models of every kind. No time is
asserted. The rows of plain runs are in test_records.py."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import by_backend, kernel, measured, rival, run, shown, small, write_tokens
from conftest import few
from test_records import reads

import bench_mfu
from bench import machine, tables
from bench.record import verify
from core.settings import UserError

# --- kernels ---


@pytest.mark.slow
@pytest.mark.ci
def test_a_kernel_that_is_wrong_in_long_texts_is_off_by_its_error(tmp_path):
    """A single key has gradients that are 0."""
    wrong = kernel(tmp_path, "wrong", "out = out * (1.01 if T == 300 else 1)")
    content = measured(*small("kernel"), f"--backends={wrong}", "--lengths=1,300",
                       "--batch_sizes=1", code=1)
    for row, off in zip(content["rows"], (0.0, 0.01), strict=True):
        assert [row["error_out"], row["error_grad"]] == pytest.approx([off] * 2, rel=1e-3, abs=1e-5)
    assert any("error_out 1.0e-02" in answer for answer in content["answers"])


@pytest.mark.parametrize("more, size, of_products, keys", few([
    (["--weights=int8", "--kv_caches=none"], 4, 1, 0), (["--dtype=bfloat16", "--tied=0"], 2, 2, 7),
    (["--constraint=tensor,python"], 4, 4, 7), (["--attention_window=3,none"], 4, 4, (3 + 7) / 2)]))
def test_decode_reads_weights_of_their_size_and_the_keys_that_are_seen(
    more, size, of_products, keys
):
    argv = [*small("decode"), "--backends=sdpa", "--new_tokens=4", "--n_kv_head=1", "--prompts=5",
            *(["--kv_caches=dynamic"] if keys else []), *more]
    for row in (content := measured(*argv, "--batch_sizes=1,2"))["rows"]:
        want = reads(size, of_products, row["point"]["B"], keys) / (row["ms"] / 1e3) / 8e9
        assert row["mbu"] == pytest.approx(want)
    assert len(content["rows"]) == 2 * (2 if "constraint" in more[0] else 1)
    (row,) = measured(*argv, "--bandwidth_gbs=1e-9", "--batch_sizes=1")["rows"][:1]
    assert row["mbu"] is None and row["mbu_why"]  # more than the memory can send


@pytest.mark.slow
@pytest.mark.parametrize("mode, own, tokens", [
    ("decode", True, 1), ("train", True, 32), ("train", False, 2)])
def test_each_backend_has_the_largest_batch_that_fits(mode, own, tokens, tmp_path):
    """So they have no loss in common."""
    full = "if B > {}: raise torch.OutOfMemoryError('made up')"
    files = [kernel(tmp_path, name, full.format(most)) for name, most in (("a", 3), ("b", 6))]
    more = ["--prompts=4", "--new_tokens=3", "--kv_caches=none"] * (mode == "decode")
    more += [f"--backends={','.join(files)}"] if own else [
        hf(tmp_path), "--backends=sdpa", "--block_size=2", "--rounds=1"]
    content = measured(*small(mode, own), "--batch_size=auto", *more)
    assert mode == "decode" or "batch" in content["reference"]["why"]
    # What always fits has the most that are tried.
    for row, size in zip(content["rows"], (3, 6) if own else (4096,) * 3, strict=True):
        assert row["status"] == "ok" and row["batch_size"] == size and len(row["rounds"]) == 1 + own
        assert {r["shape"]["B"] for r in row["rounds"]} == {size}
        assert row["tokens_per_s"] == pytest.approx(size * tokens / row["ms"] * 1e3)
        assert "loss_difference" not in row
    assert not [w for w in verify(content) if not (own and re.search("causality|error", w))]


@pytest.mark.slow
def test_all_backends_agree_or_say_why_they_are_left_out():
    table = by_backend(measured(*small("train"), "--backends=all"))
    ok = {name for name, row in table.items() if row["status"] == "ok"}
    assert {"manual", "tiled", "sdpa", "sdpa_flash", "sdpa_math"} <= ok
    assert all(abs(table[name]["loss_difference"]) < 1e-5 for name in ok)
    assert "interpreter" in table["triton"]["why"][0]


def test_rows_with_other_options_are_of_them():
    """Recomputed blocks give the same loss, rounded activations another one."""
    content = measured(*small("train"), "--dtype=bfloat16", "--backends=sdpa", "--rounds=1",
                       "--profile", "--bandwidth_gbs=8",
                       "--vary=gradient_checkpointing=True,residual_dtype=autocast+optimizer=muon")
    plain, again, other = content["rows"]
    assert again["backend"] == "sdpa with gradient_checkpointing=True" and verify(content) == []
    assert plain["loss"] == again["loss"] != other["loss"]
    least = [r["profile"]["rooflines"]["optimizer"]["roofline_ms"] for r in (plain, again, other)]
    assert least[0] == least[1] > least[2] == 0  # Muon's is not known
    assert tables.named(other, content["settings"])[1] == "residual_dtype=autocast+optimizer=muon"


@pytest.mark.slow
def test_a_profile_of_a_compiled_step_has_inductors_kernels():
    content = measured(*small("train"), "--backends=sdpa", "--profile", "--bandwidth_gbs=8",
                       "--compile=True", "--rounds=1")
    (row,) = content["rows"]
    names = [name for name, *_ in row["profile"]["names"]["elementwise"]]
    assert row["compiled"] and any("cpp_fused" in name for name in names)


@pytest.mark.slow
def test_a_point_for_which_memory_does_not_do(tmp_path, monkeypatch):
    """manual's scores of 9000 tokens take 0.65 GB. The folder has modules of the same names."""
    (tmp_path / "bench").mkdir()
    for name in ("train.py", "model.py", "bench/__init__.py", "bench/workers.py"):
        (tmp_path / name).write_text("raise SystemExit('another module')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = by_backend(measured(*small("kernel"), "--backends=manual,sdpa", "--lengths=64,9000",
                                "--rounds=1", "--batch_sizes=1", "--memory_gb=1.5",
                                "--n_kv_head=1"), "T")
    full = found.pop(("manual", 9000))
    assert full["status"] == "failed" and full["why"][0].startswith("out of memory: ")
    assert len(found) == 3 and {r["status"] for r in found.values()} == {"ok"}
    assert "error_out" not in found["sdpa", 9000]  # too long for float64


def test_the_free_memory_of_a_container_is_what_its_limit_leaves(tmp_path, monkeypatch):
    for name, path in (("MEMINFO", tmp_path / "meminfo"), ("CGROUP", tmp_path)):
        monkeypatch.setattr(machine, name, path)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5000000 kB\n")
    (tmp_path / "memory.current").write_text("1200000000\n")
    (tmp_path / "memory.stat").write_text("file 900\ninactive_file 500\n")  # of it, read files
    for limit, free in (("", 5_120_000_000), ("max", 5_120_000_000),
                        ("3000000000", 1_800_000_500), ("30000000000", 5_120_000_000)):
        if limit:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.free_memory(torch.device("cpu")) == free


# --- converge ---


def converging(folder: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    code, _, content = shown(
        *small("converge"), "--dataset=tiny", f"--data_dir={write_tokens(folder)}",
        "--learning_rate=0.01", "--steps=20", *more)
    return code, by_backend(content), content


def test_a_training_that_ends_elsewhere_fails(tmp_path):
    """Right for two sequences, as in its proof, wrong for four."""
    wrong = kernel(tmp_path, "wrong", "out = out * (9 if B > 2 else 1)")
    code, rows, content = converging(tmp_path, f"--backends={wrong}")
    assert code == 1 and rows["manual"]["verdict"] == "baseline"
    assert rows["wrong"]["verdict"] == "FAIL" and abs(rows["wrong"]["difference"]) > 0.01
    assert converging(tmp_path, "--backends=flash_attn_2")[0] == 1  # nothing was compared
    for row in rows.values():  # a tenth of the steps
        assert row["final_loss"] == pytest.approx(sum(row["losses"][-2:]) / 2)
    assert any("wrong.py" in answer and "1.00%" in answer for answer in content["answers"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_paths_beside_a_plain_one_with_seeds(optimizer, tmp_path):
    code, table, content = converging(tmp_path, "--paths=float32,bfloat16,bfloat16-residual",
                                      "--seeds=2", "--gradient_accumulation_steps=2",
                                      f"--optimizer={optimizer}")
    base, exact, other, half = (row["losses"] for row in table.values())
    # float32 differs by the order of sums alone, bfloat16 by its rounding: both really ran
    assert exact == pytest.approx(base, abs=2e-4) and base[-1] < base[0] - 0.1
    assert half == pytest.approx(base, abs=0.1) and half != pytest.approx(base, abs=2e-4)
    assert other != half
    noise, plain = statistics.stdev(table["plain"]["final_losses"]), table.pop("plain")
    assert plain["verdict"] == "baseline" and table["float32"]["verdict"] == "ok"
    assert list(table) == ["float32", "bfloat16", "bfloat16-residual"]
    for row in table.values():
        assert row["seed_noise"] == pytest.approx(noise) and len(row["rounds"]) == 20
        assert row["final_loss"] == pytest.approx(sum(row["final_losses"]) / 2)
        far = abs(row["final_loss"] - plain["final_loss"]) > noise
        assert row["verdict"] == ("FAIL" if far else "ok")
    assert code == any(r["verdict"] == "FAIL" for r in table.values())
    assert all("did not converge" in why for why in verify(content))


# --- rivals, and models of transformers ---


@pytest.mark.slow
def test_decode_has_rows_for_the_rivals_where_they_have_such_a_cache(tmp_path):
    """A run's config file with Muon says nothing of its generation."""
    pytest.importorskip("transformers")
    (config := tmp_path / "muon.py").write_text("optimizer = 'muon'\nmuon_rates = 1, 2", "utf-8")
    content = measured("decode", str(config), *small("decode")[1:], "--backends=sdpa",
                       "--batch_sizes=2", "--prompts=5",
                       "--kv_caches=none,static", "--new_tokens=3", "--rival=hf", rival(tmp_path))
    at = by_backend(content, "cache")
    lacking = {key for key, r in at.items() if r["status"] == "unavailable"}
    assert len(at) == 6 and lacking == {("nanogpt", "static"), ("hf_sdpa", "none")}
    row = at["nanogpt", "none"]
    assert len(row["rounds"]) == 2 and row["first_ms"] > 0 and row["cache_bytes"] == 0
    size = 4 * 64 * 32  # a cache is not read
    assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)
    # the last token is drawn, but never read: keys and values of one less
    assert at["hf_sdpa", "static"]["cache_bytes"] == 2 * (5 + 3 - 1) * 2 * 2 * 32 * 4


# 2 layers of 4 query heads and 2 key heads of 8, 32 wide; an MLP of 3 x 64; a head of its own
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64}
WEIGHTS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 64 * 32  # that a token multiplies


def hf(path: Path, kind: str = "llama", **more: Any) -> str:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**{**TINY, **more})
    config.save_pretrained(path / kind)
    return f"--hf={path / kind}"


FLASH = ["flash (CPU)"]


@pytest.mark.slow
@pytest.mark.parametrize("kind, more, keys, gains, kernels, refused, why", [
    pytest.param("llama", {}, 2 * 16.5, 5, {"sdpa": FLASH, "hf_eager": [], "hf_sdpa": FLASH},
                 "flash_attn_2", ".", marks=pytest.mark.ci),
    ("gemma2", {"sliding_window": 8}, 16.5 + (36 + 24 * 8) / 32, 9,
     {"manual": [], "hf_eager": []}, "sdpa", "scale|cap")])
def test_a_row_for_every_backend_and_for_transformers_own(
    kind, more, keys, gains, kernels, refused, why, tmp_path
):
    """Gemma 2 has softcap, its own scale, a window in every second layer, and a tied head."""
    content = measured(*small("train", own=False), hf(tmp_path, kind, **more),
                       "--gradient_accumulation_steps=2",
                       f"--backends={next(iter(kernels))},{refused}")
    rows = by_backend(content)
    assert rows[refused]["status"] == "unavailable" and "rounds" not in rows[refused]
    assert re.search(why, rows[refused]["why"][0])
    full, causal = 2 * 12 * 4 * 8 * 32, 12 * 4 * 8 * keys
    for name, ran in kernels.items():  # the same weights and tokens, so the same loss
        assert rows[name]["status"] == "ok" and rows[name]["kernels"] == ran
        assert abs(rows[name]["loss_difference"]) < 1e-5
        assert abs(rows[name]["gradient_norm_difference"]) < 1e-4
        rate = 2 * 4 * 32 / (rows[name]["ms"] / 1e3)
        assert rows[name]["mfu"] == pytest.approx((6 * WEIGHTS + full) * rate / 0.5e12)
    want = {"mfu": 6 * WEIGHTS + full, "mfu_causal": 6 * WEIGHTS + causal}
    assert content["flops_per_token"] == pytest.approx(want) and verify(content) == []
    assert content["hf"]["counted"]["parameters"] == WEIGHTS + gains * 32


@pytest.mark.slow
def test_generation_of_transformers_with_its_caches(tmp_path):
    content = measured(*small("decode", own=False), hf(tmp_path), "--backends=sdpa",
                       "--batch_sizes=2", "--prompts=5", "--new_tokens=4")
    at = by_backend(content, "cache")
    who = ("sdpa", "hf_eager", "hf_sdpa")
    theirs = {(name, cache) for name in who for cache in ("dynamic", "static")}
    for key in at.keys() - theirs:
        assert at.pop(key)["status"] == "unavailable"
    assert at.keys() == theirs
    numbers = 2 * 2 * 2 * 8  # keys and values of a token
    for row in at.values():
        assert row["status"] == "ok" and row["cache_bytes"] == 4 * 2 * (5 + 4 - 1) * numbers
        size = 4 * (WEIGHTS + 5 * 32) + 2 * (5 + 4 / 2) * numbers * 4
        assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)
    assert at["sdpa", "dynamic"]["proof"]["canary"] and at["sdpa", "static"]["proof"]["canary"]
    assert verify(content) == []


# --- options ---


def test_every_mode_refuses_each_option_of_others_and_names_who_has_it(capsys):
    helps = {}
    for mode in ("train", "kernel", "decode", "converge", "runs", "qualify", "plan"):
        with pytest.raises(SystemExit):
            bench_mfu.main([mode, "--help"])
        helps[mode] = {*re.findall(r"^  --(\w+) ", capsys.readouterr().out, re.M)}
    known = {"document_mask", "max_iters"}.union(*helps.values())
    assert len(known) > 60 and not {"n_layer", "vocab_size", "batch_size"} & helps["kernel"]
    for mode, name in [(mode, name) for mode, its in helps.items() for name in known - its]:
        with pytest.raises(UserError, match=f"--{name}: .* mode {mode}$") as error:
            bench_mfu.main([mode, f"--{name}=1"])
        having = {other for other, names in helps.items() if name in names} or {"train.py"}
        assert having | {mode} <= {*re.findall(r"[\w.]+", str(error.value))}
    for word, named in (("processors", []), ("batch_sises", ["--batch_sizes"])):
        with pytest.raises(UserError, match=f"--{word}") as error:  # a near one, if there is one
            bench_mfu.main(["decode", f"--{word}=1"])
        assert [w for w in re.findall(r"--\w+", str(error.value)) if w != f"--{word}"] == named


def test_a_config_file_of_a_run_may_have_more(tmp_path):
    """But nothing that would change what is measured."""
    (path := tmp_path / "c.py").write_text("max_iters = 9\n", "utf-8")
    argv = ["kernel", str(path), *small("kernel")[1:], "--lengths=8", "--batch_sizes=1"]
    assert run([*argv, "--backends=sdpa"])[0] == 0
    for mode, text, named in (
        ("kernel", "document_mask = True", r"--document_mask: .*c\.py:1"),
        ("kernel", "init_from = 'gpt2'", r"--init_from: .*c\.py:1"),
        ("train", "hf = 'x'\nprofile = True", "--profile"),
        ("train", "hf = 'x'\nvary = ['onednn=True']", "--vary"),
        ("decode", "hf = 'x'\nweights = 'int8'", "--weights"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(UserError, match=named):
            run([mode, str(path)])


@pytest.mark.parametrize("argv, value", [
    (["--backends=sdpaa"], "sdpaa"), (["--backends=auto"], "auto"),
    (["--rival=llama"], "llama"),
    (["--rival=nanogpt=/none/such"], "/none/such"), (["--record=a/b"], "a/b"),
    (["converge", "--steps=15"], "15"), (["converge", "--dataset=none_such"], "none_such"),
    (["decode", "--prompts=30"], "--block_size=32"), (["decode", "--batch_size=3"], "size=3"),
    (["decode", "--batch_size=auto", "--batch_sizes=3"], "--batch_sizes"),
    (["--bandwidth_gbs=9"], "--profile"), (["nomode"], "nomode"), (["runs"], "--rival"),
    (["converge", "--paths=float32", "--backends=sdpa"], "--paths"), (["--dataset=x"], "--dataset"),
    (["converge", "--seeds=2", "--tolerance=0.1"], "--tolerance"),
    (["decode", "--compile=True", "--kv_caches=none"], "static"), (["--records_dir=x"], "--record"),
    (["kernel", "--windows=8", "--attention_window=4"], "--attention_window"),
    (["--backends=sdpa", "--attention_backend=manual"], "--attention_backend"),
    (["--n_layer=2", "--hf=x"], "--n_layer"), (["--compile_mode=max-autotune"], "--compile_mode"),
    (["--vary=help"], "--vary=help"), (["--vary=compile_mode=default"], "--compile"),
    (["qualify", "--stages=3", "--rival=hf"], "--stages"),
    (["--hf=BROKEN"], "--hf"), (["--hf=/none/such"], "--hf"), (["--rival=hf", "--hf=x"], "--rival"),
    (["decode", "--constraint="], "--constraint"), (["plan"], "--gpu"),
    (["plan", "--gpu=NVIDIA H800"], "--nvlink_gbs"),  # half of the H100's
    (["plan", "--gpu=RTX 409"], "NVIDIA GeForce RTX 4090"),  # the name that is near
    (["plan", "--gpu=Tesla T4", "--dtype=bfloat16"], "bfloat16 rates"),
    (["plan", "--gpu=NVIDIA H200", "--gpus=12"], "--gpus=12"),
    (["plan", "--gpu=NVIDIA H200", "--context_parallels=3"], "--context_parallels"),
    (["plan", "--gpu=RTX 4090 Laptop GPU"], "Laptop"), (["plan", "--gpu=GB200"], "'GB200'"),
    (["plan", "--gpu=titan"], "TITAN V"), (["plan", "--gpu=NVIDIA"], "'NVIDIA'"),
    (["plan", "--gpu=NVIDIA H200", "--peak_tflops=measure"], "--peak_tflops"),
    *few([(["--hf=t5"], "T5Config"), (["--hf=bert"], "causal"), (["--hf=llama"], "size=32"),
          (["--hf=mixtral"], "experts")], 0),
])
def test_a_mistake_is_one_line_that_names_it(argv, value, tmp_path):
    mode = "train" if argv[0].startswith("-") else argv[0]
    words = argv[argv[0] == mode :]
    kind = words[-1].partition("--hf=")[2] if words else ""
    base = [mode] if mode in ("runs", "nomode", "plan") else small(mode, own=not kind)
    if kind in ("t5", "bert", "llama", "mixtral"):
        words = [hf(tmp_path, kind, max_position_embeddings=16 if kind == "llama" else 64)]
    elif kind == "BROKEN":
        (tmp_path / "BROKEN").mkdir()
        (tmp_path / "BROKEN" / "config.json").write_text("{", encoding="utf-8")
        words = [*words[:-1], f"--hf={tmp_path / 'BROKEN'}"]
    with pytest.raises(UserError) as error:
        run([*base, *words])
    assert value in str(error.value) and ("--hf" in value or "\n" not in str(error.value))
