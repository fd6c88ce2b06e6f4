// Text that grows in its place: blocks that did not change keep their nodes, and what the reader selected in them.

import { drawBlock, drawPlain, MAX_NODES, nodesOf } from "./draw.js";
import { hasMarkdown, loadMarkdown, readBlocks } from "./markdown.js";
import { tellDrawn, work } from "./slices.js";
import { loadKatex } from "./tex.js";

const RESERVE = 1000; // nodes for the text behind those that are drawn
const MAX_PLAIN = 100_000; // characters of a block of it
const START = { count: 0, at: 0, ranks: [] };

export class Growing {
  /** `onEnd()` is called whenever the text is shown whole. */
  constructor(node, onEnd = () => {}) {
    Object.assign(this, { node, onEnd });
    this.text = "";
    this.parts = []; // of blocks, in their order
    this.settled = START; // where blocks begin that may still change, and what is before them
    this.settledText = "";
    this.isDrawing = false;
  }

  /** Shows a text, as much of it at once as `slices.js` has it. */
  show(text) {
    const clean = text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd");
    if (clean !== this.text) {
      this.text = clean;
      this.draw();
    }
  }

  draw() {
    this.isStale = true;
    if (!this.isDrawing) {
      this.isDrawing = true;
      if (hasMarkdown()) {
        work(this.passes());
      } else {
        loadMarkdown().then(() => {
          work(this.passes());
          tellDrawn();
        });
      }
    }
  }

  *passes() {
    while (this.isStale) {
      this.isStale = false;
      yield* this.pass(this.text);
    }
    this.isDrawing = false;
    this.onEnd();
    if (this.parts.some(({ isLacking }) => isLacking)) {
      loadKatex().then((isThere) => isThere && this.drawLacking());
    }
  }

  drawLacking() {
    if (this.parts.some(({ isLacking }) => isLacking)) {
      this.settled = START;
      this.settledText = "";
      this.draw();
    }
  }

  *pass(text) {
    if (!text.startsWith(this.settledText)) {
      this.settled = START;
    }
    let { count, at } = this.settled;
    const ranks = [...this.settled.ranks];
    let room = this.room(count);
    while (at < text.length) {
      const isPlain = !hasMarkdown() || room < 0;
      const found = isPlain ? plainBlocks(text, at) : readBlocks(text, at);
      yield Math.ceil(found.read / 25) + found.blocks.length;
      let place = 0;
      for (const block of found.blocks) {
        yield* this.place(count, block, ranks, room);
        room -= nodesOf(this.parts[count]);
        count += 1;
        place += block.length;
        if (place === found.settled) {
          this.settle(text, count, at + place, ranks);
        }
      }
      if (found.isEnd) {
        break;
      }
      if (!found.blocks.length) {
        this.settle(text, count, at + found.settled, ranks);
      }
      at += found.settled;
    }
    this.parts.splice(count).forEach(({ node }) => node.remove());
  }

  settle(text, count, at, ranks) {
    this.settled = { count, at, ranks: [...ranks] };
    this.settledText = text.slice(0, at);
  }

  /** How many nodes may still be made behind so many blocks. */
  room(count = this.parts.length) {
    return MAX_NODES - RESERVE - this.parts.slice(0, count).reduce((sum, part) => sum + nodesOf(part), 0);
  }

  /** Puts a block in its place, in what is there of it already. */
  *place(index, block, ranks, room) {
    const old = this.parts[index];
    const part = block.item ? yield* drawBlock(block, old, ranks, room, () => this.room()) : drawPlain(block.source, old);
    if (part !== old) {
      old?.node.remove();
      this.parts[index] = part;
    }
    if (this.node.childNodes[index] !== part.node) {
      this.node.insertBefore(part.node, this.node.childNodes[index] ?? null);
    }
    yield 1;
  }
}

/** Text as it is written, where no markdown is read. */
function plainBlocks(text, at) {
  const source = text.slice(at, at + MAX_PLAIN);
  const isEnd = at + source.length === text.length;
  return { blocks: [{ source, length: source.length }], settled: isEnd ? 0 : source.length, isEnd, read: source.length };
}
