// Markdown within a block: emphasis, code, links, formulas. Text only ever becomes text nodes.

import { findFormula, formulaNode } from "./formula.js";

const MAX_DEPTH = 12;
const CODE = /(`+)(?!`)([\s\S]*?[^`])\1(?!`)/y;
const LABEL = /\[((?:[^\[\]\\]|\\.){0,500})\]/.source;
const ADDRESS = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/.source;
const LINK = new RegExp(`!?${LABEL}${ADDRESS}`, "y");
const BARE_LINK = /<?(https?:\/\/[^\s<>"'`]+)>?/y;
const DELIMITERS = [
  ["***", "em", "strong"],
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Text with marks for emphasis, code, links and formulas, as nodes. */
export function inline(text, depth = 0) {
  const nodes = [];
  const unclosed = new Set();
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) {
      nodes.push(...withBreaks(plain));
      plain = "";
    }
  };
  while (at < text.length) {
    const found = special(text, at, unclosed, depth);
    if (found === null) {
      plain += text[at];
      at += 1;
    } else if (typeof found.node === "string") {
      plain += found.node;
      at = found.end;
    } else {
      flush();
      nodes.push(found.node);
      at = found.end;
    }
  }
  flush();
  return nodes;
}

/** The construct that starts at a place, if it is more than a character: a node or text, and its end. */
function special(text, at, unclosed, depth) {
  const char = text[at];
  const formula = char === "$" || char === "\\" ? findFormula(text, at) : null;
  if (formula) {
    return { node: formulaNode(formula), end: formula.end };
  }
  if (char === "\\" && /[([\])]/.test(text[at + 1] ?? "")) {
    return { node: text.slice(at, at + 2), end: at + 2 }; // a formula's mark, whose other one is not there (yet)
  }
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
    return { node: text[at + 1], end: at + 2 };
  }
  if (char === "`") {
    const match = sticky(CODE, text, at);
    if (match) {
      const node = document.createElement("code");
      node.textContent = match[2].replace(/^ (.*[^ ].*) $/s, "$1").replaceAll("\n", " ");
      return { node, end: at + match[0].length };
    }
    const run = /`+/y;
    run.lastIndex = at;
    return { node: run.exec(text)[0], end: run.lastIndex };
  }
  if (depth >= MAX_DEPTH) {
    return null;
  }
  if (char === "[" || (char === "!" && text[at + 1] === "[")) {
    const match = sticky(LINK, text, at);
    return match && { node: link(match[2], inline(match[1] || match[2], depth + 1)), end: at + match[0].length };
  }
  if ((char === "h" || char === "<") && !/\w/.test(text[at - 1] ?? "")) {
    const match = sticky(BARE_LINK, text, at);
    if (match) {
      const address = match[1].replace(/[.,;:!?)\]]+$/, "");
      const closed = match[0] === `<${match[1]}>`;
      const shown = closed ? match[1] : address;
      const start = match[0].startsWith("<") && !closed ? 1 : 0;
      return start ? null : { node: link(shown, [shown]), end: at + (closed ? match[0].length : shown.length) };
    }
  }
  return "*_~".includes(char) ? emphasis(text, at, unclosed, depth) : null;
}

function emphasis(text, at, unclosed, depth) {
  for (const [mark, ...kinds] of DELIMITERS) {
    if (!text.startsWith(mark, at) || unclosed.has(mark) || /\s|^$/.test(text[at + mark.length] ?? "")) {
      continue;
    }
    const inWord = mark[0] === "_";
    if (inWord && /\w/.test(text[at - 1] ?? "")) {
      continue;
    }
    const end = closing(text, at + mark.length, mark, inWord);
    if (end < 0) {
      unclosed.add(mark);
      continue;
    }
    let children = inline(text.slice(at + mark.length, end), depth + 1);
    for (const kind of kinds) {
      const node = document.createElement(kind);
      node.append(...children);
      children = [node];
    }
    return { node: children[0], end: end + mark.length };
  }
  return null;
}

/** The place where a mark opened before `from` closes, outside code and not after white space; -1 if it does not. */
function closing(text, from, mark, inWord) {
  let at = from;
  while (at < text.length) {
    if (text[at] === "`") {
      const match = sticky(CODE, text, at);
      at += match ? match[0].length : 1;
    } else if (text[at] === "\\" || text[at] === "$") {
      at = findFormula(text, at)?.end ?? at + (text[at] === "$" ? 1 : 2);
    } else if (text.startsWith(mark, at)) {
      let size = 0;
      while (text[at + size] === mark[0]) {
        size += 1;
      }
      const fits = size === mark.length || (size === 3 && mark.length < 3);
      if (fits && at > from && !/\s/.test(text[at - 1]) && !(inWord && /\w/.test(text[at + size] ?? ""))) {
        return at + size - mark.length;
      }
      at += size;
    } else {
      at += 1;
    }
  }
  return -1;
}

/** A link to the web or to mail; anything else stays text. */
function link(address, children) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) {
    const node = document.createElement("span");
    node.append(...children);
    return node;
  }
  const node = document.createElement("a");
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  node.append(...children);
  return node;
}

function withBreaks(text) {
  return text.split("\n").flatMap((line, number) => (number ? [document.createElement("br"), line] : [line]));
}

function sticky(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}
