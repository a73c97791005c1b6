// The crew, live: devices and their shares, memory, blocks of the cache, requests. Fed by /motley/live.

import { el } from "./markdown.js";
import { events } from "./state.js";

const N_POINTS = 90; // of the curve of speed
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) { n /= 1024; unit++; }
  return `${n < 10 && unit ? n.toFixed(1) : Math.round(n)} ${UNITS[unit]}`;
}

const percent = (part, whole) => (whole ? (100 * part) / whole : 0);
const count = (n) => Math.round(n).toLocaleString("en");

/** A bar of parts: [{share, label, kind}]. */
function bar(parts, label) {
  const node = el("div", { class: "bar-of", role: "img", "aria-label": label });
  for (const { share, kind, title } of parts) {
    const part = el("i", { class: kind, title });
    part.style.width = `${share}%`;
    node.append(part);
  }
  return node;
}

export class Crew {
  constructor(node, pulse) {
    this.node = node;
    this.pulse = pulse;
    this.isShown = false;
    this.controller = null;
    this.speeds = [];
  }

  show(isShown) {
    this.isShown = isShown;
    if (isShown) this.connect();
    else this.controller?.abort();
  }

  async connect() {
    if (!this.isShown) return;
    this.controller?.abort();
    const controller = (this.controller = new AbortController());
    while (this.controller === controller && !controller.signal.aborted) {
      try {
        for await (const event of events("motley/live", { signal: controller.signal })) this.draw(event);
      } catch (error) {
        if (controller.signal.aborted) break;
        if (!this.node.children.length) this.node.replaceChildren(el("p", { class: "empty" }, `Not connected: ${error.message}`));
      }
      this.pulse.classList.remove("alive");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
    this.pulse.classList.remove("alive");
  }

  draw(live) {
    this.pulse.classList.add("alive");
    this.speeds.push(live.rates?.new ?? 0);
    this.speeds = this.speeds.slice(-N_POINTS);
    this.node.replaceChildren(this.model(live), this.devices(live.devices ?? []), this.cache(live.cache ?? {}), this.requests(live), this.totals(live));
  }

  model({ model = {} }) {
    const parts = [model.n_params && `${model.n_params < 1e9 ? `${(model.n_params / 1e6).toFixed(0)} M` : `${(model.n_params / 1e9).toFixed(1)} B`} parameters`, model.size && bytes(model.size), model.n_ctx && `context ${count(model.n_ctx)}`];
    return el("section", {}, el("h3", {}, model.name ?? "Model"), el("p", { class: "dim" }, parts.filter(Boolean).join(" · ")));
  }

  devices(devices) {
    const total = devices.reduce((sum, d) => sum + (d.memory?.weights ?? 0), 0);
    const most = Math.max(1, ...devices.map((d) => Object.values(d.memory ?? {}).reduce((a, b) => a + b, 0)));
    const split = bar(devices.map((d, i) => ({ share: 100 * (d.share ?? 0), kind: `d${i % 6}`, title: `${d.name}: ${(100 * d.share).toFixed(1)} %` })), "Shares of the weights");
    const rows = devices.map((d, i) => {
      const memory = d.memory ?? {}, sum = Object.values(memory).reduce((a, b) => a + b, 0);
      const kinds = Object.entries(memory).filter(([, n]) => n > 0);
      return el("li", { class: "device" },
        el("div", { class: "line" }, el("b", { class: `dot d${i % 6}` }), el("strong", {}, d.name), el("span", { class: "space" }), el("span", { class: "big" }, `${(100 * (d.share ?? 0)).toFixed(1)} %`)),
        bar(kinds.map(([kind, n]) => ({ share: percent(n, most), kind: `m-${kind}`, title: `${kind}: ${bytes(n)}` })), `Memory of ${d.name}`),
        el("p", { class: "dim" }, `${bytes(sum)}: `, kinds.map(([kind, n]) => `${kind.replace("kv_", "")} ${bytes(n)}`).join(", ")));
    });
    return el("section", {}, el("h3", {}, `${devices.length} device${devices.length === 1 ? "" : "s"}`, el("small", {}, total ? `${bytes(total)} of weights` : "")), split, el("ul", { class: "plain" }, ...rows));
  }

  cache(cache) {
    const groups = cache.groups ?? [];
    const rows = groups.map((g) => {
      const own = g.n_used - g.n_shared, free = g.n_blocks - g.n_used - g.n_cached;
      const of = (n) => percent(n, g.n_blocks);
      return el("li", {}, groups.length > 1 ? el("div", { class: "line" }, el("span", {}, g.name)) : null,
        bar([{ share: of(own), kind: "b-used", title: `${own} used` }, { share: of(g.n_shared), kind: "b-shared", title: `${g.n_shared} shared` }, { share: of(g.n_cached), kind: "b-cached", title: `${g.n_cached} cached` }], "Blocks of the cache"),
        el("p", { class: "legend" },
          el("span", {}, el("b", { class: "dot b-used" }), `${count(own)} used`), el("span", {}, el("b", { class: "dot b-shared" }), `${count(g.n_shared)} shared`),
          el("span", {}, el("b", { class: "dot b-cached" }), `${count(g.n_cached)} cached`), el("span", {}, el("b", { class: "dot b-free" }), `${count(free)} free`)));
    });
    const hits = cache.prefix?.n_query_tokens ? percent(cache.prefix.n_hit_tokens, cache.prefix.n_query_tokens) : 0;
    return el("section", {}, el("h3", {}, "Cache", el("small", {}, cache.block_size ? `blocks of ${cache.block_size} tokens` : "")), el("ul", { class: "plain" }, ...rows),
      el("p", { class: "dim" }, `${count(cache.n_tokens ?? 0)} tokens of ${count(cache.n_sequences ?? 0)} sequence${cache.n_sequences === 1 ? "" : "s"}; ${hits.toFixed(0)} % of all prompt tokens were found in it`));
  }

  requests({ requests = {}, rates = {}, model = {} }) {
    const rows = (requests.slots ?? []).map((slot) => el("li", {},
      el("div", { class: "line" }, el("span", {}, `#${slot.id}`), el("span", { class: "space" }), el("span", { class: "dim" }, `${count(slot.n_prompt)} + ${count(slot.n_new)} tokens`)),
      bar([{ share: percent(slot.n_prompt, model.n_ctx), kind: "b-cached", title: "prompt" }, { share: percent(slot.n_new, model.n_ctx), kind: "b-used", title: "answer" }], "Context of the request")));
    return el("section", {}, el("h3", {}, "Requests", el("small", {}, `${requests.running ?? 0} running, ${requests.waiting ?? 0} waiting`)),
      el("div", { class: "line" }, el("span", { class: "big" }, (rates.new ?? 0).toFixed(1)), el("span", { class: "dim" }, " tokens/s"), el("span", { class: "space" }), el("span", { class: "dim" }, rates.prompt ? `prompts ${count(rates.prompt)} tokens/s` : "")),
      this.curve(), el("ul", { class: "plain" }, ...rows));
  }

  curve() {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "path");
    const area = document.createElementNS(svg.namespaceURI, "path");
    const most = Math.max(1, ...this.speeds), x = (i) => ((i + N_POINTS - this.speeds.length) * 300) / (N_POINTS - 1), y = (v) => 46 - (44 * v) / most;
    const points = this.speeds.map((v, i) => `${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
    svg.setAttribute("viewBox", "0 0 300 48");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("class", "curve");
    line.setAttribute("d", `M${points}`);
    line.setAttribute("class", "line");
    area.setAttribute("d", `M${x(0).toFixed(1)} 48L${points}L300 48Z`);
    area.setAttribute("class", "area");
    svg.append(area, line);
    return svg;
  }

  totals({ totals = {}, speculation = {}, steps }) {
    const pairs = [["requests", totals.requests], ["prompt tokens", totals.prompt_tokens], ["… found in the cache", totals.cached_tokens], ["new tokens", totals.new_tokens], ["steps", steps]];
    if (speculation.drafted) pairs.push(["drafted tokens", speculation.drafted], ["… accepted", `${percent(speculation.accepted, speculation.drafted).toFixed(0)} %`]);
    if (totals.cancelled) pairs.push(["cancelled", totals.cancelled]);
    if (totals.failed) pairs.push(["failed", totals.failed]);
    const rows = pairs.filter(([, n]) => n !== undefined && n !== null).flatMap(([name, n]) => [el("dt", {}, name), el("dd", {}, typeof n === "number" ? count(n) : n)]);
    return el("section", {}, el("h3", {}, "Since the start"), el("dl", {}, ...rows));
  }
}
