"""bench_mfu.py: every mode on the CPU with small sizes. No time is asserted."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import MODEL, by_backend, kernel, measured, rival, run, small, write_tokens

import bench_mfu
from bench import machine
from bench.record import verify
from core import flops
from core.settings import UserError

# --- the modes ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """mode train, with a record, a rival and a refused backend."""
    folder = tmp_path_factory.mktemp("train")
    argv = [*small("train"), "--backends=eager,sdpa,sdpa_cudnn", rival(folder), "--record=tiny",
            f"--records_dir={folder}", "--json"]
    code, out = run(argv)
    assert code == 0
    return json.loads(out.splitlines()[-1]), out, folder


def test_train_gives_a_row_for_every_backend_and_rival(trained):
    content, out, _ = trained
    table = by_backend(content)
    assert list(table) == ["manual", "nanogpt", "sdpa", "sdpa_cudnn"]
    for name in ("manual", "sdpa", "nanogpt"):
        row = table[name]
        assert row["status"] == "ok" and row["batch_size"] == 4 and len(row["rounds"]) == 2
        assert row["ms"] == pytest.approx(sum(r["ms"] for r in row["rounds"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["ms"] * 1e3)
        share = row["tokens_per_s"] / 0.5e12
        assert row["mfu"] == pytest.approx(flops.flops_per_token(MODEL, 32) * share)
        assert row["mfu_causal"] == pytest.approx(flops.flops_per_token(MODEL, 32, True) * share)
        for r in row["rounds"]:
            assert 0 < r["forward_ms"] + r["backward_ms"] + r["optimizer_ms"] <= r["ms"] * 1.001
        assert row["memory_bytes"] > 2**26
        assert row["warm_up_s"] > row["first_step_s"] > 0 and row["setup_s"] > 0
    assert table["sdpa"]["kernels"] == ["flash (CPU)"] and table["manual"]["kernels"] == []
    assert abs(table["manual"]["loss_difference"]) < 1e-5 > abs(table["sdpa"]["loss_difference"])
    assert abs(table["sdpa"]["gradient_norm_difference"]) < 1e-4
    assert "loss_difference" not in table["nanogpt"]  # other weights
    refused = table["sdpa_cudnn"]
    assert refused["status"] == "unavailable" and "rounds" not in refused
    assert f"| sdpa_cudnn | unavailable | {refused['why'][0]}" in out
    table = re.search(r"\n(\| backend .*\n){1}((?:\|.*\n)+)", out)
    assert table and len({len(line) for line in table[0].strip().splitlines()}) == 1
    # torch counts the same FLOPs, but for biases and norm gains, which it leaves out
    counted, gains = content["reference"]["flops_per_token"], (2 * 2 + 1) * 32
    assert content["flops_per_token"]["mfu"] == pytest.approx(counted + 6 * gains, rel=1e-12)


def test_a_record_is_complete_and_a_second_leaves_it(trained):
    content, out, folder = trained
    (made,) = folder.glob("*_cpu_tiny")
    written = (made / "record.json").read_text(encoding="utf-8")
    assert json.loads(written) == content and f"record: {made}" in out
    assert content["commit"] and isinstance(content["dirty"], bool)
    assert content["command"].startswith("python bench_mfu.py train --device=cpu")
    page = (made / "README.md").read_text(encoding="utf-8")
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells = {head.split()[0]: cell.strip() for head, cell in zip(table[0], table[4], strict=True)}
    row = by_backend(content)["sdpa"]
    assert table[4][0].split() == ["|", "sdpa"] and "unavailable" in page
    assert (cells["mfu"], cells["causal"]) == (f"{row['mfu']:.1%}", f"{row['mfu_causal']:.1%}")
    assert (cells["rounds"], cells["tok/s"]) == ("2", f"{row['tokens_per_s']:,.0f}")
    run([*small("train"), "--backends=sdpa", f"--records_dir={folder}", "--record=tiny"])
    assert (folder / f"{made.name}-2" / "record.json").exists()
    assert (made / "record.json").read_text(encoding="utf-8") == written


def test_kernel_times_attention_alone_at_every_point(tmp_path):
    """One kernel is wrong by a percent in long texts."""
    wrong = kernel(tmp_path, "wrong", "out = out * (1.01 if T == 700 else 1)")
    content = measured(*small("kernel"), f"--backends=manual,sdpa,{wrong}", "--lengths=16,700",
                       "--batch_sizes=1,2")
    points = {(r["point"]["B"], r["point"]["T"]) for r in content["rows"]}
    assert points == {(B, T) for B in (1, 2) for T in (16, 700)} and len(content["rows"]) == 12
    for row in content["rows"]:
        B, T = row["point"]["B"], row["point"]["T"]
        assert row["status"] == "ok" and row["error_out"] > 0 < row["error_grad"]
        off = 0.01 if T == 700 and row["backend"] == wrong else 0.0
        for of in ("error_out", "error_grad"):
            assert row[of] == pytest.approx(off, rel=1e-3, abs=1e-5)
        flop = 12 * B * 2 * 16 * T * (T + 1) / 2
        assert row["tflops_causal"] == pytest.approx(flop / (row["ms"] / 1e3) / 1e12)
        assert row["tflops_full"] / row["tflops_causal"] == pytest.approx(2 * T / (T + 1))
        assert row["share"] == pytest.approx(row["tflops_causal"] / 0.5)
    assert any("error_out 1.0e-02" in answer for answer in content["answers"])


@pytest.mark.parametrize("more, size, of_products", [
    (["--constraint=none,tensor,python,regex"], 4, 4), (["--dtype=bfloat16"], 2, 2),
    (["--weights=int8"], 4, 1),
])
def test_decode_runs_over_batches_prompts_and_caches(more, size, of_products):
    """Two query heads a key head; matrices and head in int8."""
    argv = [*small("decode"), "--backends=sdpa", "--new_tokens=4", "--n_kv_head=1"]
    content = measured(*argv, *more, "--batch_sizes=1,2", "--prompts=5", "--kv_caches=none,dynamic")
    kinds = 4 if "regex" in more[0] else 1
    assert len(content["rows"]) == 2 * 2 * kinds
    assert sum("Fastest" in answer for answer in content["answers"]) == 2 * kinds  # equals compete
    C, L, V = 32, 2, 64
    products = V * C + L * ((C + C) * C + C * C + 8 * C * C)
    gains = C + L * 2 * C
    for row in content["rows"]:
        p = row["point"]
        assert row["status"] == "ok" and p["P"] == 5 and len(row["rounds"]) == 2
        assert row["tokens_per_s"] == pytest.approx(p["B"] / row["ms"] * 1e3)
        assert row["first_ms"] > 0 and row["memory_bytes"] > 2**26
        assert (row["cache_bytes"] > 0) == (p["cache"] == "dynamic")
        read = products * of_products + gains * size
        read += p["B"] * (5 + 4 / 2) * 2 * L * (C // 2) * size  # keys and values of a mean text
        assert row["mbu"] == pytest.approx(read / (row["ms"] / 1e3) / 8e9)  # --bandwidth_gbs
    few = ("--bandwidth_gbs=1e-9", "--batch_sizes=1", "--prompts=5", "--kv_caches=none")
    (row,) = measured(*argv, *few)["rows"]
    assert row["mbu"] is None and row["mbu_why"]  # more than the memory can send


@pytest.mark.slow
def test_decode_has_rows_for_the_rivals_where_they_have_such_a_cache(tmp_path):
    pytest.importorskip("transformers")
    content = measured(*small("decode"), "--backends=sdpa", "--batch_sizes=2", "--prompts=5",
                       "--kv_caches=none,static", "--new_tokens=3", "--rival=hf", rival(tmp_path))
    at = {(r["backend"], r["point"]["cache"]): r for r in content["rows"]}
    lacking = {key for key, r in at.items() if r["status"] == "unavailable"}
    assert len(at) == 6 and lacking == {("nanogpt", "static"), ("hf_sdpa", "none")}
    row = at["nanogpt", "none"]
    assert len(row["rounds"]) == 2 and row["first_ms"] > 0 and row["cache_bytes"] == 0
    size = 4 * 64 * 32 + 2 * (5 + 3 / 2) * 2 * 2 * 32 * 4
    assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)
    # the last token is drawn, but never read: keys and values of one less
    assert at["hf_sdpa", "static"]["cache_bytes"] == 2 * (5 + 3 - 1) * 2 * 2 * 32 * 4


@pytest.mark.parametrize("mode", ["train", "decode"])
def test_each_backend_has_the_largest_batch_that_fits(mode, tmp_path):
    full = "if B > {}: raise torch.OutOfMemoryError('made up')"
    files = [kernel(tmp_path, name, full.format(most)) for name, most in (("a", 5), ("b", 11))]
    few = ["--prompts=4", "--new_tokens=3", "--kv_caches=none"] if mode == "decode" else []
    content = measured(*small(mode), "--batch_size=auto", f"--backends={','.join(files)}", *few)
    assert mode == "decode" or "batch" in content["reference"]["why"]
    for row, size in zip(content["rows"], (5, 11), strict=True):
        assert row["status"] == "ok" and row["batch_size"] == size and len(row["rounds"]) == 2
        assert {r["shape"]["B"] for r in row["rounds"]} == {size}
        tokens = size * (32 if mode == "train" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3)
    assert not [why for why in verify(content) if "causality" not in why and "error" not in why]


# --- converge ---


def converging(folder: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    code, out = run([*small("converge"), "--dataset=tiny", f"--data_dir={write_tokens(folder)}",
                     "--learning_rate=0.01", "--steps=20", "--json", *more])
    content = json.loads(out.splitlines()[-1])
    return code, by_backend(content), content


def test_a_training_that_ends_elsewhere_fails(tmp_path):
    """Right for two sequences, as in its proof, wrong for four."""
    wrong = kernel(tmp_path, "wrong", "out = out * (9 if B > 2 else 1)")
    code, rows, content = converging(tmp_path, f"--backends=sdpa,{wrong}")
    verdicts = {name: r["verdict"] for name, r in rows.items()}
    assert code == 1 and verdicts == {"manual": "baseline", "sdpa": "ok", "wrong": "FAIL"}
    base = rows["manual"]
    for row in rows.values():
        assert len(row["rounds"]) == 10 and len(row["losses"]) == 20
        assert row["final_loss"] == pytest.approx(sum(row["losses"][-2:]) / 2)
        assert row["difference"] == pytest.approx(row["final_loss"] / base["final_loss"] - 1)
        assert row["time_saved"] == pytest.approx(1 - row["ms"] / base["ms"])
        assert (abs(row["difference"]) > 0.01) == (row["verdict"] == "FAIL")
    assert base["losses"][-1] < base["losses"][0] - 0.1
    assert any("wrong.py" in answer and "1.00%" in answer for answer in content["answers"])


@pytest.mark.slow
def test_training_paths_beside_a_plain_one_with_seeds(tmp_path):
    more = ["--seeds=2", "--gradient_accumulation_steps=2", "--tolerance=1e-9"]
    code, table, content = converging(
        tmp_path, "--paths=float32,bfloat16,bfloat16-residual", *more)
    assert list(table) == ["plain", "float32", "bfloat16", "bfloat16-residual"]
    base, exact, half = (table[n]["losses"] for n in ("plain", "float32", "bfloat16-residual"))
    # float32 differs by the order of sums alone, bfloat16 by its rounding: both really ran
    assert exact == pytest.approx(base, abs=2e-4) and base[-1] < base[0] - 0.1
    assert half == pytest.approx(base, abs=0.1) and half != pytest.approx(base, abs=2e-4)
    assert table["bfloat16"]["losses"] != half
    noise, plain = statistics.stdev(table["plain"]["final_losses"]), table.pop("plain")
    assert plain["verdict"] == "baseline" and table["float32"]["verdict"] == "ok"
    for row in table.values():
        assert row["seed_noise"] == pytest.approx(noise) and len(row["rounds"]) == 20
        assert row["final_loss"] == pytest.approx(sum(row["final_losses"]) / 2)
        far = abs(row["final_loss"] - plain["final_loss"]) > noise
        assert row["verdict"] == ("FAIL" if far else "ok")
    assert code == any(r["verdict"] == "FAIL" for r in table.values())
    assert all("did not converge" in why for why in verify(content))


# --- backends and options ---


@pytest.mark.slow
def test_all_backends_agree_or_say_why_they_are_left_out():
    table = by_backend(measured(*small("train"), "--backends=all"))
    ok = {name for name, row in table.items() if row["status"] == "ok"}
    assert {"manual", "tiled", "sdpa", "sdpa_flash", "sdpa_math"} <= ok
    assert all(abs(table[name]["loss_difference"]) < 1e-5 for name in ok)
    assert "interpreter" in table["triton"]["why"][0]


@pytest.mark.slow
def test_a_point_for_which_memory_does_not_do(tmp_path, monkeypatch):
    """manual's scores of 9000 tokens take 0.65 GB. The folder has modules of the same names."""
    (tmp_path / "bench").mkdir()
    for name in ("train.py", "model.py", "bench/__init__.py", "bench/workers.py"):
        (tmp_path / name).write_text("raise SystemExit('another module')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = measured(*small("kernel"), "--backends=manual,sdpa", "--lengths=64,9000", "--rounds=1",
                    "--batch_sizes=1", "--memory_gb=1.5", "--n_kv_head=1")["rows"]
    found = {(r["backend"], r["point"]["T"]): r for r in rows}
    ok = [at for at, r in found.items() if r["status"] == "ok"]
    assert ok == [("manual", 64), ("sdpa", 64), ("sdpa", 9000)]
    assert found["manual", 9000]["why"][0].startswith("out of memory: ")
    assert "error_out" not in found["sdpa", 9000]  # too long for float64


