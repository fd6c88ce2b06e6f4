// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing that a model writes can become markup.

import { colourCode } from "./colours.js";
import { formulaLines, formulaNode } from "./formula.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MAX_DEPTH = 12;

/**
 * Cuts text into blocks. A block that came out complete stays as it is when text is added behind it, so a growing
 * answer needs only its last blocks made anew.
 * @param {string} text
 * @returns {{source: string, make: () => Node}[]}
 */
export function parseBlocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  const ranks = []; // marks of the headings that enclose the place
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = readBlock(lines, at, depth, ranks);
    blocks.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return blocks;
}

/** All of a text as nodes. */
export function renderMarkdown(text, depth = 0) {
  const fragment = document.createDocumentFragment();
  for (const block of parseBlocks(text, depth)) {
    fragment.append(block.make());
  }
  return fragment;
}

function readBlock(lines, at, depth, ranks) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match) {
    return readFence(lines, at, match[1], match[2]);
  }
  match = HEADING.exec(line);
  if (match) {
    const [, marks, title] = match;
    const name = headingName(marks.length, ranks);
    return [at + 1, () => filled(name, title)];
  }
  const formula = formulaLines(lines, at);
  if (formula) {
    return [formula.end, () => formulaNode(formula)];
  }
  if (RULE.test(line)) {
    return [at + 1, () => document.createElement("hr")];
  }
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) {
      return readQuote(lines, at, depth);
    }
    if (ITEM.test(line)) {
      return readList(lines, at, depth);
    }
  }
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && TABLE_RULE.test(lines[at + 1])) {
    return readTable(lines, at);
  }
  return readParagraph(lines, at, depth);
}

/** The element of a heading: a message's own is h2, and no rank below it is left out, as screen readers want it. */
function headingName(marks, ranks) {
  while (ranks.at(-1) >= marks) {
    ranks.pop();
  }
  ranks.push(marks);
  return `h${Math.min(ranks.length + 2, 6)}`;
}

function readFence(lines, at, marks, language) {
  let end = at + 1;
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  while (end < lines.length && !closing.test(lines[end])) {
    end += 1;
  }
  const code = lines.slice(at + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), () => codeBlock(code, language)];
}

function codeBlock(code, language) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "text";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy-code";
  copy.textContent = "Copy";
  caption.append(name, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  const inner = document.createElement("code");
  inner.textContent = code;
  colourCode(inner, language);
  pre.append(inner);
  figure.append(caption, pre);
  return figure;
}

function readQuote(lines, at, depth) {
  let end = at;
  const inner = [];
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !startsBlock(lines, end))) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  const make = () => {
    const quote = document.createElement("blockquote");
    quote.append(renderMarkdown(inner.join("\n"), depth + 1));
    return quote;
  };
  return [end, make];
}

function readList(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    const isSibling = match && match[1].length <= indent.length + 1 && /\d/.test(match[2]) === ordered;
    if (isSibling && !RULE.test(lines[end])) {
      if (match[1].length < indent.length) {
        break;
      }
      items.push([match[3] ?? ""]);
    } else if (!lines[end].trim()) {
      const next = lines.slice(end).find((line) => line.trim());
      const isInside = next !== undefined && /^ {2,}/.test(next.slice(indent.length));
      if (!isInside && (next === undefined || !sameList(next, indent, ordered))) {
        break;
      }
      loose ||= sameList(next, indent, ordered);
      items.at(-1).push("");
    } else if (/^ {2,}/.test(lines[end].slice(indent.length)) || !(startsBlock(lines, end) || !lines[end - 1].trim())) {
      items.at(-1).push(lines[end]);
    } else {
      break;
    }
    end += 1;
  }
  const start = ordered ? Number.parseInt(marker, 10) : 1;
  return [end, () => list(items, ordered, start, loose, depth)];
}

function sameList(line, indent, ordered) {
  const match = ITEM.exec(line);
  return Boolean(match) && match[1].length === indent.length && /\d/.test(match[2]) === ordered;
}

function list(items, ordered, start, loose, depth) {
  const node = document.createElement(ordered ? "ol" : "ul");
  if (ordered && start !== 1) {
    node.start = start;
  }
  for (const [first, ...rest] of items) {
    const filledLines = rest.filter((line) => line.trim());
    const margin = filledLines.reduce((least, line) => Math.min(least, line.search(/\S/)), 99);
    const text = [first, ...rest.map((line) => line.slice(Math.min(margin, line.length)))].join("\n").trimEnd();
    const item = document.createElement("li");
    const task = /^\[([ xX])\]\s+/.exec(text);
    if (task) {
      item.className = "task";
      const box = document.createElement("input");
      box.type = "checkbox";
      box.disabled = true;
      box.checked = task[1] !== " ";
      box.setAttribute("aria-label", box.checked ? "Done" : "To do");
      item.append(box);
    }
    for (const block of parseBlocks(task ? text.slice(task[0].length) : text, depth + 1)) {
      const made = block.make();
      item.append(...(!loose && made.nodeName === "P" ? made.childNodes : [made]));
    }
    node.append(item);
  }
  return node;
}

function readTable(lines, at) {
  const aligns = cells(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "right" : "";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) {
    end += 1;
  }
  const rows = lines.slice(at + 2, end).map(cells);
  return [end, () => table(cells(lines[at]), aligns, rows)];
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(head, aligns, rows) {
  const holder = document.createElement("div");
  holder.className = "table";
  holder.tabIndex = 0;
  const node = document.createElement("table");
  const fill = (parent, kind, texts) => {
    const row = document.createElement("tr");
    head.forEach((_, column) => {
      const cell = filled(kind, texts[column] ?? "");
      if (aligns[column]) {
        cell.className = aligns[column];
      }
      row.append(cell);
    });
    parent.append(row);
  };
  fill(node.createTHead(), "th", head);
  const body = node.createTBody();
  rows.forEach((row) => fill(body, "td", row));
  holder.append(node);
  return holder;
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) {
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return [end, () => filled("p", text)];
}

function startsBlock(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line)) || formulaLines(lines, at) !== null;
}

function filled(kind, text) {
  const node = document.createElement(kind);
  node.append(...inline(text));
  return node;
}
