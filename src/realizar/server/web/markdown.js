// Markdown's grammar, by markdown-it, which is fetched with the first answer: text to a tree of what is in it. Its rules
// may take time that grows with the square of a text's length, so they are given short pieces alone.

import { addFormulaRules } from "./formula.js";

const MAX_WINDOW = 20_000; // characters that are cut into blocks at a time
const MAX_LINES = 500;
const MAX_PIECE = 2000; // characters whose marks are looked for at a time
const MAX_CELLS = 5000; // of a table
const MAX_LEVEL = 12; // of elements within each other; a list and its item are two
const TABLE_RULE = /^[ \t]*[|:-][|: \t-]*$/;
const LOOK_BACK = 2; // lines at the end of a text that may still become something else
let parser = null;
let loading = null;

/** Fetches markdown-it once; an attempt that failed is made again. Resolves to whether markdown can be read. */
export function loadMarkdown() {
  loading ??= import("./vendor/markdown-it.min.js").then(
    ({ default: MarkdownIt }) => {
      parser = configured(new MarkdownIt({ linkify: true, breaks: true, maxNesting: MAX_LEVEL + 8 }));
      return true;
    },
    () => {
      loading = null;
      return false;
    },
  );
  return loading;
}

/** True if markdown can be read at once. */
export const hasMarkdown = () => parser !== null;

function configured(markdown) {
  markdown.disable(["reference", "lheading", "html_block", "html_inline", "entity"]); // text that is none of ours stays
  markdown.validateLink = (address) => /^(?:https?:\/\/|mailto:)/i.test(address);
  markdown.inline.State = class extends markdown.inline.State {
    /** Marks of emphasis open before and close after whatever is not blank: languages without blanks need it. */
    scanDelims(start, isInWord) {
      const found = super.scanDelims(start, isInWord);
      if (isInWord) {
        found.can_open = /\S/.test(this.src[start + found.length] ?? "");
        found.can_close = start > 0 && /\S/.test(this.src[start - 1]);
      }
      return found;
    }
  };
  const { ruler } = markdown.block;
  ruler.before("table", "too_deep", (state, start, end, silent) =>
    state.level >= MAX_LEVEL && !silent && takePlain(state, start, end));
  ruler.before("table", "too_large_table", tooLargeTable, { alt: ["paragraph"] });
  addFormulaRules(markdown);
  return markdown;
}

/** Lines as they are written. */
function takePlain(state, start, end) {
  const token = state.push("plain", "", 0);
  token.content = state.getLines(start, end, state.blkIndent, false);
  token.map = [start, end];
  state.line = end;
  return true;
}

function tooLargeTable(state, start, end, silent) {
  const rule = start + 1 < end ? state.src.slice(state.bMarks[start + 1], state.eMarks[start + 1]) : "";
  if (!TABLE_RULE.test(rule)) {
    return false;
  }
  const columns = rule.split("|").length;
  let last = start + 2;
  while (last < end && !state.isEmpty(last)) {
    last += 1;
  }
  if (columns * (last - start) <= MAX_CELLS || !state.src.slice(state.bMarks[start], state.eMarks[start]).includes("|")) {
    return false;
  }
  return silent || takePlain(state, start, last);
}

/**
 * Blocks at a place of a text: `{blocks: [{source, item, length}], settled, isEnd, read}`. A block's length is that up to the
 * next one; `settled` is that of the blocks that stay as they are whatever comes behind the text; `isEnd` says that there are
 * no more, `read` how many characters were read: so few that the work is bounded.
 */
export function readBlocks(text, at) {
  const window = cutWindow(text, at);
  const isEnd = at + window.length === text.length;
  const lines = window.split("\n");
  const starts = [0];
  lines.forEach((line) => starts.push(starts.at(-1) + line.length + 1));
  const [tokens, env] = [[], { unclosed: lines.length }];
  parser.block.parse(window, parser, env, tokens);
  const found = nested(tokens);
  const blocks = found.map((item, index) => {
    const [first, end] = item.token.map;
    const until = starts[found[index + 1]?.token.map[0] ?? lines.length];
    const begin = index ? starts[first] : 0;
    return { source: lines.slice(first, end).join("\n"), item, length: Math.min(until, window.length) - begin, end };
  });
  const limit = Math.min(lines.length - LOOK_BACK, env.unclosed);
  const open = blocks.findIndex(({ end }) => end > limit);
  const read = window.length;
  const kept = Math.max((open < 0 ? blocks.length : open) - 1, 0); // an open one may still join the block before it
  if (isEnd) {
    return { blocks, settled: total(blocks.slice(0, kept)), isEnd, read };
  }
  if (kept > 0) {
    return { blocks: blocks.slice(0, kept), settled: total(blocks.slice(0, kept)), isEnd, read };
  }
  blocks.length = Math.min(blocks.length, 1); // a block that is longer than what is read at a time ends there
  lengthenCode(blocks[0], text, at, window.length);
  const size = blocks[0]?.length ?? window.length;
  const isLast = at + size >= text.length;
  return { blocks, settled: isLast ? 0 : size, isEnd: isLast, read };
}

const total = (blocks) => blocks.reduce((sum, { length }) => sum + length, 0);

function cutWindow(text, at) {
  let end = at;
  for (let count = 0; count < MAX_LINES && end < text.length; count += 1) {
    const next = text.indexOf("\n", end) + 1 || text.length;
    if (next - at > MAX_WINDOW) {
      return text.slice(at, end > at ? end : at + MAX_WINDOW);
    }
    end = next;
  }
  return text.slice(at, end);
}

/** Code is not cut, however long it is. */
function lengthenCode(block, text, at, length) {
  if (block?.item.type !== "fence") {
    return;
  }
  const { token } = block.item;
  const begin = text.indexOf("\n", at + text.slice(at, at + length).search(/\S/)) + 1 || text.length;
  const closing = new RegExp(`^ {0,3}${token.markup[0]}{${token.markup.length},}[ \\t]*$`, "gm");
  closing.lastIndex = begin;
  const close = closing.exec(text);
  const end = close ? close.index : text.length;
  token.content = text.slice(begin, end);
  block.length = (close ? Math.min(closing.lastIndex + 1, text.length) : text.length) - at;
  block.source = text.slice(at, at + block.length);
}

/** What is within a block's lines, as `nested` gives it, piece by piece. */
export function* readInline(content) {
  for (let at = 0; at < content.length;) {
    const part = content.slice(at, at + MAX_PIECE);
    const isLast = at + part.length >= content.length;
    const cut = isLast ? 0 : Math.max(part.lastIndexOf("\n"), part.lastIndexOf(" "));
    const piece = cut > 0 ? part.slice(0, cut + 1) : part;
    const tokens = [];
    parser.inline.parse(piece, parser, {}, tokens);
    yield { length: piece.length, items: nested(tokens) };
    at += piece.length;
  }
}

/** Tokens that open and close as a tree of `{type, token, children}`. */
function nested(tokens) {
  const levels = [[]];
  for (const token of tokens) {
    if (token.nesting < 0) {
      levels.pop();
      continue;
    }
    const item = { type: token.type.replace(/_open$/, ""), token, children: [] };
    levels.at(-1).push(item);
    if (token.nesting > 0) {
      levels.push(item.children);
    }
  }
  return levels[0];
}