def test_the_free_memory_of_a_container_is_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5000000 kB\n")
    (tmp_path / "memory.current").write_text("1200000000\n")
    for limit, free in ((None, 5_120_000_000), ("max", 5_120_000_000),
                        ("3000000000", 1_800_000_000), ("30000000000", 5_120_000_000)):
        if limit:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.free_memory(torch.device("cpu")) == free


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


@pytest.mark.parametrize("word, named", [
    ("processors", []), ("batch_sises", ["--batch_sizes"]), ("profile", ["train"]),
])
def test_a_mistyped_option_names_a_near_one_or_its_modes(word, named):
    with pytest.raises(UserError, match=f"--{word}") as error:
        bench_mfu.main(["decode", f"--{word}=1"])
    words = {*re.findall(r"[\w.-]+", str(error.value))}
    assert words >= {*named} and {w for w in words if w[:2] == "--"} <= {f"--{word}", *named}


def test_a_config_file_of_a_run_may_have_more(tmp_path):
    (path := tmp_path / "c.py").write_text("max_iters = 9\nlearning_rate = 1.0\n", "utf-8")
    argv = [str(path), *small("kernel")[1:], "--lengths=8", "--batch_sizes=1", "--backends=sdpa"]
    assert run(["kernel", *argv])[0] == 0
    path.write_text("document_mask = True\n", "utf-8")  # it would change what is measured
    with pytest.raises(UserError, match=r"--document_mask: .*c\.py:1"):
        run(["kernel", *argv])


