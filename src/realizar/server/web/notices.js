// Lines above the composer that stay until they are answered or no longer true.

const notices = new Map();

/** Shows a line under a name, in place of the one that it had. `action`: `{label, run}`, a button at its end. */
export function notify(name, text, action = null) {
  if (notices.get(name)?.dataset.text === text) {
    return;
  }
  dismiss(name);
  const node = document.createElement("div");
  node.className = "notice-line";
  node.dataset.text = text;
  const words = document.createElement("span");
  words.textContent = text;
  node.append(words);
  if (action) {
    node.append(button(action.label, "quiet", () => {
      dismiss(name);
      action.run();
    }));
  }
  const close = button("×", "dismiss", () => dismiss(name));
  close.setAttribute("aria-label", "Dismiss");
  node.append(close);
  notices.set(name, node);
  document.getElementById("notices").append(node);
}

export function dismiss(name) {
  notices.get(name)?.remove();
  notices.delete(name);
}

function button(text, className, run) {
  const node = document.createElement("button");
  node.type = "button";
  node.className = className;
  node.textContent = text;
  node.addEventListener("click", run);
  return node;
}
