// How much of the model's context the open chat takes, as the server counted it with the last answer.

const byId = (id) => document.getElementById(id);
const NEARLY_FULL = 0.9;
let length = 0; // tokens of context; 0: the server did not say

/** Sets the length of the context, in tokens. */
export function setContextLength(tokens) {
  length = Number.isFinite(tokens) ? tokens : 0;
}

/** Shows the use of a branch; `coming`: tokens of the answer that is coming, which nobody counted yet. */
export function showContext(path, coming = 0) {
  const counted = path.findLast((message) => message.used)?.used ?? 0;
  const used = Math.min(counted + coming, length);
  const meter = byId("context");
  meter.hidden = !length || !used;
  if (meter.hidden) {
    return;
  }
  const part = used / length;
  meter.setAttribute("aria-valuemax", String(length));
  meter.setAttribute("aria-valuenow", String(used));
  meter.setAttribute("aria-valuetext", `${used} of ${length} tokens`);
  meter.classList.toggle("full", part >= NEARLY_FULL);
  byId("context-used").setAttribute("stroke-dasharray", `${(100 * part).toFixed(1)} 100`);
  const numbers = `${used.toLocaleString()} of ${length.toLocaleString()} tokens`;
  byId("context-text").textContent = part >= NEARLY_FULL ? `${numbers}: the context is nearly full` : numbers;
}
