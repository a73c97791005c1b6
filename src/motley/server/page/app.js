// The chat: conversations, messages, streaming. Text of models and users is only ever put into text nodes.

import { el, codeBlock, copyText, MarkdownView } from "./markdown.js";
import { FIELDS, follow, get, events, newId, pathOf, requestFields, settings, siblingsOf, store } from "./state.js";
import { Crew } from "./crew.js";

const $ = (id) => document.getElementById(id);
const messagesNode = $("messages"), input = $("input");
const isNarrow = matchMedia("(max-width: 860px)");

let chat = null;
let running = null; // {controller, message} of the answer that streams
let server = { n_ctx: 0, model: "", defaults: {} };
const views = new Map(); // message id → MessageView

// ---------------------------------------------------------------- one message

class MessageView {
  constructor(message) {
    this.message = message;
    this.node = el("article", { class: `message ${message.role}`, "data-role": message.role });
    this.body = el("div", { class: "content" });
    this.markdown = new MarkdownView(this.body);
    this.foot = el("footer", {});
    this.node.append(this.body, this.foot);
    this.update(true);
  }

  /** Shows the message as it is now. `whole`: also what changes only at the end. */
  update(whole = false) {
    const { message } = this;
    if (message.role === "user") {
      this.body.textContent = message.content;
    } else if (message.role === "tool") {
      this.body.replaceChildren(el("span", { class: "label" }, "Result"), codeBlock(message.content, "result"));
    } else {
      this.showReasoning();
      if (settings.raw) this.body.textContent = message.content;
      else if (message.content || this.markdown.sources.length) this.markdown.show(message.content);
      this.showCalls();
      this.node.classList.toggle("waiting", isRunning(message) && !message.content && !message.reasoning && !message.calls?.length);
      this.node.classList.toggle("streaming", isRunning(message));
    }
    if (whole) this.showFoot();
  }

  /** How far the prompt is read, before the first token. */
  progress({ total, processed }) {
    this.message.stats = { ...this.message.stats, prompt_tokens: total };
    if (!this.message.content && !this.message.reasoning && processed < total) this.body.replaceChildren(el("span", { class: "progress" }, `reading ${Math.round((100 * processed) / total)} %`));
    else if (!this.message.content) this.body.replaceChildren();
  }

  showReasoning() {
    const { reasoning, content } = this.message;
    if (!reasoning) return;
    if (!this.reasoning) {
      this.reasoning = el("details", { class: "reasoning" }, el("summary", {}), el("div", {}));
      this.body.before(this.reasoning);
    }
    const thinks = isRunning(this.message) && !content && !this.message.calls?.length;
    this.reasoning.classList.toggle("thinking", thinks);
    this.reasoning.firstChild.textContent = thinks ? "Thinking…" : "Thoughts";
    this.reasoning.lastChild.textContent = reasoning;
  }

  showCalls() {
    const calls = this.message.calls ?? [];
    if (!calls.length) return;
    if (!this.calls) {
      this.calls = el("div", { class: "calls" });
      this.body.after(this.calls);
    }
    calls.forEach((call, i) => {
      let card = this.calls.children[i];
      if (!card) {
        card = el("section", { class: "call" }, el("header", {}, el("span", { class: "label" }, "Tool call"), el("code", {}, "")), el("pre", {}, el("code", {})));
        this.calls.append(card);
      }
      card.querySelector("header code").textContent = call.name;
      card.querySelector("pre code").textContent = pretty(call.arguments);
    });
    if (!isRunning(this.message) && !this.answers && this.message.id === chat?.leaf) this.askResults(calls);
  }

  /** Fields for the results of the calls, which the user gives in place of a program. */
  askResults(calls) {
    const fields = calls.map((call) => el("textarea", { rows: 1, placeholder: `Result of ${call.name}`, "aria-label": `Result of ${call.name}` }));
    this.answers = el("form", { class: "results", onsubmit: (event) => {
      event.preventDefault();
      let parent = this.message.id;
      calls.forEach((call, i) => (parent = addMessage({ role: "tool", content: fields[i].value, call_id: call.id, name: call.name, parent }).id));
      answer(parent);
    } }, ...fields, el("button", { class: "quiet" }, "Send results"));
    this.calls.append(this.answers);
  }

