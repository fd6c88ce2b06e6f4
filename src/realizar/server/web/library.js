// What is done with all chats at once: search, export and import.

import { download, exportTexts, fileName, ImportError, readImport, withNewIds } from "./transfer.js";

const SNIPPET = 90; // characters
const BEFORE = 12; // of them before the words that were found, which a narrow drawer has room to show

/** A part of a text around the place where words were found. */
function snippet(text, at) {
  const start = Math.max(0, at - BEFORE);
  const part = text.slice(start, start + SNIPPET).replace(/\s+/g, " ").trim();
  return `${start ? "…" : ""}${part}${start + SNIPPET < text.length ? "…" : ""}`;
}

/**
 * Looks for a text in titles and messages, whatever its case. Resolves to a map by the chats' ids of `{message, text}`:
 * the newest message that has it, null if only the title does, and what stands around it.
 */
export async function search(archive, wanted) {
  const needle = wanted.trim().toLowerCase();
  const found = new Map();
  for (const chat of await archive.list()) {
    if (chat.title.toLowerCase().includes(needle)) {
      found.set(chat.id, { message: null, created: 0, text: "" });
    }
  }
  await archive.eachMessage((message) => {
    const written = [message.content, ...(message.files ?? []).map(({ name, text = "" }) => `${name} ${text}`)].join(" ");
    const at = written.toLowerCase().indexOf(needle);
    const before = found.get(message.conversation);
    if (at >= 0 && !(before?.created > message.created)) {
      const text = snippet(written, at);
      found.set(message.conversation, { message: message.id, created: message.created, text });
    }
  });
  return found;
}

/** Saves one chat, or with null all that are not deleted, as files. */
export async function saveAs(archive, id) {
  const all = (await archive.list()).filter((chat) => (id === null ? !chat.deleted : chat.id === id));
  const loaded = [];
  for (const chat of all) {
    const found = await archive.load(chat.id);
    if (found?.messages.length) {
      loaded.push(found);
    }
  }
  if (!loaded.length) {
    return;
  }
  const day = new Date().toISOString().slice(0, 10);
  exportTexts(loaded).forEach((text, index) => {
    download(id === null ? `chats-${day}${index ? `-${index + 1}` : ""}.json` : fileName(loaded[0].chat.title), text);
  });
}

/** Takes a file's chats in beside those that there are, and says what came of it; nothing stored is overwritten. */
export async function takeFile(archive, file) {
  let read;
  try {
    read = await readImport(file);
  } catch (error) {
    if (!(error instanceof ImportError)) {
      throw error;
    }
    return error.message;
  }
  const added = [];
  for (const each of read) {
    const stored = await archive.load(each.chat.id);
    const isHere = stored && !stored.chat.deleted;
    if (!isHere || !isWithin(each.messages, stored.messages)) {
      added.push((await archive.isFree(each)) ? each : withNewIds(each));
    }
  }
  if (added.length) {
    await archive.add(added);
  }
  const here = read.length - added.length;
  return [count(added.length, "was", "were", "imported"), here ? count(here, "was", "were", "here already") : ""].join(" ").trim();
}

const count = (number, one, more, what) => `${number} ${number === 1 ? `chat ${one}` : `chats ${more}`} ${what}.`;

function isWithin(messages, stored) {
  const contents = new Map(stored.map(({ id, content }) => [id, content]));
  return messages.every(({ id, content }) => contents.get(id) === content);
}
