// Chats as files: what an export holds, and what of a file is taken in. A file may come from anywhere: it is bounded,
// read whole or refused, and only fields that are known by name are copied from it.

import { areCalls } from "./calls.js";
import { areFiles, knownFile } from "./files.js";
import { isConversation, isMessage, newId } from "./tree.js";

const FORMAT = "realizar chats";
const VERSION = 1;
const MAX_BYTES = 64 << 20;
const HEAD_BYTES = 1000; // at most, of what a file has beside its chats
const MAX_MESSAGES = 50_000; // of a file
const MAX_CHATS = 10_000;
const MAX_TITLE = 200;
const TYPES = {
  id: "string", role: "string", content: "string", created: "number", reasoning: "string", error: "string",
  stopped: "boolean", stats: "string", model: "string", used: "number", cut: "boolean", call: "string", name: "string",
};

/** A reason why a file is not taken in, as a sentence. */
export class ImportError extends Error {}

/** Texts of the files that hold some conversations, `[{chat, messages}]`: one, but for more than one may have. */
export function exportTexts(chats) {
  const parts = [[]];
  let [count, size] = [0, HEAD_BYTES];
  for (const { chat, messages } of chats) {
    const text = JSON.stringify({
      id: chat.id, title: chat.title, updated: chat.updated, leaf: chat.leaf,
      messages: messages.map((message) => ({ ...known(message), parent: message.parent })),
    });
    const bytes = new Blob([text]).size + 1;
    [count, size] = [count + messages.length, size + bytes];
    if ((count > MAX_MESSAGES || size > MAX_BYTES) && parts.at(-1).length) {
      parts.push([]);
      [count, size] = [messages.length, HEAD_BYTES + bytes];
    }
    parts.at(-1).push(text);
  }
  const head = JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString() }).slice(0, -1);
  return parts.map((part) => `${head},"chats":[${part.join(",")}]}`);
}

/** Hands a text to the browser as a file to keep. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** A chat's name as that of a file. */
export function fileName(title) {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  return `${plain || "chat"}.json`;
}

/**
 * The conversations of a file, `[{chat, messages}]`.
 * @throws {ImportError} for a file that is too large, or that this page did not write.
 */
export async function readImport(file) {
  if (file.size > MAX_BYTES) {
    throw new ImportError(`“${file.name}” is larger than ${MAX_BYTES >> 20} MiB, the most that is read.`);
  }
  let value;
  try {
    value = JSON.parse(await file.text());
  } catch {
    throw new ImportError(`“${file.name}” is not JSON.`);
  }
  if (value?.format !== FORMAT || !Array.isArray(value.chats)) {
    throw new ImportError(`“${file.name}” is not an export of this page.`);
  }
  if (value.version !== VERSION) {
    throw new ImportError(`“${file.name}” was written by a newer version of this page.`);
  }
  const count = value.chats.reduce((sum, chat) => sum + (chat?.messages?.length ?? 0), 0);
  if (value.chats.length > MAX_CHATS || !(count <= MAX_MESSAGES)) {
    const most = `${MAX_MESSAGES.toLocaleString()} messages in ${MAX_CHATS.toLocaleString()} chats`;
    throw new ImportError(`“${file.name}” holds more than ${most}, the most that is read.`);
  }
  return value.chats.map((chat, index) => readChat(chat, `Chat ${index + 1} of “${file.name}”`));
}

function readChat(value, name) {
  const chat = { id: value?.id, title: value?.title, updated: value?.updated, leaf: value?.leaf ?? null };
  if (!isConversation(chat) || !Array.isArray(value.messages) || !value.messages.length) {
    throw new ImportError(`${name} is not one that this page wrote.`);
  }
  chat.title = chat.title.slice(0, MAX_TITLE);
  const ids = new Set();
  const messages = value.messages.map((each, index) => {
    const message = { ...known(each ?? {}), conversation: chat.id, parent: idOrNull(each?.parent) };
    if (!isMessage(message) || ids.has(message.id)) {
      throw new ImportError(`Message ${index + 1} of chat “${chat.title}” is not one that this page wrote.`);
    }
    ids.add(message.id);
    return message;
  });
  return { chat: { ...chat, leaf: idOrNull(chat.leaf) }, messages };
}

const idOrNull = (value) => (typeof value === "string" ? value : null);

/** The fields of a message that mean something here, as far as their types are right. */
function known(message) {
  const names = Object.keys(TYPES).filter((name) => Object.hasOwn(message, name) && typeof message[name] === TYPES[name]);
  const found = Object.fromEntries(names.map((name) => [name, message[name]]));
  if (Object.hasOwn(message, "files") && areFiles(message.files)) {
    found.files = message.files.map(knownFile);
  }
  if (Object.hasOwn(message, "calls") && areCalls(message.calls)) {
    found.calls = message.calls.map(({ id, name, arguments: given }) => ({ id, name, arguments: given }));
  }
  return found;
}

/** The same conversation under ids that nobody has. */
export function withNewIds({ chat, messages }) {
  const ids = new Map(messages.map(({ id }) => [id, newId()]));
  const id = newId();
  return {
    chat: { ...chat, id, leaf: ids.get(chat.leaf) ?? null },
    messages: messages.map((message) => (
      { ...message, id: ids.get(message.id), conversation: id, parent: ids.get(message.parent) ?? null }
    )),
  };
}
