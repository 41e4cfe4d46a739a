// A line chart: hover or use the arrow keys to read values, drag to zoom, toggle a log scale.

const CHART_HEIGHT = 230;
const MARGIN = { top: 10, right: 14, bottom: 30, left: 58 };

class LineChart {
  // spec: an entry of METRICS, and {describe, curves: [{name, run, split, color, points}], smoothing()}
  constructor(spec) {
    Object.assign(this, spec);
    this.log = false;
    this.range = null;
    this.at = null;
    this.drag = null;
    this.canvas = s("svg");
    this.reading = h("div", { class: "reading", role: "status" });
    this.plot = h("div", { class: "plot" }, this.canvas, this.reading);
    this.logButton = h("button", { type: "button", class: "small", "aria-pressed": "false",
      onclick: () => this.toggleLog() }, "log");
    this.logButton.hidden = !this.curves.some(({ points }) => points.some(([, y]) => y > 0));
    this.resetButton = h("button", { type: "button", class: "small", hidden: true,
      onclick: () => this.zoom(null) }, "reset zoom");
    this.figure = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", {}, this.title), h("span", { class: "tools" }, this.resetButton, this.logButton)),
      this.plot, valuesTable(this.title, this.curves, this.say));
    // Drawn once the width is known, and again whenever it changes.
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  zoom(range) {
    this.range = range;
    this.resetButton.hidden = range === null;
    this.draw();
  }

  isDrawable(value) {
    return isNumber(value) && (!this.log || value > 0);
  }

  inRange(points) {
    if (!this.range) return points;
    const [low, high] = this.range;
    return points.filter(([x]) => x >= low && x <= high);
  }

  steps() {
    const found = new Set(this.curves.flatMap((curve) => this.inRange(curve.points).map(([x]) => x)));
    return [...found].sort((a, b) => a - b);
  }

  draw() {
    const width = Math.max(this.plot.clientWidth, 220);
    const shown = this.curves.map((curve) => this.inRange(curve.points));
    const measured = shown.map((points) => (this.settles && points.length > 2 ? points.slice(1) : points));
    const across = shown.flat().map(([x]) => x);
    const heights = measured.flat().map(([, y]) => y).filter((y) => this.isDrawable(y));
    this.scales = makeScales(across, heights, width, this);
    const canvas = s("svg", { viewBox: `0 0 ${width} ${CHART_HEIGHT}`, width, height: CHART_HEIGHT,
      role: "img", tabindex: "0", "aria-label": this.describe },
      s("title", {}, this.describe), axes(this.scales, width, this.say),
      this.curves.flatMap((curve, index) => this.drawCurve(curve, shown[index])),
      s("g", { class: "cursor" }));
    this.listen(canvas);
    this.canvas.replaceWith(canvas);
    this.canvas = canvas;
    this.point(null);
  }

  drawCurve(curve, points) {
    const evaluation = curve.split === "eval";
    const amount = evaluation || this.exact ? 0 : this.smoothing();
    const look = `line c${curve.color}${evaluation ? " eval" : ""}`;
    const drawn = [];
    if (amount > 0) drawn.push(s("path", { class: `${look} faint`, d: this.path(points) }));
    drawn.push(s("path", { class: look, d: this.path(amount > 0 ? smoothed(points, amount) : points),
      "data-run": curve.run, "data-split": curve.split }));
    const dots = evaluation || points.length === 1 ? points.filter(([, y]) => this.isDrawable(y)) : [];
    // Of equal curves, each leaves gaps through which those below are seen.
    if (curve.below) drawn.at(-1).style.strokeDasharray = `14 ${14 * (2 ** curve.below - 1)}`;
    const cut = points.filter(([, y]) => this.isDrawable(y) && this.scales.isBeyond(y));
    return drawn.concat(dots.map(([x, y]) => this.dot(curve, x, y, 3)),
      cut.length ? this.cutMark(curve, cut) : []);
  }

  // What is higher than the axis is drawn at its top edge: say how high it is.
  cutMark(curve, points) {
    const [x, y] = points.reduce((a, b) => (b[1] > a[1] ? b : a));
    const onTheRight = this.scales.x(x) > this.plot.clientWidth / 2;
    return s("text", { class: `cut c${curve.color} ${onTheRight ? "end" : ""}`, x: this.scales.x(x) + (onTheRight ? -6 : 6), y: MARGIN.top + 10 },
      `↑ ${this.say(y)}${points.length > 1 ? `, ${points.length} values` : ""}, cut`);
  }

  dot(curve, x, y, radius) {
    return s("circle", { class: `dot c${curve.color}`, cx: this.scales.x(x), cy: this.scales.y(y), r: radius });
  }

  path(points) {
    let pen = "M";
    let path = "";
    for (const [x, y] of points) {
      if (this.isDrawable(y)) path += `${pen}${this.scales.x(x).toFixed(2)} ${this.scales.y(y).toFixed(2)}`;
      pen = this.isDrawable(y) ? "L" : "M";
    }
    return path;
  }

