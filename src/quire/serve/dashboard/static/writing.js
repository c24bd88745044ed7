// One answer that is being written: its stream, its switch, its counts and times.

import { stream } from "./api.js";
import { milliseconds, number, plural } from "./dom.js";

/** Counts and times of one answer, as the line below it. */
export class Timing {
  constructor() {
    this.start = performance.now();
    this.first = 0;
    this.last = 0;
    this.pieces = 0;
    this.usage = null;
  }

  piece() {
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
  }

  line(finish) {
    const parts = [];
    if (this.first) {
      const tokens = this.usage?.completion_tokens ?? this.pieces;
      parts.push(plural(tokens, "token"), `first after ${milliseconds(this.first - this.start)}`);
      const seconds = (this.last - this.first) / 1000;
      if (tokens >= 8 && seconds > 0.02) {
        const rate = (tokens - 1) / seconds;
        parts.push(`${rate >= 20 ? number.format(Math.round(rate)) : rate.toFixed(1)} tokens/s`);
      }
      const cached = this.usage?.prompt_tokens_details?.cached_tokens;
      if (cached) parts.push(`${number.format(cached)} of ${number.format(this.usage.prompt_tokens)} prompt tokens from cache`);
    }
    if (finish === "length") parts.push("cut at the token limit");
    if (finish === "stopped") parts.push("stopped");
    return parts.join(" · ");
  }
}

/** The Send and Stop buttons of a form, and the abort switch between them. */
export class Writing {
  constructor(send, stop) {
    this.send = send;
    this.stop = stop;
    this.abort = null;
    stop.addEventListener("click", () => this.end());
  }

  get busy() {
    return this.abort !== null;
  }

  begin() {
    this.abort = new AbortController();
    this.show();
    return this.abort.signal;
  }

  end() {
    this.abort?.abort();
  }

  done() {
    this.abort = null;
    this.show();
  }

  show() {
    const focused = document.activeElement === this.send || document.activeElement === this.stop;
    this.send.hidden = this.busy;
    this.stop.hidden = !this.busy;
    if (focused) (this.busy ? this.stop : this.send).focus();
  }
}

/**
 * Follow a stream: call `take(choice)` for each event that has one; it returns whether the event brought text.
 * Returns {finish, timing, error}: an error leaves what came before it in place.
 */
export async function follow(path, body, signal, take) {
  const timing = new Timing();
  let finish = null;
  let error = null;
  try {
    for await (const event of stream(path, body, signal)) {
      const choice = event.choices?.[0];
      if (choice && take(choice)) timing.piece();
      finish = choice?.finish_reason ?? finish;
      timing.usage = event.usage ?? timing.usage;
    }
  } catch (problem) {
    if (problem.name === "AbortError") finish = "stopped";
    else error = problem;
  }
  return { finish, timing, error };
}
