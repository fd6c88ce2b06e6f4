"""Texts that are made to keep a page busy: marks that never close, nest or multiply, by kinds and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

SIZES = (3000, 8000, 40_000)
# Pieces that are repeated up to a size.
REPEATED = {
    "blank lines": "\n",
    "quotes within quotes": ">",
    "lists within lists": "- ",
    "numbered lists within lists": "1. ",
    "quotes and lists": "> - ",
    "deep items": "- - - - - - - - - - - - - - - a\n",
    "loose items": "- a\n\n\n",
    "items": "1) a\n",
    "tasks": "- [ ] a\n",
    "headings": "# a\n\n###### b\n\n",
    "marks of a heading": "#",
    "rules": "* * *\n",
    "paragraphs": "a\n\n",
    "lines": "a\n",
    "one word": "a",
    "small tables": "|a|\n|-|\n",
    "open fences": "- ```\n",
    "code blocks": "```\na\n```\n",
    "coloured blocks": "```js\nlet a = 1\n```\n",
    "indented code": "    a\n\n",
    "backticks": "`a",
    "brackets": "[",
    "open links": "[a](",
    "links in links": "[[a](b)",
    "links": "[a](https://b.c) ",
    "pictures": "![",
    "pictures in pictures": "![a](",
    "addresses": "https://a.b/c ",
    "open addresses": "https://a@",
    "angles": "<a:",
    "emphasis": "*a",
    "mixed emphasis": "**a _b",
    "alternate emphasis": "_*",
    "struck": "~~a",
    "backslashes": "\\",
    "dollars": "$a",
    "double dollars": "$$a",
    "formulas": r"\(x_1^2\) ",
    "other formulas": "$x$ ",
    "displayed formulas": "$$\nx\n$$\n",
    "open formulas": "\\[\n",
    "open environments": "\\begin{align}\n",
    "escapes": "\\*",
    "entities": "&amp;",
    "markup": "<b>",
}


def repeated(piece: str, size: int) -> str:
    return (piece * (size // len(piece) + 1))[:size]


def around(before: str, after: str, size: int, inner: str = "x") -> str:
    count = size // (len(before) + len(after))
    return before * count + inner + after * count


# Texts that are made otherwise, by their size.
MADE: dict[str, Callable[[int], str]] = {
    "a wide table": lambda n: f"{'|a' * (n // 8)}|\n{'|-' * (n // 8)}|\n" + "|\n" * (n // 4),
    "a long table": lambda n: "| a | b |\n|---|---|\n" + repeated("| 1 | 2 |\n", n),
    "a heading and blanks": lambda n: "# a" + " " * n + "b",
    "a heading and lines": lambda n: "# a" + "\n" * n + "b",
    "emphasis in emphasis": lambda n: around("*a ", " a*", n),
    "links around links": lambda n: around("[", "](a)", n),
    "pictures around pictures": lambda n: around("![", "](a)", n),
    "fractions": lambda n: "$$" + around(r"\frac{", "}{2}", min(n, 2900)) + "$$",
    "roots": lambda n: "\\(" + around(r"\sqrt{", "}", min(n, 1900)) + r"\)",
    "a matrix": lambda n: r"\[\begin{matrix}" + repeated("x&", min(n, 2800)) + r"\end{matrix}\]",
    "macros": lambda n: "\\[\\def\\b{" + "x" * 200 + "}\\def\\a{\\b\\b\\b\\b}" + "\\a" * 80 + "\\]\n" * (n // 3000),
    "doubled macros": lambda n: r"$$\def\a#1{#1#1}" + r"\a{" * 15 + "x" * 20 + "}" * 15 + "$$",
    "many formulas": lambda n: " ".join(rf"\(x_{{{number}}}\)" for number in range(n // 12)),
    "code": lambda n: "```\n" + repeated("let a = 1\n", n),
    "one word of Java": lambda n: "```java\n" + repeated("$", min(n, 19_000)) + "\n```",
    "words of C#": lambda n: "```csharp\n" + repeated("public ", min(n, 19_000)) + "\n```",
    "numbers of code": lambda n: "```js\n" + repeated("1 ", min(n, 19_000)) + "\n```",
    "deeper and deeper": lambda n: "\n".join(" " * (2 * (at % 60)) + "- a" for at in range(n // 60)),
    "growing backticks": lambda n: "".join("`" * at + "a" for at in range(1, int((2 * n) ** 0.5))),
    "everything": lambda n: repeated(
        "# a\n\n> - *b* [c](https://d.e) `f`\n\n|g|\n|-|\n\n$h$\n\n```py\ni = 1\n```\n", n
    ),
    "a formula in each cell": lambda n: "|a|b|\n|-|-|\n" + repeated("|$x$|$y$|\n", n),
    "pipes": lambda n: "|" * (n // 2) + "\n" + "|-" * (n // 4),
}


def hostile_texts() -> Iterator[tuple[str, str]]:
    """200 texts and what they are."""
    for size in SIZES:
        for name, piece in REPEATED.items():
            yield f"{name}, {size}", repeated(piece, size)
        for name, make in MADE.items():
            yield f"{name}, {size}", make(size)