  showFoot() {
    const { message } = this, siblings = siblingsOf(chat, message), at = siblings.indexOf(message);
    const button = (label, title, action) => el("button", { class: "quiet", type: "button", title, onclick: action }, label);
    const parts = [];
    if (siblings.length > 1) {
      const step = (by) => () => { follow(chat, siblings[at + by]); store.save(); showChat(); };
      const arrows = el("span", { class: "branches" }, button("‹", "The branch before", step(-1)), el("span", {}, `${at + 1}/${siblings.length}`), button("›", "The next branch", step(1)));
      arrows.firstChild.disabled = at === 0;
      arrows.lastChild.disabled = at === siblings.length - 1;
      parts.push(arrows);
    }
    if (!isRunning(message)) {
      const copy = button("Copy", "Copy the text", () => copyText(message.content, copy));
      if (message.content) parts.push(copy);
      if (message.role === "user") parts.push(button("Edit", "Edit, as a new branch", () => this.edit()));
      if (message.role === "assistant") {
        parts.push(button("Regenerate", "Another answer, as a new branch", () => answer(message.parent)));
        if (message.id === chat.leaf && !message.calls?.length) parts.push(button("Continue", "Go on where the answer ended", () => answer(message.parent, message)));
        parts.push(button("Edit", "Edit the answer", () => this.edit()));
      }
      parts.push(button("Delete", "Delete this message and what follows", () => deleteMessage(message)));
      if (message.stats) parts.push(el("span", { class: "figures" }, figures(message)));
    }
    if (message.error) parts.unshift(el("span", { class: "error" }, message.error));
    this.foot.replaceChildren(...parts);
  }

  edit() {
    const { message } = this;
    const area = el("textarea", { class: "edit", "aria-label": "Edit the message" });
    area.value = message.content;
    const close = () => { this.markdown.sources = []; this.body.replaceChildren(); this.update(true); };
    const save = () => {
      const content = area.value;
      if (message.role === "user") {
        const made = addMessage({ role: "user", content, parent: message.parent });
        answer(made.id);
      } else {
        message.content = content;
        store.save();
        close();
      }
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (message.role === "user" && !event.shiftKey))) { event.preventDefault(); save(); }
    });
    this.body.replaceChildren(area, el("div", { class: "row" },
      el("button", { class: "primary", type: "button", onclick: save }, message.role === "user" ? "Send" : "Save"),
      el("button", { class: "quiet", type: "button", onclick: close }, "Cancel")));
    grow(area);
    area.addEventListener("input", () => grow(area));
    area.focus();
  }
}

const isRunning = (message) => running?.message === message;

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text ?? "";
  }
}

