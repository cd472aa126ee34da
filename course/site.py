"""Build the site of README, course, docs, and a page of explain.py, by MkDocs.

    python -m course.site                          into out/site; the model is out/shakespeare_cpu
    python -m course.site --run=RUN --out=FOLDER

A dead link is an error. Only search needs a web server.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import explain
from core.settings import UserError, exit_on_user_error, read
from course import ROOT
from course.build import CODE_URL, REPOSITORY, without_marks

PROMPT = "To be, or not to be, that is the question"


@dataclass(frozen=True)
class SiteConfig:
    """Build the site: python -m course.site [--option=value]."""

    run: str = "out/shakespeare_cpu"  # folder of a trained model, for the page of explain.py
    out: str = "out/site"  # folder of the site, which is replaced


def main(argv: list[str]) -> int:
    config = read(SiteConfig, argv).settings
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # an advertisement
    try:
        import latex2mathml.converter  # noqa: F401
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
        from mkdocs.exceptions import MkDocsException
    except ImportError as e:
        install = 'pip install -c constraints.txt -e ".[site]"'
        raise UserError(f"the site needs MkDocs and latex2mathml ({e}): {install}") from e
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))
        words = (f"--out_dir={config.run}", f"--prompt={PROMPT}", f"--html={folder}/explain.html")
        if explain.main([*words]):
            return 1
        places = {"docs_dir": folder, "site_dir": str(Path(config.out).resolve())}
        try:
            settings = load_config(str(ROOT / "mkdocs.yml"), strict=True, **places)
            settings["nav"] += [{"Code": REPOSITORY}]
            build(settings)
        except MkDocsException as e:
            raise UserError(f"MkDocs found errors (above): {e}") from e
    print(f"python -m http.server --directory {config.out}: look at it in a browser")
    return 0


def write_pages(folder: Path) -> None:
    pages = ("README.md", "course/*.md", "docs/*.md")
    pictures = ("course/pictures/*", "docs/*.svg", "docs/*.png", "bench/records/*/*.png")
    patterns = (*pages, *pictures, "course/site.css")
    shown = {path for pattern in patterns for path in ROOT.glob(pattern)}
    for path in shown:
        to = folder / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            page = without_marks(path.read_text(encoding="utf-8"))
            to.write_text(typeset(relinked(page, path, shown)), encoding="utf-8")
        else:
            shutil.copy(path, to)


def relinked(page: str, path: Path, shown: set[Path]) -> str:
    """Point links to files outside the site at the repository."""

    def link(found: re.Match[str]) -> str:
        file, hash_, anchor = found[2].partition("#")
        target = (path.parent / file).resolve()
        if target in shown:
            return found[0]
        if not target.exists():
            raise UserError(f"{path.name}: a link to {found[2]}, which does not exist")
        return f"{found[1]}{CODE_URL}/{target.relative_to(ROOT).as_posix()}{hash_}{anchor}"

    return re.sub(r"(\]\(|^\[\d+\]: )(?!http|#)([^)\s]+)", link, page, flags=re.M)


def typeset(page: str) -> str:
    """Convert ```math blocks and $...$ outside code to MathML."""
    from latex2mathml.converter import convert

    def block(found: re.Match[str]) -> str:
        return f'<div class="formula">{convert(found[1], display="block")}</div>\n'

    def inline(found: re.Match[str]) -> str:
        # At the beginning of a line Markdown takes <math> for a block.
        return found[0] if found[1] is None else f"<span>{convert(found[1])}</span>"

    page = re.sub(r"^```math\n((?:.*\n)*?)```\n", block, page, flags=re.M)
    code = r"^```(?:.*\n)*?```$|`+[^`]+`+"
    return re.sub(rf"{code}|\$([^$\s](?:[^$\n]*[^$\s])?)\$", inline, page, flags=re.M)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
