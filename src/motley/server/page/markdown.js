// Markdown as DOM nodes. Model text is hostile: nothing here parses HTML, and links lead only to http, https or mail.

/** An element: el("a", {href, class}, child, "text", …). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Lines → blocks: {kind, lines or text, …}. Every block knows its source, so that unchanged ones need no new nodes. */
function blocksOf(text) {
  const lines = text.split("\n"), blocks = [];
  let i = 0;
  const push = (kind, from, more) => blocks.push({ kind, source: lines.slice(from, i).join("\n"), ...more });
  while (i < lines.length) {
    const line = lines[i], from = i;
    const fence = FENCE.exec(line);
    if (fence) {
      const [, indent, mark, info] = fence, code = [];
      const isEnd = (l) => l.trim().startsWith(mark) && l.trim().replaceAll(mark[0], "") === "" && l.search(/\S/) <= 3;
      for (i++; i < lines.length && !isEnd(lines[i]); i++) code.push(lines[i].replace(new RegExp(`^ {0,${indent.length}}`), ""));
      const closed = i < lines.length;
      i++;
      push("code", from, { code: code.join("\n"), language: info.trim().split(/\s/)[0], closed });
    } else if (!line.trim()) {
      i++;
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      i++;
      push("heading", from, { level: marks.length, text: title });
    } else if (RULE.test(line)) {
      i++;
      push("rule", from);
    } else if (/^ {0,3}>/.test(line)) {
      const inner = [];
      while (i < lines.length && lines[i].trim() && (/^ {0,3}>/.test(lines[i]) || !startsBlock(lines[i]))) inner.push(lines[i++].replace(/^ {0,3}> ?/, ""));
      push("quote", from, { text: inner.join("\n") });
    } else if (ITEM.test(line)) {
      const inner = [];
      const own = ITEM.exec(line)[1].length;
      while (i < lines.length) {
        const item = ITEM.exec(lines[i]), indent = lines[i].search(/\S/);
        if (indent === -1) {
          const next = lines.slice(i + 1).find((l) => l.trim());
          if (next === undefined || !(ITEM.test(next) || next.search(/\S/) > own)) break;
        } else if (!item && indent <= own && (startsBlock(lines[i]) || !lines[i - 1]?.trim())) break;
        inner.push(lines[i++]);
      }
      push("list", from, { lines: inner });
    } else if (line.includes("|") && i + 1 < lines.length && TABLE_RULE.test(lines[i + 1]) && lines[i + 1].includes("-")) {
      const head = cellsOf(line), aligns = cellsOf(lines[i + 1]).map((c) => (/^:-+:$/.test(c) ? "center" : /-:$/.test(c) ? "end" : "start"));
      const rows = [];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(cellsOf(lines[i]));
      push("table", from, { head, aligns, rows });
    } else {
      const words = [line];
      for (i++; i < lines.length && lines[i].trim() && !startsBlock(lines[i]); i++) words.push(lines[i]);
      push("paragraph", from, { text: words.join("\n") });
    }
  }
  return blocks;
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function nodeOf(block, depth = 0) {
  switch (block.kind) {
    case "code": return codeBlock(block.code, block.language);
    case "heading": return el(`h${Math.min(6, block.level + 1)}`, {}, ...inline(block.text));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, ...(depth < 12 ? blocksOf(block.text).map((b) => nodeOf(b, depth + 1)) : [block.text]));
    case "list": return listNode(block.lines, depth);
    case "table": return tableNode(block);
    default: return el("p", {}, ...inline(block.text));
  }
}

function listNode(lines, depth) {
  const first = ITEM.exec(lines[0]), own = first[1].length, ordered = /\d/.test(first[2]);
  const list = el(ordered ? "ol" : "ul", ordered && parseInt(first[2], 10) !== 1 ? { start: parseInt(first[2], 10) } : {});
  let body = null;
  const finish = () => {
    if (!body) return;
    const task = /^\[([ xX])\]\s+/.exec(body[0]);
    if (task) body[0] = body[0].slice(task[0].length);
    const cut = Math.min(...body.slice(1).filter((l) => l.trim()).map((l) => l.search(/\S/)), 8);
    const inner = blocksOf([body[0], ...body.slice(1).map((l) => l.slice(cut === Infinity ? 0 : cut))].join("\n"));
    const nodes = depth < 12 ? inner.flatMap((b) => (b.kind === "paragraph" ? inline(b.text) : [nodeOf(b, depth + 1)])) : [body.join("\n")];
    list.append(el("li", task ? { class: "task" } : {}, task ? el("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }) : null, ...nodes));
  };
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= own + 1) {
      finish();
      body = [item[3]];
    } else body.push(line);
  }
  finish();
  return list;
}

function tableNode({ head, aligns, rows }) {
  const cell = (tag) => (text, i) => el(tag, { class: `to-${aligns[i] ?? "start"}` }, ...inline(text));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map(cell("th")))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.slice(0, head.length).map(cell("td")))))));
}

