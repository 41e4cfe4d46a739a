// Tables that sort by any column and can be filtered.

const MOST_ROWS = 300;

// columns: {title, value(row) to sort by, cell(row) to show, numeric}
function dataTable({ caption, columns, rows, filter, wide }) {
  const state = { column: null, descending: false, text: "" };
  const body = h("tbody");
  const note = h("p", { class: "note", role: "status" });
  const headers = columns.map((column, index) => h("th", { scope: "col", class: column.numeric ? "number" : null },
    h("button", { type: "button", onclick: () => sortBy(index) }, column.title)));
  const table = h("table", { class: wide ? "wide" : null }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, headers)), body);

  function sortBy(index) {
    state.descending = state.column === index ? !state.descending : Boolean(columns[index].numeric);
    state.column = index;
    show();
  }

  function matches(row) {
    return columns.some((column) => String(column.value(row) ?? "").toLowerCase().includes(state.text));
  }

  function show() {
    const kept = rows.filter(matches);
    if (state.column !== null) {
      const { value } = columns[state.column];
      kept.sort((a, b) => compare(value(a), value(b)) * (state.descending ? -1 : 1));
    }
    headers.forEach((header, index) => header.setAttribute("aria-sort",
      index !== state.column ? "none" : state.descending ? "descending" : "ascending"));
    body.replaceChildren(...kept.slice(0, MOST_ROWS).map((row) => h("tr", {},
      columns.map((column) => h("td", { class: column.numeric ? "number" : column.style }, column.cell(row))))));
    const beyond = kept.length > MOST_ROWS ? `; showing the first ${MOST_ROWS}` : "";
    note.textContent = filter ? `${kept.length} of ${rows.length} rows${beyond}` : "";
  }

  const box = filter ? h("input", { type: "search", placeholder: "filter", "aria-label": `Filter ${caption}`,
    oninput: (event) => { state.text = event.target.value.toLowerCase(); show(); } }) : null;
  show();
  return h("div", { class: "table" }, filter ? h("div", { class: "filter" }, box, note) : null,
    h("div", { class: "scroll" }, table));
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

// A row per name and a column per run, without rows that have no values.
function sideBySide(caption, runs, rows) {
  const filled = rows.map(([name, value]) => [name, runs.map((run) => guardedText(() => value(run)))])
    .filter(([, values]) => values.some((value) => value !== ""));
  if (runs.length === 1) return factsTable(caption, null, filled);
  const same = ([, values]) => values.every((value) => value === values[0]);
  const equal = filled.filter(same).map(([name, values]) => [name, values.slice(0, 1)]);
  const head = h("thead", {}, h("tr", {}, h("td"), runs.map((run) => h("th", { scope: "col" }, swatch(run), breakable(run.label),
    run.best ? [" ", h("span", { class: "badge good" }, "best")] : null))));
  return h("div", {}, factsTable(caption, head, filled.filter((row) => !same(row))),
    equal.length ? h("details", { class: "equal" }, h("summary", {}, `${equal.length} more, the same in all runs`),
      factsTable(`${caption}: the same in all`, null, equal)) : null);
}

function factsTable(caption, head, rows) {
  return h("div", { class: "scroll whole" }, h("table", { class: "facts" }, h("caption", {}, caption), head,
    h("tbody", {}, rows.map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, breakable(name)),
      values.map((value) => h("td", {}, value || "–")))))));
}

function guardedText(say) {
  try {
    const value = say();
    return value === null || value === undefined || value === "–" ? "" : String(value);
  } catch {
    return "";
  }
}

// Stacked bars, one per run, on a common scale.
function stackedBars({ label, runs, parts, total, say, mark }) {
  const largest = Math.max(...runs.map((run) => Math.max(total(run), mark ? mark(run) || 0 : 0)), 1e-30);
  const bars = runs.map((run) => {
    const known = parts.map((part) => ({ ...part, size: part.value(run) })).filter((part) => part.size > 0);
    const text = known.map((part) => `${part.name} ${say(part.size)}`).join(", ");
    const marked = mark ? mark(run) : null;
    return h("div", { class: "bar-row" },
      runs.length > 1 ? h("div", { class: "bar-name" }, swatch(run), run.label) : null,
      h("div", { class: "bar", role: "img", "aria-label": `${label}: ${text}` },
        known.map((part) => sized(h("div", { class: `part p${part.color}`, title: `${part.name}: ${say(part.size)}` },
          h("span", {}, part.size / largest > 0.12 ? say(part.size) : "")), "width", part.size / largest)),
        marked ? sized(h("div", { class: "mark", title: `highest measured: ${say(marked)}` }), "left", marked / largest) : null));
  });
  const used = parts.filter((part) => runs.some((run) => part.value(run) > 0));
  return h("div", { class: "bars" }, bars, h("ul", { class: "legend" },
    used.map((part) => h("li", {}, h("span", { class: `swatch p${part.color}` }),
      runs.length > 1 ? part.name : `${part.name} ${say(part.value(runs[0]))}`)),
    mark && runs.some(mark) ? h("li", {}, h("span", { class: "swatch line-mark" }), runs.length > 1 ? "highest measured" : `highest measured ${say(mark(runs[0]))}`) : null));
}

function sized(node, property, share) {
  node.style[property] = `${Math.min(Math.max(share, 0), 1) * 100}%`;
  return node;
}