function figures({ stats, finish }) {
  const parts = [];
  if (stats.new_tokens) parts.push(`${stats.new_tokens} tokens`);
  if (stats.speed) parts.push(`${stats.speed.toFixed(1)} tokens/s`);
  if (stats.cached) parts.push(`${stats.cached} of ${stats.prompt_tokens} cached`);
  if (finish === "length") parts.push("cut at the limit");
  if (finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

// ---------------------------------------------------------------- conversations

function addMessage(fields) {
  const message = { id: newId(), created: Date.now(), content: "", ...fields };
  chat.messages.push(message);
  chat.leaf = message.id;
  chat.updated = Date.now();
  if (!chat.title && message.role === "user") chat.title = message.content.trim().split("\n")[0].slice(0, 80);
  store.save();
  showChat();
  return message;
}

function deleteMessage(message) {
  if (running) stop();
  const gone = new Set([message.id]);
  for (let n = -1; n !== gone.size;) {
    n = gone.size;
    for (const m of chat.messages) if (gone.has(m.parent)) gone.add(m.id);
  }
  chat.messages = chat.messages.filter((m) => !gone.has(m.id));
  const sibling = chat.messages.findLast((m) => m.parent === message.parent);
  if (sibling) follow(chat, sibling);
  else chat.leaf = message.parent;
  store.flush();
  showChat();
}

function openChat(next) {
  if (running) stop();
  chat = next ?? store.chats.find((c) => !c.messages.length) ?? store.create();
  if (chat.messages.length) location.hash = chat.id;
  else history.replaceState(null, "", location.pathname);
  document.body.classList.remove("sidebar");
  views.clear();
  messagesNode.replaceChildren();
  showChat();
  toEnd();
  if (!isNarrow.matches) input.focus();
}

function showChat() {
  const path = pathOf(chat);
  for (const id of [...views.keys()]) if (!path.some((m) => m.id === id)) { views.get(id).node.remove(); views.delete(id); }
  messagesNode.querySelector(".welcome")?.remove();
  if (!path.length) messagesNode.append(welcome());
  path.forEach((message, i) => {
    let view = views.get(message.id);
    if (!view || view.message !== message) {
      view?.node.remove();
      view = new MessageView(message);
      views.set(message.id, view);
    } else {
      if (view.answers && message.id !== chat.leaf) { view.answers.remove(); view.answers = null; }
      view.showFoot();
    }
    if (messagesNode.children[i] !== view.node) messagesNode.insertBefore(view.node, messagesNode.children[i] ?? null);
  });
  $("title").textContent = chat.title || "New chat";
  document.title = chat.title ? `${chat.title} — Motley` : "Motley";
  showConversations();
  showStatus();
}

function welcome() {
  const ideas = ["Tell me a story about a fox named Ada and a red kite.", "Lena has 12 apples and buys 30 more. How many has she?", "What can you do?"];
  return el("div", { class: "welcome" },
    el("img", { src: "icon.svg", alt: "", width: 56, height: 56 }),
    el("h2", {}, "What shall we do?"),
    el("p", {}, server.model ? `${server.model} is at your service.` : ""),
    el("div", { class: "ideas" }, ...ideas.map((idea) => el("button", { class: "idea", type: "button", onclick: () => send(idea) }, idea))));
}

function showConversations() {
  const query = $("search").value, now = new Date();
  const group = (time) => {
    const days = Math.floor((new Date(now).setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / 864e5);
    return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : days < 31 ? "This month" : "Earlier";
  };
  const nodes = [];
  let last = "";
  for (const each of store.search(query)) {
    const name = group(each.updated);
    if (name !== last) nodes.push(el("h3", {}, (last = name)));
    const link = el("a", { href: `#${each.id}`, class: each === chat ? "current" : null, title: each.title, onclick: (event) => { event.preventDefault(); openChat(each); } }, each.title || "Untitled");
    nodes.push(el("div", { class: "entry" }, link,
      el("button", { class: "icon", type: "button", title: "Rename", "aria-label": `Rename ${each.title}`, onclick: () => rename(each, link) }, "✎"),
      el("button", { class: "icon", type: "button", title: "Delete", "aria-label": `Delete ${each.title}`, onclick: () => removeChat(each) }, "✕")));
  }
  if (!nodes.length) nodes.push(el("p", { class: "empty" }, query ? "Nothing found" : "Conversations are kept in this browser."));
  $("conversations").replaceChildren(...nodes);
}

function rename(each, link) {
  const field = el("input", { value: each.title, "aria-label": "Title" });
  const save = () => { each.title = field.value.trim() || each.title; store.save(); showChat(); };
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") save(); if (event.key === "Escape") { event.stopPropagation(); showConversations(); } });
  field.addEventListener("blur", save);
  link.replaceWith(field);
  field.select();
}

async function removeChat(each) {
  const dialog = $("confirm");
  dialog.querySelector("p").textContent = `Delete “${each.title || "Untitled"}”?`;
  dialog.showModal();
  dialog.onclose = () => {
    if (dialog.returnValue !== "yes") return;
    store.remove(each);
    if (each === chat) openChat(store.search("")[0]);
    else showConversations();
  };
}

// ---------------------------------------------------------------- answers

/** The conversation as the API takes it, up to and including message `id`. */
function apiMessages(id) {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const m of pathOf({ ...chat, leaf: id })) {
    if (m.role === "tool") messages.push({ role: "tool", tool_call_id: m.call_id, name: m.name, content: m.content });
    else if (m.role === "assistant" && m.calls?.length) {
      messages.push({ role: "assistant", content: m.content || null, tool_calls: m.calls.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: c.arguments } })) });
    } else messages.push({ role: m.role, content: m.content });
  }
  return messages;
}

