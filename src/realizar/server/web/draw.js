// Markdown's tree to DOM nodes. Text only ever becomes text nodes, and elements are those that are named here, so nothing
// that a model writes can become markup. Work is an iterator's, for `slices.js`.

import { colourCode } from "./colours.js";
import { drawFormula } from "./formula.js";
import { readInline } from "./markdown.js";
import { hasKatex } from "./tex.js";

export const MAX_NODES = 50_000; // of a text
const MAX_BLOCK_NODES = 6000;
const MAX_DEPTH = 12; // of marks within each other
const CONTAINERS = { bullet_list: "ul", ordered_list: "ol", blockquote: "blockquote", thead: "thead", tbody: "tbody" };
const MARKS = { em: "em", strong: "strong", s: "del" };

class TooMuch extends Error {}

/** What is drawn of one block: how many nodes of its own it has, and its parts, which stay where they do not change. */
class Part {
  constructor(type, head, node, parts = []) {
    Object.assign(this, { type, head, node, parts, holder: node, own: 1, key: null, isLacking: false });
  }
}

export const nodesOf = (part) => part.parts.reduce((sum, each) => sum + nodesOf(each), part.own);

/** Text as it is written. */
export function drawPlain(source, old) {
  const isOld = old?.type === "plain";
  const part = isOld ? old : new Part("plain", "", document.createElement("p"));
  if (part.key !== source) {
    part.node.className = "lines-kept";
    part.node.textContent = source;
    Object.assign(part, { key: source, own: 2 });
  }
  return part;
}

/**
 * A block as a part: the old one, changed or not, where that will do; its source as it is written where it is too much.
 * `ranks`: marks of the headings that enclose the place; `limit`: how many nodes it may have; `room()`: how many the text
 * may still get when code is coloured.
 */
export function* drawBlock({ source, item }, old, ranks, limit, room) {
  const context = { made: 0, limit: Math.min(limit, MAX_BLOCK_NODES), isLacking: false, ranks, room };
  try {
    return yield* drawItem(item, old, context);
  } catch (error) {
    if (!(error instanceof TooMuch || error instanceof RangeError)) {
      throw error;
    }
    const part = drawPlain(source, null);
    part.key = keyOf(item);
    return part;
  }
}

function headOf({ type, token, name = "" }) {
  return [type, name, token.markup, token.info, JSON.stringify(token.attrs), token.hidden].join("\n");
}

function keyOf(item) {
  item.key ??= [headOf(item), item.token.content, ...item.children.map(keyOf)].join("\u0001");
  return item.key;
}

function* drawItem(item, old, context) {
  const { type } = item;
  if (type === "heading") {
    item.name = headingName(item.token.markup.length, context.ranks);
  }
  const key = keyOf(item);
  if (old?.key === key && !(old.isLacking && hasKatex())) {
    count(context, nodesOf(old));
    context.isLacking ||= old.isLacking;
    return old;
  }
  const before = [context.made, context.isLacking];
  context.isLacking = false;
  let part = null;
  if (type in CONTAINERS || type === "table") {
    part = yield* drawContainer(item, old, context);
  } else if (type === "fence" || type === "code_block") {
    part = drawCode(item, old, context);
  } else {
    part = new Part(type, headOf(item), yield* drawLeaf(item, context));
    part.own = context.made - before[0];
  }
  part.key = key;
  part.isLacking = context.isLacking;
  context.isLacking ||= before[1];
  yield context.made - before[0];
  return part;
}

/** The element of a heading: a message's own is h2, and no rank below it is left out, as screen readers want it. */
function headingName(marks, ranks) {
  while (ranks.at(-1) >= marks) {
    ranks.pop();
  }
  ranks.push(marks);
  return `h${Math.min(ranks.length + 2, 6)}`;
}

function count(context, nodes) {
  context.made += nodes;
  if (context.made > context.limit) {
    throw new TooMuch();
  }
}

function make(context, kind, className = "") {
  count(context, 1);
  const node = document.createElement(kind);
  if (className) {
    node.className = className;
  }
  return node;
}

function addText(context, parent, text) {
  if (parent.lastChild?.nodeType === Node.TEXT_NODE) {
    parent.lastChild.appendData(text);
  } else if (text) {
    count(context, 1);
    parent.append(text);
  }
}

function* drawContainer(item, old, context) {
  const head = headOf(item);
  const part = old?.type === item.type && old.head === head ? old : container(item, head);
  count(context, part.own);
  const inner = { ...context, ranks: [] };
  for (const [index, child] of item.children.entries()) {
    const before = part.parts[index];
    const now = yield* drawItem(child, before, inner);
    if (now !== before) {
      part.parts[index] = now;
      if (before) {
        before.node.replaceWith(now.node);
      } else {
        part.holder.append(now.node);
      }
    }
  }
  Object.assign(context, { made: inner.made, isLacking: inner.isLacking });
  part.parts.splice(item.children.length).forEach(({ node }) => node.remove());
  return part;
}

function container({ type, token }, head) {
  if (type === "table") {
    const part = new Part(type, head, document.createElement("div"));
    Object.assign(part.node, { className: "table", tabIndex: 0 });
    part.holder = document.createElement("table");
    part.node.append(part.holder);
    part.own = 2;
    return part;
  }
  const part = new Part(type, head, document.createElement(CONTAINERS[type]));
  const start = token.attrGet("start");
  if (start !== null) {
    part.node.start = start;
  }
  return part;
}

