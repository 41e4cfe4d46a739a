// Builds the page.

const SECTIONS = [
  ["facts", "Summary", factsSection],
  ["curves", "Curves", curvesSection],
  ["time", "Where the time goes", timeSection],
  ["memory", "Memory per device", memorySection],
  ["mesh", "Mesh", meshSection],
  ["sharding", "Sharding", shardingSection],
  ["ledger", "Ledger", ledgerSection],
  ["samples", "Samples", samplesSection],
  ["config", "Config", configSection],
  ["events", "Events", eventsSection],
];
const COLORS = 16;

function header(runs, leftOut) {
  const first = runs[0];
  const projects = [...new Set(runs.map((run) => run.facts.project).filter(Boolean))].map(words);
  const events = (found, name, style) => (found.length ?
    h("a", { class: `badge ${style}`, href: "#events" }, `${found.length} ${name}${found.length > 1 ? "s" : ""}`) : null);
  const alone = runs.length === 1;
  return h("header", {},
    h("h1", {}, projects.join(", ") || "Run", h("span", {}, alone ? first.label : `${runs.length} runs compared`)),
    h("p", { class: "under" },
      alone ? h("span", { class: `badge ${status(first).style}` }, status(first).text) : null,
      alone && first.facts.plan ? h("span", {}, words(first.facts.plan)) : null,
      events(runs.flatMap(incidents), "incident", "bad"),
      events(runs.flatMap(warnings), "warning", "bad"), events(runs.flatMap(remarks), "remark", ""),
      leftOut ? h("span", {}, `${leftOut} older runs are not shown`) : null));
}

function build() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = labelled(data.runs);
  const nav = h("nav", { "aria-label": "Sections" }, SECTIONS.map(([id, title]) => h("a", { href: `#${id}` }, title)));
  const sections = SECTIONS.map(([id, title, render]) => h("section", { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, runs.length > 1 && id === "config" ? "Config differences" : title),
    guarded(() => render(runs))));
  document.getElementById("page").append(guarded(() => header(runs, data.left_out)), nav, h("main", {}, sections),
    h("footer", {}, `Meshwright ${data.version}`));
}

build();