/** Lets the model answer message `parent`; `unfinished`: an answer that it continues. */
async function answer(parent, unfinished = null) {
  if (running) stop();
  notice("");
  let body;
  try {
    body = { ...requestFields(), messages: apiMessages(unfinished ? unfinished.id : parent), stream: true, stream_options: { include_usage: true }, timings_per_token: true, return_progress: true };
  } catch (error) {
    notice(error.message);
    return;
  }
  if (unfinished) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const message = unfinished ?? addMessage({ role: "assistant", parent });
  delete message.error;
  delete message.finish;
  const controller = new AbortController();
  running = { controller, message };
  const view = views.get(message.id), started = performance.now();
  const frame = new Frame(() => { view.update(); showStatus(); if (isAtEnd) toEnd(); });
  view.update(true);
  $("send").hidden = true;
  $("stop").hidden = false;
  toEnd();
  let nTokens = 0;
  try {
    for await (const event of events("v1/chat/completions", { body, signal: controller.signal })) {
      const choice = event.choices?.[0];
      if (choice?.delta) add(message, choice.delta);
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      if (choice?.delta?.content || choice?.delta?.reasoning_content || choice?.delta?.tool_calls) nTokens++;
      if (event.prompt_progress) view.progress(event.prompt_progress);
      if (event.timings) message.stats = { ...message.stats, speed: event.timings.predicted_per_second, new_tokens: event.timings.predicted_n, cached: event.timings.cache_n, prompt_tokens: event.timings.cache_n + event.timings.prompt_n || message.stats?.prompt_tokens };
      if (event.usage) message.stats = { ...message.stats, new_tokens: event.usage.completion_tokens, prompt_tokens: event.usage.prompt_tokens, total: event.usage.total_tokens };
      frame.ask();
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message || String(error);
  } finally {
    message.stats ??= { new_tokens: nTokens, speed: (1000 * nTokens) / (performance.now() - started) };
    if (running?.message === message) running = null;
    if (!running) { $("send").hidden = false; $("stop").hidden = true; }
    chat.updated = Date.now();
    store.flush();
    frame.now();
    view.update(true);
    showConversations();
  }
}

function add(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    call.arguments += piece.function?.arguments ?? "";
  }
}

function stop() {
  running?.controller.abort();
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
}

function send(text) {
  const content = text ?? input.value.trim();
  if (!content) return;
  if (running) stop();
  if (text === undefined) { input.value = ""; grow(input); }
  const message = addMessage({ role: "user", content, parent: chat.leaf });
  location.hash = chat.id;
  toEnd();
  answer(message.id);
}

/** Calls a function once for each frame at most. */
class Frame {
  constructor(draw) { this.draw = draw; this.asked = 0; }
  ask() { this.asked ||= requestAnimationFrame(() => this.now()); }
  now() { cancelAnimationFrame(this.asked); this.asked = 0; this.draw(); }
}

// ---------------------------------------------------------------- around the messages

