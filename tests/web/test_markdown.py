"""Markdown on the page: what it becomes, that nothing in it is markup or is lost, and that growing it is the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scripted_api import ScriptedApi, words
from web.page_driver import load_renderer

ATTACKS = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1>",
    "[a](javascript:window.hit=1)",
    "[a](JaVaScRiPt:window.hit=1)",
    "[a](data:text/html,<script>window.hit=1</script>)",
    "![a](javascript:window.hit=1)",
    "<javascript:window.hit=1>",
    '[a](https://x.y/"onmouseover="window.hit=1)',
    "```<img src=x onerror=window.hit=1>\ncode\n```",
    "| <img src=x onerror=window.hit=1> |\n|---|\n| <script>window.hit=1</script> |",
    "> - **<iframe srcdoc='<script>parent.hit=1</script>'></iframe>**",
    "`<b>`<style>*{display:none}</style>",
    "&lt;img src=x onerror=window.hit=1&gt;",
)
SHARDS = (
    *(
        "word ",
        "Ünit",
        "\n",
        "\n\n",
        "- ",
        "* ",
        "1. ",
        "2) ",
        "  ",
        "    ",
        "> ",
        "# ",
        "### ",
        "```",
        "```py\n",
        "`",
        "``",
    ),
    *("*", "**", "***", "***\n", "_", "__", "~~", "[a](https://x.y)", "[b](", "](", "|", "|--|", "|---|:-:|\n", "---"),
    *("\\", "\\*", "<b>", "https://z.w/q_r_", "- [x] ", "![i](https://x.y/z)", "<https://u.v>", ":", "(", ")", "\t"),
    *("$", "$$", "$$\n", "\\(", "\\)", "\\[", "\\[\n", "\\]", "$x^2$", "\\frac{", "}", "\\begin{align}", "\\\\", "&"),
)


@pytest.fixture
def module(api: ScriptedApi, page: Any) -> Any:
    """The page, with `render(text)` that makes an element."""
    load_renderer(page, api.url)
    return page


RENDERED = {
    "a *b* **c** ~~e~~": "<p>a <em>b</em> <strong>c</strong> <del>e</del></p>",
    "***d***": "<p><em><strong>d</strong></em></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "*open **and": "<p>*open **and</p>",
    "`a*b*` ``c`d``": "<p><code>a*b*</code> <code>c`d</code></p>",
    "# One\n## Two": "<h3>One</h3><h4>Two</h4>",
    "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "**「d」**e": "<p><strong>「d」</strong>e</p>",
    "a\n---": "<p>a</p><hr>",
    '[a](b "c") ![d](https://e.f/)': '<p>[a](b "c") <a href="https://e.f/" target="_blank" '
    'rel="noopener noreferrer nofollow">d</a></p>',
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "\\*a\\* \\<": "<p>*a* &lt;</p>",
    "<b>&amp;</b>": "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>",
}


def test_what_becomes_of_it(module: Any) -> None:
    shown = module.evaluate(
        "texts => Promise.all(texts.map(async text => (await render(text)).innerHTML))", list(RENDERED)
    )
    assert dict(zip(RENDERED, shown, strict=True)) == RENDERED
    code_in_item = "1. a\n   ```\n   x\n     y\n   ```\n2. b"
    assert (
        module.evaluate("async text => (await render(text)).querySelector('ol > li pre').textContent", code_in_item)
        == "x\n  y"
    )


def test_links(module: Any) -> None:
    text = "[a *b*](https://x.y/(z)) see https://x.y/q_r_s. <https://u.v/> [m](mailto:a@b.c) [no](file:///etc) https://"
    links = module.evaluate(
        "async text => [...(await render(text)).querySelectorAll('a')].map(a => [a.href, a.textContent, a.rel])", text
    )
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["https://x.y/(z)", "a b", rel],
        ["https://x.y/q_r_s", "https://x.y/q_r_s", rel],
        ["https://u.v/", "https://u.v/", rel],
        ["mailto:a@b.c", "m", rel],
    ]


def test_tables_and_code(module: Any) -> None:
    text = "| a | b |\n|:--|--:|\n| `x` | 1 \\| 2 |\n| only |\n\n```python title\nif a < b:\n    pass\n```\n~~~\nopen"
    found = module.evaluate(
        "async text => { const all = await render(text); return ["
        "[...all.querySelectorAll('tr')].map(row => [...row.cells].map(cell => cell.textContent)),"
        "[...all.querySelectorAll('td')].map(cell => cell.className),"
        "[...all.querySelectorAll('figure')].map(node => "
        "[node.querySelector('span').textContent, node.querySelector('code').textContent])]; }",
        text,
    )
    assert found == [
        [["a", "b"], ["x", "1 | 2"], ["only", ""]],
        ["", "right", "", "right"],
        [["python", "if a < b:\n    pass"], ["text", "open"]],
    ]


COLOURED = {
    "python": ("def f(x):\n    return 'a<b>' # no", {"def": "hljs-keyword", "'a<b>'": "hljs-string"}),
    "json": ('{"a": 1}', {'"a"': "hljs-attr", "1": "hljs-number"}),
    "sh": ("echo $HOME", {"echo": "hljs-built_in", "$HOME": "hljs-variable"}),
    "constructor": ("def f", {}),
    "": ("def f", {}),
}


def test_code_is_coloured(module: Any) -> None:
    """Its text stays the same to the letter, and only spans are made. The last one is coloured last."""
    long = ("python", "x = 1\n" * 5000, {})
    texts = [
        long,
        *((language, *rest) for language, rest in COLOURED.items()),
        ("js", "let a", {"let": "hljs-keyword"}),
    ]
    module.evaluate(
        "async texts => { for (const text of texts) document.body.append(await render(text)); }",
        [f"```{language}\n{code}\n```" for language, code, _ in texts],
    )
    module.wait_for_function("() => [...document.querySelectorAll('pre')].at(-1).querySelector('.hljs-keyword')")
    for (_, code, expected), (text, names, spans) in zip(
        texts,
        module.evaluate(
            """[...document.querySelectorAll('pre > code')].map(code => {
            const all = [...code.querySelectorAll('*')];
            return [code.textContent, all.map(node => node.localName),
              Object.fromEntries(all.map(node => [node.textContent, node.className]))]; })"""
        ),
        strict=True,
    ):
        assert text == code
        assert set(names) <= {"span"}
        assert {each: spans.get(each) for each in expected} == expected
        assert bool(spans) == bool(expected)


def test_attacks_are_inert(api: ScriptedApi, page: Any) -> None:
    """Attacks come from the model, from the user, and from storage."""
    attack = "\n\n".join(ATTACKS)
    api.script = lambda body: words(attack)
    page.goto(api.url)
    page.fill("#prompt", attack)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".assistant[aria-busy=false] .stats:has-text('tokens')")
    for _ in range(2):
        kinds = page.evaluate("[...new Set([...document.querySelectorAll('#log .body *')].map(node => node.nodeName))]")
        assert not {"SCRIPT", "IMG", "SVG", "svg", "IFRAME", "STYLE", "OBJECT", "B"} & set(kinds), kinds
        hrefs = page.evaluate("[...document.querySelectorAll('#log a')].map(a => a.protocol)")
        assert set(hrefs) <= {"https:"}
        names = page.evaluate("[...document.querySelectorAll('#log *')].flatMap(node => node.getAttributeNames())")
        assert [name for name in names if name.startswith("on")] == []
        page.evaluate("document.querySelectorAll('#log a').forEach(a => a.dispatchEvent(new MouseEvent('mouseover')))")
        assert page.evaluate("window.hit") is None
        assert "window.hit = 1</script>" in page.locator(".assistant .body").inner_text()
        page.reload()
        page.wait_for_selector(".assistant")


def test_nothing_is_lost_and_growing_is_the_same(module: Any) -> None:
    """Words all come out, in their order; and an answer shown piece by piece ends as one shown at once."""
    rng = random.Random(3)
    texts = ["".join(rng.choices(SHARDS, k=rng.randint(1, 40))) for _ in range(400)]
    texts += [">" * 3000, "- " * 2000, "[" * 3000, "*a " * 2000, "`" * 2001, "**" * 1500 + "a", "|" * 2000 + "\n|-|"]
    found = module.evaluate(
        """async texts => {
          const { MessageView } = await import('/static/view.js');
          const { idle } = await import('/static/slices.js');
          const wrong = [];
          for (const text of texts) {
            const whole = await render(text);
            const count = node => (node.textContent.match(/word|Ünit/g) ?? []).join();
            const plain = text.replace(/```+[^\\n`]*/g, '');
            if (text.length < 1000) {
              const given = (plain.match(/word|Ünit/g) ?? []).length;
              const shown = (whole.textContent.match(/word|Ünit/g) ?? []).length;
              if (shown < given && !/\\|/.test(text)) wrong.push(['lost', text, whole.innerHTML]);
              const message = { role: 'assistant', content: '' };
              const view = new MessageView(message, {});
              for (let at = 0; at < text.length; at += 3) {
                message.content = text.slice(0, at + 3);
                view.update(true);
                await idle();
              }
              for (const code of [...whole.querySelectorAll('pre'), ...view.body.querySelectorAll('pre')]) {
                code.textContent = code.textContent; // its colours come when they come
              }
              if (view.body.innerHTML !== whole.innerHTML) wrong.push(['differs', text]);
            }
          }
          return wrong;
        }""",
        texts,
    )
    assert found == []