@pytest.mark.parametrize("argv, value", [
    (["--backends=sdpaa"], "sdpaa"),
    (["--backends=auto"], "auto"),
    (["--init_from=gpt2"], "init_from"),
    (["--rival=llama"], "llama"),
    (["--rival=nanogpt=/none/such"], "/none/such"),
    (["--record=a/b"], "a/b"),
    (["converge", "--steps=15"], "15"),
    (["converge", "--dataset=none_such"], "none_such"),
    (["decode", "--prompts=30"], "--block_size=32"),
    (["decode", "--batch_size=3"], "--batch_size=3"),
    (["decode", "--batch_size=auto", "--batch_sizes=3"], "--batch_sizes"),
    (["decode", "--hf=x", "--weights=int8"], "--weights=int8"),
    (["--bandwidth_gbs=9"], "--profile"),
    (["nomode"], "nomode"),
    (["converge", "--paths=float32", "--backends=sdpa"], "--paths"),
    (["runs"], "--rival"),
])
def test_a_mistake_is_one_line_that_names_it(argv, value):
    mode = "train" if argv[0].startswith("-") else argv[0]
    base = [mode] if mode in ("runs", "nomode") else small(mode)
    with pytest.raises(UserError) as error:
        run([*base, *argv[argv[0] == mode :]])
    assert value in str(error.value) and "\n" not in str(error.value)
