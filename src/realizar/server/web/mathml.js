// MathML's elements, as the formulas of this page use them.

const MATHML = "http://www.w3.org/1998/Math/MathML";

/** A formula that this module does not know how to draw. */
export class TexError extends Error {}

export function element(name, children = [], attributes = {}) {
  const node = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) {
    node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Nodes as one. */
export const row = (nodes) => (nodes.length === 1 ? nodes[0] : element("mrow", nodes));
export const space = (width) => element("mspace", [], { width });
export const fence = (char, attributes = {}) =>
  element("mo", [char], { stretchy: "false", lspace: "0", rspace: "0", ...attributes });

/** A base with its subscript and superscript, beside it or below and above. */
export function withScripts(base, sub, sup, stacked) {
  if (!sub && !sup) {
    return base;
  }
  const [both, low, high] = stacked ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
  const inner = base ?? element("mrow");
  if (sub && sup) {
    return element(both, [inner, sub, sup]);
  }
  return sub ? element(low, [inner, sub]) : element(high, [inner, sup]);
}
