"""README, docs and config headers: commands parse, tables are current, KERNEL.md's kernel runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from math import isclose
from pathlib import Path
from typing import Any

import benches
import pytest
import support_tables
import test_train
from checkout import ROOT, files

import attention
import bench_mfu
import checkpoint
import sample
from attention.__main__ import parser
from attention.check import command as check
from bench.evaluate import TasksConfig
from bench.settings import load_config
from checkpoint.__main__ import ExportConfig
from core.optimizer import learning_rate, schedule_warnings
from core.settings import read
from course.lab.__main__ import LabConfig
from data.prepare import DATASETS, PrepareConfig
from explain import ExplainConfig
from sample import SampleConfig
from train import IGNORED, TrainConfig


def commands(text: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", text.replace("\\\n", " "), re.S)
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def elsewhere() -> list[str]:
    """The launch lines in the headers of config/, and the steps of the workflows."""
    lines: list[str] = []
    for path in files(".github/workflows/*.yml"):
        lines += re.findall(r"- run: (.+?)(?:  #.*)?$", path.read_text("utf-8"), re.M)
    for path in files("config/*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"#   ((?:python|torchrun) .*)", line):
                lines.append(found[1].split("  #")[0].strip())
    return lines


README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = files("*.md", "docs/*.md", "course/*.md", "tests/*.md")
SHOWN = [line for page in PAGES for line in commands(page.read_text(encoding="utf-8"))]


def as_settings(kind: type, **options: Any) -> Callable[[list[str]], object]:
    return lambda words: read(kind, words, **options)


def as_bench(words: list[str]) -> object:
    mode = words[0] if words and words[0] in bench_mfu.MODES else None
    return load_config(words[1:] if mode else words, mode)


READERS: dict[str, Callable[[list[str]], object]] = {  # by the first words, the longest first
    "train.py": as_settings(TrainConfig),
    "sample.py": as_settings(SampleConfig),
    "explain.py": as_settings(ExplainConfig),
    "bench_mfu.py": as_bench,
    "-m data": lambda words: [DATASETS[words[0]], read(PrepareConfig, words[1:])],
    "-m attention check": check.read,
    "-m attention": lambda words: parser().parse_args(words),
    "-m checkpoint": as_settings(ExportConfig, positional="command"),
    "-m bench.evaluate tasks": as_settings(TasksConfig, positional="folder"),
    "-m course.lab": as_settings(LabConfig),
}


@pytest.mark.parametrize("line", dict.fromkeys(SHOWN + elsewhere()))
def test_a_command_that_is_shown_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(line)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert words[0] in re.findall(r"^([a-z-]+):", makefile, re.M)
    elif program == "torchrun" or program.endswith("python"):
        words = words[words.index("train.py") :] if program == "torchrun" else words
        words = [word for word in words if word != "--help"]
        for first, reads in READERS.items():
            if words[: len(first.split())] == first.split():
                reads(words[len(first.split()) :])
                return
        assert find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).is_file(), line
    else:
        known = re.search(r"python3|pip|ruff|git|lm_eval|source", program)
        assert known or any((ROOT / word).is_file() for word in (program, *words)), line


def test_the_support_tables_are_those_that_caps_give() -> None:
    assert support_tables.overview() in README
    assert support_tables.table() in (ROOT / "docs" / "SUPPORT.md").read_text(encoding="utf-8")
    assert support_tables.auto_order() in (ROOT / "docs" / "ATTENTION.md").read_text("utf-8")


def test_every_file_that_the_pages_name_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            assert path.exists(), f"{page.name} links to {target}"
            titles = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M) if anchor else []
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert not anchor or anchor in anchors, f"{page.name} links to {target}"


# --- the README alone ---


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in lines[2:]]


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    return text


# The knobs of nanoGPT's train.py.
NANOGPT = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint
init_from wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size
block_size n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2
grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile"""


def test_the_settings_of_nanogpt_are_ours_but_for_two() -> None:
    gone = set(NANOGPT.split()) - {f.name for f in fields(TrainConfig)}
    assert gone == {"always_save_checkpoint", "backend"} == set(IGNORED)
    assert all(f"`{name}`" in section("Coming from nanoGPT") for name in gone)


def test_the_table_of_mfu_and_the_picture_are_the_record() -> None:
    text, drawn = section("Measure MFU"), (ROOT / "docs" / "cover.svg").read_text(encoding="utf-8")
    (folder,) = re.findall(r"\[record\]\((.+?)/README\.md\)", text)
    content = json.loads((ROOT / folder / "record.json").read_text(encoding="utf-8"))
    rows = {row["backend"]: row for row in content["rows"]}
    shown = rows_of(text)
    assert len(shown) == len(rows)
    for name, *cells in shown:
        row = rows[{"nanoGPT": "nanogpt"}.get(name, name)]
        speed, mfu = f"{row['tokens_per_s']:,.0f}", f"{100 * row['mfu']:.1f}"
        memory = f"{row['memory_bytes'] / 1e9:.1f}"
        assert cells == [speed, f"{row['q1_ms']:.1f} to {row['q3_ms']:.1f}", f"{mfu}%",
                         f"{row['mfu_causal']:.1%}", f"{memory} GB"]
        assert all(f">{value}<" in drawn for value in (speed, mfu, memory))
    ours, other = rows["sdpa_cudnn"], rows["nanogpt"]
    faster, less = other["ms"] / ours["ms"], ours["memory_bytes"] / other["memory_bytes"]
    assert f"{faster:.2f} times nanoGPT's speed in {100 * less:.0f} % of its memory" in README


