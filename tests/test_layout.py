"""The ranks of docs/DESIGN.md: imports point down only, and no file has grown past its budget."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"train", "sample", "bench_mfu", "explain"}
BELOW: dict[str, set[str]] = {  # what each may import of the project
    "attention": set(),
    "core": {"attention"},
    "data": {"core"},
    "model": {"attention", "core"},
    "inference": {"attention", "core", "data", "model"},
    "checkpoint": {"attention", "core", "data", "model"},
}
BUDGETS = {"model.py": 320, "train.py": 420, "attention/manual.py": 70, "attention/sdpa.py": 150,
           "attention/tiled.py": 200}  # fmt: skip


def sources() -> list[Path]:
    folders = (*BELOW, "bench", "viewer", "docs")
    inside = [p for folder in folders if folder != "model" for p in (ROOT / folder).rglob("*.py")]
    return [*ROOT.glob("*.py"), *(p for p in inside if "exercises" not in p.parts)]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """The modules that a file imports, lazily or not, and the function they are imported in."""

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((name.name, inside) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                # Only attention/, which is a package of the wheel too, imports relatively.
                assert child.level <= (path.parent == ROOT / "attention"), f"{path}: {child.level}"
                if child.level and child.module is None:  # from . import a, b
                    yield from ((f"attention.{name.name}", inside) for name in child.names)
                else:
                    here = "attention." if child.level else ""
                    yield here + (child.module or ""), inside
            named = isinstance(child, ast.FunctionDef)
            yield from visit(child, child.name if named else inside)  # type: ignore[attr-defined]

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def test_imports_point_down_only() -> None:
    rooms = {*BELOW, *COMMANDS, "bench", "viewer", "docs"}
    for path in sources():
        name = path.relative_to(ROOT).with_suffix("")
        room = name.parts[0]
        if room not in BELOW:
            continue
        for module, function in imported(path):
            other = module.partition(".")[0]
            if other not in rooms or other == room or other in BELOW[room]:
                continue
            # The two exceptions of docs/DESIGN.md.
            assert (str(name), function, other) == ("model", "from_pretrained", "checkpoint") or (
                str(name) == "attention/__main__" and other == "core"
            ), f"{name} imports {module}"


def test_kernels_do_not_know_one_another() -> None:
    kernels = {"manual", "tiled", "sdpa", "sdpa_bmm", "flex", "triton_flash", "flash", "paged"}
    for kernel in kernels:
        found = [module for module, _ in imported(ROOT / "attention" / f"{kernel}.py")]
        assert not {f"attention.{k}" for k in kernels} & set(found), kernel


def test_what_runs_as_a_command_does_not_run_when_it_is_imported() -> None:
    found = set()
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.If) and "'__name__'" in ast.dump(node.test):
                name = path.relative_to(ROOT).as_posix()
                asked = ast.unparse(node.test).split(" and ")[0]
                run_as = "attention" if name == "attention/__init__.py" else "__main__"
                assert asked == f"__name__ == {run_as!r}", name
                found.add(name)
    assert found >= {f"{command}.py" for command in COMMANDS}


def test_the_root_holds_what_a_person_runs_and_the_model() -> None:
    assert {p.stem for p in ROOT.glob("*.py")} == COMMANDS | {"model"}


def test_no_file_is_past_its_budget() -> None:
    for path in sources():
        name, lines = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8").count("\n")
        if "kernels" not in name:
            assert lines <= BUDGETS.get(name, 450), f"{name} has {lines} lines"
