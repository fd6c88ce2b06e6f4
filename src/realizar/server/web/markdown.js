// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing that a model writes can become markup.

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
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = readBlock(lines, at, depth);
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

function readBlock(lines, at, depth) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match) {
    return readFence(lines, at, match[1], match[2]);
  }
  match = HEADING.exec(line);
  if (match) {
    const [, marks, title] = match;
    return [at + 1, () => filled(`h${Math.min(marks.length + 2, 6)}`, title)];
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
  pre.append(inner);
  figure.append(caption, pre);
  return figure;
}

function readQuote(lines, at, depth) {
  let end = at;
  const inner = [];
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !startsBlock(lines[end]))) {
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
    } else if (/^ {2,}/.test(lines[end].slice(indent.length)) || !(startsBlock(lines[end]) || !lines[end - 1].trim())) {
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
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) {
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return [end, () => filled("p", text)];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function filled(kind, text) {
  const node = document.createElement(kind);
  node.append(...inline(text));
  return node;
}

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

/** Text with marks for emphasis, code and links, as nodes. */
function inline(text, depth = 0) {
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

/** What starts at a place if it is more than a character: a node, or text, and where it ends. */
function special(text, at, unclosed, depth) {
  const char = text[at];
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

/** Where a mark closes that was opened before `from`: not after white space, not inside code; -1 for nowhere. */
function closing(text, from, mark, inWord) {
  let at = from;
  while (at < text.length) {
    if (text[at] === "`") {
      const match = sticky(CODE, text, at);
      at += match ? match[0].length : 1;
    } else if (text[at] === "\\") {
      at += 2;
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
