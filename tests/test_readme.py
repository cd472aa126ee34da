"""What the README and the config headers say is true: commands parse, the table is generated."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import bench_mfu
from attention import support
from attention.__main__ import ALIASES as CLI_ALIASES
from attention.__main__ import Options
from bench.config import load_config
from bench.serving import ServingConfig
from core.settings import read
from data.prepare import DATASETS, PrepareConfig
from explain import ExplainConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
ALIASES = {"attn_implementation": "attention_backend"}


def commands(text: str) -> list[str]:
    """The lines of the shell blocks, comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def in_headers() -> list[str]:
    """The launch lines in the headers of config/."""
    lines: list[str] = []
    for path in sorted((ROOT / "config").glob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"#   ((?:python|torchrun) .*)", line):
                lines.append(found[1].split("  #")[0].strip())
    return lines


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", commands(README) + in_headers())
def test_a_command_that_is_shown_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert words[1] in targets
        return
    if words[0] == "torchrun":
        words = ["python", *[w for w in words[1:] if not w.startswith(("--standalone", "--nproc"))]]
    if not words[0].endswith("python"):
        assert re.search(r"python3|pip|ruff|git", words[0]), f"unknown command: {line}"
        return
    rest = [w for w in words[1:] if w != "--help"]
    kinds: dict[str, Any] = {"train.py": TrainConfig, "sample.py": SampleConfig,
                             "explain.py": ExplainConfig}  # fmt: skip
    if rest[0] in kinds:
        read(kinds[rest[0]], rest[1:], aliases=ALIASES)
    elif rest[:2] == ["-m", "data"]:
        assert rest[2] in DATASETS
        read(PrepareConfig, rest[3:])
    elif rest[:2] == ["-m", "attention"]:
        read(Options, rest[2:], aliases=CLI_ALIASES, positional="backend")
    elif rest[0] == "bench_mfu.py":
        words = rest[1:]
        if words[:1] != ["compare"]:
            load_config(words[1:] if words and words[0] in bench_mfu.MODES else words)
    elif rest[:2] == ["-m", "bench.serving"]:
        read(ServingConfig, rest[2:])
    elif rest[:2] == ["-m", "docs.exercises"]:
        assert rest[2] in map(str, range(1, 10))
    else:
        module = rest[:2] in (["-m", "pytest"], ["-m", "attention.support"])
        assert module or (ROOT / rest[0]).is_file(), f"unknown: {line}"


def test_the_support_tables_are_those_that_caps_give() -> None:
    """python -m attention.support writes them."""
    assert support.overview() in README
    assert support.table() in (ROOT / "docs" / "SUPPORT.md").read_text(encoding="utf-8")


def test_every_file_that_the_pages_name_is_there() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
