// Where formulas begin and end in a text, and what is shown of them.

import { hasKatex, loadKatex, texToMath } from "./tex.js";

const MAX_LENGTH = 4000; // of a formula within a line of text
const ENDS = { "\\(": "\\)", "\\[": "\\]" };
const OPENING_LINE = /^ *(\$\$|\\\[|\\begin\{([a-zA-Z]+\*?)\})/;
const DISPLAYED = /^(?:align|alignat|equation|gather|multline|eqnarray|displaymath)\*?$/;
const MAX_KEPT = 300; // formulas that were drawn last
const kept = new Map(); // by their sources: an answer that grows makes its last block anew at each frame
const MONEY = /^[\d.,]+\s*(?:[kKmMbB]|million|billion)?\s+\p{L}{2,}/u;

/**
 * A formula that starts at a place of a text: `{source, raw, display, end}`, or null.
 * `$` is one only as pandoc and GitHub have it: nothing blank inside its marks, no word or digit right outside them.
 */
export function findFormula(text, at) {
  const open = text.startsWith("$$", at) ? "$$" : text[at] === "$" ? "$" : text.slice(at, at + 2);
  const close = ENDS[open] ?? open;
  if (open !== "$" && open !== "$$" && !ENDS[open]) {
    return null;
  }
  const start = at + open.length;
  const inner = text.slice(start, start + MAX_LENGTH);
  const length = open[0] === "$" ? unescaped(inner, close) : inner.indexOf(close);
  if (length <= 0) {
    return null;
  }
  const source = inner.slice(0, length);
  const end = start + length + close.length;
  if (!source.trim() || (open === "$" && !isFormula(source, text[at - 1], text[end]))) {
    return null;
  }
  return { source, raw: text.slice(at, end), display: open === "$$" || open === "\\[", end };
}

/** The place of closing dollar signs without a backslash before them; -1 if there are none. */
function unescaped(text, close) {
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") {
      at += 1;
    } else if (text.startsWith(close, at)) {
      return at;
    }
  }
  return -1;
}

function isFormula(source, before, after) {
  const isClosed = !/^\s|\s$|`|\n\s*\n/.test(source);
  return isClosed && !/[\w$\\]/.test(before ?? "") && !/[\w$]/.test(after ?? "") && !MONEY.test(source);
}

/** A displayed formula whose lines start at one: `{source, raw, display, end}` with the line after it, or null. */
export function formulaLines(lines, at) {
  const match = OPENING_LINE.exec(lines[at]);
  if (!match || (match[2] && !DISPLAYED.test(match[2]))) {
    return null;
  }
  const [, open, environment] = match;
  const close = environment ? `\\end{${environment}}` : ENDS[open] ?? open;
  const inner = [];
  let size = 0;
  for (let end = at; end < lines.length && size <= MAX_LENGTH; end += 1) {
    const line = end === at ? lines[at].slice(match[0].length) : lines[end];
    const found = line.indexOf(close);
    if (found < 0) {
      if (open === "$$" && end > at && !line.trim()) {
        return null; // a paragraph ends there
      }
      inner.push(line);
      size += line.length + 1;
      continue;
    }
    const source = [...inner, line.slice(0, found)].join("\n");
    if (!source.trim() || !/^\s*[.,;:]?\s*$/.test(line.slice(found + close.length))) {
      return null;
    }
    const whole = environment ? `${open}${source}${close}` : source;
    return { source: whole, raw: lines.slice(at, end + 1).join("\n"), display: true, end: end + 1 };
  }
  return null;
}

/**
 * A formula as the browser draws it, or as it was written where it can't be. The first one is written until what draws
 * it has come.
 */
export function formulaNode(formula) {
  let node = hasKatex() ? drawn(formula) : null;
  if (node === null) {
    const code = document.createElement("code"); // whatever is wrong with it: its source is never lost
    code.className = "tex";
    code.textContent = formula.raw;
    node = code;
    if (!hasKatex()) {
      loadKatex().then((isThere) => {
        code.replaceWith((isThere && drawn(formula)) || code);
        document.dispatchEvent(new Event("drawn")); // what is shown may have grown
      });
    }
  }
  if (!formula.display) {
    return node;
  }
  const holder = document.createElement("span");
  holder.className = "formula";
  holder.append(node);
  return holder;
}

function drawn({ source, raw, display }) {
  const key = `${display} ${source}`;
  let math = kept.get(key);
  if (math === undefined) {
    try {
      math = texToMath(source.trim(), display);
    } catch {
      math = null;
    }
    if (kept.size >= MAX_KEPT) {
      kept.clear();
    }
    kept.set(key, math);
  }
  const copy = math?.cloneNode(true) ?? null;
  if (copy) {
    copy.dataset.tex = raw;
  }
  return copy;
}

/** The text of what is selected, with formulas as they were written; null where none is among it. */
export function selectedSource(selection) {
  const holder = document.createElement("div");
  for (let index = 0; index < selection.rangeCount; index += 1) {
    holder.append(selection.getRangeAt(index).cloneContents());
  }
  const formulas = holder.querySelectorAll("math[data-tex]");
  if (!formulas.length) {
    return null;
  }
  formulas.forEach((math) => math.replaceWith(math.dataset.tex));
  holder.className = "visually-hidden lines-kept";
  document.body.append(holder); // only what is laid out has lines
  const text = holder.innerText;
  holder.remove();
  return text;
}
