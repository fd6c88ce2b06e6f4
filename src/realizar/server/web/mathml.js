// KaTeX's MathML as browsers draw it: they know the elements of MathML Core, so tables' columns and lines, alphabets and
// frames become classes and letters. Elements and attributes are made by name from this file alone.

import { inAlphabet } from "./alphabets.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(
  ("math mrow mi mn mo mtext mspace msub msup msubsup munder mover munderover mmultiscripts mprescripts mfrac msqrt mroot "
    + "mtable mtr mtd mstyle mpadded mphantom").split(" "),
);
const ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel fence form stretchy separator symmetric accent accentunder lspace rspace width "
    + "height depth voffset minsize maxsize linethickness mathcolor mathbackground mathsize movablelimits").split(" "),
);
const FRAMES = new Map(Object.entries({
  box: "boxed", top: "top", bottom: "bottom", left: "left", right: "right", horizontalstrike: "struck",
  updiagonalstrike: "struck-up", downdiagonalstrike: "struck-down",
}));
const TEXTS = new Map([["bold", "bold"], ["italic", "slanted"], ["bold-italic", "bold slanted"], ["monospace", "fixed"]]);

function element(name, children) {
  const node = document.createElementNS(MATHML, name);
  node.append(...children);
  return node;
}

/** A copy of an element of KaTeX's for this page. */
export function copyMath(source) {
  const name = source.localName;
  if (name === "semantics") {
    return copyMath(source.firstElementChild); // the rest of it is the formula's TeX
  }
  if (name === "menclose") {
    return framed(source);
  }
  const children = name === "mtable" ? rows(source) : lines([...source.childNodes]);
  const isWrapper = ["mi", "mn", "mo"].includes(name) && source.firstElementChild;
  const node = element(ELEMENTS.has(name) && !isWrapper ? name : "mrow", children);
  for (const { name: attribute, value } of source.attributes) {
    if (ATTRIBUTES.has(attribute)) {
      node.setAttribute(attribute, value);
    }
  }
  setLetters(node, source.getAttribute("mathvariant"));
  return node;
}

const copyNode = (node) => (node.nodeType === Node.ELEMENT_NODE ? copyMath(node) : node.textContent.normalize());

/** Alphabets: letters of a formula become those of Unicode, words keep theirs and get a class. */
function setLetters(node, variant) {
  if (node.localName === "mtext") {
    node.setAttribute("class", TEXTS.get(variant) ?? "");
  } else if (variant === "normal" && node.localName === "mi") {
    node.setAttribute("mathvariant", "normal");
  } else if (variant && ["mi", "mn", "mo"].includes(node.localName)) {
    node.textContent = inAlphabet(node.textContent, variant);
  } else if (node.textContent === "\u20d7") {
    node.textContent = "→"; // the combining arrow would be set beside its letter
    node.setAttribute("stretchy", "false");
  }
}

function framed(source) {
  const notations = (source.getAttribute("notation") ?? "").split(" ").map((each) => FRAMES.get(each)).filter(Boolean);
  const node = element("mrow", [...source.childNodes].map(copyNode));
  node.setAttribute("class", ["framed", ...notations].join(" "));
  return node;
}

/** Copies of nodes, or, where lines are broken among them, a table of these lines. */
function lines(nodes) {
  const broken = [[]];
  for (const node of nodes) {
    if (node.localName === "mspace" && node.getAttribute("linebreak") === "newline") {
      broken.push([]);
    } else {
      broken.at(-1).push(copyNode(node));
    }
  }
  if (broken.length === 1) {
    return broken[0];
  }
  return [element("mtable", broken.map((line) => element("mtr", [element("mtd", line)])))];
}

/** A table's rows, with classes for how its columns stand and where lines are drawn. */
function rows(table) {
  const list = (name) => (table.getAttribute(name) ?? "").split(" ");
  const [sides, bars, rules] = [list("columnalign"), list("columnlines"), list("rowlines")];
  const isAligned = list("columnspacing")[0] === "0em" && sides.length > 1;
  return [...table.children].map((row, line) => element("mtr", cellsOf(row).map((cell, column) => {
    const copy = copyMath(cell);
    const classes = [
      sides[column] ?? "",
      column && bars[column - 1] !== "none" && bars[column - 1] ? "ruled" : "",
      line && rules[line - 1] !== "none" && rules[line - 1] ? "ruled-above" : "",
      isAligned ? "aligned" : "",
    ];
    copy.setAttribute("class", classes.filter(Boolean).join(" "));
    return copy;
  })));
}

/** A row's cells, without the empty ones that KaTeX puts around those of an environment whose lines have numbers. */
const cellsOf = (row) =>
  [...row.children].filter(({ classList: names }) => !names.contains("mtr-glue") && !names.contains("mml-eqn-num"));
