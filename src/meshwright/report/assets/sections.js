// The sections of the page.

const last = (points) => points.findLast(([, y]) => isNumber(y))?.[1];

function curveOf(run, split, metric) {
  return run.curves.find((curve) => curve.split === split && curve.metric === metric);
}

function newest(run, split, metric) {
  const curve = curveOf(run, split, metric);
  return curve ? last(curve.points) : undefined;
}

// The median: not affected by the first steps and by pauses.
function usual(run, metric) {
  const curve = curveOf(run, "train", metric);
  const values = curve ? curve.points.map(([, y]) => y).filter(isNumber).sort((a, b) => a - b) : [];
  return values.length ? values[values.length >> 1] : undefined;
}

function highest(run, metric) {
  const curve = curveOf(run, "train", metric);
  const values = curve ? curve.points.map(([, y]) => y).filter(isNumber) : [];
  return values.length ? values.reduce((a, b) => Math.max(a, b)) : undefined;
}

function meshText(run) {
  const axes = Object.entries(run.facts.mesh || {}).filter(([, size]) => size > 1);
  return axes.map(([axis, size]) => `${axis}=${size}`).join(" × ");
}

function stepsDone(run) {
  const ends = run.curves.map((curve) => curve.points.at(-1)?.[0] ?? 0);
  return run.result?.steps ?? (ends.length ? Math.max(...ends) : undefined);
}

function status(run) {
  if ((!run.result || run.result.failed) && run.failure) return { text: run.failure, style: "bad" };
  if (!run.result) return { text: "no result yet: still running, or interrupted", style: "open" };
  return { text: run.result.stopped ? `finished: ${run.result.stopped}` : "finished", style: "done" };
}

// Remarks in run.json that are not also events.
function remarks(run) {
  const said = new Set(run.events.map((event) => event.message));
  return [run.facts.remarks ?? []].flat().map(words).filter((remark) => !said.has(remark));
}

// Steps that were not finite.
const incidents = (run) => run.events.filter((event) => event.kind === "incident");

function incidentsText(run) {
  const actions = incidents(run).map((event) => words(event.action));
  const counts = [...new Set(actions)].map((action) => `${action} ${actions.filter((each) => each === action).length}`);
  return actions.length ? `${actions.length} (${counts.join(", ")})` : "";
}

const warnings = (run) => run.events.filter((event) => event.kind === "warning");

function finalLoss(run) {
  return run.result?.final_loss ?? newest(run, "train", "loss");
}

function evalLoss(run) {
  return run.result?.eval_loss ?? newest(run, "eval", "loss");
}

// result.json knows the last attempt only.
const wholeTime = (run) => run.seconds ?? run.result?.seconds;

const FACTS = [
  ["Status", (run) => status(run).text],
  ["Started", (run) => (run.facts.started ? moment(run.facts.started) : "")],
  ["Resumed", (run) => (run.facts.resumed || []).map(moment).join("; ")],
  ["Steps", (run) => number(stepsDone(run))],
  ["Time", (run) => seconds(wholeTime(run))],
  ["Goodput", (run) => percent(run.result?.goodput)],
  ["Attempts", (run) => (run.result?.attempts > 1 ? number(run.result.attempts) : "")],
  ["First loss", (run) => number(curveOf(run, "train", "loss")?.points[0]?.[1] ?? run.result?.first_loss)],
  ["Final loss", (run) => number(finalLoss(run))],
  ["Loss on held-out data", (run) => number(evalLoss(run))],
  ["Incidents", incidentsText],
  ["Tokens per second", (run) => count(usual(run, "tokens_per_second"))],
  ["Samples per second", (run) => count(usual(run, "samples_per_second"))],
  ["Time per step", (run) => seconds(usual(run, "step_seconds"))],
  ["Utilization (MFU)", (run) => percent(usual(run, "mfu"))],
  ["Plan", (run) => run.facts.plan],
  ["Mesh", (run) => meshText(run)],
  ["Devices", (run) => {
    const { count: devices, kind, platform, processes } = run.facts.devices;
    return `${devices} × ${kind || platform}${processes > 1 ? ` in ${processes} processes` : ""}`;
  }],
  ["Parameters", (run) => `${count(run.facts.parameters.count)} (${number(run.facts.parameters.count)}), ${bytes(run.facts.parameters.bytes)}`],
  ["Global batch", (run) => `${number(run.facts.global_batch_size)} samples` +
    (run.facts.tokens_per_sample ? ` of ${number(run.facts.tokens_per_sample)} tokens` : "")],
  ["Data", (run) => run.facts.dataset.description],
  ["Mixture", (run) => run.events.findLast((event) => event.kind === "mixture")?.message ?? ""],
  ["Data fingerprint", (run) => run.facts.dataset.fingerprint],
  ["Seed", (run) => run.facts.seed],
  ["FLOPs per step", (run) => count(run.facts.flops_per_step)],
  ["Versions", (run) => Object.entries(run.facts.versions).map(([name, value]) => `${name} ${value}`).join(", ")],
  ["Command", (run) => [run.facts.command].flat().map(quoted).join(" ")],
  ["Folder", (run) => run.path],
];

