// A conversation: messages that know their parents. A message that is edited or asked again gets a sibling, so that
// nothing is ever taken away, and what two tabs say at once stands side by side.

import { areCalls } from "./calls.js";
import { areFiles } from "./files.js";

const ROLES = ["user", "assistant", "tool"];

/** An id that no other tab makes. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** True if a stored value is a message that the page can show. Unknown fields are ignored. */
export function isMessage(value) {
  return ROLES.includes(value?.role) && typeof value.content === "string" && typeof value.id === "string"
    && typeof value.conversation === "string" && Number.isFinite(value.created)
    && ["string", "undefined"].includes(typeof value.reasoning)
    && (value.files === undefined || areFiles(value.files)) && (value.calls === undefined || areCalls(value.calls))
    && (value.role !== "tool" || typeof value.call === "string");
}

export function isConversation(value) {
  return typeof value?.id === "string" && typeof value.title === "string" && Number.isFinite(value.updated);
}

/** The name of a conversation that nobody named: the beginning of its first question. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line || "Chat";
}

/**
 * Messages by id, and the branch that is shown: the path from a first message to `leaf`.
 *
 * A message: `{id, conversation, parent, role, content, created}`; of a user, `files`, text or images; of an answer, `reasoning`,
 * `calls`, `error`, `stopped`, `cut`, `stats`, `model`, `used`, and `open` while it comes; of a tool, `call` and `name`.
 * `parent` is the message before, or null.
 */
export class Tree {
  constructor(messages = [], leaf = null) {
    this.messages = new Map();
    this.byParent = null; // made when it is asked for
    this.leaf = null;
    this.merge(messages);
    this.leaf = this.messages.has(leaf) ? leaf : this.newestBelow(null);
  }

  get size() {
    return this.messages.size;
  }

  get(id) {
    return this.messages.get(id) ?? null;
  }

  /** Adds a message after another one and shows it. */
  add(parent, message) {
    const made = { ...message, parent, created: Math.max(Date.now(), (this.get(parent)?.created ?? 0) + 1) };
    this.messages.set(made.id, made);
    this.byParent = null;
    this.leaf = made.id;
    return made;
  }

  /**
   * Takes in what is stored. A message that this tab is writing itself stays as it is here.
   * Where the branch that is shown was continued elsewhere, its continuation is shown.
   */
  merge(stored, isOurs = () => false) {
    const before = this.messages.size;
    this.byParent = null;
    for (const message of stored) {
      if (!isOurs(message.id)) {
        this.messages.set(message.id, message);
      }
    }
    if (this.leaf !== null && this.messages.size > before) {
      this.leaf = this.newestBelow(this.leaf);
    }
  }

  /** Messages right after one (null: the first ones), the oldest first. */
  children(parent) {
    this.byParent ??= Map.groupBy([...this.messages.values()].sort(earlier), (message) => this.parentOf(message));
    return this.byParent.get(parent) ?? [];
  }

  /** The messages that stand where this one stands, itself among them. */
  siblings(message) {
    return this.children(this.parentOf(message));
  }

  /** From the first message to the leaf. */
  path() {
    const found = [];
    for (let at = this.get(this.leaf); at; at = this.get(this.parentOf(at))) {
      found.push(at);
    }
    return found.reverse();
  }

  /** Shows a message, and below it what was said last. */
  choose(message) {
    this.leaf = this.newestBelow(message.id);
  }

  /** The end of the newest branch below a message. */
  newestBelow(id) {
    let at = id;
    for (let next = this.children(at).at(-1); next; next = this.children(at).at(-1)) {
      at = next.id;
    }
    return at;
  }

  /** The message before a message. Null if it is lost or not older, as stored messages must not form circles. */
  parentOf(message) {
    return this.get(message.parent)?.created < message.created ? message.parent : null;
  }
}

function earlier(one, other) {
  return one.created - other.created || (one.id < other.id ? -1 : 1);
}
