"""What pip installs: the package nanoattn, alone beside torch and numpy, outside of the checkout.

The wheel is built from a copy, and installed into a new environment that has torch and numpy and
nothing else. FRESH_PYTHON=its/bin/python names one where pip has installed the wheel with all that
it asks for, as .ci/run makes it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from checkout import ROOT, files
from packaging.requirements import Requirement

import attention

CHECKOUT = {path.parent.name for path in files("*/__init__.py")}
CHECKOUT |= {path.stem for path in files("*.py")}


def done(words: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHONPATH": "", **env}
    return subprocess.run(words, cwd=folder, env=whole, capture_output=True, text=True)


def needed(name: str) -> set[str]:
    """A distribution and all that it requires."""
    found, new = set[str](), {name}
    while new:
        found |= new
        asked = [Requirement(line) for n in new for line in metadata.requires(n) or ()]
        holds = (r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""}))
        new = set(holds) - found
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a folder build/ where it builds."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for path in files("attention/**/*"):
        if "__pycache__" not in path.parts:
            to = copy / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run = done([*pip, "-w", str(out), "."], copy)
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment where the wheel is installed."""
    if made := os.environ.get("FRESH_PYTHON"):
        return str(ROOT / made)
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for found in map(metadata.distribution, needed("torch") | needed("numpy")):
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():  # a folder may be of several
                (site / top).symlink_to(str(found.locate_file(top)))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    run = done([*pip, "--target", str(site), str(wheel)], folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return str(folder / "bin" / "python")


def readme() -> str:
    """The README's lines for one's own code."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch, nanoattn\n.*?)```", text, re.S)
    return str(code)


# --- the wheel ---


@pytest.mark.slow
def test_the_wheel_holds_one_package_with_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (about,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        asked = [Requirement(line) for line in re.findall(
            r"^Requires-Dist: (.*)", opened.read(about).decode(), re.M)]
    info = f"nanoattn-{attention.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"nanoattn", info}
    assert f"{info}/licenses/LICENSE" in names
    inside = {name.partition("/")[2] for name in names if name.startswith("nanoattn/")}
    source = [p for p in files("attention/**/*.*") if "__pycache__" not in p.parts]
    assert inside == {str(path.relative_to(ROOT / "attention")) for path in source}
    assert {r.name for r in asked if r.marker is None} == {"torch", "numpy"}


@pytest.mark.slow
def test_the_lines_of_the_readme_run(python: str, tmp_path: Path) -> None:
    said = "\nprint(chosen)\nprint(tuple(out.shape), nanoattn.__version__, nanoattn.__file__)"
    run = done([python, "-c", readme() + said], tmp_path)
    assert run.returncode == 0, run.stderr
    assert "INFO: Attention backend: sdpa" in run.stdout
    assert f"(2, 1024, 8, 64) {attention.__version__} " in run.stdout
    assert str(ROOT / "attention") not in run.stdout


@pytest.mark.slow
def test_every_name_and_every_module_imports(python: str, tmp_path: Path) -> None:
    """But what is made for Triton, where there is none."""
    modules = {p.stem for p in files("attention/*.py")} - {"__init__", "__main__"}
    modules -= {"triton_kernels", "paged_kernels"}
    code = f"from nanoattn import *; import {', '.join(f'nanoattn.{m}' for m in sorted(modules))}"
    run = done(
        [python, "-W", "error", "-c", f"{code}\nprint(visible(2, 1), Spec.__module__)"], tmp_path
    )
    assert run.stdout == "True nanoattn.spec\n", run.stderr


@pytest.mark.slow
def test_a_kernel_of_ones_own_is_checked(python: str, tmp_path: Path) -> None:
    """The file of docs/KERNEL.md, where nothing of the checkout is at hand."""
    page = (ROOT / "docs" / "KERNEL.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "chunked.py").write_text(code, encoding="utf-8")
    check = [python, "-m", "nanoattn", "check", "chunked.py", "--quick", "--dtype=float32"]
    run = done(check, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    (tmp_path / "chunked.py").write_text(code.replace("* spec.softmax_scale", "* 0.2"))
    run = done([*check, "--first"], tmp_path)
    assert run.returncode == 1, run.stderr
    assert "\nimport nanoattn\n" in run.stdout and "sys.path" not in run.stdout


@pytest.mark.slow
def test_the_lines_of_the_readme_for_transformers_run(tmp_path: Path) -> None:
    """On a small model of random weights; here, or where FRESH_PYTHON's pip installed it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import nanoattn, torch, transformers\n.*?)```", text, re.S)
    made = os.environ.get("FRESH_PYTHON_HF")
    run = done([str(ROOT / made) if made else sys.executable, "-c", code], tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.search(r"^transformer\.h\.\*\.attn \(2 layers: 0, 1\): sdpa ", run.stdout, re.M)


# --- one package under two names ---


@pytest.mark.slow
@pytest.mark.parametrize("order", ["attention, nanoattn", "nanoattn, attention"])
def test_in_a_checkout_both_names_are_the_same_modules(order: str, tmp_path: Path) -> None:
    (tmp_path / "nanoattn").symlink_to(ROOT / "attention")
    code = f"""import sys, {order}
assert nanoattn is attention and nanoattn.Spec is attention.Spec
assert sys.modules['nanoattn.sdpa'] is sys.modules['attention.sdpa']"""
    run = done([sys.executable, "-c", code], ROOT, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_another_package_named_attention_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "attention.py").write_text("other = True")
    (tmp_path / "nanoattn").symlink_to(ROOT / "attention")
    code = "import nanoattn, attention; assert attention.other and nanoattn.Spec"
    run = done([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(tmp_path))
    assert run.returncode == 0, run.stderr


# --- what is said in two places ---


def test_the_version_is_the_citations() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)", text, re.M) == [attention.__version__]