function tiles(run) {
  const shown = [
    ["Final loss", number(finalLoss(run))],
    ["Held-out loss", number(evalLoss(run))],
    ["Steps", number(stepsDone(run))],
    ["Time", seconds(wholeTime(run))],
    ["Tokens/s", count(usual(run, "tokens_per_second"))],
    ["Samples/s", count(usual(run, "samples_per_second"))],
    ["Per step", seconds(usual(run, "step_seconds"))],
    ["MFU", percent(usual(run, "mfu"))],
    ["Mesh", meshText(run) || "–"],
    ["Parameters", `${count(run.facts.parameters?.count)}${run.facts.parameters?.frozen ? ` of ${count(run.facts.parameters.count + run.facts.parameters.frozen)}` : ""}`],
    ["Memory per device", bytes(run.facts.memory_per_device?.total)],
  ].filter(([, value]) => value !== "–");
  return h("dl", { class: "tiles" }, shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function factsSection(runs) {
  const samples = runs.filter((run) => run.result?.sample);
  const how = runs.some((run) => run.best) ? `The best run has the lowest loss ${bestLoss(runs) === evalLoss ? "on held-out data" : "in training"}.` : "";
  return [
    runs.length === 1 ? guarded(() => tiles(runs[0])) : null,
    how ? h("p", { class: "note above" }, how) : null,
    runs.length === 1 ?
      h("details", {}, h("summary", {}, "All details"), sideBySide("Summary of the run", runs, FACTS)) :
      sideBySide("Summary of the runs", runs, FACTS),
    samples.map((run) => h("details", {}, h("summary", {}, `Generated sample${runs.length > 1 ? `, ${run.label}` : ""}`),
      h("pre", {}, words(run.result.sample)))),
    runs.filter((run) => run.completions?.length).map(completionsTable),
  ].flat();
}

function completionsTable(run) {
  const rows = run.completions, scored = rows.some((row) => "reward" in row);
  const text = (key) => ({ title: key, value: (row) => words(row[key]), cell: (row) => words(row[key]), style: "long" });
  const figure = (key) => ({ title: key, numeric: true, value: (row) => row[key], cell: (row) => number(row[key]) });
  const columns = scored ? [text("prompt"), text("completion"), figure("reward"), figure("advantage")] :
    [text("prompt"), figure("step"), text("completion")];
  const caption = scored ? "Completions of the last rollout" : "Completions of held-out prompts";
  const table = dataTable({ caption, rows, filter: rows.length > 12, columns });
  return h("details", {}, h("summary", {}, run.label ? `Completions of ${run.label}` : caption), table);
}

// Metrics in the order of words.js; a task's own come after the loss.
function metricsOf(runs) {
  const found = [...new Set(runs.flatMap((run) => run.curves.map((curve) => curve.metric)))];
  const order = Object.keys(METRICS);
  const rank = (metric) => (metric === "loss" ? -1 : order.includes(metric) ? order.indexOf(metric) : 0);
  return found.sort((a, b) => rank(a) - rank(b));
}

// The value of a metric that never changes; undefined if it does, or has a single point.
function constantOf(runs, metric) {
  const points = runs.flatMap((run) => run.curves.filter((curve) => curve.metric === metric).flatMap((curve) => curve.points));
  const same = points.every(([, y]) => y === points[0][1]) && isNumber(points[0]?.[1]);
  return same && metric !== "loss" && (points.length > 1 || metric === "eval_samples") ? points[0][1] : undefined;
}

// Counts the curves with the same points before each, which it would hide; returns whose they are.
function markEqual(curves) {
  const groups = grouped(curves, (curve) => [curve.split, curve.points]).filter((group) => group.length > 1);
  groups.forEach((group) => group.forEach((curve, index) => { curve.below = index; }));
  return groups.map((group) => group.map((curve) => curve.run).join(" and "));
}

function curvesSection(runs) {
  const all = metricsOf(runs);
  const constant = all.filter((metric) => constantOf(runs, metric) !== undefined);
  const metrics = all.filter((metric) => !constant.includes(metric));
  if (!all.length) return [missing("No metrics yet: a run logs them every tracking.log_every steps, to metrics.jsonl.")];
  let amount = 0;
  const equal = new Set();
  const charts = metrics.map((metric) => {
    const curves = runs.flatMap((run) => run.curves.filter((curve) => curve.metric === metric)
      .map((curve) => ({ ...curve, run: run.label, color: runs.length > 1 ? run.color : curve.split === "eval" ? 1 : 0,
        name: runs.length > 1 ? `${run.label} ${curve.split}` : curve.split })));
    const known = about(metric);
    const shown = curves.map((curve) => `${curve.name} ends at ${known.say(last(curve.points))}`).join(", ");
    markEqual(curves).forEach((names) => equal.add(names));
    return new LineChart({ ...known, curves, smoothing: () => amount, describe: `${known.title} by step: ${shown}` });
  });
  const output = h("output", {}, "0");
  const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", id: "smoothing",
    oninput: (event) => {
      amount = Number(event.target.value);
      output.textContent = event.target.value;
      charts.forEach((chart) => chart.draw());
    } });
  const evals = runs.some((run) => run.curves.some((curve) => curve.split === "eval"));
  const legend = runs.length > 1 ?
    [...runs.map((run) => h("li", {}, swatch(run), run.label)), evals ? h("li", {}, h("span", { class: "swatch dashed" }), "dashed: held-out data") : null] :
    [h("li", {}, h("span", { class: "swatch c0" }), "train"), evals ? h("li", {}, h("span", { class: "swatch c1" }), "eval (held-out data)") : null];
  const thinned = runs.some((run) => run.curves.some((curve) => curve.count > curve.points.length));
  return [
    h("div", { class: "controls" }, h("ul", { class: "legend" }, legend),
      h("label", { for: "smoothing" }, "smoothing ", slider, output)),
    h("div", { class: "charts" }, charts.map((chart) => chart.figure)),
    equal.size ? h("p", { class: "note" }, `Where curves are equal, they are dashes over each other: ${[...equal].join("; ")}.`) : null,
    constant.length ? h("p", { class: "note" }, `Constant: ${constant.map((metric) =>
      `${about(metric).title} ${about(metric).say(constantOf(runs, metric))}`).join("; ")}.`) : null,
    h("p", { class: "note" }, "Hover over a chart, or focus it and use the arrow keys, to read values. Drag to zoom, double-click to zoom out." +
      (thinned ? " Long curves are downsampled: each interval is shown by its lowest and highest points." : "")),
  ];
}

