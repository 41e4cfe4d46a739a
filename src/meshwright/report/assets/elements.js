// Creates elements. Text stays text: no code on the page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined && child !== "") node.append(child);
  }
  return node;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function missing(text) {
  return h("p", { class: "missing" }, text);
}

// Lists of items with the same key, in order.
function grouped(items, key) {
  const groups = new Map();
  for (const item of items) {
    const text = JSON.stringify(key(item)) ?? "";
    groups.set(text, [...(groups.get(text) || []), item]);
  }
  return [...groups.values()];
}

// Text that breaks after dots and underscores, not inside of words and numbers.
function breakable(text) {
  return words(text).split(/(?<=[_/])|(?<=\.)(?<!\d\.)|(?<=\d\.)(?!\d)/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]));
}

// Tabs for runs; runs with the same content share one, and a single one needs none.
function perRun(runs, label, render, content = (run) => run.path) {
  const groups = grouped(runs, content);
  const body = h("div", { role: groups.length > 1 ? "tabpanel" : null });
  const show = ([run]) => body.replaceChildren(...[guarded(() => render(run))].flat());
  if (groups.length === 1) {
    show(groups[0]);
    return runs.length === 1 ? body : h("div", {}, h("p", { class: "note above" }, "The same in all runs."), body);
  }
  const tabs = groups.map((group, index) =>
    h("button", { type: "button", role: "tab", "aria-selected": index === 0, onclick: () => choose(index) },
      group.map((run) => h("span", {}, swatch(run), run.label))));
  const choose = (index) => {
    tabs.forEach((tab, at) => tab.setAttribute("aria-selected", String(at === index)));
    show(groups[index]);
  };
  tabs[0].setAttribute("aria-selected", "true");
  tabs.slice(1).forEach((tab) => tab.setAttribute("aria-selected", "false"));
  show(groups[0]);
  return h("div", {}, h("div", { class: "tabs", role: "tablist", "aria-label": label }, tabs), body);
}

function swatch(run) {
  return h("span", { class: `swatch c${run.color}`, "aria-hidden": "true" });
}

// Unexpected content in a file breaks only its section, not the page.
function guarded(render) {
  try {
    return render();
  } catch (error) {
    return missing(`This section cannot be shown: ${error.message}`);
  }
}