# --- the kernel of docs/KERNEL.md ---


@pytest.fixture
def chunked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file as the page has it, in a folder that is now the current one."""
    text = (ROOT / "docs" / "KERNEL.md").read_text(encoding="utf-8")
    code, mask = re.findall(r"```python\n(.*?)```", text, re.S)
    assert code.count("\n") <= 30
    (tmp_path / "prefix.py").write_text(mask, encoding="utf-8")
    (tmp_path / "chunked.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "chunked.py"


@pytest.mark.slow
@pytest.mark.ci
def test_the_kernel_of_the_page_passes_the_check(chunked: str) -> None:
    assert check.main([chunked, "--quick", "--device=cpu"]) == 0


def test_the_mask_of_the_page(chunked: str) -> None:
    mods = attention.get("flex:prefix.py").mods
    assert mods is not None
    assert mods.mean_keys(1024, 2) == sum(max(i + 1, 256) for i in range(1024)) / 1024


@pytest.mark.slow
def test_the_kernel_of_the_page_trains_and_is_measured(chunked: str, tmp_path: Path) -> None:
    out, data_dir = tmp_path / "out", test_train.make_data(tmp_path)
    backend = f"--attention_backend={chunked}"
    run = test_train.run(data_dir, out, attention_backend=chunked)
    state = checkpoint.load(checkpoint.latest(out)).state
    assert run.code == 0 and state["attention_backend"] == "chunked"
    words = [f"--out_dir={out}", "--max_new_tokens=4", "--device=cpu", backend]
    code, said, _ = test_train.enter(sample.main, words)
    assert code == 0 and said
    rows = benches.measured(*benches.small("train"), f"--backends=sdpa,{chunked}")["rows"]
    assert {row["backend"]: row["status"] for row in rows} == {"sdpa": "ok", chunked: "ok"}


NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
RATIO = re.compile(r"([\d.]+), ([\d.]+): \*\*([\d.]+)\*\*")  # ours, theirs, and their ratio


def rounds_to(number: float, shown: str) -> bool:
    """True if a number is the shown one, which may have fewer digits."""
    unit = 10.0 ** -len(shown.partition(".")[2])
    return isclose(number, float(shown.replace(",", "")), rel_tol=1e-6, abs_tol=0.51 * unit)


def test_the_tables_of_speed_are_the_records() -> None:
    page = (ROOT / "docs" / "SPEED.md").read_text(encoding="utf-8")
    unknown = []
    for section in re.split(r"^(?=## )", page, flags=re.M)[1:]:
        records = re.findall(r"\]\(\.\./(bench/records/[^)]+README\.md)\)", section)
        text = "".join((ROOT / record).read_text(encoding="utf-8") for record in records)
        known = {*map(float, NUMBER.findall(text.replace(",", "")))}
        for before, table in re.findall(r"((?:.+\n)*)\n((?:\|.*\n)+)", section):
            if "no record" in before:
                continue
            for a, b, ratio in RATIO.findall(table):
                assert abs(float(a) / float(b) - float(ratio)) < 0.01, (a, b, ratio)
            rows = [row for row in table.splitlines()[2:] if not row.startswith("| anchor")]
            shown = {*NUMBER.findall(RATIO.sub(r"\1 \2", "\n".join(rows)))}
            unknown += [x for x in shown if not any(rounds_to(y, x) for y in known)]
    assert not unknown


# --- config/ ---


@pytest.mark.parametrize("path", files("config/[!b]*.py"), ids=lambda p: p.stem)
def test_a_config_loads_and_sets_only_what_differs(path):
    loaded = read(TrainConfig, [str(path)])
    assert loaded.origins and all(str(path) in origin for origin in loaded.origins.values())
    assert loaded.settings.dataset in DATASETS
    own = "gpt" if loaded.settings.eval_only else path.stem.removeprefix("train_")
    assert loaded.settings.out_dir == f"out/{own}"  # where no other run's checkpoints are

# Of nanoGPT's config/finetune_shakespeare.py.
FINETUNE = """import time
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
always_save_checkpoint = False
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
"""


def test_nanogpts_finetuning_runs_unchanged_at_its_constant_rate(tmp_path):
    (tmp_path / "finetune.py").write_text(FINETUNE)
    argv = [str(tmp_path / "finetune.py"), "--backend=nccl"]
    loaded = read(TrainConfig, argv, ignored=IGNORED)
    config, report = loaded.settings, "\n".join(loaded.report())
    assert "always_save_checkpoint" in report and "backend" in report
    assert (config.dataset, config.gradient_accumulation_steps) == ("shakespeare", 32)
    assert {learning_rate(step, config) for step in range(config.max_iters)} == {3e-5}
    assert schedule_warnings(config) == []
