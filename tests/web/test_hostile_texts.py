"""Whatever a text is, the page reads and draws it in small steps and makes few nodes of it."""

from __future__ import annotations

from typing import Any

import pytest

from scripted_api import ScriptedApi
from web.hostile_texts import hostile_texts
from web.page_driver import load_renderer

MAX_NODES = 50_000
MAX_READ = 20_000
MAX_STEP = 4000  # elements that are made without a break: a formula's are the most

# What is done for a text, step by step: the elements that each step makes, the nodes of all, and what was read of it.
DRAW = """async text => {
  const { Growing } = await import('/static/growing.js');
  const { readBlocks } = await import('/static/markdown.js');
  const growing = new Growing(document.createElement('div'));
  Object.assign(growing, { text, isStale: true });
  let most = 0;
  window.made = 0;
  for (const _ of growing.passes()) {
    most = Math.max(most, made);
    made = 0;
  }
  const walker = document.createTreeWalker(growing.node);
  let nodes = 0;
  while (walker.nextNode()) nodes += 1;
  const reads = [];
  for (let at = 0, found; at < text.length && !found?.isEnd; at += found.settled) {
    found = readBlocks(text, at);
    reads.push(found.read);
  }
  return { most, nodes, shown: growing.node.textContent.length, read: Math.max(...reads),
    all: reads.reduce((a, b) => a + b) };
}"""
COUNT = """() => {
  window.made = 0;
  for (const name of ['createElement', 'createElementNS']) {
    const make = document[name].bind(document);
    document[name] = (...kind) => { window.made += 1; return make(...kind); };
  }
}"""


FIRST_WAIT_IS_SHORT = """() => {
  const { setTimeout } = window;
  let isFirst = true;
  window.setTimeout = (task, ms, ...rest) => {
    const isShort = isFirst && ms >= 1000;
    isFirst &&= !isShort;
    return setTimeout(task, isShort ? 50 : ms, ...rest);
  };
}"""


@pytest.fixture
def module(api: ScriptedApi, page: Any) -> Any:
    """The page, with `render(text)`, and with `made`, the number of elements that were made."""
    load_renderer(page, api.url)
    page.evaluate(COUNT)
    return page


def test_any_text_is_drawn_in_bounded_steps(module: Any) -> None:
    texts = list(hostile_texts())
    assert len(texts) > 200
    assert len({text for _, text in texts}) > 190
    for name, text in texts:
        done = module.evaluate(DRAW, text)
        assert done["nodes"] <= MAX_NODES, name
        assert done["most"] <= MAX_STEP, name
        assert done["read"] <= MAX_READ, name
        assert done["all"] <= 3 * len(text) + MAX_READ, name
        assert done["shown"] > 0 or not text.strip("-> *\n"), name


def test_a_text_of_too_many_nodes_ends_as_it_is_written(module: Any) -> None:
    text = "*a*\n\n" * 40_000 + "the *end*"
    done = module.evaluate(DRAW, text)
    assert 40_000 < done["nodes"] <= MAX_NODES
    last = module.evaluate("async text => (await render(text)).lastChild.textContent", text)
    assert last.startswith("*a*\n\n")
    assert last.endswith("the *end*")
    code = "```\n" + "a\n" * 100_000 + "```\n*b*"
    assert module.evaluate("async text => (await render(text)).querySelector('code').textContent.length", code) == (
        200_000 - 1
    ), "code is not cut"


def test_a_large_table_is_shown_as_written(module: Any) -> None:
    wide = f"{'|a' * 100}|\n{'|-' * 100}|\n" + "|\n" * 100 + "\n*b*"
    shown = module.evaluate(
        "async text => { const node = await render(text); return [node.querySelector('table'), node.innerText,"
        " node.querySelector('em').textContent]; }",
        wide,
    )
    assert shown == [None, wide.replace("\n\n*b*", "b"), "b"]


def test_a_stream_redraws_what_changed(module: Any) -> None:
    """How much is made for a piece does not grow with the text, and rows and items that are whole stay."""
    made, kept = module.evaluate(
        """async () => {
          const { Growing } = await import('/static/growing.js');
          const { idle } = await import('/static/slices.js');
          const growing = new Growing(document.createElement('div'));
          const pieces = [];
          for (let at = 0; at < 100; at += 1) pieces.push(`A *word* ${at}.\\n\\n`);
          for (let at = 0; at < 100; at += 1) pieces.push(`- an *item* ${at}\\n`);
          pieces.push('\\n|a|b|\\n|-|-|\\n');
          for (let at = 0; at < 100; at += 1) pieces.push(`|*${at}*|b|\\n`);
          let [text, most, kept] = ['', 0, []];
          for (const piece of pieces) {
            made = 0;
            text += piece;
            growing.show(text);
            await idle();
            most = Math.max(most, made);
            const [first, item, row] = ['p', 'li', 'td'].map(kind => growing.node.querySelector(kind));
            kept.push([first, item, row]);
          }
          return [most, [0, 1, 2].map(kind => new Set(kept.map(each => each[kind]).filter(Boolean)).size)];
        }"""
    )
    assert made <= 12
    assert kept == [1, 1, 1]


def test_code_that_takes_too_long_stays_plain(module: Any) -> None:
    """The worker that colours it is ended, and the next one colours what comes then.

    It gets a fortieth of the seconds that a fast machine needs for it.
    """
    module.evaluate(FIRST_WAIT_IS_SHORT)
    hostile = "```java\n" + "$" * 19_000 + "\n```"
    module.evaluate(
        "async texts => { for (const text of texts) document.body.append(await render(text)); }",
        [hostile, "```java\nint a;\n```", "```js\nlet a\n```"],
    )
    module.wait_for_function("() => document.querySelector('.hljs-keyword')")
    shown = module.evaluate("[...document.querySelectorAll('pre > code')].map(code => code.innerHTML)")
    assert shown == ["$" * 19_000, "int a;", '<span class="hljs-keyword">let</span> a']
