// Formats numbers for reading.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function count(value) {
  if (!isNumber(value)) return "–";
  for (const letter of ["", "k", "M", "G"]) {
    if (Math.abs(value) < 999.5) return `${Number(value.toPrecision(3))}${letter}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(3))}T`;
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 1000) return `${unit === "B" ? Math.round(value) : Number(value.toFixed(1))} ${unit}`;
    value /= 1000;
  }
  return `${Number(value.toFixed(1))} TB`;
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 60) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rest} s`;
}

function percent(value) {
  return isNumber(value) ? `${Number((100 * value).toPrecision(3))}%` : "–";
}

function moment(value) {
  const date = new Date(typeof value === "number" ? value * 1000 : value);
  return Number.isNaN(date.getTime()) ? String(value ?? "–") : date.toLocaleString();
}

function words(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// A word of a command as a shell reads it.
function quoted(word) {
  const text = words(word);
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

// How to show metrics: the chart's title, the format of its values (say), whether its axis starts
// at zero, so that small variations look small (zero), whether it is never smoothed (exact), and
// whether the first value is an outlier because of one-time work (settles).
const METRICS = {
  loss: { title: "Loss", say: number },
  eval_samples: { title: "Held-out samples", say: number },
  learning_rate: { title: "Learning rate", say: number, zero: true, exact: true },
  grad_norm: { title: "Gradient norm", say: number },
  skipped: { title: "Skipped steps", say: number, zero: true, exact: true },
  tokens_per_second: { title: "Tokens per second", say: count, zero: true },
  samples_per_second: { title: "Samples per second", say: count, zero: true },
  step_seconds: { title: "Time per step", say: seconds, zero: true, settles: true },
  mfu: { title: "Model FLOPs utilization", say: percent, zero: true },
  flops_per_second: { title: "FLOPs per second", say: count, zero: true },
  memory_bytes: { title: "Memory per device", say: bytes, zero: true, exact: true },
  input_wait_share: { title: "Share of time waiting for input", say: percent, zero: true },
  communication_share: { title: "Share of time communicating", say: percent, zero: true },
};

function about(metric) {
  return METRICS[metric] || { title: metric, say: number };
}
