"""The libraries that the page has from npm are npm's files to the byte, have their licences, and are in the package."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import realizar.server.web

VENDOR = Path(realizar.server.web.__file__).parent / "vendor"
ROOT = Path(__file__).parents[2]
# Files by the package of npm that has them, its version, their place in it, and their SHA-256.
FILES = {
    ("markdown-it", "15.0.3"): {
        (
            "markdown-it.min.js",
            "dist/browser/markdown-it.esm.min.mjs",
        ): "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30",
        ("markdown-it.LICENSE", "LICENSE"): "792c48c5a849a15fdf9e37e8bcf9e6d1dd13b32b46c642a748a0a46a9919d473",
    },
    ("katex", "0.19.1"): {
        ("katex.min.js", "dist/katex.min.js"): "fa140498b8cfc8302cbe5e7cb1bdbc1f952bc38b3fa258ede09e73edbf9a74bc",
        ("katex.LICENSE", "LICENSE"): "766ccc1f306c885aa45542a9846bbd0a505b27a0374f146778171c2254ce18e3",
    },
    ("@highlightjs/cdn-assets", "11.12.0"): {
        ("highlight.min.js", "es/highlight.min.js"): "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
        ("highlight.LICENSE", "LICENSE"): "6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490",
    },
}


def test_files_are_those_of_npm() -> None:
    expected = {name: digest for files in FILES.values() for (name, _), digest in files.items()}
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()} == expected
    for package, version in FILES:
        name = package.split("/")[0].lstrip("@").removesuffix("js")
        assert f"{package} {version}" in (ROOT / "docs/architecture.md").read_text()
        assert version in (VENDOR / f"{name}.min.js").read_text()


def test_the_package_has_them_and_their_licences() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "server/web/vendor/*" in project["tool"]["setuptools"]["package-data"]["realizar"]
    assert project["project"]["license"] == "MIT AND BSD-3-Clause"
    found = {path for pattern in project["project"]["license-files"] for path in ROOT.glob(pattern)}
    assert {path for path in VENDOR.iterdir() if path.suffix == ".LICENSE"} < found