/** Code that only grew keeps its colours until the new ones are there. */
function drawCode(item, old, context) {
  const head = headOf(item);
  const content = item.token.content.replace(/\n$/, "");
  const language = item.token.info.trim().split(/\s+/)[0];
  const isGrown = old?.head === head && content.startsWith(old.content);
  const part = isGrown ? old : codePart(item.type, head, language);
  const more = isGrown ? content.slice(old.content.length) : content;
  const { lastChild } = part.code;
  if (more && lastChild?.nodeType === Node.TEXT_NODE) {
    lastChild.appendData(more);
  } else if (more) {
    part.code.append(more);
    part.own += 1;
  }
  part.content = content;
  count(context, part.own);
  colourCode(part.code, language, (nodes) => {
    const fits = nodes - part.own <= context.room();
    part.own = fits ? nodes + 10 : part.own;
    return fits;
  });
  return part;
}

function codePart(type, head, language) {
  const part = new Part(type, head, document.createElement("figure"));
  part.node.className = "code";
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "text";
  const copy = document.createElement("button");
  Object.assign(copy, { type: "button", className: "copy-code", textContent: "Copy" });
  caption.append(name, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  part.code = document.createElement("code");
  pre.append(part.code);
  part.node.append(caption, pre);
  part.own = 8;
  return part;
}

function* drawLeaf(item, context) {
  const { type, token, children } = item;
  if (type === "hr") {
    return make(context, "hr");
  }
  if (type === "formula") {
    return formulaNode(token.meta, context);
  }
  if (type === "plain") {
    const node = make(context, "p", "lines-kept");
    addText(context, node, token.content);
    return node;
  }
  if (type === "list_item") {
    return yield* drawListItem(children, context);
  }
  if (type === "tr") {
    const row = make(context, "tr");
    for (const { type: kind, token: { attrs }, children: [inner] } of children) {
      const cell = make(context, kind, /center|right/.exec(attrs?.[0][1])?.[0]);
      row.append(cell);
      yield* fill(cell, inner.token.content, context);
    }
    return row;
  }
  const node = make(context, item.name ?? "p");
  yield* fill(node, children[0].token.content, context);
  return node;
}

function* drawListItem(children, context) {
  const node = make(context, "li");
  const [first] = children;
  const content = first?.type === "paragraph" ? first.children[0].token.content : "";
  const task = /^\[([ xX])\]\s+/.exec(content);
  if (task) {
    node.className = "task";
    const box = make(context, "input");
    Object.assign(box, { type: "checkbox", disabled: true, checked: task[1] !== " " });
    box.setAttribute("aria-label", task[1] !== " " ? "Done" : "To do");
    node.append(box);
    first.children[0].token.content = content.slice(task[0].length);
  }
  const inner = { ...context, ranks: [] };
  for (const child of children) {
    if (child.type === "paragraph" && child.token.hidden) {
      yield* fill(node, child.children[0].token.content, inner);
    } else {
      node.append((yield* drawItem(child, null, inner)).node);
    }
  }
  Object.assign(context, { made: inner.made, isLacking: inner.isLacking });
  return node;
}

/** Draws text with marks into an element. */
function* fill(parent, content, context) {
  for (const { length, items } of readInline(content)) {
    yield 1 + Math.ceil(length / 4);
    yield* addInline(parent, items, context, 0);
  }
}

function* addInline(parent, items, context, depth) {
  for (const item of items) {
    const { type, token, children } = item;
    if (type === "text" || type === "text_special") {
      addText(context, parent, token.content);
    } else if (type === "softbreak" || type === "hardbreak") {
      parent.append(make(context, "br"));
    } else if (type === "code_inline") {
      const code = make(context, "code");
      addText(context, code, token.content);
      parent.append(code);
    } else if (type === "formula") {
      const before = context.made;
      parent.append(formulaNode(token.meta, context));
      yield 100 + context.made - before;
    } else if (type === "image") {
      const shown = parent.closest("a") ? parent : link(context, token.attrGet("src"));
      addText(context, shown, token.content || token.attrGet("src"));
      parent.append(...(shown === parent ? [] : [shown]));
    } else {
      const node = depth < MAX_DEPTH ? marked(type, token, context) : null;
      if (node) {
        parent.append(node);
      }
      yield* addInline(node ?? parent, children, context, depth + 1);
    }
  }
}

function marked(type, token, context) {
  return type === "link" ? link(context, token.attrGet("href")) : make(context, MARKS[type]);
}

function link(context, address) {
  const node = make(context, "a");
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

/** A formula as the browser draws it, or as it was written where it can't be, or not yet. */
function formulaNode(formula, context) {
  let node = hasKatex() ? drawFormula(formula) : null;
  context.isLacking ||= !hasKatex();
  if (node) {
    count(context, 2 * node.querySelectorAll("*").length + 1);
  } else {
    node = make(context, "code", "tex"); // whatever is wrong with it: its source is never lost
    addText(context, node, formula.raw);
  }
  if (!formula.display) {
    return node;
  }
  const holder = make(context, "span", "formula");
  holder.append(node);
  return holder;
}
