// Markdown as elements, made with createElement and textContent only: markup in the text stays text, links lead to
// http, https or mailto, and an image is a link. While a text grows, only its last block is rendered again.

import { button, copy, el } from "./dom.js";

const DEPTH = 8; // lists and quotes nested deeper stay plain text
const LONGEST = 20000; // characters of a paragraph that are searched for emphasis

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const closes = (line, fence) => {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
};

const starts = (line, next) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || (line.includes("|") && next !== undefined && DIVIDER.test(next) && next.includes("-"));

/** Lines of the block that begins at `lines[at]`: [kind, end]. Blank lines belong to no block. */
function block(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) {
    let end = at + 1;
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return ["code", Math.min(end + 1, lines.length)];
  }
  if (HEADING.test(line)) return ["heading", at + 1];
  if (RULE.test(line)) return ["rule", at + 1];
  if (QUOTE.test(line)) {
    let end = at + 1;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return ["quote", end];
  }
  const item = ITEM.exec(line);
  if (item) {
    const indent = item[0].length;
    const ordered = /\d/.test(item[2]);
    let end = at + 1;
    for (; end < lines.length; end += 1) {
      const here = lines[end];
      const other = ITEM.exec(here);
      if (other && other[1].length < indent && /\d/.test(other[2]) === ordered) continue;
      if (here.trim() === "" ? !continues(lines, end, indent) : !here.startsWith(" ".repeat(Math.min(indent, 2))) && (other || starts(here, lines[end + 1]) || lines[end - 1].trim() === "")) break;
    }
    return [ordered ? "ordered" : "bullets", end];
  }
  if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(lines[at + 1]) && lines[at + 1].includes("-")) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return ["table", end];
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !starts(lines[end], lines[end + 1])) end += 1;
  return ["paragraph", end];
}

/** Whether a list goes on after blank lines: with an indented line or another item. */
function continues(lines, at, indent) {
  let next = at;
  while (next < lines.length && lines[next].trim() === "") next += 1;
  return next < lines.length && (lines[next].startsWith(" ".repeat(Math.min(indent, 2))) || ITEM.test(lines[next]));
}

/** Blocks of `text` as [kind, lines, offset of the end in characters]. */
export function blocks(text) {
  const lines = text.split("\n");
  const offsets = [0];
  for (const line of lines) offsets.push(offsets.at(-1) + line.length + 1);
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [kind, end] = block(lines, at);
    found.push([kind, lines.slice(at, end), offsets[end]]);
    at = end;
  }
  return found;
}

/** Elements of `text`. */
export function render(text, depth = 0) {
  if (depth > DEPTH) return [el("p", { className: "plain" }, text)];
  return blocks(text).map(([kind, lines]) => element(kind, lines, depth));
}

function element(kind, lines, depth) {
  const inner = (strip) => render(lines.map(strip).join("\n"), depth + 1);
  switch (kind) {
    case "code": return code(lines);
    case "heading": {
      const [, marks, title] = HEADING.exec(lines[0]);
      return el(`h${Math.min(6, marks.length + 2)}`, { dir: "auto" }, inline(title));
    }
    case "rule": return el("hr");
    case "quote": return el("blockquote", { dir: "auto" }, inner((line) => line.replace(QUOTE, "")));
    case "bullets":
    case "ordered": return list(kind, lines, depth);
    case "table": return table(lines);
    default: return el("p", { dir: "auto" }, inline(lines.join("\n")));
  }
}

function code(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  const source = lines.slice(1, closed ? -1 : undefined).join("\n");
  const name = language.trim().split(/\s/)[0].slice(0, 30);
  const take = button("Copy", (event) => copy(source, event.target));
  return el("figure", { className: "code" }, el("figcaption", {}, el("span", {}, name || "code"), take), el("pre", { tabIndex: 0 }, el("code", {}, source)));
}

function list(kind, lines, depth) {
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && (!items.length || item[1].length < items.at(-1).indent)) items.push({ indent: item[0].length, lines: [line.slice(item[0].length)] });
    else {
      const last = items.at(-1);
      last.lines.push(line.replace(new RegExp(`^ {0,${last.indent}}`), ""));
    }
  }
  const loose = lines.some((line) => line.trim() === "");
  const made = items.map((item) => {
    const parts = render(item.lines.join("\n"), depth + 1);
    const tight = !loose && parts[0]?.tagName === "P";
    return el("li", { dir: "auto" }, tight ? [...parts[0].childNodes] : parts.slice(0, 1), parts.slice(1));
  });
  const start = kind === "ordered" ? Number.parseInt(lines[0].trim(), 10) : 1;
  return el(kind === "ordered" ? "ol" : "ul", start === 1 ? {} : { start }, made);
}

