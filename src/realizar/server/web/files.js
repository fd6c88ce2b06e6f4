// Text files and images that go with a message: chosen, dropped or pasted, shown as chips until it is sent.

import { knownModel } from "./connection.js";
import { imageNode, isImage, isImageFile, readImage } from "./images.js";
import { dismiss, notify } from "./notices.js";
import { loadDraftFiles, saveDraftFiles } from "./store.js";

const MAX_BYTES = 1 << 20; // of a file
const MAX_FILES = 20;
const byId = (id) => document.getElementById(id);

const isText = (file) => typeof file.text === "string";

/** True for a stored list of files: `{name, text}`, or `{name, url}` of an image. */
export function areFiles(value) {
  return Array.isArray(value) && value.length > 0
    && value.every((file) => typeof file?.name === "string" && (isText(file) || isImage(file)));
}

/** A file with the fields that it has here. */
export const knownFile = (file) => (isText(file) ? { name: file.name, text: file.text } : { name: file.name, url: file.url });

/** A message's content as the model gets it: its text, or parts where it has images, which come first. */
export function contentOf(message) {
  const images = (message.files ?? []).filter((file) => !isText(file));
  const text = withFiles(message);
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}

/** A message's text with its files in fences, each below its name, before what was written. */
function withFiles(message) {
  const parts = (message.files ?? []).filter(isText).map(({ name, text }) => {
    const runs = text.match(/`+/g) ?? [];
    const fence = "`".repeat(runs.reduce((most, run) => Math.max(most, run.length + 1), 3));
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}

/** A file of a message: an image, or a text that is folded away. */
export function fileNode(file) {
  return isText(file) ? textNode(file) : imageNode(file);
}

function textNode({ name, text }) {
  const node = document.createElement("details");
  node.className = "fold file";
  const [summary, pre] = [document.createElement("summary"), document.createElement("pre")];
  summary.textContent = `${name} (${size(text)})`;
  pre.textContent = text;
  pre.tabIndex = 0;
  node.append(summary, pre);
  return node;
}

function size(text) {
  const lines = text.split("\n").length - (text.endsWith("\n") ? 1 : 0);
  return `${lines.toLocaleString()} ${lines === 1 ? "line" : "lines"}`;
}

async function readText(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`“${file.name}” is larger than ${MAX_BYTES >> 20} MiB, the most that a message takes.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) {
    throw new Error(`“${file.name}” is neither text in UTF-8 nor an image.`);
  }
  return { name: file.name, text };
}

/** What goes with the message of a file; an error with a sentence where it can't. */
async function read(file) {
  if (!isImageFile(file)) {
    return readText(file);
  }
  const { id, largest_image: largest } = await knownModel();
  if (!largest) {
    throw new Error(`“${file.name}” is an image, and ${id} reads text only.`);
  }
  return readImage(file, largest);
}

/** The files that go with the next message. */
export class Attachments {
  constructor() {
    this.files = loadDraftFiles().filter((file) => areFiles([file]));
    this.numReading = 0; // of what was given at once
    this.reading = Promise.resolve(); // ends when nothing is read any more
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", ({ target }) => {
      this.add([...target.files]);
      target.value = "";
    });
    byId("prompt").addEventListener("paste", (event) => {
      if (event.clipboardData.files.length) {
        event.preventDefault();
        this.add([...event.clipboardData.files]);
      }
    });
    this.listenToDrops();
    this.show();
  }

  listenToDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
    addEventListener("dragover", (event) => {
      if (hasFiles(event)) {
        event.preventDefault();
        mark(true);
      }
    });
    addEventListener("dragleave", (event) => mark(event.relatedTarget !== null));
    addEventListener("drop", (event) => {
      if (hasFiles(event)) {
        event.preventDefault(); // the browser would open it in the page's place
        mark(false);
        this.add([...event.dataTransfer.files]);
      }
    });
  }

  get isEmpty() {
    return !this.files.length && !this.numReading;
  }

  /** Says on its button what a model takes. */
  showKinds(sees) {
    const label = sees ? "Add images and text files" : "Add text files";
    byId("attach").title = label;
    byId("attach").setAttribute("aria-label", label);
  }

  add(files) {
    this.numReading += 1;
    this.reading = this.reading.then(() => this.takeIn(files));
  }

  /** Takes files in; one that the model can't read is refused with a sentence. */
  async takeIn(files) {
    dismiss("file");
    for (const file of files) {
      try {
        if (this.files.length >= MAX_FILES) {
          throw new Error(`A message takes at most ${MAX_FILES} files.`);
        }
        this.files.push(await read(file));
      } catch (error) {
        notify("file", error.message);
      }
    }
    this.numReading -= 1;
    this.show();
    byId("prompt").focus();
  }

  /** Gives the files, once they are read, and keeps none. */
  async take() {
    await this.reading;
    const taken = this.files;
    this.files = [];
    this.show();
    return taken;
  }

  remove(file) {
    const at = this.files.indexOf(file);
    this.files.splice(at, 1);
    this.show();
    byId("prompt").focus();
    const back = () => {
      this.files.splice(at, 0, file);
      this.show();
    };
    notify("file", `“${file.name}” was taken out.`, { label: "Undo", run: back });
  }

  show() {
    saveDraftFiles(this.files);
    byId("files").replaceChildren(...this.files.map((file) => this.chip(file)));
    byId("files").hidden = !this.files.length;
  }

  chip(file) {
    const [item, name, remove] = [document.createElement("li"), document.createElement("span"), document.createElement("button")];
    name.textContent = isText(file) ? `${file.name} (${size(file.text)})` : file.name;
    remove.type = "button";
    remove.className = "dismiss";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Take “${file.name}” out`);
    remove.addEventListener("click", () => this.remove(file));
    item.append(...(isText(file) ? [] : [imageNode({ ...file, name: "" })]), name, remove);
    return item;
  }
}
