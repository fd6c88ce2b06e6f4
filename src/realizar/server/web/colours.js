// Colours of code, by highlight.js in a worker, which is started when the first code in a named language is shown.

const MAX_LENGTH = 20_000; // characters
const MAX_NODES = 8000; // of one block
const MAX_WAIT_MS = 5000; // a language that takes longer is coloured no more
const CLASS = /^(?:hljs-[a-z_-]+|[a-z]+_)$/;
const jobs = []; // the first one is the worker's
const running = new WeakSet(); // elements that are coloured
const slow = new Set(); // languages
let worker = null;
let isReady = false;
let timer = 0;

/**
 * Colours an element's text as code of a language when that can be done, and again if it has grown since; text in no
 * known language stays. `allow(nodes)` tells whether it may have so many.
 */
export function colourCode(node, language, allow) {
  const code = node.textContent;
  if (!language || slow.has(language) || !code || code.length > MAX_LENGTH || running.has(node)) {
    return;
  }
  running.add(node);
  jobs.push({ code, language, end: (markup) => {
    running.delete(node);
    const text = node.textContent;
    const nodes = 2 * (markup?.match(/<span/g) ?? []).length + 2;
    if (markup !== null && text.startsWith(code) && nodes <= MAX_NODES && allow(nodes)) {
      colour(node, markup, text.slice(code.length));
    }
    if (text !== code && markup !== null) {
      colourCode(node, language, allow);
    }
  } });
  if (jobs.length === 1) {
    begin();
  }
}

function begin() {
  worker ??= started();
  if (isReady) {
    const [{ code, language }] = jobs;
    worker.postMessage({ code, language });
    timer = setTimeout(() => {
      slow.add(language);
      stop();
    }, MAX_WAIT_MS);
  }
}

function started() {
  const made = new Worker(new URL("./painter.js", import.meta.url), { type: "module" });
  made.addEventListener("error", stop); // it is started anew for the next code
  made.addEventListener("message", ({ data }) => {
    if (isReady) {
      end(data);
    } else {
      isReady = true;
      begin();
    }
  });
  return made;
}

function stop() {
  worker.terminate();
  [worker, isReady] = [null, false];
  end(null);
}

function end(markup) {
  clearTimeout(timer);
  const job = jobs.shift();
  while (slow.has(jobs[0]?.language)) {
    jobs.shift().end(null);
  }
  if (jobs.length) {
    begin();
  }
  job.end(markup);
}

function colour(node, markup, rest) {
  // The markup is read in a document that runs nothing, and only spans with known classes are taken from it.
  const parsed = new DOMParser().parseFromString(`<pre>\n${markup}</pre>`, "text/html").body.firstChild;
  node.replaceChildren(...copies(parsed), rest);
}

function copies(parent) {
  return [...parent.childNodes].map((node) => {
    if (node.nodeType !== Node.ELEMENT_NODE) {
      return node.textContent;
    }
    const span = document.createElement("span");
    span.className = [...node.classList].filter((name) => CLASS.test(name)).join(" ");
    span.append(...copies(node));
    return span;
  });
}
