// Conversations as this browser keeps them: in IndexedDB, a record for each message, so that tabs only ever add to what
// others wrote. Tabs hear of each other's changes. What could not be written yet is handed on through localStorage when
// the page goes away.

import { isConversation, isMessage, titleOf } from "./tree.js";

const DATABASE = "realizar";
const CHATS = "conversations";
const MESSAGES = "messages";
const LAST_WORDS = "realizar.unsaved.";
const PATIENCE_MS = 10_000; // with a browser that does not even say no
const READ_AT_ONCE = 100; // messages, which may have images
const KEPT_AFTER_DELETION_MS = 30 * 24 * 3600 * 1000;

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(CHATS, { keyPath: "id" });
    request.result.createObjectStore(MESSAGES, { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  const late = new Promise((_, reject) => {
    setTimeout(() => reject(new Error("it does not answer")), PATIENCE_MS);
  });
  return Promise.race([result(request), late]);
}

function abort(transaction) {
  try {
    transaction.abort();
  } catch {
    // It is over already.
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Conversations and their messages. Methods reject where the browser can't read or write; `unsaved` stays then. */
export class Archive {
  constructor() {
    this.unsaved = new Map(); // messages by id that are not written yet
    this.isFailing = false; // whether the last attempt to write messages failed
    this.database = null;
    this.onChange = () => {};
    this.channel = new BroadcastChannel("realizar");
    this.channel.onmessage = ({ data }) => this.onChange(String(data));
  }

  /** Runs steps as one transaction and resolves once it is written. `work(store)` gets stores by name. */
  async transact(mode, work) {
    this.database ??= openDatabase().then((database) => {
      database.onversionchange = () => database.close(); // a newer page wants to change its shape
      database.onclose = () => { this.database = null; };
      return database;
    });
    let database;
    let transaction;
    try {
      database = await this.database;
      transaction = database.transaction([CHATS, MESSAGES], mode);
    } catch (error) {
      this.database = null; // the next attempt opens it anew
      throw error;
    }
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new Error("the write was aborted"));
    });
    done.catch(() => {});
    try {
      const value = await work((name) => transaction.objectStore(name));
      await done;
      return value;
    } catch (error) {
      abort(transaction);
      throw error;
    }
  }

  /** All conversations, the last changed first; deleted ones have `deleted`, a time in ms. */
  async list() {
    const found = await this.transact("readonly", (store) => result(store(CHATS).getAll()));
    return found.filter(isConversation).sort((one, other) => other.updated - one.updated);
  }

  /** A conversation's record and messages, and how many more of these can't be read; null if there is none. */
  async load(id) {
    return this.transact("readonly", async (store) => {
      const [chat, all] = await Promise.all([
        result(store(CHATS).get(id)), result(store(MESSAGES).index("conversation").getAll(id)),
      ]);
      const messages = all.filter(isMessage);
      return isConversation(chat) ? { chat, messages, unreadable: all.length - messages.length } : null;
    });
  }

  /**
   * Writes messages of a conversation.
   * @param chat its record; a stored one keeps its title.
   * @param all every message known here: written where another tab erased the conversation.
   * @param revive whether a deleted conversation comes back; otherwise it stays so, and an erased one is not written.
   */
  async save(chat, messages, all, revive) {
    messages.forEach((message) => this.unsaved.set(message.id, message));
    const written = [...this.unsaved.values()].filter((message) => message.conversation === chat.id);
    const copies = new Map(written.map((message) => [message, structuredClone(message)]));
    this.isFailing = true;
    await this.transact("readwrite", async (store) => {
      const found = await result(store(CHATS).get(chat.id));
      const stored = found?.erased ? null : found;
      if (!stored && !revive) {
        return;
      }
      const { deleted, ...kept } = stored ?? chat;
      const record = { ...kept, leaf: chat.leaf, updated: Math.max(Date.now(), kept.updated ?? 0) };
      store(CHATS).put(deleted && !revive ? { ...record, deleted } : record);
      for (const message of stored ? copies.values() : all) {
        store(MESSAGES).put(message);
      }
    });
    this.isFailing = false;
    for (const [message, copy] of copies) {
      if (message.content === copy.content && message.open === copy.open) {
        this.unsaved.delete(message.id);
      }
    }
    this.channel.postMessage(chat.id);
  }

  /** Changes fields of a conversation's record; a field set to undefined goes. */
  async change(id, fields) {
    await this.transact("readwrite", async (store) => {
      const stored = await result(store(CHATS).get(id));
      if (stored && !stored.erased) {
        store(CHATS).put(JSON.parse(JSON.stringify({ ...stored, ...fields })));
      }
    });
    this.channel.postMessage(id);
  }

  /** Takes a conversation away for good. Its id stays for a while: what other tabs leave of it is not taken in. */
  async erase(id) {
    await this.transact("readwrite", async (store) => {
      store(CHATS).put({ id, erased: Date.now() });
      const keys = await result(store(MESSAGES).index("conversation").getAllKeys(id));
      keys.forEach((key) => store(MESSAGES).delete(key));
    });
    this.channel.postMessage(id);
  }

  /** Adds whole conversations, `[{chat, messages}]`, in one go. */
  async add(chats) {
    await this.transact("readwrite", (store) => {
      for (const { chat, messages } of chats) {
        store(CHATS).put(chat);
        messages.forEach((message) => store(MESSAGES).put(message));
      }
    });
    chats.forEach(({ chat }) => this.channel.postMessage(chat.id));
  }

  /** Calls with each message of conversations that are not deleted. */
  async eachMessage(run) {
    const shown = new Set((await this.list()).filter(({ deleted }) => !deleted).map(({ id }) => id));
    await this.transact("readonly", async (store) => {
      let [range, all] = [null, null];
      do {
        all = await result(store(MESSAGES).getAll(range, READ_AT_ONCE));
        all.filter((message) => isMessage(message) && shown.has(message.conversation)).forEach(run);
        range = all.length ? IDBKeyRange.lowerBound(all.at(-1).id, true) : null;
      } while (all.length === READ_AT_ONCE);
    });
  }

  /** True if no record has the id of a conversation or of one of its messages. */
  async isFree({ chat, messages }) {
    return this.transact("readonly", async (store) => {
      const keys = await Promise.all([
        result(store(CHATS).getKey(chat.id)), ...messages.map(({ id }) => result(store(MESSAGES).getKey(id))),
      ]);
      return keys.every((key) => key === undefined);
    });
  }

  /** Erases what was deleted long ago. */
  async tidy() {
    const before = Date.now() - KEPT_AFTER_DELETION_MS;
    await this.transact("readwrite", async (store) => {
      const all = await result(store(CHATS).getAll());
      all.filter(({ erased }) => erased < before).forEach(({ id }) => store(CHATS).delete(id));
    });
    const old = (await this.list()).filter(({ deleted }) => deleted < before);
    for (const { id } of old) {
      await this.erase(id);
    }
  }

  /** Leaves what is not written yet where the next page finds it. Called while the page goes away: no time to wait. */
  leaveLastWords() {
    for (const message of this.unsaved.values()) {
      try {
        localStorage.setItem(LAST_WORDS + message.id, JSON.stringify(message));
      } catch {
        // Full or turned off: what was written before has to do.
      }
    }
  }

  /** Takes in what pages that went away left. */
  async takeLastWords() {
    let keys = [];
    try {
      keys = Object.keys(localStorage).filter((key) => key.startsWith(LAST_WORDS));
    } catch {
      return; // Turned off: nobody could leave anything.
    }
    for (const key of keys) {
      const text = localStorage.getItem(key);
      const message = parsed(text);
      if (isMessage(message)) {
        await this.takeIn(message);
      }
      if (localStorage.getItem(key) === text) {
        localStorage.removeItem(key);
      }
    }
  }

  /** Writes a message that a page left, unless it was written whole before the page went. */
  async takeIn({ open, ...message }) {
    await this.transact("readwrite", async (store) => {
      const chat = await result(store(CHATS).get(message.conversation));
      if (chat?.erased) {
        return;
      }
      const stored = await result(store(MESSAGES).get(message.id));
      if (!chat) {
        const title = titleOf(message.content);
        store(CHATS).put({ id: message.conversation, title, updated: message.created, leaf: message.id });
      }
      if (!stored || stored.open) {
        store(MESSAGES).put(open ? { ...message, stopped: true } : message);
      }
    });
  }
}
