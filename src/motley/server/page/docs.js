// Shows openapi.json: sections by tag, fields of each body, and a command to copy. Builds nodes only, no HTML from text.

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function example(schema) {
  if (schema.type === "array") return schema.items?.type === "string" ? ["text"] : [];
  return { string: "text", integer: 16, number: 0.8, boolean: true, object: {} }[schema.type] ?? "Hello";
}

function command(method, path, schema) {
  const url = new URL(path, location.href).href;
  if (method !== "post") return `curl ${url}`;
  const body = {};
  for (const name of schema?.required ?? []) body[name] = example(schema.properties[name] ?? {});
  if ("messages" in body) body.messages = [{ role: "user", content: "Hello" }];
  return `curl ${url} -d '${JSON.stringify(body)}'`;
}

function operation(method, path, about) {
  const schema = about.requestBody?.content["application/json"].schema;
  const inside = node("div", { class: "inside" });
  if (about.description) inside.append(node("p", {}, about.description));
  const fields = Object.entries(schema?.properties ?? {});
  if (fields.length) {
    const rows = fields.map(([name, field]) => {
      const shown = schema.required?.includes(name) ? node("strong", {}, name) : name;
      return node("tr", {}, node("td", {}, node("code", {}, shown)), node("td", {}, field.type ?? ""),
        node("td", {}, field.description ?? ""));
    });
    inside.append(node("table", {}, node("tbody", {}, ...rows)));
  }
  inside.append(node("pre", {}, command(method, path, schema)));
  const title = node("summary", {}, node("span", { class: "method" }, method.toUpperCase()), node("code", {}, path),
    node("span", { class: "about" }, about.summary));
  return node("details", {}, title, inside);
}

const main = document.getElementById("docs");
try {
  const description = await (await fetch("openapi.json")).json();
  const sections = new Map();
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const tag = about.tags[0];
      if (!sections.has(tag)) sections.set(tag, node("section", {}, node("h2", {}, tag)));
      sections.get(tag).append(operation(method, path, about));
    }
  }
  main.append(...["OpenAI", "Anthropic", "llama-server", "State"].map((tag) => sections.get(tag)).filter(Boolean));
} catch (error) {
  main.append(node("p", {}, `openapi.json cannot be read: ${error}`));
}
