// Markdown as elements, made with createElement and textContent only: markup in the text stays text, links lead to
// http, https or mailto, and an image is a link. While a text grows, only its last block is rendered again.

import { button, copy, el } from "./dom.js";

const DEPTH = 8; // lists and quotes nested deeper stay plain text
const LONGEST = 20000; // characters of a block that are searched for markup
const WIDEST = 2000; // characters of a line that may begin or continue a block other than a paragraph
const MOST_LINES = 500; // of a block: further ones are another block
const MOST_CELLS = 5000; // of a table
const SLICE = 12; // milliseconds of drawing before the page may do something else

// Each takes time in proportion to its line.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;

/** Match a line against a block's rule; a line that is too wide is plain text. */
const match = (rule, line) => (line.length > WIDEST ? null : rule.exec(line));

const closes = (line, fence) => {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
};

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

/** Whether a table begins: the next line has a dash for each column. */
const divides = (line, next) =>
  next !== undefined && line.length <= WIDEST && line.includes("|") && match(/^ {0,3}[|:-][\s|:-]*$/, next) !== null && cells(next).every((cell) => /^:?-+:?$/.test(cell));

const starts = (line, next) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((rule) => match(rule, line)) || divides(line, next);

/** Lines of the block that begins at `lines[at]`: [kind, end]. Blank lines belong to no block. */
function block(lines, at) {
  const line = lines[at];
  const fence = match(FENCE, line);
  const most = Math.min(lines.length, at + MOST_LINES);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return ["code", Math.min(end + 1, lines.length)];
  }
  if (match(HEADING, line)) return ["heading", end];
  if (match(RULE, line)) return ["rule", end];
  if (match(QUOTE, line)) {
    while (end < most && match(QUOTE, lines[end])) end += 1;
    return ["quote", end];
  }
  const item = match(ITEM, line);
  if (item) return [/\d/.test(item[2]) ? "ordered" : "bullets", listEnd(lines, end, most, item)];
  if (divides(line, lines[end])) {
    end += 1;
    while (end < most && lines[end].length <= WIDEST && lines[end].includes("|")) end += 1;
    return ["table", end];
  }
  while (end < most && lines[end].trim() !== "" && !starts(lines[end], lines[end + 1])) end += 1;
  return ["paragraph", end];
}

/** The end of a list whose first item is matched. It goes on after blank lines with an indented line or another item. */
function listEnd(lines, end, most, item) {
  const indent = item[0].length;
  const indented = (line) => line.startsWith(" ".repeat(Math.min(indent, 2)));
  const ordered = /\d/.test(item[2]);
  while (end < most) {
    const here = lines[end];
    const other = match(ITEM, here);
    if (here.trim() === "") {
      let next = end;
      while (next < most && lines[next].trim() === "") next += 1;
      if (next === most || !(indented(lines[next]) || match(ITEM, lines[next]))) return end;
      end = next;
    } else if (other && other[1].length < indent && /\d/.test(other[2]) === ordered) end += 1;
    else if (!indented(here) && (other || starts(here, lines[end + 1]) || lines[end - 1].trim() === "")) return end;
    else end += 1;
  }
  return end;
}

/** Blocks of `text` as [kind, lines, offset of the end in characters]; null now and then among blank lines. */
export function* blocks(text) {
  const lines = text.split("\n");
  let offset = 0;
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      offset += lines[at].length + 1;
      at += 1;
      if (at % MOST_LINES === 0) yield null;
      continue;
    }
    const [kind, end] = block(lines, at);
    const held = lines.slice(at, end);
    for (const line of held) offset += line.length + 1;
    yield [kind, held, offset];
    at = end;
  }
}

/** Elements of `text`. */
export function render(text, depth = 0) {
  if (depth > DEPTH) return [el("p", { className: "plain" }, text)];
  return [...blocks(text)].filter(Boolean).map(([kind, lines]) => element(kind, lines, depth));
}

function element(kind, lines, depth) {
  if (kind !== "code" && lines.reduce((sum, line) => sum + line.length, 0) > LONGEST) return el("p", { className: "plain", dir: "auto" }, lines.join("\n"));
  const inner = (strip) => render(lines.map(strip).join("\n"), depth + 1);
  switch (kind) {
    case "code": return code(lines);
    case "heading": {
      const [, marks, title] = HEADING.exec(lines[0]);
      let shown = title.trimEnd();
      while (shown.endsWith("#")) shown = shown.slice(0, -1);
      return el(`h${Math.min(6, marks.length + 2)}`, { dir: "auto" }, inline(shown.trimEnd()));
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
    const item = match(ITEM, line);
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
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  if (sides.length * lines.length > MOST_CELLS) return el("pre", { tabIndex: 0 }, lines.join("\n"));
  const row = (tag, line) => {
    const found = cells(line);
    return el("tr", {}, sides.map((side, i) => el(tag, { className: `to-${side}`, dir: "auto" }, inline(found[i] ?? ""))));
  };
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

/** A growing text in `box`: blocks that are complete are never touched again, and long texts are drawn in slices. */
export class Growing {
  constructor(box) {
    this.box = box;
    this.done = 0; // characters in complete blocks
    this.last = [];
  }

  update(text) {
    clearTimeout(this.later);
    this.draw(blocks(text.slice(this.done)), this.done, null);
  }

  /** Draw blocks of the text from `base` on, of which `open` was read before: it is complete if another one follows. */
  draw(found, base, open) {
    const until = performance.now() + SLICE;
    for (;;) {
      const { value, done } = found.next();
      if (done) break;
      if (value === null) continue;
      if (open !== null) this.complete(base, open);
      open = value;
      if (performance.now() < until) continue;
      this.later = setTimeout(() => this.draw(found, base, open));
      return;
    }
    this.clear();
    this.last = open === null ? [] : [element(open[0], open[1], 0)];
    this.box.append(...this.last);
  }

  complete(base, [kind, lines, end]) {
    this.clear();
    this.box.append(element(kind, lines, 0));
    this.done = base + end;
  }

  clear() {
    for (const node of this.last) node.remove();
    this.last = [];
  }
}
