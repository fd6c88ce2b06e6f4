// Tool calls of an answer, and their results: what is shown of them, and the form in which results are given.

function element(kind, className, text = "") {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

/** True for a stored list of calls, `[{id, name, arguments}]` with texts. */
export function areCalls(value) {
  return Array.isArray(value) && value.length > 0
    && value.every((call) => ["id", "name", "arguments"].every((key) => typeof call?.[key] === "string"));
}

/** Takes the parts of calls that a delta brings into a message. */
export function takeCalls(message, deltas) {
  for (const { index = 0, id, function: made } of deltas) {
    message.calls ??= [];
    const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += made?.name ?? "";
    call.arguments += made?.arguments ?? "";
  }
}

/** Something with a heading that is folded away, and a text as it is. */
function folded(className, heading, name, text) {
  const node = element("details", className);
  const summary = element("summary", "", `${heading} `);
  summary.append(element("code", "", name));
  const pre = element("pre", "");
  pre.tabIndex = 0;
  pre.append(element("code", "", text));
  node.append(summary, pre);
  return node;
}

function spaced(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still coming, or is no JSON
  }
}

export const callNode = (call) => folded("fold call", "Call of", call.name, spaced(call.arguments));
export const resultNode = (message) => folded("fold result", "Result of", message.name ?? "a tool", message.content);

/** A form for the results of calls; `onSend(results)` gets a text for each. */
export function resultForm(calls, onSend) {
  const form = element("form", "results");
  const fields = calls.map((call) => {
    const label = element("label", "field", `Result of ${call.name}`);
    const field = element("textarea", "");
    field.rows = 2;
    label.append(field);
    form.append(label);
    return field;
  });
  const send = element("button", "primary", calls.length > 1 ? "Send results" : "Send result");
  form.append(send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onSend(fields.map((field) => field.value));
  });
  return form;
}

/** The turns of a branch as a request has them: calls only where results of all of them follow. */
export function turnsWithCalls(path) {
  return path.flatMap((message, index) => {
    if (message.role === "tool") {
      return isAnswered(path, index) ? [{ role: "tool", tool_call_id: message.call, content: message.content }] : [];
    }
    const content = message.content;
    if (!message.calls || !isAnswered(path, index)) {
      return content ? [{ role: message.role, content }] : [];
    }
    const calls = message.calls.map(({ id, name, arguments: given }) => (
      { id, type: "function", function: { name, arguments: given } }
    ));
    return [{ role: message.role, content: content || null, tool_calls: calls }];
  });
}

/** True if the calls around a place, before its results or at itself, all have their results right after them. */
function isAnswered(path, index) {
  let start = index;
  while (path[start]?.role === "tool") {
    start -= 1;
  }
  const calls = path[start]?.calls ?? [];
  const results = path.slice(start + 1, start + 1 + calls.length);
  return calls.length > 0 && index <= start + calls.length && results.length === calls.length
    && calls.every((call, place) => results[place].role === "tool" && results[place].call === call.id);
}
