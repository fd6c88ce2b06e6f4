// A field in the place of a message that is edited.

function element(kind, className, text = "") {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

/** A form with a text in it. Enter or its button give `onSend(text)`, Escape or the other one `onCancel()`. */
export function makeEditor(text, onSend, onCancel) {
  const [form, field, foot] = [element("form", "editor"), element("textarea", ""), element("div", "editor-foot")];
  const [cancel, send] = [element("button", "quiet", "Cancel"), element("button", "primary", "Send")];
  field.value = text;
  field.rows = Math.min(12, text.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit your message");
  cancel.type = "button";
  foot.append(cancel, send);
  form.append(field, foot);
  cancel.addEventListener("click", onCancel);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() || !text) {
      onSend(field.value.trim());
    }
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // elsewhere it stops the answer
      onCancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  return form;
}
