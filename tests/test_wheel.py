"""What pip installs: the package nanoattn, alone beside torch and numpy, outside of the checkout.

The wheel is built from a copy, and installed into a new environment that has torch and numpy and
nothing else. FRESH_PYTHON=its/bin/python names one where pip has installed the wheel with all that
it asks for, as .ci/run makes it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import attention
from attention import alias

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = {path.parent.name for path in ROOT.glob("*/__init__.py")}
CHECKOUT |= {path.stem for path in ROOT.glob("*.py")}


def done(words: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHONPATH": "", **env}
    return subprocess.run(words, cwd=folder, env=whole, capture_output=True, text=True)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a folder build/ where it builds."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "attention", copy / "attention", ignore=no_caches)
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


def needed(name: str) -> set[str]:
    """A distribution and all that it requires."""
    found, new = set[str](), {name}
    while new:
        found |= new
        asked = [Requirement(line) for n in new for line in metadata.requires(n) or ()]
        holds = (r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""}))
        new = set(holds) - found
    return found


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
            r"^Requires-Dist: (.*)", opened.read(about).decode(), re.M)]  # fmt: skip
    info = f"nanoattn-{attention.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"nanoattn", info}
    assert f"{info}/licenses/LICENSE" in names
    inside = {name.partition("/")[2] for name in names if name.startswith("nanoattn/")}
    assert inside == {path.name for path in (ROOT / "attention").glob("*.*")}
    assert {r.name for r in asked if r.marker is None} == {"torch", "numpy"}


@pytest.mark.slow
def test_nothing_else_comes_with_it(python: str, tmp_path: Path) -> None:
    """Or the tests below would prove nothing; and an installed package takes no generic name."""
    names = sorted(CHECKOUT | {"rich", "pydantic", "matplotlib", "transformers"})
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    assert "attention" in names and "core" in names and "model" in names
    assert done([python, "-c", code], tmp_path).stdout == "[]\n"


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
    modules = {p.stem for p in (ROOT / "attention").glob("*.py")} - {"__init__", "__main__"}
    modules -= {"triton_kernels", "paged_kernels"}
    code = f"from nanoattn import *; import {', '.join(f'nanoattn.{m}' for m in sorted(modules))}"
    run = done(
        [python, "-W", "error", "-c", f"{code}\nprint(visible(2, 1), Spec.__module__)"], tmp_path
    )
    assert run.stdout == "True nanoattn.spec\n", run.stderr


@pytest.mark.slow
def test_the_other_commands_say_where_they_are(python: str, tmp_path: Path) -> None:
    for words in ((), ("sdpa", "--dtype=float32")):
        run = done([python, "-m", "nanoattn", *words], tmp_path)
        assert run.returncode == 1 and run.stdout == ""
        assert (
            run.stderr.startswith("python -m nanoattn has one command, check")
            and run.stderr.count("\n") == 1
        )


@pytest.mark.slow
def test_a_kernel_of_ones_own_is_checked(python: str, tmp_path: Path) -> None:
    """The file of docs/KERNEL.md, where nothing of the checkout is at hand."""
    page = (ROOT / "docs" / "KERNEL.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "chunked.py").write_text(code, encoding="utf-8")
    check = [python, "-m", "nanoattn", "check", "chunked.py", "--quick", "--dtype=float32"]
    run = done(check, tmp_path)
    assert run.returncode == 0 and "All that it declares is right." in run.stdout, run.stderr
    (tmp_path / "chunked.py").write_text(code.replace("* spec.softmax_scale", "* 0.2"))
    run = done([*check, "--first"], tmp_path)
    assert run.returncode == 1 and "from nanoattn import get, matrix" in run.stdout, run.stderr


@pytest.mark.slow
def test_the_lines_of_the_readme_for_transformers_run(tmp_path: Path) -> None:
    """On a small model of random weights; here, or where FRESH_PYTHON's pip installed it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import nanoattn, transformers\n.*?)```", text, re.S)
    made = os.environ.get("FRESH_PYTHON_HF")
    run = done([str(ROOT / made) if made else sys.executable, "-c", code], tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^transformer\.h\.[01]\.attn: sdpa ", run.stdout, re.M)) >= 4


# --- one package under two names ---

TWICE = """
import sys
first, second = sys.argv[1:]
__import__(first), __import__(second)
import attention, nanoattn
assert attention is nanoattn and attention.__name__ == first
assert all(m.__name__.partition(".")[0] == first for n, m in [*sys.modules.items()]
           if n.partition(".")[0] in (first, second) and n != "attention.alias")
__import__(second + ".oracle")  # not imported before
import attention.oracle, nanoattn.oracle
assert attention.oracle is nanoattn.oracle and attention.oracle.__spec__.name == first + ".oracle"
from attention.select import resolve as one
from nanoattn.select import resolve as other
assert one is other and callable(attention.select)
print(attention.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [("attention", "nanoattn"), ("nanoattn", "attention")])
def test_the_name_that_comes_first_is_the_package(
    names: tuple[str, str], python: str, tmp_path: Path
) -> None:
    run = done([python, "-c", TWICE, *names], tmp_path, PYTHONPATH=str(ROOT))
    assert run.returncode == 0, run.stderr
    assert (run.stdout == f"{ROOT}/attention/__init__.py\n") == (names[0] == "attention")


@pytest.mark.slow
def test_two_versions_in_one_process_are_an_error(python: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "attention", tmp_path / "attention")
    with open(tmp_path / "attention" / "sdpa.py", "a", encoding="utf-8") as file:
        file.write("# another version\n")
    run = done([python, "-c", "import nanoattn, attention"], tmp_path)
    assert run.returncode == 1
    said = run.stderr.splitlines()[-1]
    assert said.startswith("ImportError: nanoattn was imported from ") and str(tmp_path) in said


def test_the_other_name_is_of_this_package_and_of_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    sys.modules["attention_of_others"] = ModuleType("attention_of_others")
    made = alias.Alias("attention", "elsewhere")
    ours = {
        n.partition(".")[2]: m for n, m in sys.modules.items() if f"{n}.".startswith("attention.")
    }
    there = {n.partition(".")[2]: m for n, m in sys.modules.items() if n.startswith("elsewhere")}
    assert there == ours and there[""] is attention
    assert made.find_spec("elsewhere.oracle") is not None
    for name in ("elsewhere.no_such_file", "elsewheres.oracle", "attention.oracle", "oracle"):
        assert made.find_spec(name) is None


@pytest.mark.parametrize("change", ["other text", "a file more", "a file less"])
def test_another_version_that_came_first_is_an_error(change, tmp_path: Path, monkeypatch) -> None:
    for path in (ROOT / "attention").glob("*.py"):
        shutil.copy(path, tmp_path)
    if change == "a file less":
        (tmp_path / "sdpa.py").unlink()
    else:
        with open(tmp_path / ("sdpa.py" if change == "other text" else "more.py"), "a") as file:
            file.write("# another version\n")
    other = ModuleType("nanoattn")
    other.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "nanoattn", other)
    before = [*sys.meta_path]
    with pytest.raises(ImportError, match=f"nanoattn was imported from {tmp_path}, and attention"):
        alias.share()
    assert sys.meta_path == before


OPERATORS = """
import torch, attention, nanoattn.triton_kernels, attention.triton_kernels, nanoattn.paged_kernels
import attention.paged_kernels, nanoattn
assert nanoattn.triton_kernels is attention.triton_kernels
q = torch.randn(1, 16, 2, 16, requires_grad=True)
spec = nanoattn.Spec(2, 2, 16, "float32")
outs = [a.get("triton").attend(q, q, q, spec) for a in (attention, nanoattn)]
grads = [torch.autograd.grad(out.sum(), q)[0] for out in outs]
want = torch.autograd.grad(nanoattn.get("manual").attend(q, q, q, spec).sum(), q)[0]
assert all(torch.allclose(grad, want, atol=1e-5) for grad in grads)
"""


@pytest.mark.slow
def test_operators_are_registered_once() -> None:
    pytest.importorskip("triton")
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = done([sys.executable, "-c", OPERATORS], ROOT, **env)
    assert run.returncode == 0, run.stderr


# --- what is said in two places ---


def test_the_version_is_the_citations() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)", text, re.M) == [attention.__version__]


def test_all_that_the_package_exports_is_listed() -> None:
    """A type checker of somebody's project takes __all__ for what there is."""
    tree = ast.parse(Path(attention.__file__).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert sorted(name.name for node in imports for name in node.names) == sorted(attention.__all__)
