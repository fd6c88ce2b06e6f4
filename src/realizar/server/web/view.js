// One message on the page, and how it grows.

import { callNode, resultForm, resultNode } from "./calls.js";
import { makeEditor } from "./editor.js";
import { fileNode } from "./files.js";
import { Growing } from "./growing.js";

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

function element(kind, className, text = "") {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

function action(name, label, run) {
  const button = element("button", "action");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  button.addEventListener("click", () => run(button));
  return button;
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/**
 * A message's element.
 * `handlers`: edit(message, text), giveResults(message, results), isLast(message), regenerate(message), proceed(message), hasSeveral() of models, siblings(message), choose(message, label of the button).
 */
export class MessageView {
  constructor(message, handlers) {
    this.message = message;
    this.handlers = handlers;
    this.node = element("article", `message ${message.role === "tool" ? "from-tool" : message.role}`);
    this.node.append(element("h2", "visually-hidden", NAMES[message.role]));
    this.body = element("div", "body");
    this.actions = element("div", "actions");
    this.makeVersions();
    const copy = action("copy", "Copy", (button) => copyText(this.message.content, button));
    if (message.role === "user") {
      this.editButton = action("edit", "Edit and ask again", () => this.edit());
      this.actions.append(this.versions, this.editButton, copy);
      this.node.append(this.body, this.actions);
    } else if (message.role === "tool") {
      this.node.append(resultNode(message), this.versions);
    } else {
      this.thought = this.makeThought();
      this.content = new Growing(this.body, () => this.showBusy());
      this.stats = element("span", "stats");
      this.proceedButton = action("continue", "Continue", () => handlers.proceed(this.message));
      this.notice = element("div", "notice");
      this.actions.append(
        this.versions, this.stats, copy, action("retry", "Regenerate", () => handlers.regenerate(this.message)),
        this.proceedButton,
      );
      this.calls = element("div", "calls");
      this.node.append(this.thought.node, this.body, this.calls, this.notice, this.actions);
    }
    this.update(false);
  }

  /** Arrows between the versions of a message, where it has several. */
  makeVersions() {
    this.versions = element("span", "versions");
    this.place = element("span", "place");
    const step = (by, name, label) => action(name, label, () => {
      const all = this.handlers.siblings(this.message);
      const other = all[all.indexOf(this.message) + by];
      if (other) {
        this.handlers.choose(other, label);
      }
    });
    [this.before, this.after] = [step(-1, "left", "Previous version"), step(1, "right", "Next version")];
    this.versions.append(this.before, this.place, this.after);
  }

  showVersions() {
    const all = this.handlers.siblings?.(this.message) ?? [];
    const place = all.indexOf(this.message);
    this.versions.hidden = all.length < 2;
    this.place.textContent = `${place + 1} / ${all.length}`;
    // Not `disabled`: the button that was pressed keeps the focus at the last version.
    this.before.setAttribute("aria-disabled", String(place <= 0));
    this.after.setAttribute("aria-disabled", String(place >= all.length - 1));
  }

  /** A field in the message's place. What was said stays; what is sent from here stands beside it. */
  edit() {
    if (this.form) {
      return;
    }
    const finish = () => {
      this.form.remove();
      this.form = null;
      this.node.classList.remove("editing");
      this.editButton.focus();
    };
    this.form = makeEditor(this.message.content, (text) => {
      finish();
      this.handlers.edit(this.message, text);
    }, finish);
    this.node.classList.add("editing");
    this.node.prepend(this.form);
    this.form.querySelector("textarea").focus();
  }

  makeThought() {
    const node = element("details", "thought");
    const summary = element("summary", "", "Thinking");
    const text = element("div", "thought-text");
    node.append(summary, text);
    return { node, summary, text: new Growing(text, () => this.showBusy()) };
  }

  /** Tool calls, and below the last message of a chat a form for their results. */
  showCalls(busy) {
    const calls = this.message.calls ?? [];
    const isAsking = calls.length > 0 && !busy && Boolean(this.handlers.isLast?.(this.message));
    const source = JSON.stringify([calls, isAsking]);
    if (this.shownCalls === source) {
      return; // what is unfolded or typed stays
    }
    this.shownCalls = source;
    this.calls.replaceChildren(...calls.map(callNode));
    if (isAsking) {
      this.calls.append(resultForm(calls, (results) => this.handlers.giveResults(this.message, results)));
    }
  }

  /** A message is busy until it has come and is drawn. */
  showBusy() {
    const isBusy = this.isBusy || this.content.isDrawing || this.thought.text.isDrawing;
    this.node.setAttribute("aria-busy", String(isBusy));
  }

  /** Shows the message as it is now; `busy` while it grows here. */
  update(busy) {
    this.showVersions();
    const { content, reasoning = "", error, stopped, stats, open, cut } = this.message;
    if (this.message.role === "user") {
      if (!this.body.childNodes.length) { // what was sent does not change
        this.body.append(...(this.message.files ?? []).map(fileNode), content);
      }
      return;
    }
    if (this.message.role === "tool") {
      return;
    }
    this.thought.node.hidden = !reasoning;
    this.thought.summary.textContent = busy && !content ? "Thinking…" : "Thought";
    this.thought.text.show(reasoning);
    this.content.show(content);
    this.showCalls(busy);
    this.node.classList.toggle("busy", busy);
    this.node.classList.toggle("waiting", busy && !content && !reasoning && !this.message.calls);
    this.isBusy = busy;
    this.showBusy();
    this.actions.hidden = busy;
    this.proceedButton.hidden = !content || !(stopped || error || cut || open);
    const model = this.handlers.hasSeveral?.() && this.message.model;
    this.stats.textContent = [model, stats, stopped && "stopped", open && !busy && "unfinished"].filter(Boolean).join(" · ");
    this.notice.hidden = !error;
    this.notice.textContent = error ?? "";
    this.notice.setAttribute("role", error ? "alert" : "none");
  }
}

/** Copies text and says so on the button for a moment. Pages without TLS have no clipboard API: the old way then. */
export async function copyText(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", "visually-hidden", text);
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
  }
  if (!copied) {
    return;
  }
  if (button.classList.contains("copy-code")) {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } else {
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  }
}
