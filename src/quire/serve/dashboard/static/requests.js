// The table of live requests: counts and times, never text.

import { request } from "./api.js";
import { $, button, duration, el, number } from "./dom.js";

const rows = new Map();

function make(id) {
  const cells = Object.fromEntries(["id", "state", "age", "prompt", "cached", "output", "rate", "blocks"].map((name) => [name, el("td", { data: { column: name } })]));
  cells.id.append(el("code", { title: id }, id.length > 22 ? `${id.slice(0, 21)}…` : id));
  const stop = button("Stop", async () => {
    stop.disabled = true;
    await request(`dashboard/requests/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => (stop.disabled = false));
  }, { "aria-label": `Stop request ${id}` });
  return { row: el("tr", {}, Object.values(cells), el("td", {}, stop)), cells };
}

/** Show `live`, a list of {id, state, age, prompt, cached, output, rate, blocks}; `hidden` counts the rest. */
export function showRequests(live, hidden) {
  const seen = new Set();
  for (const entry of live) {
    seen.add(entry.id);
    if (!rows.has(entry.id)) rows.set(entry.id, make(entry.id));
    const { row, cells } = rows.get(entry.id);
    cells.state.textContent = entry.state;
    cells.age.textContent = duration(entry.age);
    for (const name of ["prompt", "cached", "output", "blocks"]) cells[name].textContent = number.format(entry[name]);
    cells.rate.textContent = entry.rate === null ? "–" : entry.rate.toFixed(entry.rate < 20 ? 1 : 0);
    $("requests-body").append(row);
  }
  for (const [id, { row }] of rows) {
    if (seen.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  $("requests-none").hidden = live.length > 0;
  $("requests-table").hidden = live.length === 0;
  $("requests-more").textContent = hidden ? `and ${number.format(hidden)} more` : "";
}
