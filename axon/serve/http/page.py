"""The page at `/`, and the headers by which a browser runs its own script and nothing else."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple


class Page(NamedTuple):
    """HTML, and the headers that it is sent with."""

    html: str
    headers: dict[str, str]


def read_page() -> Page:
    """The page, its script and style named by their hashes: nothing else runs, loads or is sent to another host."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", html),
        "style-src": _hash_of("style", html),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html, headers)


def _hash_of(tag: str, html: str) -> str:
    """The one element of this tag, as a policy names what is in it."""
    (text,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
