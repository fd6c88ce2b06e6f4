// The chats of this tab: the one that is open, and those whose answers still come. Everything said is kept at once.

import { Answer, turnsOf } from "./answer.js";
import { dismiss, notify } from "./notices.js";
import { newId, titleOf, Tree } from "./tree.js";

const SAVE_EVERY_MS = 1000; // while an answer comes

/** One conversation: its record, its messages, and the answer that is coming, if any. */
class Chat {
  constructor(record, messages, isStored = false) {
    this.record = record;
    this.isStored = isStored; // or was: another tab may have erased it since
    this.tree = new Tree(messages, record.leaf);
    this.answer = null;
    this.isGone = false; // deleted in another tab
  }

  get id() {
    return this.record.id;
  }
}

/**
 * What is done with chats. `onShow()` is called when the open one looks different, `onGrow(message)` when only a
 * message of it grew, `prepare(turns, isBegun)` gives a request's body for some turns, of which the last is an answer that goes
 * on where `isBegun`.
 */
export class Chats {
  constructor(archive, { onShow, onGrow, prepare, system }) {
    Object.assign(this, { archive, onShow, onGrow, prepare, system });
    this.open = null; // null: a new one, of which nothing is said yet
    this.answering = new Map(); // chats by id
  }

  get answer() {
    return this.open?.answer ?? null;
  }

  /**
   * Shows a stored chat, at a message where that is there, or with null a new chat; gives whether it is there.
   * `onFound(path)` is called before it is shown.
   */
  async show(id, leaf = null, onFound = () => {}) {
    let found = this.answering.get(id) ?? null;
    if (id !== null && !found) {
      const stored = await this.read(id);
      found = stored && new Chat(stored.chat, stored.messages, true);
      tellUnreadable(stored?.unreadable ?? 0);
    }
    if (found?.tree.get(leaf)) {
      found.tree.choose(found.tree.get(leaf));
    }
    dismiss("deleted");
    this.open = found;
    onFound(found?.tree.path() ?? []);
    this.onShow();
    return found !== null || id === null;
  }

  /** Shows messages that are not stored. */
  showUnstored({ chat, messages }) {
    this.open = new Chat(chat, messages);
    messages.forEach((message) => this.archive.unsaved.set(message.id, message));
    this.onShow();
  }

  async read(id) {
    try {
      const found = await this.archive.load(id);
      return found?.chat.deleted ? null : found;
    } catch (error) {
      tellTrouble(error);
      return null;
    }
  }

  /** Sends a message at the end of what is shown. */
  send(content, files = []) {
    const title = titleOf(content || files[0]?.name || "");
    this.open ??= new Chat({ id: newId(), title, updated: 0, leaf: null }, []);
    this.say(this.open.tree.leaf, content, files);
  }

  /** Sends a message in another one's place, which stays beside it. */
  edit(message, content) {
    this.stop();
    this.say(this.open.tree.parentOf(message), content, message.files);
  }

  say(parent, content, files = []) {
    const chat = this.open;
    const given = { id: newId(), conversation: chat.id, role: "user", content };
    const message = chat.tree.add(parent, files.length ? { ...given, files } : given);
    this.keep(chat, [message], true);
    this.ask(chat, message.id);
  }

  /** Gives the results of an answer's calls, one text for each, and asks for what the model makes of them. */
  giveResults(message, results) {
    const chat = this.open;
    let parent = message.id;
    const said = message.calls.map(({ id, name }, index) => {
      const result = { id: newId(), conversation: chat.id, role: "tool", call: id, name, content: results[index] };
      const added = chat.tree.add(parent, result);
      parent = added.id;
      return added;
    });
    this.keep(chat, said, true);
    this.ask(chat, parent);
  }

  /** Asks again for an answer; the one that there is stays beside it. */
  regenerate(message) {
    this.stop();
    this.ask(this.open, this.open.tree.parentOf(message));
  }

  /** Goes on with an answer that was broken off; the part that there is stays beside it. */
  proceed(message) {
    this.stop();
    this.ask(this.open, this.open.tree.parentOf(message), message);
  }

  /** Shows another version of a message. */
  choose(message) {
    this.open.tree.choose(message);
    this.keep(this.open, [], false);
    this.onShow();
  }

  stop() {
    this.answer?.stop();
  }

  /**
   * Asks for the model's answer to what stands up to a message, and keeps it while it comes.
   * @param begun an answer that this one goes on with, or null.
   */
  async ask(chat, parent, begun = null) {
    const { tree } = chat;
    tree.leaf = parent;
    const turns = turnsOf(begun ? [...tree.path(), begun] : tree.path(), this.system());
    const { content = "", reasoning } = begun ?? {};
    const blank = { id: newId(), conversation: chat.id, role: "assistant", content, open: true };
    const message = tree.add(parent, reasoning ? { ...blank, reasoning } : blank);
    let saved = 0;
    const answer = new Answer(message, () => {
      if (!chat.isGone) {
        this.archive.unsaved.set(message.id, message);
        if (Date.now() - saved >= SAVE_EVERY_MS) {
          saved = Date.now();
          this.keep(chat, [message], false);
        }
      }
      if (chat === this.open) {
        this.onGrow(message);
      }
    });
    chat.answer = answer;
    this.answering.set(chat.id, chat);
    this.onShow();
    await answer.run(() => this.prepare(turns, begun !== null));
    if (chat.answer === answer) {
      chat.answer = null;
      this.answering.delete(chat.id);
    }
    this.keep(chat, [message], false);
    if (chat === this.open) {
      this.onShow(message);
    }
  }

  /** Writes messages; what can't be written stays on the page, which says so. */
  async keep(chat, messages, revive) {
    chat.record.leaf = chat.tree.leaf;
    chat.isGone &&= !revive;
    try {
      await this.archive.save({ ...chat.record }, messages, [...chat.tree.messages.values()], revive);
      chat.isStored ||= revive;
      dismiss("storage");
    } catch (error) {
      tellTrouble(error);
    }
  }

  /** Another tab wrote a chat. */
  async hear(id) {
    const chat = this.open?.id === id ? this.open : this.answering.get(id);
    if (!chat) {
      return;
    }
    let stored;
    try {
      stored = await this.archive.load(id);
    } catch (error) {
      tellTrouble(error);
      return;
    }
    if (stored === null && !chat.isStored) {
      return; // not written yet
    }
    const isThere = stored !== null && !stored.chat.deleted;
    chat.isGone = !isThere;
    if (isThere) {
      const ours = chat.answer?.message.id;
      chat.tree.merge(stored.messages, (other) => other === ours || this.archive.unsaved.has(other));
      chat.record.title = stored.chat.title;
    }
    if (chat !== this.open) {
      return;
    }
    if (isThere) {
      dismiss("deleted");
      this.onShow();
    } else {
      const restore = () => this.keep(chat, [], true);
      notify("deleted", "This chat was deleted in another tab.", { label: "Restore", run: restore });
    }
  }
}

/** Says that messages are missing from what is shown. */
function tellUnreadable(count) {
  if (count) {
    notify("unreadable", `Some stored messages of this chat (${count}) can’t be read; they are kept as they are.`);
  } else {
    dismiss("unreadable");
  }
}

/** Says that what is said can't be kept. */
export function tellTrouble(error) {
  const why = error?.name === "QuotaExceededError"
    ? "The browser’s storage for this page is full; erase chats to make room."
    : `The browser keeps nothing for this page (${error?.message || error}).`;
  notify("storage", `${why} What is said now is lost when this tab closes.`);
}
