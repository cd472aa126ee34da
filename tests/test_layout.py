"""The ranks and budgets of docs/DESIGN.md: imports point down, and files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from checkout import ROOT, files

COMMANDS = {"train", "sample", "bench_mfu", "explain"}
BELOW: dict[str, set[str]] = {  # the rooms that each may import
    "attention": set(),
    "core": {"attention"},
    "data": {"core"},
    "model": {"attention", "core"},
    "inference": {"attention", "checkpoint", "core", "data", "model"},
    "checkpoint": {"attention", "core", "data", "model"},
}
TOP = {*COMMANDS, "bench", "viewer", "course"}
# Lines in all, exercises and web pages included. They only fall: who adds shortens something else.
CAPS = {"source": 23_390, "tests": 14_170}
KERNELS = ("manual", "tiled", "sdpa", "sdpa_bmm", "flex", "triton_flash", "flash", "paged")
# A backend has about 150 lines. flash.py holds three packages, flex.py two kernels and their
# compilation, tiled.py the backward pass written out; sdpa.py is five backends.
BUDGETS = {"model.py": 400, "train.py": 360, "attention/flash.py": 200, "attention/flex.py": 220,
           "attention/tiled.py": 190}
BUDGETS |= {name: BUDGETS.get(name, 160) for name in (f"attention/{k}.py" for k in KERNELS)}


def in_rooms(*suffixes: str) -> list[str]:
    rooms = ({*BELOW} | TOP) - COMMANDS - {"model"}
    return [f"{room}/**/*.{suffix}" for room in rooms for suffix in suffixes]


def sources() -> list[Path]:
    return [p for p in files("*.py", *in_rooms("py")) if "exercises" not in p.parts]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Imported modules, and the importing function."""

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((name.name, inside) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = path.relative_to(ROOT).parts[:-1]
                # Relative imports in attention/ only: it is also installed, as nanoattn.
                assert not child.level or package[:1] == ("attention",), path
                module = resolve_name("." * child.level + (child.module or ""), ".".join(package))
                yield module, inside
                yield from ((f"{module}.{name.name}", inside) for name in child.names)
            name = child.name if isinstance(child, ast.FunctionDef) else inside
            yield from visit(child, name)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def test_imports_point_down_only_and_kernels_do_not_know_one_another() -> None:
    """GPT.from_pretrained is the exception."""
    kernels = {f"attention.{kernel}" for kernel in KERNELS}
    for path in sources():
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        room = name.partition("/")[0]
        for module, function in imported(path) if room in BELOW else ():
            other = module.partition(".")[0]
            assert not {name.replace("/", "."), module} <= kernels, f"{name} imports {module}"
            if other in {*BELOW} | TOP and other not in {room, *BELOW[room]}:
                exception = ("model", "from_pretrained", "checkpoint")
                assert (name, function, other) == exception, f"{name} imports {module}"


def test_files_below_the_commands_do_not_import_each_other_in_a_cycle() -> None:
    """At import time."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sources()}
    graph = {name: {m for m, function in imported(path) if not function and m in {*names} - {name}}
             for name, path in names.items()}
    TopologicalSorter(graph).prepare()  # CycleError


def test_the_root_holds_the_commands_and_the_model_and_docs_text_only() -> None:
    assert {p.stem for p in files("*.py")} == COMMANDS | {"model"}
    assert {p.suffix for p in files("docs/**/*")} <= {".md", ".png", ".svg"}


def test_no_file_is_past_its_budget() -> None:
    for path in sources():
        name, lines = path.relative_to(ROOT).as_posix(), path.read_text("utf-8").count("\n")
        if "kernels" not in name:
            usual = 350 if name.startswith("bench") else 450
            assert lines <= BUDGETS.get(name, usual), f"{name} has {lines} lines"


def test_the_totals_are_under_their_caps() -> None:
    rooms = {"source": ["*.py", *in_rooms("py", "js", "css", "html")], "tests": ["tests/**/*.py"]}
    for name, patterns in rooms.items():
        lines = sum(len(path.read_bytes().splitlines()) for path in files(*patterns))
        assert lines <= CAPS[name], f"{name} has {lines:,} lines"