  listen(canvas) {
    const stepAt = (event) => this.scales.invert(event.clientX - canvas.getBoundingClientRect().left);
    canvas.addEventListener("pointermove", (event) => {
      this.point(stepAt(event));
      if (this.drag !== null) this.shade(this.drag, stepAt(event));
    });
    canvas.addEventListener("pointerleave", () => { this.drag = null; this.point(null); });
    canvas.addEventListener("pointerdown", (event) => {
      // Touch scrolls the page; only a mouse zooms.
      if (event.pointerType !== "mouse") return;
      this.drag = stepAt(event);
      event.preventDefault();
    });
    canvas.addEventListener("pointerup", (event) => this.drop(stepAt(event)));
    canvas.addEventListener("dblclick", () => this.zoom(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.step(event));
  }

  drop(step) {
    if (this.drag === null) return;
    const [low, high] = [this.drag, step].sort((a, b) => a - b);
    this.drag = null;
    if (this.steps().filter((x) => x >= low && x <= high).length > 1) this.zoom([low, high]);
  }

  step(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    const known = this.steps();
    const index = known.indexOf(this.at);
    const next = index < 0 ? known.length - 1 : index + direction;
    this.point(known[Math.min(Math.max(next, 0), known.length - 1)]);
  }

  shade(from, to) {
    const [left, right] = [this.scales.x(from), this.scales.x(to)].sort((a, b) => a - b);
    this.canvas.querySelector(".cursor").append(s("rect", { class: "range", x: left, y: MARGIN.top,
      width: right - left, height: CHART_HEIGHT - MARGIN.top - MARGIN.bottom }));
  }

  // Shows the values at the nearest step; null hides them.
  point(step) {
    const cursor = this.canvas.querySelector(".cursor");
    cursor.replaceChildren();
    this.reading.replaceChildren();
    const known = this.steps();
    this.at = step === null || !known.length ? null : nearest(known, step);
    if (this.at === null) return;
    const x = this.scales.x(this.at);
    cursor.append(s("line", { class: "hair", x1: x, x2: x, y1: MARGIN.top, y2: CHART_HEIGHT - MARGIN.bottom }));
    this.reading.append(h("div", { class: "at" }, `step ${number(this.at)}`));
    for (const curve of this.curves) {
      const value = valueAt(curve.points, this.at);
      if (value === undefined) continue;
      if (this.isDrawable(value)) cursor.append(this.dot(curve, this.at, value, 3.5));
      this.reading.append(h("div", {}, h("span", { class: `swatch c${curve.color}` }), `${curve.name} `,
        h("b", {}, isNumber(value) ? this.say(value) : "not finite")));
    }
    const onTheRight = x > this.plot.clientWidth / 2;
    this.reading.style.left = onTheRight ? "" : `${x + 10}px`;
    this.reading.style.right = onTheRight ? `${this.plot.clientWidth - x + 10}px` : "";
  }
}

function nearest(sorted, wanted) {
  return sorted.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best), sorted[0]);
}

function valueAt(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] === step) return points[middle][1];
    if (points[middle][0] < step) low = middle + 1; else high = middle - 1;
  }
  return undefined;
}

// An exponential moving average with bias correction that skips gaps.
function smoothed(points, amount) {
  let mean = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    if (!isNumber(y)) return [x, y];
    mean = amount * mean + (1 - amount) * y;
    weight = amount * weight + (1 - amount);
    return [x, mean / weight];
  });
}

function makeScales(xs, heights, width, { log, zero }) {
  const ys = log ? heights.map(Math.log10) : heights;
  const extent = (values) => (values.length ?
    values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [values[0], values[0]]) : [0, 1]);
  const [left, right] = extent(xs);
  let [low, high] = extent(ys);
  if (zero && !log && low > 0) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  // If no value is negative, the axis does not go below zero.
  low = !log && low >= 0 ? Math.max(0, low - room) : low - room;
  high += room;
  const across = width - MARGIN.left - MARGIN.right;
  const down = CHART_HEIGHT - MARGIN.top - MARGIN.bottom;
  const span = right - left || 1;
  return {
    left, right, low, high, log,
    x: (value) => MARGIN.left + (right === left ? across / 2 : ((value - left) / span) * across),
    // Values outside the axis are drawn at its edge.
    y: (value) => MARGIN.top + down * (1 - Math.min(Math.max(((log ? Math.log10(value) : value) - low) / (high - low), 0), 1)),
    isBeyond: (value) => (log ? Math.log10(value) : value) > high,
    invert: (pixel) => left + ((pixel - MARGIN.left) / across) * span,
  };
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-12); n += 1) found.push(n * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const factor of high - low < 2.2 ? [1, 2, 5] : [1]) {
      const value = factor * 10 ** power;
      if (Math.log10(value) >= low && Math.log10(value) <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : [10 ** low, 10 ** ((low + high) / 2), 10 ** high];
}

function axes(scales, width, say) {
  const bottom = CHART_HEIGHT - MARGIN.bottom;
  const group = s("g", { class: "axes", "aria-hidden": "true" });
  const values = scales.log ? logTicks(scales.low, scales.high) : ticks(scales.low, scales.high, 6);
  for (const value of values) {
    const y = scales.y(value);
    group.append(s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
      s("text", { x: MARGIN.left - 8, y: y + 4, class: "end" }, say(value)));
  }
  const across = scales.right > scales.left ?
    ticks(scales.left, scales.right, Math.max(2, Math.min(6, width / 110))).filter(Number.isInteger) : [scales.left];
  for (const value of across) {
    group.append(s("text", { x: scales.x(value), y: bottom + 18, class: "mid" }, number(value)));
  }
  group.append(s("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
  return group;
}

// The same values as a table, built when it is opened.
function valuesTable(title, curves, say) {
  const details = h("details", { class: "values" }, h("summary", {}, "values"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const steps = [...new Set(curves.flatMap((c) => c.points.map(([x]) => x)))].sort((a, b) => a - b);
    const rows = steps.map((step) => h("tr", {}, h("th", { scope: "row" }, number(step)),
      curves.map((curve) => {
        const value = valueAt(curve.points, step);
        return h("td", {}, value === undefined ? "" : value === null ? "not finite" : say(value));
      })));
    details.append(h("div", { class: "scroll low" }, h("table", {},
      h("caption", {}, title),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "step"),
        curves.map((curve) => h("th", { scope: "col" }, curve.name)))),
      h("tbody", {}, rows))));
  });
  return details;
}
