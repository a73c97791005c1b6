// What the page remembers (conversations, settings) and how it talks to the server.

const CHATS = "motley.chats", SETTINGS = "motley.settings";

const read = (key, fallback) => {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
};

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

// Settings. An empty field is not sent: the server's own value counts.
const number = (name, label, hint, more = {}) => ({ name, label, hint, kind: "number", ...more });
export const FIELDS = [
  ["Conversation", [
    { name: "system", label: "System prompt", kind: "text", local: true, hint: "Stands before every conversation" },
    number("max_tokens", "Longest answer", "tokens", { min: 1, step: 1 }),
    { name: "stop", label: "Stop strings", kind: "list", hint: "one a line" },
    { name: "thinking", label: "Reasoning", kind: "choice", local: true, choices: ["", "on", "off"], hint: "for models that can" },
  ]],
  ["Sampling", [
    number("temperature", "Temperature", "0 always takes the likeliest", { min: 0, step: 0.05 }),
    number("top_k", "Top k", "candidates; 0: all", { min: 0, step: 1 }),
    number("top_p", "Top p", "share of probability", { min: 0, max: 1, step: 0.01 }),
    number("min_p", "Min p", "of the likeliest's probability", { min: 0, max: 1, step: 0.01 }),
    number("typical_p", "Typical p", "", { min: 0, max: 1, step: 0.01 }),
    number("top_n_sigma", "Top n σ", "of the logits", { step: 0.1 }),
    number("seed", "Seed", "empty: another each time", { step: 1 }),
    number("min_keep", "Min keep", "candidates", { min: 0, step: 1 }),
  ]],
  ["Repetition", [
    number("repeat_penalty", "Repeat penalty", "1: none", { min: 0, step: 0.01 }),
    number("repeat_last_n", "Over the last", "tokens", { step: 1 }),
    number("presence_penalty", "Presence penalty", "", { step: 0.05 }),
    number("frequency_penalty", "Frequency penalty", "", { step: 0.05 }),
    number("dry_multiplier", "DRY multiplier", "0: off", { min: 0, step: 0.05 }),
    number("dry_base", "DRY base", "", { step: 0.05 }),
    number("dry_allowed_length", "DRY allowed length", "tokens", { min: 1, step: 1 }),
    number("dry_penalty_last_n", "DRY over the last", "tokens", { step: 1 }),
  ]],
  ["More samplers", [
    number("dynatemp_range", "Dynamic temperature ±", "", { min: 0, step: 0.05 }),
    number("dynatemp_exponent", "… exponent", "", { min: 0, step: 0.1 }),
    number("xtc_probability", "XTC probability", "", { min: 0, max: 1, step: 0.05 }),
    number("xtc_threshold", "XTC threshold", "", { min: 0, max: 1, step: 0.05 }),
    number("mirostat", "Mirostat", "0, 1 or 2", { min: 0, max: 2, step: 1 }),
    number("mirostat_tau", "Mirostat τ", "", { step: 0.1 }),
    number("mirostat_eta", "Mirostat η", "", { step: 0.01 }),
    { name: "samplers", label: "Order of samplers", kind: "list", hint: "one a line" },
  ]],
  ["Motley", [
    number("n_expert_used", "Experts of a token", "of models with experts", { min: 1, step: 1 }),
    number("n_layer_exit", "Layers", "leave the model early", { min: 1, step: 1 }),
    { name: "speculative", label: "Speculation", kind: "choice", choices: ["", "auto", "off"], hint: "drafts, checked by the model" },
    { name: "cache_salt", label: "Cache salt", kind: "line", hint: "shares the cache only with the same salt" },
  ]],
  ["Tools and form", [
    { name: "tools", label: "Tools", kind: "json", hint: "OpenAI's form: a list of functions" },
    { name: "tool_choice", label: "Tool choice", kind: "choice", choices: ["", "auto", "required", "none"] },
    { name: "json_schema", label: "JSON schema", kind: "json", hint: "the answer matches it" },
    { name: "extra", label: "Other fields", kind: "json", local: true, hint: "an object, sent as it is" },
  ]],
  ["Server", [
    { name: "key", label: "API key", kind: "secret", local: true, hint: "kept in this browser" },
    { name: "theme", label: "Theme", kind: "choice", local: true, choices: ["", "light", "dark"] },
    { name: "raw", label: "Show answers as", kind: "choice", local: true, choices: ["", "plain text"] },
  ]],
];

export const settings = new Proxy(read(SETTINGS, {}), {
  set(target, name, value) {
    if (value === "" || value === null || value === undefined) delete target[name];
    else target[name] = value;
    localStorage.setItem(SETTINGS, JSON.stringify(target));
    return true;
  },
  deleteProperty(target, name) {
    delete target[name];
    localStorage.setItem(SETTINGS, JSON.stringify(target));
    return true;
  },
});