let isAtEnd = true;
messagesNode.addEventListener("scroll", () => {
  isAtEnd = messagesNode.scrollHeight - messagesNode.scrollTop - messagesNode.clientHeight < 60;
  $("to-end").hidden = isAtEnd;
});
function toEnd() {
  messagesNode.scrollTop = messagesNode.scrollHeight;
  isAtEnd = true;
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function showStatus() {
  const last = running?.message ?? pathOf(chat).findLast((m) => m.role === "assistant");
  const speed = last?.stats?.speed;
  $("speed").textContent = speed ? `${speed.toFixed(1)} tokens/s` : "";
  const used = last?.stats?.prompt_tokens ? last.stats.prompt_tokens + (last.stats.new_tokens ?? 0) : 0;
  const context = $("context");
  context.hidden = !server.n_ctx;
  context.querySelector("i").style.width = `${Math.min(100, (100 * used) / (server.n_ctx || 1))}%`;
  context.querySelector(".text").textContent = `${used.toLocaleString("en")} of ${server.n_ctx.toLocaleString("en")} tokens`;
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function fieldNode(field) {
  const { name, label, hint, kind } = field, id = `set-${name}`;
  const shown = name === "seed" ? undefined : server.defaults[name];
  const placeholder = kind === "number" && typeof shown === "number" ? String(+shown.toFixed(4)) : kind === "number" ? "default" : "";
  let control;
  if (kind === "choice") control = el("select", { id }, ...field.choices.map((choice) => el("option", { value: choice }, choice || "default")));
  else if (kind === "number") control = el("input", { id, type: "number", min: field.min, max: field.max, step: field.step, placeholder });
  else if (kind === "secret" || kind === "line") control = el("input", { id, type: kind === "secret" ? "password" : "text", autocomplete: "off" });
  else control = el("textarea", { id, rows: kind === "text" ? 4 : 3, spellcheck: kind === "text" ? "true" : "false", class: kind === "json" ? "mono" : "" });
  control.value = settings[name] ?? "";
  control.addEventListener("input", () => {
    if (kind !== "number") settings[name] = control.value;
    else if (control.value === "") settings[name] = "";
    else if (control.validity.valid) settings[name] = control.valueAsNumber;
    if (kind === "json") {
      let isWrong = false;
      try { if (control.value) JSON.parse(control.value); } catch { isWrong = true; }
      control.setCustomValidity(isWrong ? "This is not JSON." : "");
    }
    if (name === "theme") applyTheme();
    if (name === "key") connect();
  });
  return el("label", { class: `field ${kind}`, for: id }, el("span", {}, label), control, hint ? el("small", {}, hint) : null);
}

function showSettings() {
  $("fields").replaceChildren(...FIELDS.map(([title, group]) => el("fieldset", {}, el("legend", {}, title), ...group.map(fieldNode))));
}

function applyTheme() {
  document.documentElement.dataset.theme = settings.theme ?? "";
}

async function connect() {
  try {
    await get("health");
    const { data } = await get("v1/models");
    server.model = data?.[0]?.id ?? "";
    server.n_ctx = data?.[0]?.meta?.n_ctx ?? 0;
    notice("");
    try {
      const props = await get("props");
      server.defaults = props.default_generation_settings?.params ?? {};
      server.n_ctx = props.default_generation_settings?.n_ctx ?? server.n_ctx;
    } catch { /* an older or another server */ }
    $("model").textContent = server.model;
    document.body.dataset.state = "ready";
    showChat();
    crew.connect();
  } catch (error) {
    notice(error.message);
    document.body.dataset.state = "waiting";
    clearTimeout(connect.timer);
    connect.timer = setTimeout(connect, 1000);
  }
}

// ---------------------------------------------------------------- events

const crew = new Crew($("crew-body"), $("pulse"));
function toggleCrew(isOpen = $("crew").hidden) {
  $("crew").hidden = !isOpen;
  document.body.classList.toggle("crew", isOpen);
  $("toggle-crew").setAttribute("aria-pressed", String(isOpen));
  crew.show(isOpen);
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", stop);
input.addEventListener("input", () => grow(input));
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  if (event.key === "ArrowUp" && !input.value) {
    const last = pathOf(chat).findLast((m) => m.role === "user");
    if (last) { event.preventDefault(); views.get(last.id).edit(); }
  }
});
$("new-chat").addEventListener("click", () => openChat(null));
$("search").addEventListener("input", showConversations);
$("open-sidebar").addEventListener("click", () => document.body.classList.toggle(isNarrow.matches ? "sidebar" : "no-sidebar"));
$("close-sidebar").addEventListener("click", () => document.body.classList.remove("sidebar"));
$("toggle-crew").addEventListener("click", () => toggleCrew());
$("close-crew").addEventListener("click", () => toggleCrew(false));
$("to-end").addEventListener("click", toEnd);
$("open-settings").addEventListener("click", () => { showSettings(); $("settings").showModal(); });
$("settings").addEventListener("close", () => { views.clear(); messagesNode.replaceChildren(); showChat(); });
$("reset-settings").addEventListener("click", () => { for (const [, group] of FIELDS) for (const { name } of group) delete settings[name]; applyTheme(); showSettings(); });
$("toggle-theme").addEventListener("click", () => {
  const isDark = settings.theme ? settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  settings.theme = isDark ? "light" : "dark";
  applyTheme();
});
$("export").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
  el("a", { href: url, download: `motley-chats-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
});
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (!file) return;
  try {
    const count = store.import(await file.text());
    notice(`${count} conversation${count === 1 ? "" : "s"} imported.`);
    showConversations();
  } catch (error) {
    notice(`Import: ${error.message}`);
  }
});
store.onfull = () => notice("The browser's storage is full: export and delete some conversations.");
document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  else if (command && event.shiftKey && key === "o") { event.preventDefault(); openChat(null); }
  else if (command && key === "k") { event.preventDefault(); document.body.classList.remove("no-sidebar"); document.body.classList.toggle("sidebar", isNarrow.matches); $("search").focus(); }
  else if (command && key === "b") { event.preventDefault(); $("open-sidebar").click(); }
  else if (command && key === "j") { event.preventDefault(); toggleCrew(); }
  else if (command && key === ",") { event.preventDefault(); $("open-settings").click(); }
  else if (key === "/" && document.activeElement === document.body) { event.preventDefault(); input.focus(); }
});
addEventListener("hashchange", () => {
  const found = store.chats.find((c) => c.id === location.hash.slice(1));
  if (found && found !== chat) openChat(found);
});
addEventListener("storage", () => { if (!running) { store.merge(); showChat(); } });
addEventListener("beforeunload", () => store.flush());
messagesNode.addEventListener("click", () => { if (isNarrow.matches) document.body.classList.remove("sidebar"); });

applyTheme();
openChat(store.chats.find((c) => c.id === location.hash.slice(1)));
connect();
