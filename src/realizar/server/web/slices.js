// Work in slices: as much at once as a reader does not feel, the rest in tasks of its own, so that the page reacts.

const SLICE = 800; // units of work, each some ten microseconds, before the page does something else
const queue = [];
const ends = [];
const channel = new MessageChannel();
let spent = 0;
let isPlanned = false;
let isToTell = false;

channel.port1.onmessage = () => {
  isPlanned = false;
  spent = 0;
  if (queue.length) {
    run();
    tellDrawn();
  }
};

/** Has the page told before it is painted that what is shown may have grown. */
export function tellDrawn() {
  if (!isToTell) {
    isToTell = true;
    requestAnimationFrame(() => {
      isToTell = false;
      document.dispatchEvent(new Event("drawn"));
    });
  }
}

/** Does work: an iterator that yields how many units it has done since it last did. A small one ends before this does. */
export function work(iterator) {
  queue.push(iterator);
  if (queue.length === 1) {
    run();
  }
}

function run() {
  while (queue.length && spent < SLICE) {
    let next = { done: true };
    try {
      next = queue[0].next();
    } finally {
      spent += next.value ?? 1;
      if (next.done) {
        queue.shift();
      }
    }
  }
  if (!isPlanned) {
    isPlanned = true;
    channel.port2.postMessage(null);
  }
  if (!queue.length) {
    ends.splice(0).forEach((end) => end());
  }
}

/** Resolves once nothing is left to do. */
export const idle = () => (queue.length ? new Promise((end) => { ends.push(end); }) : Promise.resolve());
