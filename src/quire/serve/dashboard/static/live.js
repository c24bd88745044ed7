// The live view: follows the server's events and draws them. Numbers only; it never asks for anything else.

import { ServerError, events, request } from "./api.js";
import { drawBlocks, drawLine } from "./draw.js";
import { milliseconds } from "./play.js";

const SPAN = 120;
const RATE_WINDOW = 2;
const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const history = [];
let latest = null;

function health(state, text) {
  const box = $("health");
  if (box.textContent !== text) box.textContent = text;
  box.dataset.state = state;
  document.querySelector(".live").classList.toggle("stale", state !== "good" && state !== "busy");
}

const percent = (share) => `${share >= 0.1 || share === 0 ? Math.round(share * 100) : (share * 100).toFixed(1)}%`;
const latency = (seconds) => (seconds === null || seconds === undefined ? "–" : milliseconds(seconds * 1000));

/** Output tokens a second over the last moments; null until there is something to compare with. */
function rate(now) {
  const first = history.find((s) => now.time - s.time <= RATE_WINDOW);
  return first ? (now.generation_tokens - first.generation_tokens) / (now.time - first.time) : null;
}

function take(snapshot) {
  if (latest && (snapshot.time <= latest.time || snapshot.generation_tokens < latest.generation_tokens)) history.length = 0;
  snapshot.rate = rate(snapshot);
  history.push(snapshot);
  while (history[0].time < snapshot.time - SPAN) history.shift();
  latest = snapshot;
  show(snapshot);
  draw();
}

function show(s) {
  $("running").textContent = number.format(s.num_running);
  $("waiting").textContent = number.format(s.num_waiting);
  $("rate").textContent = s.rate === null ? "–" : s.rate >= 100 || s.rate === 0 ? number.format(Math.round(s.rate)) : s.rate.toFixed(1);
  $("kv-share").textContent = s.num_blocks ? percent(s.num_used_blocks / s.num_blocks) : "–";
  for (const name of ["ttft", "itl"]) {
    for (const word of ["p50", "p99"]) $(`${name}-${word}`).textContent = latency(s[`${name}_${word}`]);
  }
  $("hit-rate").textContent = s.prompt_tokens && s.cached_tokens !== undefined ? percent(s.cached_tokens / s.prompt_tokens) : "–";
  $("prompt-tokens").textContent = number.format(s.prompt_tokens);
  $("generation-tokens").textContent = number.format(s.generation_tokens);
  $("preemptions").textContent = number.format(s.num_preemptions);
  const ended = Object.values(s.finished ?? {}).reduce((a, b) => a + b, 0);
  const failed = s.finished?.error ?? 0;
  $("finished").textContent = failed ? `${number.format(ended)}, ${number.format(failed)} failed` : number.format(ended);
  if (s.model) $("model").textContent = s.model;
  if (s.draining) health("wait", "Shutting down");
  else if (s.healthy === false) health("bad", "Engine restarting");
  else health("good", s.num_running || s.num_waiting ? "Busy" : "Ready");
  document.title = s.num_running ? `(${s.num_running}) Quire` : "Quire";
}

function draw() {
  const s = latest;
  if (!s) return;
  const over = (name) => history.map((h) => [s.time - h.time, h[name] ?? null]);
  drawLine($("chart-rate"), over("rate"), SPAN, { fill: true, label: (top) => short.format(top) });
  drawLine($("chart-ttft"), over("ttft_p50"), SPAN, { name: "--soft" });
  drawLine($("chart-itl"), over("itl_p50"), SPAN, { name: "--soft" });
  const shared = s.num_shared_blocks ?? 0;
  const alone = s.num_used_blocks - shared;
  const each = drawBlocks($("kv"), [["--deep", shared], ["--red", alone], ["--gold", s.num_cached_blocks], ["--free", s.num_free_blocks]]);
  $("kv-shared-item").hidden = s.num_shared_blocks === undefined;
  $("kv-shared").textContent = number.format(shared);
  $("kv-used").textContent = number.format(alone);
  $("kv-cached").textContent = number.format(s.num_cached_blocks);
  $("kv-free").textContent = number.format(s.num_free_blocks);
  const tokens = s.block_size ? ` of ${s.block_size} tokens` : "";
  $("kv-scale").textContent = each > 1.5 ? `a square is ${Math.round(each)} blocks${tokens}` : each ? `a square is a block${tokens}` : "";
  $("kv").setAttribute("aria-label", `KV blocks: ${s.num_used_blocks} in use, ${s.num_cached_blocks} cached, ${s.num_free_blocks} free`);
}

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const visible = () => document.visibilityState === "visible" || new Promise((resolve) => {
  document.addEventListener("visibilitychange", resolve, { once: true });
});

/** Follow the events for as long as the page is seen; after a break, try again, ever less often. */
export async function startLive() {
  let pause = 500;
  new ResizeObserver(draw).observe(document.querySelector(".live"));
  document.addEventListener("quire-colours", draw);
  for (;;) {
    await visible();
    const abort = new AbortController();
    const hide = () => document.visibilityState === "hidden" && abort.abort();
    document.addEventListener("visibilitychange", hide);
    try {
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
