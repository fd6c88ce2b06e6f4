// Takes over the one conversation that earlier versions of this page kept in localStorage.

import { isMessage, titleOf } from "./tree.js";

const KEY = "realizar.conversation";

/** The same number for the same text: two tabs that take the text over at once write the same records. */
function fingerprint(text) {
  let hash = 0x811c9dc5;
  for (let at = 0; at < text.length; at += 1) {
    hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193) >>> 0;
  }
  return `${hash.toString(16)}-${text.length}`;
}

/**
 * Messages in a row, each after the one before, with times that any tab would give them. What is no message is kept as
 * the text that it is.
 */
function chain(values, id) {
  let parent = null;
  return values.map((value, index) => {
    const base = { id: `${id}-${index}`, conversation: id, parent, created: index + 1 };
    parent = base.id;
    const message = { ...value, ...base };
    return isMessage(message) ? message : { ...base, role: "user", content: JSON.stringify(value) ?? "" };
  });
}

/** A stored text as `{chat, messages}`, null for one that holds nothing. What can't be read becomes one message. */
export function convert(text, now = Date.now()) {
  let values;
  try {
    values = JSON.parse(text);
  } catch {
    values = null;
  }
  const isRead = Array.isArray(values);
  if (isRead ? !values.length : !text.trim()) {
    return null;
  }
  const id = `earlier-${fingerprint(text)}`;
  const messages = chain(isRead ? values : [{ role: "user", content: text }], id);
  const title = isRead ? titleOf(messages[0].content) : "Saved text that could not be read";
  return { chat: { id, title, updated: now, leaf: messages.at(-1).id }, messages };
}

/** The data of an earlier version, `{chat, messages}`, or null. */
export function readEarlier() {
  try {
    const text = localStorage.getItem(KEY);
    return text === null ? null : convert(text);
  } catch {
    return null; // Storage is turned off.
  }
}

/** Writes what an earlier version kept into the archive, and only then removes it. Gives the conversation, or null. */
export async function takeOver(archive) {
  const found = readEarlier();
  if (found) {
    await archive.add([found]);
    if (readEarlier()?.chat.id === found.chat.id) {
      localStorage.removeItem(KEY);
    }
  }
  return found;
}