function table(lines) {
  const cells = (line) => {
    const found = line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
    return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
  };
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (tag, line) => el("tr", {}, sides.map((side, i) => el(tag, { className: `to-${side}`, dir: "auto" }, inline(cells(line)[i] ?? ""))));
  return el("div", { className: "table", tabIndex: 0 }, el("table", {}, el("thead", {}, row("th", lines[0])), el("tbody", {}, lines.slice(2).map((line) => row("td", line)))));
}

const SAFE = /^(https?:\/\/|mailto:)[^\s]+$/i;
const INLINE = new RegExp(
  [
    String.raw`(?<escape>\\[\\\`*_{}[\]()#+\-.!|~<>])`,
    String.raw`(?<code>(?<ticks>\`+)(?<source>[^\`](?:[^\`]|(?!(?<!\`)\k<ticks>(?!\`))\`)*?)(?<!\`)\k<ticks>(?!\`))`,
    String.raw`!?\[(?<label>[^[\]\n]{0,500})\]\((?<target>[^\s()<>]{1,2000})(?:\s+"[^"\n]{0,300}")?\)`,
    String.raw`<(?<auto>(?:https?:\/\/|mailto:)[^\s<>]{1,2000})>`,
    String.raw`(?<bare>https?:\/\/[^\s<>()[\]"'*\`]{1,2000}[^\s<>()[\]"'*\`.,;:!?])`,
    String.raw`\*\*(?<strong>(?=\S)[^*\n]{1,2000}?(?:\*[^*\n]+\*[^*\n]*)?)\*\*`,
    String.raw`(?<![\w_])__(?<strong2>(?=\S)[^_\n]{1,2000}?)__(?![\w_])`,
    String.raw`\*(?<em>(?=\S)[^*\n]{1,2000}?)\*`,
    String.raw`(?<![\w_])_(?<em2>(?=\S)[^_\n]{1,2000}?)_(?![\w_])`,
    String.raw`~~(?<del>(?=\S)[^~\n]{1,2000}?)~~`,
    String.raw`(?<br> {2,}\n|\\\n)`,
  ].join("|"),
  "g",
);

const link = (text, target) => (SAFE.test(target) ? el("a", { href: target, rel: "noopener noreferrer nofollow", target: "_blank" }, text) : null);

/** Text with emphasis, code and links, as nodes. */
export function inline(text, depth = 0) {
  if (depth > 4 || text.length > LONGEST) return [text];
  const found = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const g = match.groups;
    const again = (inner) => inline(inner, depth + 1);
    const made =
      g.escape ? g.escape[1]
      : g.code ? el("code", {}, g.source.replace(/^ (.*\S.*) $/, "$1"))
      : g.target ? link(again(g.label || g.target), g.target)
      : g.auto ? link(g.auto, g.auto)
      : g.bare ? link(g.bare, g.bare)
      : g.strong ?? g.strong2 ? el("strong", {}, again(g.strong ?? g.strong2))
      : g.em ?? g.em2 ? el("em", {}, again(g.em ?? g.em2))
      : g.del ? el("del", {}, again(g.del))
      : g.br ? el("br")
      : null;
    if (made === null) continue;
    found.push(text.slice(at, match.index), made);
    at = match.index + match[0].length;
  }
  found.push(text.slice(at));
  return found.filter((part) => part !== "");
}

/** A growing text in `box`: blocks that are complete are never touched again. */
export class Growing {
  constructor(box) {
    this.box = box;
    this.done = 0; // characters in complete blocks
    this.last = [];
  }

  update(text) {
    const open = blocks(text.slice(this.done));
    for (const node of this.last) node.remove();
    const complete = open.slice(0, -1);
    for (const [kind, lines] of complete) this.box.append(element(kind, lines, 0));
    if (complete.length) {
      this.done += complete.at(-1)[2];
      this.last = render(text.slice(this.done));
    } else this.last = open.map(([kind, lines]) => element(kind, lines, 0));
    this.box.append(...this.last);
  }
}
