// TeX's formulas as MathML, which browsers draw by themselves. What is not known here is refused, and shown as written.
// Elements are made by name from this file alone, and what a model wrote only ever becomes their text.

import {
  ACCENTS, BIG, FENCES, FUNCTIONS, inAlphabet, INTEGRALS, isAlphabet, LETTERS, LIMITS, OPERATORS, SPACES, UPRIGHT, WIDE,
} from "./symbols.js";
import { element, fence, row, space, TexError, withScripts } from "./mathml.js";
import { COMMANDS } from "./texcommands.js";
import { makeTable } from "./textable.js";

const MAX_DEPTH = 80; // of groups and of what stands in them
const MAX_LENGTH = 10_000;
const TOKEN = /\\(?:(?:operatorname|tag|hspace)\*|[a-zA-Z]+|[^])|\d+(?:[.,]\d+)*|\s+|[^]/gu;
const PLAIN = new Map([["-", "−"], ["*", "∗"], ["'", "′"], ["`", "‘"]]);
const OPENING = "([{⟨⌊⌈";
const CLOSING = ")]}⟩⌋⌉";
const BIG_SIZES = { big: "1.2em", Big: "1.8em", bigg: "2.4em", Bigg: "3em" };

/**
 * A `math` element for TeX's source.
 * @throws {TexError} for what it does not know, or what is not well formed.
 */
export function texToMath(source, display) {
  if (source.length > MAX_LENGTH) {
    throw new TexError("too long");
  }
  return element("math", [new Parser(source, display).whole()], display ? { display: "block" } : {});
}

class Parser {
  constructor(source, display) {
    this.tokens = source.match(TOKEN) ?? [];
    this.at = 0;
    this.display = display;
    this.depth = 0;
  }

  peek() {
    this.skipSpace();
    return this.tokens[this.at] ?? null;
  }

