// TeX's formulas as MathML, by KaTeX, which is fetched when the first formula is to be drawn. What it refuses is shown
// as written.

import { copyMath } from "./mathml.js";

const MAX_MARKUP = 100_000; // characters
// Definitions make much of little: a formula that has some is short.
const DEFINITION = /\\(?:[egx]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])/;
const MAX_DEFINING = 500; // characters
const OPTIONS = {
  output: "mathml", // the browser draws it: no fonts, and no styles in attributes, which the page's policy forbids
  throwOnError: true,
  strict: "ignore",
  trust: ({ command }) => { throw new Error(`${command} is not drawn`); }, // addresses, pictures, attributes
  maxExpand: 500, // of macros, which may call themselves
  maxSize: 50, // em
};
// What models write and KaTeX does not know.
const MACROS = {
  "\\mbox": "\\text{#1}", "\\qed": "\\square", "\\euro": "\\text{€}", "\\textellipsis": "\\ldots",
  ...Object.fromEntries("arccot arsinh arcosh artanh sgn tr lcm rank diag".split(" ").map(
    (name) => [`\\${name}`, `\\operatorname{${name}}`],
  )),
  "\\tag@literal": "\\qquad\\text{#1}", // KaTeX leaves numbers of aligned lines out
  "\\label": (context) => { // references to equations are not drawn, so their names are not either
    context.consumeArgs(1);
    return "";
  },
};
const ENVIRONMENTS = new Map([
  ["begin{multline", "begin{gather*"], ["end{multline", "end{gather*"],
  ["begin{displaymath", "begin{equation*"], ["end{displaymath", "end{equation*"],
  ["begin{eqnarray", "begin{array}{rcl"], ["end{eqnarray", "end{array"],
]);
const REPLACED = /\\((?:begin|end)\{(?:multline|displaymath|eqnarray))\*?(?=\})|\\[^]|%/g;
let katex = null;
let loading = null;

/** Fetches KaTeX once; an attempt that failed is made again. Resolves to whether formulas can be drawn. */
export function loadKatex() {
  loading ??= import("./vendor/katex.min.js").then(
    () => {
      katex = globalThis.katex;
      return true;
    },
    () => {
      loading = null;
      return false;
    },
  );
  return loading;
}

/** True if formulas can be drawn at once. */
export const hasKatex = () => katex !== null;

/**
 * A `math` element for TeX's source. A percent sign is one: models write it so, and mean no comment.
 * @throws for what KaTeX does not know, or what is not well formed.
 */
export function texToMath(source, display) {
  const isDefining = DEFINITION.test(source);
  if (isDefining && source.length > MAX_DEFINING) {
    throw new Error("too long");
  }
  const markup = katex.renderToString(source.replace(REPLACED, replaced), {
    ...OPTIONS,
    displayMode: display,
    ...(isDefining ? { maxExpand: 50 } : {}),
    macros: { ...MACROS }, // a new object each time: KaTeX writes \gdef's definitions into it
  });
  if (markup.length > MAX_MARKUP) {
    throw new Error("too much is drawn");
  }
  const math = copyMath(new DOMParser().parseFromString(markup, "text/html").querySelector("math"));
  if (!math.textContent) {
    throw new Error("nothing would be seen");
  }
  return math;
}

function replaced(part, environment) {
  return environment ? `\\${ENVIRONMENTS.get(environment)}` : part === "%" ? "\\%" : part;
}
