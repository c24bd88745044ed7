// The API reference: openapi.json as a page, under the same policy as the others, with nothing from other servers.

import { $, el } from "./dom.js";
import { setting } from "./store.js";

document.documentElement.dataset.theme = setting("theme", "system");

/** A schema with its reference followed. */
const follow = (schema, all) => (schema?.$ref ? all[schema.$ref.split("/").at(-1)] ?? {} : schema ?? {});

/** How a schema is called in one line: "string or null", "list of TokenId". */
function typeOf(schema, all) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return [...new Set(either.map((one) => typeOf(one, all)))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items, all)}`;
  return schema.type ?? "any";
}

function bounds(schema) {
  const names = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<", minLength: "length ≥", maxLength: "length ≤" };
  return Object.entries(names).filter(([name]) => schema[name] !== undefined).map(([name, sign]) => `${sign} ${schema[name]}`).join(", ");
}

function fields(schema, all) {
  const found = follow(schema, all);
  const rows = Object.entries(found.properties ?? {}).map(([name, inner]) => {
    const wanted = (found.required ?? []).includes(name);
    const preset = inner.default === undefined || inner.default === null ? "" : `default ${JSON.stringify(inner.default)}`;
    const limits = [inner, ...(inner.anyOf ?? [])].map(bounds).filter(Boolean).join(", ");
    return el("tr", { data: { name } }, el("td", {}, el("code", {}, name)), el("td", {}, typeOf(inner, all)), el("td", { className: "dim" }, [wanted ? "required" : preset, limits].filter(Boolean).join("; ")));
  });
  return rows.length ? el("div", { className: "table", tabIndex: 0 }, el("table", {}, el("tbody", {}, rows))) : el("p", { className: "dim" }, typeOf(schema, all));
}

function endpoint(path, method, about, all) {
  const body = about.requestBody?.content?.["application/json"]?.schema;
  const answer = about.responses?.["200"]?.content ?? {};
  const parts = [el("p", {}, about.summary ?? "")];
  if (body) parts.push(el("h2", {}, "Body"), fields(body, all));
  if (answer["application/json"]?.schema) parts.push(el("h2", {}, "Answer"), fields(answer["application/json"].schema, all));
  if (answer["text/event-stream"]) parts.push(el("p", { className: "dim" }, "With \"stream\": true the answer comes as server-sent events."));
  return el("details", { data: { text: `${path} ${JSON.stringify(body ? follow(body, all).properties ?? {} : {})}`.toLowerCase() } }, el("summary", {}, el("b", {}, method.toUpperCase()), " ", el("code", {}, path), " ", el("span", { className: "dim" }, about.summary ?? "")), parts);
}

async function start() {
  const answer = await fetch("../openapi.json");
  if (!answer.ok) throw new Error(`openapi.json cannot be read (${answer.status}).`);
  const document_ = await answer.json();
  const all = document_.components?.schemas ?? {};
  const made = Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, about]) => endpoint(path, method, about, all)));
  $("endpoints").replaceChildren(...made);
  $("search").addEventListener("input", () => {
    const wanted = $("search").value.trim().toLowerCase();
    for (const one of made) one.hidden = !one.dataset.text.includes(wanted);
  });
}

start().catch((error) => $("endpoints").replaceChildren(el("p", { className: "trouble" }, error.message)));
