"""Render a document as one HTML file, safe for any prompt: inserted as text, and the content
security policy allows only the page's own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from viewer.document import Document

SCRIPTS = ("page_common.js", "page_tiles.js", "page_maps.js")


def render(document: Document) -> str:
    """HTML, to be written as UTF-8."""
    css, template = _read("page.css"), _read("page.html")
    js = "\n".join(map(_read, SCRIPTS))
    # No "<": it could end the script block.
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(" ".join(document["about"]["prompt"].split())[:80]),
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(css)}; "
        f"script-src {_hash(js)}; base-uri 'none'; form-action 'none'",
        "css": css,
        "document": data,
        "js": js,
    }
    # In one pass: inserted text may contain a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
