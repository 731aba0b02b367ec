"""A plan as one HTML file, to look at and to hand on: nothing in it is loaded from elsewhere.

The data of the page (`page_data`) is embedded as JSON, and the page's own script, which its
Content-Security-Policy names by hash, draws it.  Texts of a plan are never markup: they are only
ever set as text.
"""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from pdcompile.report.page.compose import page_data

__all__ = ["html", "page_data"]

SCRIPTS = ("parts.js", "timeline.js", "charts.js", "page.js")


def html(data: dict[str, Any]) -> str:
    """The whole document."""
    colours = "".join(f"--{name}:{fill};" for name, fill in data["colours"].items())
    style = f":root{{{colours}}}\n{_asset('page.css')}"
    script = '"use strict";\n' + "\n".join(map(_asset, SCRIPTS))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = escape(data["title"])
    said = "".join(
        f"<p>{escape(text)}</p>" for text in (data["subtitle"], data["limits"], data["certificate"])
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main id="main"><noscript><h1>{title}</h1>{said}'
        "<p>The drawings need JavaScript.</p></noscript></main>\n"
        f'<script type="application/json" id="report">{embedded(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def embedded(data: dict[str, Any]) -> str:
    """The data as JSON in which nothing ends or begins an element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
