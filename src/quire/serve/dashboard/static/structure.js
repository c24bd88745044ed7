// Structured output and tools of a conversation: an editor for each that says at once whether its text is valid.

import { $ } from "./dom.js";

const json = (text) => {
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null) throw new Error("Write a JSON object.");
  return value;
};

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** How each kind of structure is read from the editor's text, and what a request says for it. */
const FORMATS = {
  json_object: { read: () => ({ response_format: { type: "json_object" } }), text: false },
  json_schema: { read: (text) => ({ response_format: { type: "json_schema", json_schema: { name: "answer", schema: json(text) } } }), hint: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' },
  regex: { read: (text) => ({ structured_outputs: { regex: text } }), hint: "\\d{4}-\\d{2}-\\d{2}" },
  choice: { read: (text) => ({ structured_outputs: { choice: lines(text) } }), hint: "yes\nno" },
  grammar: { read: (text) => ({ structured_outputs: { grammar: text } }), hint: 'root ::= "yes" | "no"' },
};

function state(box, good, text) {
  box.dataset.state = good ? "good" : "bad";
  box.textContent = text;
}

/** The tools of the editor's text: OpenAI's list, or functions alone. Throws for anything else. */
function readTools(text) {
  const given = json(text);
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => {
    const named = tool?.function ?? tool;
    if (typeof named?.name !== "string" || !/^[\w.-]{1,64}$/.test(named.name)) throw new Error("Each function needs a name of letters, digits, _ or -.");
    return { type: "function", function: { parameters: { type: "object", properties: {} }, ...named } };
  });
}

/** Fill the editors from `settings` and write changes back. */
export function showStructure(settings, changed) {
  const [kind, text, formatState] = [$("format-kind"), $("format-text"), $("format-state")];
  const [tools, toolsState, choice] = [$("tools-text"), $("tools-state"), $("tool-choice")];
  kind.value = settings.format_kind ?? "";
  text.value = settings.format_text ?? "";
  tools.value = settings.tools ?? "";
  choice.value = settings.tool_choice ?? "auto";
  const check = () => {
    const format = FORMATS[kind.value];
    text.hidden = !format || format.text === false;
    text.placeholder = format?.hint ?? "";
    formatState.dataset.state = "none";
    formatState.textContent = "";
    if (format && (format.text === false || text.value.trim())) tell(formatState, () => format.read(text.value), "Valid");
    toolsState.dataset.state = "none";
    toolsState.textContent = "";
    if (tools.value.trim()) tell(toolsState, () => readTools(tools.value), "Valid");
  };
  const tell = (box, read, good) => {
    try {
      read();
      state(box, true, `✓ ${good}`);
    } catch (error) {
      state(box, false, error.message);
    }
  };
  const write = () => {
    Object.assign(settings, { format_kind: kind.value, format_text: text.value, tools: tools.value, tool_choice: choice.value });
    check();
    changed();
  };
  for (const input of [kind, text, tools, choice]) input.oninput = write;
  check();
}

/** Request fields for structure and tools; texts that are not valid were refused at the editor. */
export function structure(settings) {
  const found = {};
  const format = FORMATS[settings.format_kind];
  if (format && (format.text === false || settings.format_text?.trim())) Object.assign(found, format.read(settings.format_text));
  if (settings.tools?.trim()) Object.assign(found, { tools: readTools(settings.tools), tool_choice: settings.tool_choice || "auto" });
  return found;
}
