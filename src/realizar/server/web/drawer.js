// The list of chats: open, rename, delete and restore them.

import { icon } from "./view.js";

const byId = (id) => document.getElementById(id);

function element(kind, className, text = "") {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

function button(className, label, run, text = "") {
  const node = element("button", className, text);
  node.type = "button";
  node.title = label;
  node.setAttribute("aria-label", label);
  node.addEventListener("click", run);
  return node;
}

/** `handlers`: open(id), list(), rename(id, title), remove(id), restore(id), erase(id); promises, but for open. */
export class Drawer {
  constructor(handlers) {
    this.handlers = handlers;
    this.dialog = byId("chats");
    this.current = null;
    byId("open-chats").addEventListener("click", () => this.show());
    byId("close-chats").addEventListener("click", () => this.dialog.close());
    byId("undo-delete").addEventListener("click", () => this.undo());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) {
        this.dialog.close();
      }
    });
  }

  async show() {
    this.say("", null);
    await this.refresh();
    if (!this.dialog.open) {
      this.dialog.showModal();
    }
  }

  /** Shows the list as it is now, with the chat that is open marked; the focus stays where it is. */
  async refresh(current = this.current) {
    this.current = current;
    const all = await this.handlers.list();
    if (this.dialog.querySelector(".rename")) {
      return; // somebody is typing
    }
    const [focused, kind] = [document.activeElement?.closest("li")?.dataset.id, document.activeElement?.className];
    const [kept, deleted] = [all.filter((chat) => !chat.deleted), all.filter((chat) => chat.deleted)];
    byId("chat-list").replaceChildren(...kept.map((chat) => this.item(chat)));
    byId("deleted-list").replaceChildren(...deleted.map((chat) => this.deletedItem(chat)));
    byId("no-chats").hidden = kept.length > 0;
    byId("deleted").hidden = !deleted.length;
    byId("deleted-count").textContent = `Deleted (${deleted.length})`;
    const same = [...this.dialog.querySelectorAll("li")].find((node) => node.dataset.id === focused);
    [...(same?.querySelectorAll("button") ?? [])].find((node) => node.className === kind)?.focus();
  }

  item(chat) {
    const item = element("li", chat.id === this.current ? "chat-item current" : "chat-item");
    item.dataset.id = chat.id;
    const open = button("chat-open", chat.title, () => {
      this.dialog.close();
      this.handlers.open(chat.id);
    });
    const when = new Date(chat.updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(element("span", "chat-title", chat.title), element("span", "chat-when", when));
    if (chat.id === this.current) {
      open.setAttribute("aria-current", "true");
    }
    const rename = button("action rename-chat", `Rename “${chat.title}”`, () => this.rename(item, chat));
    rename.append(icon("edit"));
    const remove = button("action delete-chat", `Delete “${chat.title}”`, () => this.remove(chat));
    remove.append(icon("trash"));
    item.append(open, rename, remove);
    return item;
  }

  deletedItem(chat) {
    const item = element("li", "chat-item");
    item.dataset.id = chat.id;
    const restore = button("quiet", `Restore “${chat.title}”`, () => this.handlers.restore(chat.id), "Restore");
    const erase = button("quiet danger", `Erase “${chat.title}” for good`, () => this.handlers.erase(chat.id), "Erase");
    item.append(element("span", "chat-title", chat.title), restore, erase);
    return item;
  }

  rename(item, chat) {
    const form = element("form", "rename");
    const field = element("input", "");
    field.value = chat.title;
    field.setAttribute("aria-label", "Name of the chat");
    form.append(field);
    let isOver = false;
    const finish = async (title) => {
      if (isOver) {
        return;
      }
      isOver = true;
      form.remove();
      if (title && title !== chat.title) {
        await this.handlers.rename(chat.id, title);
      }
      await this.refresh();
      const again = [...byId("chat-list").children].find((node) => node.dataset.id === chat.id);
      again?.querySelector(".rename-chat").focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      finish(field.value.trim());
    });
    field.addEventListener("blur", () => finish(field.value.trim()));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault(); // the list stays open
        event.stopPropagation();
        finish("");
      }
    });
    item.replaceChildren(form);
    field.focus();
    field.select();
  }

  async remove(chat) {
    await this.handlers.remove(chat.id);
    this.say(`“${chat.title}” was deleted.`, chat.id);
    byId("undo-delete").focus();
  }

  async undo() {
    const id = this.undoable;
    this.say("", null);
    await this.handlers.restore(id);
    const again = [...byId("chat-list").children].find((node) => node.dataset.id === id);
    again?.querySelector(".chat-open").focus();
  }

  say(text, undoable) {
    this.undoable = undoable;
    byId("chats-said").textContent = text;
    byId("undo-delete").hidden = undoable === null;
    byId("chats-status").classList.toggle("empty", !text);
  }
}
