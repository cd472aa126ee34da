"""The package nanoattn, outside of the checkout.

`make wheel` installs it into an environment with its dependencies only, and runs these tests with
FRESH_PYTHON=its python; at last -k transformers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT, files

import attention

FRESH = os.environ.get("FRESH_PYTHON", "")
installed = pytest.mark.skipif(not FRESH, reason="make wheel runs it")


def run(folder: Path, *words: str, python: str = str(ROOT / FRESH), path: str = "") -> str:
    """Output; the exit code must be 0."""
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([python, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def code_of(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.S)[0]


@installed
def test_the_wheel_holds_one_package_with_its_license(tmp_path: Path) -> None:
    code = """import json
from importlib.metadata import distribution
found = distribution("nanoattn")
print(json.dumps([found.version, found.requires, [str(path) for path in found.files]]))"""
    version, requires, inside = json.loads(run(tmp_path, "-c", code))
    assert version == attention.__version__
    needs = {re.split(r"\W", line)[0] for line in requires if "extra ==" not in line}
    assert needs == {"torch", "numpy"}
    info = f"nanoattn-{version}.dist-info"
    names = {name for name in inside if "__pycache__" not in name}
    assert {name.partition("/")[0] for name in names} == {"nanoattn", info}
    assert f"{info}/licenses/LICENSE" in names
    source = {path.relative_to(ROOT / "attention") for path in files("attention/**/*.*")}
    assert {n for n in names if n.startswith("nanoattn/")} == {f"nanoattn/{p}" for p in source}


@installed
def test_the_first_lines_of_attention_md_run(tmp_path: Path) -> None:
    more = "\nprint(chosen, tuple(out.shape), nanoattn.__file__)"
    found = run(tmp_path, "-c", code_of("docs/ATTENTION.md") + more)
    assert "(2, 1024, 8, 64)" in found and str(ROOT / "attention") not in found


@installed
def test_every_name_and_every_module_imports(tmp_path: Path) -> None:
    """Except triton/."""
    modules = {".".join(p.relative_to(ROOT / "attention").with_suffix("").parts)
               for p in files("attention/**/*.py") if "triton" not in p.parts}
    names = (f"nanoattn.{m}" for m in sorted(modules) if "__" not in m)
    code = f"from nanoattn import *; import {', '.join(names)}\nprint(visible(2, 1))"
    assert run(tmp_path, "-W", "error", "-c", code) == "True\n"


@installed
def test_a_kernel_of_ones_own_is_checked(tmp_path: Path) -> None:
    """docs/KERNEL.md's, right and wrong."""
    code = code_of("docs/KERNEL.md")
    words = ["-m", "nanoattn", "check", "chunked.py", "--quick", "--dtype=float32"]
    (tmp_path / "chunked.py").write_text(code, encoding="utf-8")
    run(tmp_path, *words)
    (tmp_path / "chunked.py").write_text(code.replace("* spec.softmax_scale", "* 0.2"))
    with pytest.raises(AssertionError, match=r"\bfrom nanoattn import get\n"):
        run(tmp_path, *words, "--first")


@installed
def test_the_lines_of_the_readme_run_with_transformers(tmp_path: Path) -> None:
    before = """import torch
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
GPT2LMHeadModel(config).save_pretrained("gpt2")
q = k = v = torch.randn(1, 16, 2, 8)\n"""
    after = """
model(torch.arange(9)[None])
assert out.shape == q.shape
print(nanoattn.hf.report(model))"""
    found = run(tmp_path, "-c", before + code_of("README.md") + after)
    assert re.search(r"^transformer\.h.*\bsdpa\b", found, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["attention, nanoattn", "nanoattn, attention"])
def test_in_a_checkout_both_names_are_the_same_modules(order: str, tmp_path: Path) -> None:
    """Another package named attention is left alone."""
    (tmp_path / "nanoattn").symlink_to(ROOT / "attention")
    code = f"""import sys, {order}
assert nanoattn is attention and nanoattn.Spec is attention.Spec
assert sys.modules['nanoattn.sdpa'] is sys.modules['attention.sdpa']"""
    run(ROOT, "-c", code, python=sys.executable, path=f"{ROOT}:{tmp_path}")
    (tmp_path / "attention.py").write_text("other = True")
    code = f"import {order}; assert attention.other and nanoattn.Spec"
    run(tmp_path, "-c", code, python=sys.executable, path=str(tmp_path))


def test_the_version_is_that_of_citation_and_changelog() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date = re.findall(r"^date-released: (.*)", citation, re.M)[0]
    assert re.findall(r"^version: (.*)", citation, re.M) == [attention.__version__]
    assert re.findall(r"^## (.*)", changes, re.M)[0] == f"{attention.__version__}, {date}"
