"""Build the site: README, course, docs, and a page of explain.py.

    python -m course.site                          into out/site; the model is out/shakespeare_cpu
    python -m course.site --run=RUN --out=FOLDER   the model in RUN, into FOLDER

MkDocs makes HTML of the pages. Before, their links to other files of the repository are turned into
addresses and their formulas into HTML. A link that leads nowhere is an error. The site needs no
network, but a web server for its search.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import explain
from core.settings import UserError, exit_on_user_error, read
from course.notebook import CODE, REPOSITORY, without_marks
from course.source import ROOT

STYLE = Path(__file__).with_name("site.css")
PROMPT = "To be, or not to be, that is the question"
EXPLAIN = "explain.html"


@dataclass(frozen=True)
class SiteConfig:
    """Build the site: python -m course.site [--option=value]."""

    run: str = "out/shakespeare_cpu"  # folder of a trained model, for the page of explain.py
    out: str = "out/site"  # folder of the site, which is replaced


def main(argv: list[str]) -> int:
    """Build the site. Returns the exit code."""
    config = read(SiteConfig, argv).settings
    if find_spec("material") is None:
        raise UserError('the site needs MkDocs: pip install -c constraints.txt -e ".[site]"')
    out = Path(config.out).resolve()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        write_pages(pages)
        options = (f"--out_dir={config.run}", f"--prompt={PROMPT}", f"--html={pages / EXPLAIN}")
        if explain.main([*options]):
            return 1
        settings = Path(folder) / "mkdocs.yml"  # YAML contains JSON
        settings.write_text(json.dumps(mkdocs(pages, out)), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file"]
        quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
        if subprocess.run([*command, str(settings)], env=quiet).returncode:
            raise UserError("MkDocs found errors (above)")
    if lost := dead_links(out):
        raise UserError("dead links:\n" + "\n".join(lost))
    print(f"python -m http.server --directory {config.out}: look at it in a browser")
    return 0


def write_pages(folder: Path) -> None:
    """Write the pages for MkDocs, and what they show."""
    shown = {ROOT / "README.md", *ROOT.glob("course/*.md"), *ROOT.glob("docs/*.md")}
    for path in sorted(shown):
        to = folder / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        page = without_marks(path.read_text(encoding="utf-8"))
        for picture in re.findall(r"!\[[^]]*\]\((?!http)([^)]+)\)", page):
            copy = (to.parent / picture).resolve()
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / picture, copy)
            shown.add((path.parent / picture).resolve())
        to.write_text(typeset(relinked(page, path, shown)), encoding="utf-8")
    shutil.copy(STYLE, folder / STYLE.name)


def relinked(page: str, path: Path, shown: set[Path]) -> str:
    """The page with addresses in the repository for links to files that are not in the site."""

    def link(found: re.Match[str]) -> str:
        file, hash_, anchor = found[2].partition("#")
        target = (path.parent / file).resolve()
        if target in shown:
            return found[0]
        if not target.exists():
            raise UserError(f"{path.name}: a link to {found[2]}, which does not exist")
        return f"{found[1]}{CODE}/{target.relative_to(ROOT).as_posix()}{hash_}{anchor}"

    return re.sub(r"(\]\(|^\[\d+\]: )(?!http|#)([^)\s]+)", link, page, flags=re.M)


# --- formulas ---


def typeset(page: str) -> str:
    """The page with HTML for its formulas: indented blocks, and terms like S_ij, K^T, sqrt(D)."""
    blocks = re.split(r"(^```.*\n(?:.*\n)*?```$)", page, flags=re.M)
    for n in range(0, len(blocks), 2):
        made = re.sub(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+", block, blocks[n])
        # Code, addresses and HTML stay as they are.
        parts = re.split(r"(`+[^`]+`+|\]\([^)]*\)|<div class(?:.*\n)+?</div>|https?://\S+)", made)
        parts[::2] = map(terms, parts[::2])
        blocks[n] = "".join(parts)
    return "".join(blocks)


def block(found: re.Match[str]) -> str:
    """A table for the lines of a formula: columns are two spaces or more apart."""
    rows = []
    for line in found[0].removesuffix("\n").splitlines():
        indent = len(line) - len(line.lstrip()) - 4
        parts = re.split(" {2,}", html.escape(line.strip(), False))
        cells = [letters(terms(part)) for part in parts]
        style = f' style="padding-left: {indent}ch"' if indent else ""
        rows.append(f"<tr><td{style}>" + "</td><td>".join(cells) + "</td></tr>")
    return '<div class="formula"><table>\n' + "\n".join(rows) + "\n</table></div>\n"


def terms(text: str) -> str:
    text = re.sub(r"(?<!\w)(∂?d?[A-Za-z]|sum|delta)_(\w{1,3})\b", r"\1<sub>\2</sub>", text)
    power = r"\^\(((?:[^()]|\([^()]*\))+)\)|\^(-?\w+)"
    text = re.sub(power, lambda m: f"<sup>{m[1] or m[2]}</sup>", text)
    text = re.sub(r"\bsqrt(?=\()", "√", re.sub(r"\bsqrt\((\w)\)", r"√\1", text))
    return re.sub(r"\bsum(?=<sub>)", "Σ", text)


def letters(text: str) -> str:
    """Italic for variables, which have one letter; "a" is an article."""
    variable = r"(<sub>.*?</sub>|<[^>]*>|&\w+;)|(?<![A-Za-z])(d?[b-zA-Z])(?![A-Za-z])"
    return re.sub(variable, lambda m: m[1] or f"<i>{m[2]}</i>", text)


# --- MkDocs ---


def mkdocs(pages: Path, out: Path) -> dict[str, object]:
    """The settings of MkDocs."""

    def section(name: str) -> list[str]:
        def place(path: Path) -> tuple[int, str]:
            number = path.name.partition("_")[0]
            return (int(number) if number.isdigit() else 0, path.name)

        found = sorted((pages / name).glob("*.md"), key=place)
        return [path.relative_to(pages).as_posix() for path in found]

    def palette(media: str, scheme: str, icon: str, to: str) -> dict[str, object]:
        return {"media": media, "scheme": scheme, "primary": "indigo", "accent": "blue",
                "toggle": {"icon": f"material/{icon}", "name": f"Switch to {to}"}}

    dark = "(prefers-color-scheme: dark)"
    return {
        "site_name": "nanoattn",
        "docs_dir": str(pages),
        "site_dir": str(out),
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,  # else from Google
            "features": ["navigation.footer", "navigation.sections", "navigation.top", "toc.follow",
                         "content.code.copy", "search.highlight", "search.suggest"],
            "palette": [
                palette("(prefers-color-scheme: light)", "default", "weather-night", "dark mode"),
                palette(dark, "slate", "weather-sunny", "light mode"),
            ],
        },
        "extra_css": [STYLE.name],
        "plugins": ["search"],
        "markdown_extensions": ["sane_lists", "tables", "toc", "pymdownx.superfences",
                                "pymdownx.magiclink", {"toc": {"permalink": True}},
                                {"pymdownx.highlight": {"guess_lang": False}}],
        "validation": {"links": {name: "warn" for name in (
            "not_found", "anchors", "absolute_links", "unrecognized_links")}},
        "nav": [{"Home": "README.md"}, {"Course": section("course")},
                {"A model's attention": EXPLAIN},
                {"Docs": section("docs")}, {"Code": REPOSITORY}],
    }


def dead_links(site: Path) -> list[str]:
    """Links and pictures of the built pages that lead to no file, and what would need a network."""
    lost: dict[str, None] = {}
    for page in sorted(site.rglob("*.html")):
        if page.name in ("404.html", EXPLAIN):
            continue
        text = page.read_text(encoding="utf-8")
        for kind, address in re.findall(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]+)"', text):
            file = unquote(address.partition("#")[0])
            away = re.match(r"(https?:)?//", address)
            if (away and kind != "a") or not (away or re.match(r"mailto:|#|data:", address)
                                              or (page.parent / file).exists()):
                lost[f"{page.relative_to(site).as_posix()}: {address}"] = None
    return [*lost]


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
