// "Show the request": the same request as JSON, curl, Python and JavaScript.

import { $, button, copy, el } from "./dom.js";

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** JSON as a Python literal. */
function python(value, indent = 1) {
  const pad = "    ".repeat(indent);
  const end = "    ".repeat(indent - 1);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return value.length ? `[\n${value.map((v) => `${pad}${python(v, indent + 1)},\n`).join("")}${end}]` : "[]";
  const rows = Object.entries(value).map(([k, v]) => `${pad}${JSON.stringify(k)}: ${python(v, indent + 1)},\n`);
  return rows.length ? `{\n${rows.join("")}${end}}` : "{}";
}

// What the openai package takes by name; the rest goes into extra_body.
const KNOWN = new Set("model messages prompt max_tokens temperature top_p seed presence_penalty frequency_penalty stop logprobs top_logprobs tools tool_choice response_format reasoning_effort".split(" "));

function asPython(path, body, base) {
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  const rows = known.map(([name, value]) => `    ${name}=${python(value, 2)},\n`);
  if (Object.keys(extra).length) rows.push(`    extra_body=${python(extra, 2)},\n`);
  const call = path.includes("chat") ? "chat.completions" : "completions";
  const text = path.includes("chat") ? "choices[0].message.content" : "choices[0].text";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}v1", api_key="none")\nanswer = client.${call}.create(\n${rows.join("")})\nprint(answer.${text})\n`;
}

/** The forms of one request by name. */
export function forms(path, body) {
  const base = new URL(".", document.baseURI).href;
  const pretty = JSON.stringify(body, null, 2);
  const text = path.includes("chat") ? "choices[0].message.content" : "choices[0].text";
  return {
    JSON: pretty,
    curl: `curl ${base}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quote(pretty)}`,
    Python: asPython(path, body, base),
    JavaScript: `const response = await fetch("${base}${path}", {\n  method: "POST",\n  headers: { "Content-Type": "application/json" },\n  body: JSON.stringify(${pretty.replaceAll("\n", "\n  ")}),\n});\nconst answer = await response.json();\nconsole.log(answer.${text});\n`,
  };
}

/** Show the request in the dialog. */
export function showRequest(path, body) {
  const all = forms(path, body);
  const pre = el("pre", { tabIndex: 0 });
  const tabs = el("div", { className: "tabs" });
  const choose = (name) => {
    pre.textContent = all[name];
    for (const tab of tabs.children) tab.setAttribute("aria-pressed", String(tab.textContent === name));
  };
  tabs.append(...Object.keys(all).map((name) => button(name, () => choose(name), { className: "" })));
  choose("JSON");
  $("request-body").replaceChildren(tabs, pre, button("Copy", (event) => copy(pre.textContent, event.target)));
  $("request-dialog").showModal();
}
