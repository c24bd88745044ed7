// The engine, live: follows the server's events, keeps its history, and draws both. It never sends text.

import { ServerError, events, request } from "./api.js";
import { $, duration, milliseconds, number, percent, short } from "./dom.js";
import { drawBlocks, drawLine } from "./draw.js";
import { showRequests } from "./requests.js";

const RATE_WINDOW = 2; // seconds over which the rate is taken
const HOLD = 2000; // a trouble must last so many milliseconds before it is shown
const SPANS = { 300: "5 minutes", 3600: "1 hour", 86400: "24 hours" };

const rings = { 300: [], 3600: [], 86400: [] }; // rows {time, rate, ttft_p50, itl_p50, restarts}, oldest first
const recent = []; // snapshots of the last seconds
let latest = null;
let span = 300;
let pointed = null; // age under the pointer, in seconds

const live = () => document.querySelector(".live");
const latency = (seconds) => (seconds === null || seconds === undefined ? "–" : milliseconds(seconds * 1000));

// --- status: at once when good, after a moment when not, so that it does not flicker

let shown = { state: "wait", text: "Connecting" };
let held = null; // {text, timer} of a status that waits

function health(state, text) {
  if (held?.text === text) return;
  clearTimeout(held?.timer);
  held = null;
  const show = () => {
    held = null;
    const trouble = state === "bad" && shown.state !== "bad";
    shown = { state, text };
    $("health").textContent = text;
    $("health").dataset.state = state;
    if (trouble) $("announce").textContent = text;
    live().classList.toggle("stale", state !== "good");
  };
  if (state === "good" || shown.state === "wait" || shown.text === text) show();
  else held = { text, timer: setTimeout(show, HOLD) };
}

// --- numbers

/** Output tokens per second over the last moments; null until there is something to compare with. */
function rate(now) {
  const first = recent.find((s) => now.time - s.time <= RATE_WINDOW);
  return first && now.time > first.time ? (now.generation_tokens - first.generation_tokens) / (now.time - first.time) : null;
}

function take(snapshot) {
  if (latest && (snapshot.time <= latest.time || snapshot.generation_tokens < latest.generation_tokens)) recent.length = 0;
  snapshot.rate = rate(snapshot);
  recent.push(snapshot);
  while (recent[0].time < snapshot.time - 2 * RATE_WINDOW) recent.shift();
  latest = snapshot;
  for (const [seconds, row] of Object.entries(snapshot.rows ?? {})) {
    const ring = rings[seconds];
    if (ring && (!ring.length || row.time > ring.at(-1).time)) ring.push(row);
    while (ring?.length && ring[0].time < row.time - Number(seconds)) ring.shift();
  }
  show(snapshot);
  draw();
}

/** A rate of the last minute, with its share of what the machine can do if that is known. */
function work(rate, unit, share) {
  if (rate === undefined) return "–";
  return `${(rate / 1e9).toFixed(1)} ${unit}${share === undefined ? "" : `, ${percent(share)} of the machine`}`;
}

function show(s) {
  $("running").textContent = number.format(s.num_running);
  $("waiting").textContent = number.format(s.num_waiting);
  $("rate").textContent = s.rate === null ? "–" : s.rate >= 100 || s.rate === 0 ? number.format(Math.round(s.rate)) : s.rate.toFixed(1);
  $("kv-share").textContent = s.num_blocks ? percent(s.num_used_blocks / s.num_blocks) : "–";
  for (const name of ["ttft", "itl"]) for (const word of ["p50", "p99"]) $(`${name}-${word}`).textContent = latency(s[`${name}_${word}`]);
  $("prefill-p99").textContent = latency(s.prefill_p99);
  $("hit-rate").textContent = s.prompt_tokens && s.cached_tokens !== undefined ? percent(s.cached_tokens / s.prompt_tokens) : "–";
  $("prompt-tokens").textContent = number.format(s.prompt_tokens);
  $("generation-tokens").textContent = number.format(s.generation_tokens);
  $("accepted").textContent = s.spec_draft_tokens
    ? `${percent(s.spec_accepted_tokens / s.spec_draft_tokens)}, ${(1 + s.spec_accepted_tokens / s.spec_drafts).toFixed(2)} tokens per step`
    : "–";
  $("preemptions").textContent = number.format(s.num_preemptions);
  const ended = Object.values(s.finished ?? {}).reduce((a, b) => a + b, 0);
  const failed = s.finished?.error ?? 0;
  $("finished").textContent = failed ? `${number.format(ended)}, ${number.format(failed)} failed` : number.format(ended);
  $("restarts").textContent = number.format(s.restarts ?? 0);
  $("work-read").textContent = work(s.work?.read_bytes_per_second, "GB/s", s.work?.bandwidth_perc);
  $("work-computed").textContent = work(s.work?.operations_per_second, "GFLOP/s", s.work?.arithmetic_perc);
  showRequests(s.requests ?? [], s.requests_hidden ?? 0);
  if (s.draining) health("bad", "Shutting down");
  else if (s.healthy === false) health("bad", "Engine restarting");
  else health("good", s.num_running || s.num_waiting ? "Busy" : "Ready");
  document.title = s.num_running ? `(${s.num_running}) Quire` : "Quire";
}

