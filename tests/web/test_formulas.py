"""Formulas on the page: what they become, what is none, and that nothing in them is markup or is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from realizar.server.web import web_routes
from scripted_api import ScriptedApi, words
from waits import HANG_S
from web.page_driver import ask, finished, load_renderer, until

# Formulas without attributes, without styles, and without rows of one element.
PLAIN = """sources => Promise.all(sources.map(async source => {
  const math = (await render('\\\\(' + source + '\\\\)')).querySelector('math');
  math?.querySelectorAll('*').forEach(node => {
    node.getAttributeNames().forEach(name => node.removeAttribute(name));
    const isRow = ['mrow', 'mstyle'].includes(node.localName);
    if (isRow && (node.childNodes.length < 2 || node.parentNode === math)) node.replaceWith(...node.childNodes);
  });
  return math?.innerHTML;
}))"""
# MathML by hand.
DRAWN = {
    r"x_1^2": "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>",
    r"\frac{1}{2a}": "<mfrac><mn>1</mn><mrow><mn>2</mn><mi>a</mi></mrow></mfrac>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"f''": "<msup><mi>f</mi><mrow><mo>′</mo><mo>′</mo></mrow></msup>",
    r"\alpha\leq\Omega": "<mi>α</mi><mo>≤</mo><mi>Ω</mi>",
    r"\mathbb{R}\mathbf{x}": "<mi>ℝ</mi><mi>𝐱</mi>",
    r"\boldsymbol{\alpha\Gamma}": "<mi>𝜶</mi><mi>𝚪</mi>",
    r"\text{a b\%}": "<mtext>a&nbsp;b%</mtext>",
    r"\text{if $x$}": "<mtext>if&nbsp;</mtext><mi>x</mi>",
    r"\operatorname{rank}A": "<mi>rank</mi><mo>\u2061</mo><mi>A</mi>",
    r"\not=": "<mo>≠</mo>",
    r"\left(x\right)": "<mo>(</mo><mi>x</mi><mo>)</mo>",
    r"a\\b": "<mtable><mtr><mtd><mi>a</mi></mtd></mtr><mtr><mtd><mi>b</mi></mtd></mtr></mtable>",
    r"\begin{cases}1&x\\0\end{cases}": "<mo>{</mo><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mi>x</mi></mtd></mtr>"
    "<mtr><mtd><mn>0</mn></mtd></mtr></mtable>",
    r"50% {-1}": "<mn>50</mn><mi>%</mi><mo>−</mo><mn>1</mn>",
    r"\hat{x}": "<mover><mi>x</mi><mo>^</mo></mover>",
    r"\int_0^1": "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>",
    r"\mathfrak{gZ}\mathcal{L}\mathtt{7}\vec v": "<mi>𝔤</mi><mi>ℨ</mi><mi>ℒ</mi><mn>𝟽</mn>"
    "<mover><mi>v</mi><mo>→</mo></mover>",
    r"\cancel{x}\boxed{\mbox{y}}": "<mi>x</mi><mtext>y</mtext>",
    r"\begin{array}{c|r}1\\\hline 2\end{array}\label{a}": "<mtable>"
    "<mtr><mtd><mn>1</mn></mtd></mtr><mtr><mtd><mn>2</mn></mtd></mtr></mtable>",
    r"\xrightarrow{f}\lesssim\color{red}z": "<mover>"
    "<mo>→</mo><mpadded><mi>f</mi></mpadded></mover><mo>≲</mo><mi>z</mi>",
    r"\begin{aligned}a\tag*{A}\end{aligned}": "<mtable><mtr><mtd><mrow><mi>a</mi><mspace>"
    "</mspace><mtext>A</mtext></mrow></mtd></mtr></mtable>",
    r"\sum_i": "<msub><mo>∑</mo><mi>i</mi></msub>",
}
CLASSES = ["formula", "right", "center ruled", "right ruled-above", "center ruled ruled-above", "framed struck-up"]
FORMULAS = {
    r"a \(x\) b": [r"\(x\)"],
    r"a \[x\] b": [r"\[x\]"],
    "a $x$, $y$.": ["$x$", "$y$"],
    "$$\nx\n= y\n$$": ["$$\nx\n= y\n$$"],
    "so\n\\[\n\nx\n+ y\n\\]\nthen": ["\\[\n\nx\n+ y\n\\]"],
    "1. a\n   \\[\n   + x\n   \\]\n2. b": ["\\[\n+ x\n\\]"],
    "\\begin{eqnarray*}\na &=& b\n\\end{eqnarray*}": ["\\begin{eqnarray*}\na &=& b\n\\end{eqnarray*}"],
    "\\begin{multline}\na\\\\ b\n\\end{multline}": ["\\begin{multline}\na\\\\ b\n\\end{multline}"],
    "\\begin{align}\na &= b\n\\end{align}": ["\\begin{align}\na &= b\n\\end{align}"],
    r"**\(a*b*c\)** and *$a*b$*": [r"\(a*b*c\)", "$a*b$"],
    r"| $x^2$ |" + "\n|---|\n" + r"| \(y\) |": ["$x^2$", r"\(y\)"],
    "It costs $5, or $6 each, 7$ and US$8 more": [],
    "From $20 and up to 30$ then": [],
    "set $HOME and $PATH, or $HOME/$USER": [],
    r"\$x\$ and `$x$` and `\(x\)`": [],
    "$ x$ and $x $ and $$ and $": [],
    "```\n\\[x\\]\n$x$\n```": [],
}
AS_WRITTEN = (
    r"\(\foo{x}\)",
    r"\(\frac{1}\)",
    r"\(x^1^2\)",
    r"\(\begin{pmatrix}1\)",
    r"\(\left(x\)",
    r"\({x\)",
    r"\(x}\)",
    r"\(\href{javascript:window.hit=1}{x}\)",
    r"\(\constructor \__proto__\)",
    r"\(\begin{constructor}x\end{constructor}\)",
    r"\(\mathbb\)",
    r"\(" + "{" * 100 + "}" * 100 + r"\)",
    r"\(" + r"\sqrt" * 300 + r"x\)",
    r"\(" + r"\frac1" * 300 + r"x\)",
    r"\(\text{\foo}\)",
    r"$#$",
)
ATTACKS = (
    r"\(<img src=x onerror=window.hit=1>\)",
    r"\(\text{<script>window.hit=1</script>}\)",
    r"\(\operatorname{a}\mathrm{<b>}\)",
    r'\[\begin{array}{l" onclick="window.hit=1}x\end{array}\]',
    r"$\text{<svg onload=window.hit=1>}$",
    r"\(\style{color:red}{x}\unicode{60}\)",
)


@pytest.fixture(scope="module")
def module(browser: Any) -> Iterator[Any]:
    """The page, with `render(text)` that gives an element."""
    context = browser.new_context()
    page = context.new_page()
    with ScriptedApi(routes=web_routes()) as api:
        load_renderer(page, api.url)
        yield page
        context.close()


def test_what_is_drawn(module: Any) -> None:
    shown = module.evaluate(
        PLAIN,
        list(DRAWN),
    )
    assert dict(zip(DRAWN, shown, strict=True)) == DRAWN
    classes = module.evaluate(
        "async source =>"
        " [...(await render(source)).querySelectorAll('[class]')].map(node => node.getAttribute('class'))",
        r"$$\begin{array}{r|c}1&2\\\hline 3&\cancel{4}\end{array}$$",
    )
    assert [each for each in classes if "math" not in each] == CLASSES, "lines, sides and strokes are classes"
    stacked = module.evaluate("async () => (await render('$$\\\\sum_i^n$$')).querySelector('munderover') !== null")
    numbered = module.evaluate(
        "async source => (await render(source)).textContent", r"$$\begin{align}a&=b\tag{1}\\c\end{align}$$"
    )
    assert numbered.replace("\xa0", " ").split() == ["a=b(1)c"]
    assert stacked, "a displayed sum has its limits above and below"


def test_where_formulas_are(module: Any) -> None:
    """Each is known by its own source, marks and backslashes included."""
    found = module.evaluate(
        "texts => Promise.all(texts.map(async text =>"
        " [...(await render(text)).querySelectorAll('math')].map(math => math.dataset.tex)))",
        list(FORMULAS),
    )
    assert dict(zip(FORMULAS, found, strict=True)) == FORMULAS


def test_what_is_not_known_stays_as_it_is_written(module: Any) -> None:
    texts = [*AS_WRITTEN, r"open \(x and \[y"]
    shown = module.evaluate("texts => Promise.all(texts.map(async text => (await render(text)).textContent))", texts)
    assert shown == texts
    drawn = module.evaluate(
        "texts => Promise.all(texts.map(async text => (await render(text)).querySelector('math')))", texts
    )
    assert drawn == [None] * len(texts)


def test_formulas_hold_no_markup(module: Any) -> None:
    texts = list(ATTACKS)
    names = module.evaluate(
        """async texts => {
          const all = document.getElementById('log');
          all.append(...await Promise.all(texts.map(render)));
          const nodes = [...all.querySelectorAll('*')];
          return [nodes.map(node => node.localName), nodes.flatMap(node => node.getAttributeNames())];
        }""",
        texts,
    )
    known = {"div", "p", "code", "span", "math", "mrow", "mi", "mo", "mn", "mtext", "mspace", "mtable", "mtr", "mtd"}
    assert set(names[0]) <= known
    assert [name for name in names[1] if name.startswith("on") or name in ("href", "style", "src")] == []
    assert module.evaluate("window.hit") is None


def test_a_long_one_ends(module: Any) -> None:
    """Hostile lengths: each of these would take hours if work grew faster than about the square of the length."""
    doubled = r"\def\a{xx}" + r"\edef\a{\a\a}" * 40 + r"\a"
    long = [
        *("\\(" * 5000, "$" * 5001, "$a" * 5000, "\\[\n" * 3000, "$$\nx\n" * 3000 + "$", "\\(" + "{" * 3000 + "\\)"),
        *(rf"\({doubled}\)", r"\(" + r"\frac{" * 400 + "1" + "}{2}" * 400 + r"\)"),
    ]
    shown = module.evaluate(
        "texts => Promise.all(texts.map(async text => (await render(text)).textContent.length > 100))", long
    )
    assert shown == [True] * len(long)


def test_a_formula_is_written_until_it_can_be_drawn(api: ScriptedApi, page: Any) -> None:
    """KaTeX is fetched with the first formula, and not before; where it does not come, formulas stay as written."""
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url) if "katex" in request.url else None)
    page.route("**/vendor/katex*", lambda route: route.abort())
    api.script = lambda body: words(r"So \(x^2\)." if len(api.requests) > 1 else "Hello")
    page.goto(api.url)
    ask(page, "Hi")
    finished(page)
    assert fetched == []
    ask(page, "More")
    assert finished(page, 2).locator(".body").inner_text() == r"So \(x^2\)."
    page.unroute("**/vendor/katex*")
    ask(page, "Again")
    finished(page, 3)
    page.wait_for_selector(".message:last-child math msup")
    assert set(fetched) == {f"{api.url}/static/vendor/katex.min.js"}


def test_copies_have_their_backslashes(api: ScriptedApi, browser: Any) -> None:
    text = "Thus \\(\\frac{a}{b}\\) holds:\n\n\\[\nx = \\{1\\}\n\\]\n\nDone, $5."
    api.script = lambda body: words(text)
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(1000 * HANG_S)
    page = context.new_page()
    page.goto(api.url)
    ask(page, "Hi")
    answer = finished(page)
    page.wait_for_function("() => document.querySelectorAll('.assistant math').length === 2")
    copied = "() => navigator.clipboard.readText()"
    answer.locator("[aria-label=Copy]").click()
    until(lambda: page.evaluate(copied) == text)
    page.evaluate("navigator.clipboard.writeText('nothing')")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.assistant .body'))")
    page.keyboard.press("Control+C")
    until(lambda: page.evaluate(copied) != "nothing")
    lines = [line for line in page.evaluate(copied).splitlines() if line.strip()]
    assert lines == ["Thus \\(\\frac{a}{b}\\) holds:", "\\[", "x = \\{1\\}", "\\]", "Done, $5."]
    ask(page, "More")
    finished(page, 2)
    assert api.requests[1]["messages"][1]["content"] == text
    context.close()
