// TeX's commands that take arguments. Each is `(parser, name) => node`, or null for nothing to see.

import { element, fence, row, space, TexError } from "./mathml.js";
import { isEnvironment, makeTable } from "./textable.js";

const ESCAPES = /\\([%$#&_{} ])|\\[,;:!]|~/g;
const ARROWS = {
  xrightarrow: "→", xleftarrow: "←", xRightarrow: "⇒", xLeftarrow: "⇐", xleftrightarrow: "↔", xmapsto: "↦",
};

function fraction(parser, attributes = {}) {
  const [top, bottom] = parser.inline(() => [parser.argument(), parser.argument()]);
  return element("mfrac", [top, bottom], attributes);
}

function binomial(parser, display) {
  const pair = fraction(parser, { linethickness: "0" });
  const edge = (char, form) => element("mo", [char], { fence: "true", form, stretchy: "true" });
  const node = element("mrow", [edge("(", "prefix"), pair, edge(")", "postfix")]);
  return display === null ? node : element("mstyle", [node], { displaystyle: String(display) });
}

function root(parser) {
  const index = parser.inline(() => parser.bracketed());
  const under = parser.inline(() => parser.argument());
  return index ? element("mroot", [under, index]) : element("msqrt", [under]);
}

/** Words, in which spaces count, and formulas between dollar signs among them. */
function text(parser, className = "") {
  const parts = parser.word().split(/(?<!\\)\$/);
  if (parts.length % 2 === 0) {
    throw new TexError("a dollar sign is missing");
  }
  const nodes = parts.map((part, index) => (index % 2 ? parser.within(part) : words(part, className)));
  return row(nodes.filter((node, index) => index % 2 || node.textContent || parts.length === 1));
}

function words(source, className) {
  if (/\\[a-zA-Z(]/.test(source)) {
    throw new TexError("commands in a text are not known");
  }
  const plain = source.replace(/(?<!\\)[{}]/g, "").replace(ESCAPES, (whole, char) => char ?? "\u00a0");
  return element("mtext", [plain.replace(/^ | $/g, "\u00a0")], className ? { class: className } : {});
}

function upright(parser) {
  const node = parser.argument();
  const names = node.localName === "mrow" ? [...node.children] : [node];
  if (names.every((each) => /^m[in]$/.test(each.localName))) {
    return element("mi", [names.map((each) => each.textContent).join("")], { mathvariant: "normal" });
  }
  node.querySelectorAll("mi").forEach((each) => each.setAttribute("mathvariant", "normal"));
  return node;
}

function operator(parser, name) {
  const word = parser.word();
  if (!/^[\p{L}\d\s\\,-]*$/u.test(word) || /\\[^, ]/.test(word)) {
    throw new TexError("an operator's name must be a word");
  }
  const node = element("mi", [word.replace(/\\[, ]/g, "\u2009")], { mathvariant: "normal" });
  return Object.assign(node, { isFunction: true, limits: name.endsWith("*") ? "display" : "side" });
}

function over(parser, char, attributes) {
  const node = element("mover", [parser.argument(), element("mo", [char], { stretchy: "true" })], attributes);
  return Object.assign(node, { limits: "stacked" });
}

function under(parser, char) {
  const node = element("munder", [parser.argument(), element("mo", [char], { stretchy: "true" })]);
  return Object.assign(node, { limits: "stacked" });
}

function stacked(parser, name) {
  const [mark, base] = [parser.inline(() => parser.argument()), parser.argument()];
  return element(name === "underset" ? "munder" : "mover", [base, mark]);
}

function longArrow(parser, name) {
  const [below, above] = parser.inline(() => [parser.bracketed(), parser.argument()]);
  const arrow = element("mo", [ARROWS[name]], { stretchy: "true" });
  const padded = (node) => element("mrow", [space("0.4em"), node, space("0.4em")]);
  const marks = below ? [padded(below), padded(above)] : [padded(above)];
  return element(below ? "munderover" : "mover", [arrow, ...marks]);
}

function negated(parser) {
  const node = parser.argument();
  if (!/^m[oi]$/.test(node.localName)) {
    throw new TexError("only a sign can be negated");
  }
  node.textContent = `${node.textContent}\u0338`.normalize("NFC");
  return node;
}

/** The rest of a group in a style: `{\displaystyle ...}`. */
function styled(parser, display, level = "0") {
  const before = parser.display;
  parser.display = display;
  const node = element("mstyle", parser.atoms(), { displaystyle: String(display), scriptlevel: level });
  parser.display = before;
  return node;
}

function modulus(parser, name) {
  const mod = element("mi", ["mod"], { mathvariant: "normal" });
  if (name === "bmod") {
    return element("mrow", [space("0.2222em"), mod, space("0.2222em")]);
  }
  const of = parser.argument();
  const inner = name === "pod" ? [of] : [mod, space("0.3333em"), of];
  return element("mrow", [space("1em"), ...(name === "mod" ? inner : [fence("("), ...inner, fence(")")])]);
}

function environment(parser) {
  const whole = parser.word();
  const name = whole.replace(/\*$/, "");
  if (!isEnvironment(name)) {
    throw new TexError(`${whole} is not known`);
  }
  const spec = /^(?:array|alignat|alignedat)$/.test(name) ? parser.word() : "";
  const brackets = parser.inBrackets;
  parser.inBrackets = false;
  const rows = parser.rows();
  parser.inBrackets = brackets;
  parser.expect("\\end");
  if (parser.word() !== whole) {
    throw new TexError(`${whole} does not end`);
  }
  return makeTable(name, rows, name === "array" ? spec : "");
}

const same = (parser) => parser.argument();
const nothing = () => null;
const skipped = (parser) => {
  parser.word();
  return null;
};
const coloured = (parser) => {
  parser.word();
  return parser.argument();
};

export const COMMANDS = {
  frac: (parser) => fraction(parser),
  dfrac: (parser) => element("mstyle", [fraction(parser)], { displaystyle: "true" }),
  tfrac: (parser) => element("mstyle", [fraction(parser)], { displaystyle: "false" }),
  cfrac: (parser) => element("mstyle", [fraction(parser)], { displaystyle: "true" }),
  binom: (parser) => binomial(parser, null),
  dbinom: (parser) => binomial(parser, true),
  tbinom: (parser) => binomial(parser, false),
  sqrt: root,
  text: (parser) => text(parser),
  textrm: (parser) => text(parser),
  textnormal: (parser) => text(parser),
  mbox: (parser) => text(parser),
  hbox: (parser) => text(parser),
  textbf: (parser) => text(parser, "bold"),
  textit: (parser) => text(parser, "slanted"),
  emph: (parser) => text(parser, "slanted"),
  texttt: (parser) => text(parser, "fixed"),
  textsf: (parser) => text(parser),
  mathrm: upright,
  mathit: same,
  mathnormal: same,
  operatorname: operator,
  "operatorname*": operator,
  overbrace: (parser) => over(parser, "⏞"),
  overbracket: (parser) => over(parser, "⎴"),
  underbrace: (parser) => under(parser, "⏟"),
  underbracket: (parser) => under(parser, "⎵"),
  underline: (parser) => element("mrow", [parser.argument()], { class: "underline" }),
  overset: stacked,
  stackrel: stacked,
  underset: stacked,
  ...Object.fromEntries(Object.keys(ARROWS).map((name) => [name, longArrow])),
  not: negated,
  boxed: (parser) => element("mrow", [parser.argument()], { class: "boxed" }),
  fbox: (parser) => element("mrow", [text(parser)], { class: "boxed" }),
  cancel: (parser) => element("mrow", [parser.argument()], { class: "cancelled" }),
  phantom: (parser) => element("mphantom", [parser.argument()]),
  hphantom: (parser) => element("mphantom", [parser.argument()]),
  vphantom: (parser) => element("mpadded", [element("mphantom", [parser.argument()])], { width: "0" }),
  smash: same,
  mathop: (parser) => Object.assign(element("mrow", [parser.argument()]), { limits: "display" }),
  mathbin: same,
  mathrel: same,
  mathord: same,
  mathopen: same,
  mathclose: same,
  mathpunct: same,
  mathinner: same,
  textcolor: coloured,
  color: skipped,
  left: (parser) => parser.fenced(),
  begin: environment,
  substack: (parser) => {
    parser.expect("{");
    const rows = parser.rows();
    parser.expect("}");
    return makeTable("smallmatrix", rows);
  },
  bmod: modulus,
  pmod: modulus,
  mod: modulus,
  pod: modulus,
  tag: (parser) => row([space("2em"), fence("("), element("mtext", [parser.word()]), fence(")")]),
  "tag*": (parser) => row([space("2em"), element("mtext", [parser.word()])]),
  hspace: (parser) => (skipped(parser), space("0.5em")),
  "hspace*": (parser) => (skipped(parser), space("0.5em")),
  label: skipped,
  nonumber: nothing,
  notag: nothing,
  hline: nothing,
  allowbreak: nothing,
  displaystyle: (parser) => styled(parser, true),
  textstyle: (parser) => styled(parser, false),
  scriptstyle: (parser) => styled(parser, false, "1"),
  scriptscriptstyle: (parser) => styled(parser, false, "2"),
};