  skipSpace() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) {
      this.at += 1;
    }
  }

  next() {
    const token = this.peek();
    if (token === null) {
      throw new TexError("it ends too early");
    }
    this.at += 1;
    return token;
  }

  expect(token) {
    if (this.next() !== token) {
      throw new TexError(`${token} is missing`);
    }
  }

  /** Takes a token if it comes next, and returns true then. */
  takes(token) {
    if (this.peek() !== token) {
      return false;
    }
    this.at += 1;
    return true;
  }

  /** Parses with less room for displayed forms, as inside a fraction. */
  inline(work) {
    const before = this.display;
    this.display = false;
    const found = work();
    this.display = before;
    return found;
  }

  /** All of a source, as one node. */
  whole() {
    const found = this.lines();
    if (this.peek() !== null) {
      throw new TexError(`unexpected ${this.peek()}`);
    }
    return found;
  }

  /** A formula within words of this one. */
  within(source) {
    const parser = new Parser(source, false);
    parser.depth = this.depth + 1;
    return parser.whole();
  }

  /** All of a formula; where it has lines (`\\`) of its own, they stand below each other. */
  lines() {
    const rows = this.rows();
    return rows.length === 1 && rows[0].length === 1 ? row(rows[0][0]) : makeTable("aligned", rows);
  }

  /** Rows of cells of atoms up to an end, which is left there. */
  rows() {
    const rows = [[this.atoms()]];
    for (;;) {
      if (this.takes("&")) {
        rows.at(-1).push(this.atoms());
      } else if (this.takes("\\\\") || this.takes("\\cr") || this.takes("\\newline")) {
        this.bracketed(); // extra height: not drawn
        rows.push([this.atoms()]);
      } else {
        break;
      }
    }
    const last = rows.at(-1);
    if (rows.length > 1 && last.length === 1 && !last[0].length) {
      rows.pop(); // the last line was ended too
    }
    return rows;
  }

  /** Atoms up to what ends a group, a cell or a line. */
  atoms() {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) {
      throw new TexError("too deep");
    }
    const found = [];
    for (let token = this.peek(); token !== null && !this.ends(token); token = this.peek()) {
      const node = this.scripted(found);
      if (node) {
        found.push(node);
      }
    }
    this.depth -= 1;
    return found;
  }

  ends(token) {
    return ["}", "&", "\\\\", "\\cr", "\\newline", "\\end", "\\right", "\\middle"].includes(token)
      || (token === "]" && this.inBrackets);
  }

  /** An atom with what stands above and below it. `before`: the atoms before it. */
  scripted(before) {
    const token = this.peek();
    const base = token === "^" || token === "_" ? element("mrow") : this.atom(before);
    let limits = base?.limits ?? "side";
    const scripts = {};
    const primes = [];
    for (;;) {
      if (this.takes("'")) {
        primes.push("′");
      } else if (this.takes("\\limits")) {
        limits = "stacked";
      } else if (this.takes("\\nolimits")) {
        limits = "side";
      } else if (this.peek() === "^" || this.peek() === "_") {
        const kind = this.next();
        if (scripts[kind]) {
          throw new TexError(`two ${kind}`);
        }
        scripts[kind] = this.inline(() => this.argument());
      } else {
        break;
      }
    }
    if (primes.length) {
      const marks = element("mo", [primes.join("")], { lspace: "0", rspace: "0" });
      scripts["^"] = scripts["^"] ? element("mrow", [marks, scripts["^"]]) : marks;
    }
    const isStacked = limits === "stacked" || (limits === "display" && this.display);
    const node = withScripts(base, scripts["_"], scripts["^"], isStacked);
    return base?.isFunction ? this.applied(node, before) : node;
  }

  /** A function's name with the room that it needs beside what it is applied to. */
  applied(node, before) {
    const after = this.peek();
    const nodes = [node];
    if (before.length && !/^(mo|mspace)$/.test(before.at(-1).localName)) {
      nodes.unshift(space("0.1667em"));
    }
    if (after !== null && !this.ends(after) && !/^([([^_,.;)]|\\left|\\big|\\Big)/.test(after)) {
      nodes.push(space("0.1667em"));
    }
    return row(nodes);
  }

  /** The contents of braces, or the next atom. */
  argument() {
    if (this.peek() === "{") {
      return this.group();
    }
    const token = this.peek();
    if (token === null || this.ends(token) || token === "^" || token === "_") {
      throw new TexError("something is missing");
    }
    if (/^\d/.test(token)) { // \frac12 takes one digit
      this.tokens.splice(this.at, 1, ...token);
    }
    return this.atom([]) ?? element("mrow");
  }

  group() {
    this.expect("{");
    const brackets = this.inBrackets;
    this.inBrackets = false;
    const atoms = this.atoms();
    this.inBrackets = brackets;
    this.expect("}");
    return row(atoms);
  }

  /** The contents of brackets, if they come next; null otherwise. */
  bracketed() {
    if (!this.takes("[")) {
      return null;
    }
    const brackets = this.inBrackets;
    this.inBrackets = true;
    const atoms = this.atoms();
    this.inBrackets = brackets;
    this.expect("]");
    return row(atoms);
  }

  /** The text in braces as it is written, such as a name. */
  word() {
    this.expect("{");
    let text = "";
    for (let open = 1; ; ) {
      const token = this.tokens[this.at];
      this.at += 1;
      if (token === undefined) {
        throw new TexError("a brace is missing");
      }
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!open) {
        return text;
      }
      text += token;
    }
  }

  atom(before) {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) {
      throw new TexError("too deep"); // browsers' layout has its limits too
    }
    const node = this.unbounded(before);
    this.depth -= 1;
    return node;
  }

  unbounded(before) {
    const token = this.next();
    if (token === "{") {
      this.at -= 1;
      return this.group();
    }
    if (token.startsWith("\\")) {
      return this.command(token.slice(1), before);
    }
    if (/^\d/.test(token)) {
      return element("mn", [token]);
    }
    if (token === "~") {
      return space("0.3333em");
    }
    if (/[$#]/.test(token)) {
      throw new TexError(`unexpected ${token}`);
    }
    if (/^[a-zA-Z]$/.test(token) || /^\p{L}$/u.test(token)) {
      return element("mi", [token]);
    }
    return this.sign(PLAIN.get(token) ?? token, before);
  }

  /** An operator; one that has nothing before it is a sign of what follows. */
  sign(char, before) {
    if (OPENING.includes(char) || CLOSING.includes(char) || char === "|" || char === "‖") {
      return fence(char);
    }
    if (char === "/" || char === "." || char === "!") {
      return element("mo", [char], { lspace: "0", rspace: "0", stretchy: "false" });
    }
    const last = before.at(-1);
    const isFirst = !last || (last.localName === "mo" && !`${CLOSING}!`.includes(last.textContent));
    return element("mo", [char], "−+±∓".includes(char) && isFirst ? { form: "prefix" } : { stretchy: "false" });
  }

  command(name, before) {
    if (LETTERS.has(name)) {
      return element("mi", [LETTERS.get(name)]);
    }
    if (UPRIGHT.has(name)) {
      return element("mi", [UPRIGHT.get(name)], { mathvariant: "normal" });
    }
    if (OPERATORS.has(name)) {
      return this.sign(OPERATORS.get(name), before);
    }
    if (BIG.has(name)) {
      return Object.assign(element("mo", [BIG.get(name)]), { limits: "display" });
    }
    if (INTEGRALS.has(name)) {
      return Object.assign(element("mo", [INTEGRALS.get(name)]), { limits: "side" });
    }
    if (FENCES.has(name)) {
      return fence(FENCES.get(name));
    }
    if (FUNCTIONS.has(name)) {
      return Object.assign(element("mi", [name]), { isFunction: true });
    }
    if (LIMITS.has(name)) {
      return Object.assign(element("mi", [LIMITS.get(name)]), { isFunction: true, limits: "display" });
    }
    if (SPACES.has(name) || /^\s$/.test(name)) {
      return space(SPACES.get(name) ?? "0.3333em");
    }
    if (ACCENTS.has(name)) {
      return this.accent(name);
    }
    if (isAlphabet(name)) {
      return this.alphabet(name);
    }
    const size = /^([bB]igg?)[lrm]?$/.exec(name);
    if (size) {
      const height = BIG_SIZES[size[1]];
      return fence(this.delimiter(), { stretchy: "true", minsize: height, maxsize: height, symmetric: "true" });
    }
    if (!Object.hasOwn(COMMANDS, name)) {
      throw new TexError(`\\${name} is not known`);
    }
    return COMMANDS[name](this, name, before);
  }

  accent(name) {
    const under = this.argument();
    if (name === "overline") {
      return element("mrow", [under], { class: "overline" }); // few fonts have a line that grows
    }
    const mark = element("mo", [ACCENTS.get(name)], { stretchy: String(WIDE.has(name)) });
    return element("mover", [under, mark], { accent: "true" });
  }

  /** Letters of another alphabet: those of the argument, or the one that comes. */
  alphabet(name) {
    const node = this.argument();
    for (const each of [node, ...node.querySelectorAll("mi, mn")]) {
      if (/^m[in]$/.test(each.localName)) {
        each.textContent = Array.from(each.textContent, (char) => inAlphabet(char, name)).join("");
        each.removeAttribute("mathvariant");
      }
    }
    return node;
  }

  /** A delimiter's character; "" for none. */
  delimiter() {
    const token = this.next();
    if (token === ".") {
      return "";
    }
    const name = token.slice(1);
    const char = token.startsWith("\\") ? FENCES.get(name) ?? OPERATORS.get(name) : token;
    if (!char || !"()[]{}<>|/‖⟨⟩⌊⌋⌈⌉⌜⌝⟮⟯↑↓\\".includes(char)) {
      throw new TexError(`${token} is no delimiter`);
    }
    return { "<": "⟨", ">": "⟩" }[char] ?? char;
  }

  /** The contents between \left and \right, with delimiters of their height. */
  fenced() {
    const stretched = (form) => element("mo", [this.delimiter()], { fence: "true", form, stretchy: "true" });
    const brackets = this.inBrackets;
    this.inBrackets = false;
    const nodes = [stretched("prefix"), ...this.atoms()];
    while (this.takes("\\middle")) {
      nodes.push(stretched("infix"), ...this.atoms());
    }
    this.expect("\\right");
    nodes.push(stretched("postfix"));
    this.inBrackets = brackets;
    return element("mrow", nodes);
  }
}
