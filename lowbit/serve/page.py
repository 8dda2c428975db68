"""The page at /. It is one file that loads no other; its Content-Security-Policy permits only its own script and style."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers, which permit only the page's own script and style."""
    content = files("lowbit.serve").joinpath("page.html").read_bytes()
    hashes = {
        tag: base64.b64encode(hashlib.sha256(match[1]).digest()).decode()
        for tag in ("script", "style")
        if (match := re.search(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), content, re.DOTALL))
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return content, {**headers, "cache-control": "no-cache"}