/** A code block with its language and a button that copies it. */
export function codeBlock(code, language = "") {
  const copy = el("button", { class: "quiet", type: "button", onclick: () => copyText(code, copy) }, "Copy");
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", {}, el("code", {}, ...(code.length < 40000 ? colored(code) : [code]))));
}

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without a secure context
    const area = el("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  if (button) {
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1200);
  }
}

// A little colour for any language: comments, strings, numbers, usual words.
const TOKENS = /(\/\/[^\n]*|#[^\n]*|\/\*[\s\S]*?\*\/|--[^\n]*)|("""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d[\d_.]*(?:e[+-]?\d+)?|0x[\da-f]+)\b|\b(abstract|and|as|assert|async|await|break|case|catch|class|const|continue|def|default|del|do|elif|else|enum|export|extends|false|final|finally|fn|for|from|func|function|global|if|impl|import|in|interface|is|lambda|let|match|mod|mut|new|nil|None|not|null|or|package|pass|private|protected|pub|public|raise|return|select|self|static|struct|super|switch|this|throw|trait|true|True|False|try|type|typeof|undefined|use|using|var|void|where|while|with|yield)\b/gi;
const KINDS = ["comment", "string", "number", "word"];

function colored(code) {
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(TOKENS)) {
    if (found[1]?.startsWith("--") && !/^--\s/.test(found[1])) continue;
    if (found.index > at) nodes.push(code.slice(at, found.index));
    nodes.push(el("span", { class: `c-${KINDS[found.slice(1).findIndex(Boolean)]}` }, found[0]));
    at = found.index + found[0].length;
  }
  nodes.push(code.slice(at));
  return nodes;
}

const INLINE = /(?<code>(?<ticks>`+)(?!`)(?<inside>[\s\S]+?)(?<!`)\k<ticks>(?!`))|(?<link>!?\[(?<label>(?:\\.|[^\[\]\\]|\[[^\]]*\])*)\]\((?<target>[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+"[^"]*")?\))|(?<auto><(?:https?:\/\/|mailto:)[^\s<>]+>|https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?])|(?<strong>(?<s>\*\*|__)(?=\S)(?<bold>[\s\S]*?\S)\k<s>(?!\w))|(?<em>(?<e>\*|(?<!\w)_)(?=[^\s*_])(?<slant>[\s\S]*?[^\s\\])\k<e>(?!\w))|(?<gone>~~(?=\S)(?<struck>[\s\S]*?\S)~~)|(?<escape>\\(?<char>[\\`*_{}[\]()#+\-.!~|>"']))|(?<line> {2,}\n|\\\n|\n)/;

const MAX_INLINE = 8000; // characters: a longer paragraph is shown as it is, because patterns take time

/** Text with emphasis, code and links → nodes. */
export function inline(text, depth = 0) {
  if (text.length > MAX_INLINE) return [text];
  const nodes = [];
  while (text) {
    const found = depth < 8 ? INLINE.exec(text) : null;
    if (!found) {
      nodes.push(text);
      break;
    }
    if (found.index) nodes.push(text.slice(0, found.index));
    text = text.slice(found.index + found[0].length);
    const g = found.groups;
    if (g.code) nodes.push(el("code", {}, g.inside.replace(/^ (.*[^ ].*) $/s, "$1")));
    else if (g.link !== undefined) nodes.push(link(g.target, inline(g.label || g.target, depth + 1), found[0]));
    else if (g.auto) nodes.push(link(g.auto.replace(/^<|>$/g, ""), [g.auto.replace(/^<(mailto:)?|>$/g, "")], found[0]));
    else if (g.strong) nodes.push(el("strong", {}, ...inline(g.bold, depth + 1)));
    else if (g.em) nodes.push(el("em", {}, ...inline(g.slant, depth + 1)));
    else if (g.gone) nodes.push(el("del", {}, ...inline(g.struck, depth + 1)));
    else if (g.escape) nodes.push(g.char);
    else nodes.push(el("br"));
  }
  return nodes;
}

function link(target, label, source) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return document.createTextNode(source);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(source);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...label);
}

/** Shows a text that grows: only blocks that have changed get new nodes. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  show(text) {
    const blocks = blocksOf(text);
    let same = 0;
    while (same < this.sources.length && same < blocks.length && this.sources[same] === blocks[same].source) same++;
    if (!same) this.node.replaceChildren();
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const block of blocks.slice(same)) this.node.append(nodeOf(block));
    this.sources = blocks.map((block) => block.source);
  }
}
