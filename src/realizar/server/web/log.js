// The elements of the branch that is shown: its last messages, and on demand those before them.

import { MessageView } from "./view.js";

const STEP = 100; // messages that are shown at first, and more at a time

/** Messages in an element. `handlers` are those of `MessageView`; `onMore()` is called when more are to be shown. */
export class Log {
  constructor(node, button, handlers, onMore) {
    Object.assign(this, { node, button, handlers });
    this.views = new Map();
    this.count = STEP;
    button.addEventListener("click", () => {
      this.count += STEP;
      const first = this.node.firstElementChild;
      onMore();
      first?.scrollIntoView();
      this.node.firstElementChild?.querySelector("button, summary")?.focus({ preventScroll: true });
    });
  }

  /** Shows few messages again, as of a chat that was just opened; with a message, enough for that one to be seen. */
  restart(path, sought = null) {
    const at = path.findIndex(({ id }) => id === sought);
    this.count = Math.max(STEP, at < 0 ? 0 : path.length - at + 10);
  }

  /** Shows the end of a branch; messages that stay keep their elements. `coming`: the message that grows, or null. */
  show(path, coming) {
    const hidden = Math.max(0, path.length - this.count);
    const shown = path.slice(hidden);
    const ids = new Set(shown.map(({ id }) => id));
    for (const [id, view] of this.views) {
      if (!ids.has(id)) {
        view.node.remove();
        this.views.delete(id);
      }
    }
    for (const message of shown.toReversed()) { // the last ones are seen first
      const view = this.views.get(message.id) ?? new MessageView(message, this.handlers);
      this.views.set(message.id, view);
      view.message = message;
      view.update(message === coming);
    }
    shown.forEach((message, index) => {
      const view = this.views.get(message.id);
      if (this.node.children[index] !== view.node) {
        this.node.insertBefore(view.node, this.node.children[index] ?? null);
      }
    });
    this.button.hidden = hidden === 0;
    this.button.textContent = `Show earlier messages (${hidden.toLocaleString()})`;
  }

  /** Makes every message anew as it is now. */
  update(coming) {
    this.views.forEach((view) => view.update(view.message === coming));
  }
}
