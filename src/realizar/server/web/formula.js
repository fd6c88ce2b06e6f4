// Where formulas begin and end in a text, and what is shown of them.

import { texToMath } from "./tex.js";

const MAX_LENGTH = 3000; // of a formula with its marks
const ENDS = { "\\(": "\\)", "\\[": "\\]" };
const OPENING_LINE = /^(\$\$|\\\[|\\begin\{([a-zA-Z]+\*?)\})/;
const DISPLAYED = /^(?:align|alignat|equation|gather|multline|eqnarray|displaymath)\*?$/;
const MAX_KEPT = 300; // formulas that were drawn last
const kept = new Map(); // by their sources: an answer that grows makes its last block anew at each frame
const MONEY = /^[\d.,]+\s*(?:[kKmMbB]|million|billion)?\s+\p{L}{2,}/u;

/** Has a parser of markdown find formulas: tokens `formula` whose `meta` is `{source, raw, display}`. */
export function addFormulaRules(markdown) {
  markdown.block.ruler.before("code", "formula", formulaLines, { alt: ["paragraph", "blockquote", "list"] });
  markdown.inline.ruler.before("escape", "formula", (state, silent) => {
    const { src, pos } = state;
    const found = "$\\".includes(src[pos]) ? findFormula(src, pos) : null;
    if (found && found.end <= state.posMax) {
      if (!silent) {
        state.push("formula", "", 0).meta = found;
      }
      state.pos = found.end;
      return true;
    }
    if (src[pos] !== "\\" || !/[([\])]/.test(src[pos + 1] ?? "")) {
      return false;
    }
    if (!silent) {
      state.pending += src.slice(pos, pos + 2); // a formula's mark, whose other one is not there (yet)
    }
    state.pos += 2;
    return true;
  });
}

/**
 * A formula that starts at a place of a text: `{source, raw, display, end}`, or null.
 * `$` is one only as pandoc and GitHub have it: nothing blank inside its marks, no word or digit right outside them.
 */
function findFormula(text, at) {
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
  for (let at = text.search(/[\\$]/); at >= 0 && at < text.length; at += 1) {
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

/** A rule of blocks: a displayed formula whose lines start at one. Notes the first line that opens one without an end. */
function formulaLines(state, start, end, silent) {
  const { src, bMarks, tShift, eMarks } = state;
  const begin = bMarks[start] + tShift[start];
  const match = OPENING_LINE.exec(src.slice(begin, Math.min(eMarks[start], begin + 40)));
  if (!match || (match[2] && !DISPLAYED.test(match[2]))) {
    return false;
  }
  const [mark, open, environment] = match;
  const close = environment ? `\\end{${environment}}` : ENDS[open] ?? open;
  const from = begin + mark.length;
  const size = src.slice(from, from + MAX_LENGTH).indexOf(close);
  if (size < 0) {
    if (src.length - from < MAX_LENGTH) {
      state.env.unclosed = Math.min(state.env.unclosed, start);
    }
    return false;
  }
  const after = from + size + close.length;
  let last = start;
  while (last < end && eMarks[last] < after) {
    last += 1;
    if (open === "$$" && last < end && state.isEmpty(last)) {
      return false; // a paragraph ends there
    }
  }
  if (last >= end || !src.slice(from, from + size).trim() || !/^\s*[.,;:]?\s*$/.test(src.slice(after, eMarks[last]))) {
    return false;
  }
  if (!silent) {
    const raw = state.getLines(start, last + 1, state.blkIndent, false).trimEnd();
    const place = raw.indexOf(mark) + mark.length;
    const source = raw.slice(place, raw.indexOf(close, place));
    const token = state.push("formula", "", 0);
    token.map = [start, last + 1];
    token.content = raw;
    token.meta = { source: environment ? `${mark}${source}${close}` : source, raw, display: true };
    state.line = last + 1;
  }
  return true;
}

/** A formula as the browser draws it; null where that can't be done. */
export function drawFormula({ source, raw, display }) {
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
