// Tables of formulas: matrices, cases, aligned lines.

import { element, row } from "./mathml.js";

/** Environments: the delimiters around them, and how their columns stand. */
const ENVIRONMENTS = {
  matrix: ["", "", ""],
  smallmatrix: ["", "", ""],
  pmatrix: ["(", ")", ""],
  bmatrix: ["[", "]", ""],
  Bmatrix: ["{", "}", ""],
  vmatrix: ["|", "|", ""],
  Vmatrix: ["‖", "‖", ""],
  array: ["", "", ""],
  cases: ["{", "", "l"],
  dcases: ["{", "", "l"],
  rcases: ["", "}", "l"],
  aligned: ["", "", "rl"],
  align: ["", "", "rl"],
  alignat: ["", "", "rl"],
  alignedat: ["", "", "rl"],
  split: ["", "", "rl"],
  eqnarray: ["", "", "rcl"],
  gathered: ["", "", "c"],
  gather: ["", "", "c"],
  multline: ["", "", "c"],
  equation: ["", "", "c"],
  displaymath: ["", "", "c"],
  math: ["", "", "c"],
};
const SPACED = /^(?:aligned|align|alignat|alignedat|split|eqnarray|gathered|gather|multline|dcases)$/;

export const isEnvironment = (name) => Object.hasOwn(ENVIRONMENTS, name);

/** Rows of cells, each a list of nodes, as an environment has them. `spec`: an array's columns, such as `l|cr`. */
export function makeTable(name, rows, spec = "") {
  const [open, close, pattern] = ENVIRONMENTS[name];
  const columns = columnsOf(spec || pattern);
  const isCycled = !spec && pattern.length > 1;
  const body = rows.map((cells) => element("mtr", cells.map((nodes, index) => {
    const { side, bar } = columns[isCycled ? index % columns.length : Math.min(index, columns.length - 1)];
    return element("mtd", nodes, { class: bar && index ? `${side} ruled` : side });
  })));
  const kind = SPACED.test(name) ? { class: "lines", displaystyle: "true" } : { class: "cells" };
  const table = element("mtable", body, isCycled ? { ...kind, class: "lines aligned" } : kind);
  const edge = (char, form) => element("mo", [char], { fence: "true", form, stretchy: "true" });
  return open || close ? row([edge(open, "prefix"), table, edge(close, "postfix")]) : table;
}

/** Columns of a specification: the side that they stand on, and whether a line is before them. */
function columnsOf(spec) {
  const sides = { l: "left", c: "middle", r: "right" };
  const columns = [];
  let bar = false;
  for (const char of spec.replace(/[{@!>][^}]*\}/g, "")) {
    if (char === "|") {
      bar = true;
    } else if (sides[char]) {
      columns.push({ side: sides[char], bar });
      bar = false;
    }
  }
  return columns.length ? columns : [{ side: "middle", bar: false }];
}
