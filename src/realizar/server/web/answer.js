// One answer while it comes: the request, what it brings, and how fast.

import { streamChat } from "./api.js";
import { takeCalls, turnsWithCalls } from "./calls.js";
import { contentOf } from "./files.js";
import { askForKey } from "./settings.js";
import { loadKey } from "./store.js";

/** The messages of a branch that are sent. A question that got no word is left out: many templates refuse two questions in a row. */
export function turnsOf(path, system) {
  const said = turnsWithCalls(path.map((message) => ({ ...message, content: contentOf(message) })));
  const turns = said.filter(({ role }, index) => role !== "user" || said[index + 1]?.role !== "user");
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

/** Fills a message with the answer to a request, and reports each delta. */
export class Answer {
  constructor(message, onDelta) {
    this.message = message;
    this.onDelta = onDelta;
    this.controller = new AbortController();
    this.clock = { start: performance.now(), first: 0, last: 0, deltas: 0, tokens: null, drafts: null };
  }

  stop() {
    this.controller.abort();
  }

  /** Ends when the answer does, however it ends; the message then says how it ended. `prepare` gives the request's body. */
  async run(prepare) {
    try {
      const body = await prepare();
      this.message.model = body.model;
      await this.receive(body);
    } catch (error) {
      if (this.controller.signal.aborted) {
        this.message.stopped = true;
      } else {
        this.message.error = error.message;
      }
    }
    this.message.open = false;
    this.message.stats = summary(this.clock);
  }

  /** Asks for a key, and again, where the server wants another one. */
  async receive(body) {
    for (;;) {
      try {
        for await (const chunk of streamChat(body, loadKey(), this.controller.signal)) {
          this.take(chunk);
        }
        return;
      } catch (error) {
        if (error.status !== 401 || !(await askForKey())) {
          throw error;
        }
      }
    }
  }

  take(chunk) {
    const { message, clock } = this;
    clock.tokens = chunk.usage?.completion_tokens ?? clock.tokens;
    clock.drafts = chunk.timings ?? clock.drafts;
    if (chunk.usage?.total_tokens) {
      message.used = chunk.usage.total_tokens;
    }
    const choice = chunk.choices?.[0];
    const calls = choice?.delta?.tool_calls ?? [];
    const [text, thought] = [choice?.delta?.content ?? "", choice?.delta?.reasoning_content ?? ""];
    if (choice?.finish_reason === "length") {
      message.error = "The answer reached its limit of tokens.";
      message.cut = true;
    }
    if (!text && !thought && !calls.length) {
      return;
    }
    clock.last = performance.now();
    clock.first ||= clock.last;
    clock.deltas += 1;
    message.content += text;
    takeCalls(message, calls);
    if (thought) {
      message.reasoning = (message.reasoning ?? "") + thought;
    }
    this.onDelta(this);
  }

  get speed() {
    return this.clock.deltas > 4 ? `${perSecond(this.clock).toFixed(1)} tok/s` : "";
  }
}

function perSecond({ first, last, deltas, tokens }) {
  return last > first ? (((tokens ?? deltas) - 1) / (last - first)) * 1000 : 0;
}

function summary(clock) {
  const count = clock.tokens ?? clock.deltas;
  if (!clock.first || !count) {
    return "";
  }
  const parts = [`${count} ${count === 1 ? "token" : "tokens"}`];
  if (count > 1 && clock.last > clock.first) {
    parts.unshift(`${perSecond(clock).toFixed(1)} tok/s`);
  }
  parts.push(`first after ${((clock.first - clock.start) / 1000).toFixed(2)} s`);
  if (clock.drafts?.draft_n) {
    parts.push(`${clock.drafts.draft_n_accepted} of ${clock.drafts.draft_n} drafts right`);
  }
  return parts.join(" · ");
}
