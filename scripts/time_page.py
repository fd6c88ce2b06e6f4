"""How long the chat page does not react while it draws each of 200 hostile texts, and how many nodes it makes of them.

    python scripts/time_page.py [worst]

Prints the worst ones, by the longest task of the page's thread, layout included. Times are those of the processor, so
that a busy machine gives the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from realizar.server.web import web_routes
from scripted_api import ScriptedApi  # type: ignore[import-not-found]
from web.hostile_texts import hostile_texts  # type: ignore[import-not-found]
from web.page_driver import load_renderer  # type: ignore[import-not-found]

_SHOW = """async text => {
  const { Growing } = await import('/static/growing.js');
  const { idle } = await import('/static/slices.js');
  const frame = () => new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)));
  const node = document.createElement('div');
  node.className = 'body';
  document.getElementById('log').replaceChildren(node);
  new Growing(node).show(text);
  await idle();
  await frame();
  await frame();
  const walker = document.createTreeWalker(node);
  let nodes = 0;
  while (walker.nextNode()) nodes += 1;
  return nodes;
}"""


def measure(browser: Browser, page: Page, text: str) -> tuple[float, float, int]:
    """The longest task of the page's thread and all of them in ms of the processor, and the nodes that were made."""
    browser.start_tracing(page=page, categories=["toplevel", "__metadata"])
    nodes = page.evaluate(_SHOW, text)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {(e["pid"], e["tid"]) for e in events if e.get("args", {}).get("name") == "CrRendererMain"}
    spent = [e.get("tdur", 0) / 1000 for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in threads]
    return max(spent), sum(spent), nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worst", nargs="?", type=int, default=15, help="how many texts to print")
    count = parser.parse_args().worst
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with ScriptedApi(routes=web_routes()) as api, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        load_renderer(page, api.url)
        found = [(*measure(browser, page, text), name) for name, text in hostile_texts()]
    for longest, whole, nodes, name in sorted(found, reverse=True)[:count]:
        print(f"{longest:7.0f} ms at most, {whole:7.0f} ms in all, {nodes:6} nodes: {name}")
    print(f"{len(found)} texts; most nodes {max(nodes for _, _, nodes, _ in found)}")


if __name__ == "__main__":
    main()