/** The settings as fields of a request. Throws an Error that names a field whose JSON is wrong. */
export function requestFields() {
  const fields = {};
  for (const [, group] of FIELDS) {
    for (const { name, label, kind, local } of group) {
      const value = settings[name];
      if (value === undefined || local) continue;
      if (kind === "json") fields[name] = parsed(label, value);
      else if (kind === "list") fields[name] = value.split("\n").filter(Boolean);
      else fields[name] = value;
    }
  }
  if (fields.json_schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: fields.json_schema } };
    delete fields.json_schema;
  }
  if (!fields.tools) delete fields.tool_choice;
  if (settings.thinking) fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.extra) Object.assign(fields, parsed("Other fields", settings.extra));
  return fields;
}

export function parsed(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}

// Conversations are trees: a message has a parent, and siblings where it was edited or made again.

class Store {
  constructor() {
    this.chats = read(CHATS, []);
    this.timer = 0;
    this.removed = new Set();
  }

  /** Written a moment later, so that a stream does not write with every token. */
  save() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.flush(), 300);
  }

  flush() {
    clearTimeout(this.timer);
    this.merge();
    try {
      localStorage.setItem(CHATS, JSON.stringify(this.chats.filter((chat) => chat.messages.length)));
      return true;
    } catch {
      this.onfull?.();
      return false;
    }
  }

  /** Takes over what another tab has written: its conversations, and those of ours that it has continued. */
  merge() {
    const own = new Map(this.chats.map((chat) => [chat.id, chat]));
    for (const other of read(CHATS, [])) {
      const mine = own.get(other.id);
      if (!mine && !this.removed.has(other.id)) this.chats.push(other);
      else if (mine && other.updated > mine.updated) Object.assign(mine, other);
    }
  }

  create() {
    const chat = { id: newId(), title: "", updated: Date.now(), messages: [], leaf: null };
    this.chats.unshift(chat);
    return chat;
  }

  remove(chat) {
    this.removed.add(chat.id);
    this.chats = this.chats.filter((other) => other !== chat);
    this.flush();
  }

  /** Conversations that contain all words, newest first. */
  search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (chat) => [chat.title, ...chat.messages.map((m) => m.content)].join("\n").toLowerCase();
    const found = this.chats.filter((chat) => chat.messages.length && (!words.length || words.every((w) => text(chat).includes(w))));
    return found.sort((a, b) => b.updated - a.updated);
  }

  exported() {
    return JSON.stringify({ format: "motley-chats", version: 1, chats: this.chats.filter((chat) => chat.messages.length) }, null, 1);
  }

  /** Adds conversations of a file; returns how many. Throws for what is no export. */
  import(text) {
    const data = JSON.parse(text);
    if (data?.format !== "motley-chats" || !Array.isArray(data.chats)) throw new Error("this is no export of conversations");
    let count = 0;
    for (const given of data.chats) {
      if (!Array.isArray(given.messages)) continue;
      const messages = given.messages.filter((m) => m && typeof m.id === "string" && typeof m.content === "string" && ["user", "assistant", "tool"].includes(m.role));
      const known = new Set(messages.map((m) => m.id));
      for (const message of messages) if (!known.has(message.parent)) message.parent = null;
      const isOurs = this.chats.some((chat) => chat.id === given.id);
      const chat = { id: isOurs || typeof given.id !== "string" ? newId() : given.id, title: String(given.title ?? ""), updated: Number(given.updated) || Date.now(), messages };
      chat.leaf = known.has(given.leaf) ? given.leaf : messages.at(-1)?.id ?? null;
      this.chats.push(chat);
      count++;
    }
    this.flush();
    return count;
  }
}

export const store = new Store();

/** The messages from the beginning to the shown end. */
export function pathOf(chat) {
  const byId = new Map(chat.messages.map((m) => [m.id, m])), path = [], seen = new Set();
  for (let m = byId.get(chat.leaf); m && !seen.has(m.id); m = byId.get(m.parent)) {
    seen.add(m.id);
    path.unshift(m);
  }
  return path;
}

export const siblingsOf = (chat, message) => chat.messages.filter((m) => m.parent === message.parent);

/** Shows another branch: the newest end of `message`. */
export function follow(chat, message) {
  let leaf = message;
  for (let next = leaf; next; next = chat.messages.findLast((m) => m.parent === leaf.id)) leaf = next;
  chat.leaf = leaf.id;
}

// The server

export class ServerError extends Error {}

const headers = () => ({ "Content-Type": "application/json", ...(settings.key ? { Authorization: `Bearer ${settings.key}` } : {}) });

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.detail ?? message;
  } catch { /* no JSON */ }
  if (response.status === 401) message += " — set the API key in the settings";
  return new ServerError(message);
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Events of a server-sent stream, parsed; ends with the stream. */
export async function* events(path, { body, signal } = {}) {
  const response = await fetch(path, {
    method: body ? "POST" : "GET", headers: headers(), signal, body: body ? JSON.stringify(body) : undefined,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split(/\r?\n\r?\n/);
      text = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message ?? String(event.error));
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