// --- pictures

const CHARTS = [
  ["chart-rate", "rate", { fill: true, label: short }],
  ["chart-ttft", "ttft_p50", { name: "--soft", label: latency }],
  ["chart-itl", "itl_p50", { name: "--soft", label: latency }],
];

function draw() {
  const s = latest;
  if (!s) return;
  const ring = rings[span];
  const now = s.wall ?? ring.at(-1)?.time ?? 0;
  const marks = ring.filter((row, i) => i && row.restarts > ring[i - 1].restarts).map((row) => now - row.time);
  for (const [id, name, options] of CHARTS) {
    drawLine($(id), ring.map((row) => [now - row.time, row[name] ?? null]), span, { ...options, marks, at: pointed });
  }
  point(ring, now);
  const shared = s.num_shared_blocks ?? 0;
  const alone = s.num_used_blocks - shared;
  const each = drawBlocks($("kv"), [["--deep", shared], ["--red", alone], ["--gold", s.num_cached_blocks], ["--free", s.num_free_blocks]]);
  $("kv-shared-item").hidden = s.num_shared_blocks === undefined;
  $("kv-shared").textContent = number.format(shared);
  $("kv-used").textContent = number.format(alone);
  $("kv-cached").textContent = number.format(s.num_cached_blocks);
  $("kv-free").textContent = number.format(s.num_free_blocks);
  const tokens = s.block_size ? ` of ${s.block_size} tokens` : "";
  $("kv-scale").textContent = each > 1.5 ? `one square is ${Math.round(each)} blocks${tokens}` : each ? `one square is one block${tokens}` : "";
  $("kv").setAttribute("aria-label", `KV blocks: ${s.num_used_blocks} in use, ${s.num_cached_blocks} kept for reuse, ${s.num_free_blocks} free`);
}

/** Say what the charts show at the pointer. */
function point(ring, now) {
  const row = pointed === null ? null : ring.reduce((best, r) => (best === null || Math.abs(now - r.time - pointed) < Math.abs(now - best.time - pointed) ? r : best), null);
  const value = (v, text) => (v === null || v === undefined ? "–" : text(v));
  $("chart-at").textContent = row === null ? `last ${SPANS[span]}` : `${duration(Math.max(0, now - row.time))} ago: ${value(row.rate, short)} tokens/s, first ${latency(row.ttft_p50)}, between ${latency(row.itl_p50)}`;
}

function watchPointer() {
  for (const [id] of CHARTS) {
    const canvas = $(id);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      pointed = Math.max(0, Math.min(1, 1 - (event.clientX - box.left) / box.width)) * span;
      draw();
    });
    canvas.addEventListener("pointerleave", () => {
      pointed = null;
      draw();
    });
  }
  $("span").addEventListener("change", () => {
    span = Number($("span").value);
    draw();
  });
}

// --- the connection

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const seen = () => document.visibilityState === "visible" || new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));

async function history(signal) {
  const found = await (await request("dashboard/history", { signal })).json();
  for (const [seconds, rows] of Object.entries(found.rings ?? {})) if (rings[seconds]) rings[seconds].splice(0, Infinity, ...rows);
}

/** Follow the events while the page is visible; after a break, try again ever less often. */
export async function startLive() {
  let pause = 500;
  watchPointer();
  new ResizeObserver(draw).observe(live());
  document.addEventListener("quire-colours", draw);
  for (;;) {
    await seen();
    const abort = new AbortController();
    const hide = () => document.visibilityState === "hidden" && abort.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      await history(abort.signal);
      for await (const data of events(await request("dashboard/events", { signal: abort.signal }))) {
        pause = 500;
        take(JSON.parse(data));
      }
      health("wait", "Reconnecting");
    } catch (error) {
      if (error.name === "AbortError") continue;
      if (error instanceof ServerError && error.status === 401) {
        health("bad", "Needs a key");
        await new Promise((resolve) => document.addEventListener("quire-key", resolve, { once: true }));
        continue;
      }
      health("bad", "No connection");
    } finally {
      document.removeEventListener("visibilitychange", hide);
      abort.abort();
    }
    await wait(pause);
    pause = Math.min(10000, pause * 1.7);
  }
}
