// Creates elements. Text stays text: no code on the page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
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

// Tabs for runs; a single run needs none.
function perRun(runs, label, render) {
  const body = h("div", { role: runs.length > 1 ? "tabpanel" : null });
  const show = (run) => body.replaceChildren(...[guarded(() => render(run))].flat());
  if (runs.length === 1) {
    show(runs[0]);
    return body;
  }
  const tabs = runs.map((run, index) =>
    h("button", { type: "button", role: "tab", "aria-selected": index === 0,
      onclick: () => choose(index) }, swatch(run), run.label));
  const choose = (index) => {
    tabs.forEach((tab, at) => tab.setAttribute("aria-selected", String(at === index)));
    show(runs[index]);
  };
  tabs[0].setAttribute("aria-selected", "true");
  tabs.slice(1).forEach((tab) => tab.setAttribute("aria-selected", "false"));
  show(runs[0]);
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
