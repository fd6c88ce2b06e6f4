"""The chat page's files: what they are served with, and what they must not hold."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

import realizar.server.web
from realizar.server.web import web_routes
from scripted_api import ScriptedApi

FOLDER = Path(realizar.server.web.__file__).parent


def test_files_are_served_safely(api: ScriptedApi) -> None:
    types = {"/": "text/html", "/static/app.js": "text/javascript", "/static/style.css": "text/css"}
    types |= {"/static/icon.svg": "image/svg+xml", "/static/theme.js": "text/javascript"}
    with httpx.Client(base_url=api.url) as client:
        for path, kind in types.items():
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"].split("; ")
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe" not in str(policy)
            again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("../__init__.py", "__init__.py", "%2e%2e/app.py", "..%2fapp.py", "nothing.js", "", "/etc/passwd"):
            assert client.get(f"/static/{path}").status_code == 404
        assert client.post("/").status_code == 405


def test_every_route_is_one_path() -> None:
    """The server leaves these paths open to everyone, so none may hold a pattern."""
    paths = [route.path for route in web_routes()]
    assert "/" in paths
    assert [path for path in paths if not re.fullmatch(r"/|/static/(?:[a-z]+|vendor/[a-z-]+\.min)\.[a-z]+", path)] == []


def test_nothing_is_remote_and_no_markup_is_made_of_text() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".css", ".html", ".svg"):
            text = (
                path.read_text()
                .replace("http://www.w3.org/2000/svg", "")
                .replace("http://www.w3.org/1998/Math/MathML", "")
            )
            assert "://" not in text.replace(r"https?:\/\/", ""), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=", text), path