const SHARES = [["compute", "compute", 0], ["communication", "communication", 1], ["input_wait", "input wait", 2], ["idle", "idle", 3]];

function timeSection(runs) {
  const profiled = runs.filter((run) => run.profile);
  if (!profiled.length) return [missing("No profile: train with training.profile_communication=true, or run `meshwright profile`, to measure where the time of a step goes.")];
  return [
    stackedBars({ label: "Share of the time per step", runs: profiled, total: () => 1, say: percent,
      parts: SHARES.map(([key, name, color]) => ({ name, color, value: (run) => run.profile.shares?.[key] || 0 })) }),
    perRun(profiled, "Profiles", ({ profile }) => [
      h("p", {}, `${seconds(profile.seconds_per_step)} per step, measured over ${number(profile.steps)} steps.`,
        isNumber(profile.hidden_communication) ? ` Communication overlapped with compute for ${percent(profile.hidden_communication)} of the time.` : "",
        isNumber(profile.load_balance) ? ` The busiest device computed ${number(profile.load_balance)} times as long as the mean.` : ""),
      (profile.advice || []).length ? h("ul", { class: "advice" }, profile.advice.map((line) => h("li", {}, words(line)))) : null,
      collectives(profile),
    ].filter(Boolean)),
  ];
}

function collectives(profile) {
  const rows = [...(profile.collectives || [])].sort((a, b) => (b.seconds || 0) - (a.seconds || 0));
  if (!rows.length) return missing("No collectives: the devices did not communicate, or the trace does not show it.");
  return dataTable({ caption: "Collectives by time", rows, filter: rows.length > 12, columns: [
    { title: "axis", value: (row) => [row.axis].flat().join("×"), cell: (row) => [row.axis].flat().join("×") || "–" },
    { title: "kind", value: (row) => row.kind, cell: (row) => words(row.kind) },
    { title: "module", value: (row) => row.module, cell: (row) => (row.module ? breakable(row.module) : "–"), style: "path" },
    { title: "count", numeric: true, value: (row) => row.count, cell: (row) => number(row.count) },
    { title: "time", numeric: true, value: (row) => row.seconds, cell: (row) => seconds(row.seconds) },
    { title: "not overlapped", numeric: true, value: (row) => row.exposed_seconds, cell: (row) => seconds(row.exposed_seconds) },
    { title: "bytes", numeric: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
  ] });
}

const MEMORY = [["parameters", 0], ["optimizer", 1], ["state", 2], ["batch", 4], ["temporary", 3]];

function memorySection(runs) {
  const known = runs.filter((run) => run.facts.memory_per_device);
  if (!known.length) return [missing("No memory figures: they are in run.json, which training writes at the start.")];
  const size = (run, key) => Number(run.facts.memory_per_device[key]) || 0;
  return [stackedBars({ label: "Memory per device", runs: known, say: bytes,
    total: (run) => size(run, "total") || MEMORY.reduce((sum, [key]) => sum + size(run, key), 0),
    parts: MEMORY.map(([key, color]) => ({ name: key, color, value: (run) => size(run, key) })),
    mark: (run) => highest(run, "memory_bytes") })];
}

function meshSection(runs) {
  const drawn = runs.filter((run) => run.facts.mesh_svg);
  if (!drawn.length) return [missing("No drawing of the mesh: it is in run.json, which training writes at the start.")];
  return [perRun(drawn, "Meshes", (run) => [drawing(run.facts.mesh_svg, `Mesh ${meshText(run)}`), ...stages(run.facts.pipeline)],
    (run) => [run.facts.mesh_svg, run.facts.pipeline])];
}

function drawing(svg, alt) {
  // Shown as an image, so that a drawing from a file can neither run scripts nor restyle the page.
  return h("div", { class: "scroll" }, h("img", { class: "mesh", alt, src: `data:image/svg+xml,${encodeURIComponent(words(svg))}` }));
}

function stages(pipeline) {
  if (!pipeline) return [];
  const rows = (pipeline.stages || []).map((stage, index) => ({ index, ...stage }));
  return [
    h("h3", {}, "Pipeline"),
    h("p", {}, `${words(pipeline.schedule)}: ${words(pipeline.waiting)}.`),
    dataTable({ caption: "Stages", rows, columns: [
      { title: "stage", numeric: true, value: (row) => row.index, cell: (row) => number(row.index) },
      { title: "blocks", value: (row) => [row.blocks].flat().join(", "), cell: (row) => [row.blocks].flat().join(", ") || "–" },
      { title: "also", value: (row) => [row.also].flat().join(", "), cell: (row) => [row.also].flat().map(words).join(", ") || "–" },
      { title: "parameters", numeric: true, value: (row) => row.parameters, cell: (row) => number(row.parameters) },
      { title: "FLOPs per microbatch", numeric: true, value: (row) => row.flops, cell: (row) => number(row.flops) },
      { title: "microbatches held", numeric: true, value: (row) => row.microbatches_kept, cell: (row) => number(row.microbatches_kept) },
    ] }),
    pipeline.timeline_svg ? drawing(pipeline.timeline_svg, "When each stage works") : null,
  ].filter(Boolean);
}

function specText(spec) {
  return Array.isArray(spec) ? `[${spec.map((axes) => [axes].flat().filter(Boolean).join(",") || "·").join(", ")}]` : words(spec);
}

function shardingSection(runs) {
  const known = runs.filter((run) => (run.facts.sharding || []).length);
  if (!known.length) return [missing("No table of parameters: it is in run.json, which training writes at the start. `meshwright inspect` shows it too.")];
  return [perRun(known, "Sharding", (run) => dataTable({ caption: "How each parameter is sharded, and why",
    rows: alikeInBlocks(run.facts.sharding), filter: true, wide: true, columns: [
      // The filter also finds the paths that a pattern stands for.
      { title: "parameter", value: (row) => [row.name, ...row.paths].join(" "), cell: (row) => breakable(row.name), style: "path" },
      { title: "shape", value: (row) => [row.shape].flat().join("×"),
        cell: (row) => ([row.shape].flat().join("×") || "scalar") + (row.paths.length > 1 ? ` (${row.paths.length}×)` : "") },
      { title: "dtype", value: (row) => row.dtype, cell: (row) => words(row.dtype) },
      { title: "sharded over", value: (row) => specText(row.spec), cell: (row) => specText(row.spec), style: "path" },
      { title: "per device", numeric: true, value: (row) => row.bytes_per_device, cell: (row) => bytes(row.bytes_per_device) },
      { title: "why", value: (row) => row.reason, cell: (row) => words(row.reason), style: "long" },
    ] }), (run) => run.facts.sharding)];
}

// Parameters that are the same in several blocks share a row: blocks.*.mlp.up.kernel.
function alikeInBlocks(parameters) {
  const pattern = (row) => words(row.path).split(".").map((part) => (/^\d+$/.test(part) ? "*" : part)).join(".");
  return grouped(parameters, (row) => ({ ...row, path: pattern(row) })).map((rows) => ({ ...rows[0], paths: rows.map((row) => words(row.path)),
    name: rows.length > 1 ? pattern(rows[0]) : words(rows[0].path) }));
}

function ledgerSection(runs) {
  const known = runs.filter((run) => run.ledger);
  if (!known.length) return [missing("No ledger: run `meshwright ledger` with the run's settings to compare the bytes sent over each axis with the minimum.")];
  const rows = known.flatMap((run) => Object.entries(run.ledger.axes || {}).map(([axis, own]) => ({ run, axis, ...own })));
  const several = known.length > 1 ? [{ title: "run", value: (row) => row.run.label, cell: (row) => [swatch(row.run), ...breakable(row.run.label)], style: "run" }] : [];
  const axes = rows.length ? dataTable({ caption: "Bytes each device sends per step", rows, columns: [
    ...several,
    { title: "axis", value: (row) => row.axis, cell: (row) => row.axis },
    { title: "devices", numeric: true, value: (row) => row.size, cell: (row) => number(row.size) },
    { title: "sent", numeric: true, value: (row) => row.sent_bytes, cell: (row) => bytes(row.sent_bytes) },
    { title: "needed", numeric: true, value: (row) => row.minimum_bytes, cell: (row) => bytes(row.minimum_bytes) },
    { title: "ratio", numeric: true, value: (row) => row.ratio, cell: (row) => ratio(row) },
    { title: "overlapped", value: (row) => row.overlapped, cell: overlapped },
    { title: "above the minimum", value: (row) => [row.excess || []].flat().join("; "), cell: (row) => [row.excess || []].flat().join("; "), style: "long" },
  ] }) : missing("Nothing is sent: the mesh has one device.");
  const unknown = [...new Set(known.map((run) => run.ledger.overlap_unknown).filter(Boolean).map(words))];
  const notes = unknown.map((why) => h("p", { class: "note" }, `What overlaps with computing is not known: ${why}.`));
  return [axes, ...notes, perRun(known, "Ledgers", (run) => [
    notOverlapped([run.ledger.not_overlapped || []].flat()), ledgerLines(run.ledger.lines || [])])];
}

const FAMILIES = { "all-gather": "gathers", reduce: "reductions", "collective-permute": "permutes", "all-to-all": "all-to-alls" };

function overlapped(row) {
  const kinds = Object.entries(row.overlap || {}).filter(([, part]) => isNumber(part?.overlapped));
  return kinds.map(([kind, part]) => `${Math.round(100 * part.overlapped)}% of ${FAMILIES[kind] || kind}`).join(", ") || "–";
}

function notOverlapped(rows) {
  if (!rows.length) return h("div");
  return dataTable({ caption: "The largest collectives during which nothing is computed", rows, columns: [
    { title: "modules", value: (row) => [row.modules].flat().join(", "), cell: (row) => breakable([row.modules].flat().join(", ") || "outside modules"), style: "path" },
    { title: "kind", value: (row) => row.kind, cell: (row) => words(row.kind) },
    { title: "axes", value: (row) => [row.axes].flat().join("×"), cell: (row) => [row.axes].flat().join("×") },
    { title: "phase", value: (row) => row.phase, cell: (row) => words(row.phase) },
    { title: "count", numeric: true, value: (row) => row.count, cell: (row) => number(row.count) },
    { title: "sent", numeric: true, value: (row) => row.sent_bytes, cell: (row) => bytes(row.sent_bytes) },
  ] });
}

function ratio(row) {
  if (!isNumber(row.ratio)) return row.sent_bytes > 0 ? h("span", { class: "badge bad" }, "not needed") : "–";
  // The ledger's own bounds: outside them, the step sends more or less than expected.
  return h("span", { class: `badge ${row.ratio >= 0.98 && row.ratio <= 1.05 ? "good" : "bad"}` }, row.ratio.toFixed(3));
}

function ledgerLines(lines) {
  if (!lines.length) return h("div");
  const rows = [...lines].sort((a, b) => b.sent_bytes - a.sent_bytes);
  return h("details", {}, h("summary", {}, `Every collective (${rows.length} kinds)`), dataTable({
    caption: "Collectives of one step", rows, filter: true, columns: [
      { title: "module", value: (row) => row.module, cell: (row) => (row.module ? breakable(row.module) : "outside modules"), style: "path" },
      { title: "kind", value: (row) => row.kind, cell: (row) => words(row.kind) },
      { title: "axes", value: (row) => [row.axes].flat().join("×"), cell: (row) => [row.axes].flat().join("×") },
      { title: "phase", value: (row) => row.phase, cell: (row) => words(row.phase) },
      { title: "count", numeric: true, value: (row) => row.count, cell: (row) => number(row.count) },
      { title: "sent", numeric: true, value: (row) => row.sent_bytes, cell: (row) => bytes(row.sent_bytes) },
    ] }));
}

function originText(entry) {
  return [entry.origin, entry.from].filter(Boolean).map(words).join(" ");
}

// Conversations of the training data, with what is not learned in grey.
function samplesSection(runs) {
  const known = runs.filter((run) => run.samples?.length);
  if (!known.length) return [missing("No samples: they are shown for data of which only parts are learned, such as conversations.")];
  return [h("p", { class: "note" }, "Grey tokens are seen, but not learned."), perRun(known, "Samples", (run) => run.samples.map((sample) =>
    h("pre", { class: "sample" }, sample.map(([text, learned]) => h("span", { class: learned ? null : "unlearned" }, words(text))))))];
}

function configSection(runs) {
  const known = runs.filter((run) => run.config.length);
  if (!known.length) return [missing("No config: every value and its origin is in config.json, which `meshwright train` writes at the start.")];
  return runs.length > 1 ? configDifferences(known) : configOfOne(known[0]);
}

function configOfOne(run) {
  const rank = (entry) => ["override", "file"].findIndex((kind) => originText(entry).startsWith(kind)) + 1 || 3;
  const rows = [...run.config].sort((a, b) => rank(a) - rank(b));
  return [dataTable({ caption: "Settings and their origins", rows, filter: true, columns: [
    { title: "setting", value: (row) => row.key, cell: (row) => breakable(row.key), style: "path" },
    { title: "value", value: (row) => words(row.value), cell: (row) => words(row.value), style: "long" },
    { title: "origin", value: originText, cell: (row) => h("span", { class: rank(row) === 1 ? "strong" : rank(row) === 3 ? "dim" : null }, originText(row) || "–") },
  ] })];
}

function configDifferences(runs) {
  const values = runs.map((run) => new Map(run.config.map((entry) => [words(entry.key), words(entry.value)])));
  const keys = [...new Set(values.flatMap((own) => [...own.keys()]))];
  const differ = keys.filter((key) => values.some((own) => own.get(key) !== values[0].get(key)));
  if (!differ.length) return [missing(`These runs have the same settings (${keys.length} compared).`)];
  return [h("p", { class: "note" }, `${differ.length} of ${keys.length} settings differ.`),
    sideBySide("Settings that differ", runs, differ.map((key) => [key, (run) => values[runs.indexOf(run)].get(key) ?? "not set"]))];
}

function incidentTable(run) {
  const rows = incidents(run);
  if (!rows.length) return null;
  return dataTable({ caption: "Steps that were not finite", rows, columns: [
    { title: "step", numeric: true, value: (row) => row.step, cell: (row) => number(row.step) },
    { title: "action", value: (row) => words(row.action), cell: (row) => words(row.action) },
    { title: "loss", value: (row) => words(row.loss), cell: (row) => words(row.loss) },
    { title: "gradient norm", value: (row) => words(row.grad_norm), cell: (row) => words(row.grad_norm) },
    { title: "batch", numeric: true, value: (row) => row.batch, cell: (row) => number(row.batch) },
    { title: "record", value: (row) => words(row.record ?? "–"), cell: (row) => words(row.record ?? "–"), style: "long" },
  ] });
}

function eventsSection(runs) {
  return [perRun(runs, "Events", (run) => {
    const rows = [...remarks(run).map((message) => ({ kind: "remark", message })), ...run.events];
    if (!rows.length) return missing("No events: checkpoints and warnings are logged to events.jsonl.");
    const table = dataTable({ caption: "Events", rows, filter: rows.length > 12, columns: [
      { title: "step", numeric: true, value: (row) => row.step, cell: (row) => number(row.step) },
      { title: "kind", value: (row) => row.kind, cell: (row) => h("span", { class: ["warning", "incident"].includes(row.kind) ? "badge bad" : row.kind === "remark" ? "badge" : null }, words(row.kind)) },
      { title: "message", value: (row) => words(row.message), cell: (row) => words(row.message), style: "long" },
      { title: "time", value: (row) => row.time, cell: (row) => (isNumber(row.time) ? moment(row.time) : "–") },
    ] });
    return [guarded(() => incidentTable(run)), table].filter(Boolean);
  })];
}
