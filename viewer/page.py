"""The page of explain.py: a document (document.py) -> one HTML file that needs nothing else.

page.html has the text, page.css the style, and page*.js, one file for each part, draw and animate.
The document is embedded as a block of JSON, which no browser runs, and the script inserts all of it
as text, never as HTML. A content security policy lets only this script run, and nothing be loaded:
any prompt is safe.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from viewer.document import Document

HERE = Path(__file__).parent
PARTS = ("common", "maps", "board", "tiles", "caches", "costs", "ring")  # page_*.js, then page.js


def render(document: Document) -> str:
    """The page as text, to be written as UTF-8."""
    css = (HERE / "page.css").read_text(encoding="utf-8")
    scripts = [*(f"page_{part}.js" for part in PARTS), "page.js"]
    js = "\n".join((HERE / name).read_text(encoding="utf-8") for name in scripts)
    # ASCII, so U+2028 is an escape; and no "<", which could end the script block or open a comment.
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(" ".join(document["about"]["prompt"].split())[:80]),
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(css)}; "
        f"script-src {_hash(js)}; base-uri 'none'; form-action 'none'",
        "css": css,
        "document": data,
        "js": js,
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    # In one pass: an inserted text may contain another placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def _hash(text: str) -> str:
    """How a content security policy names the one inline script or style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
