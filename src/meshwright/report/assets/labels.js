// Names runs by the settings that differ between them.

const MOST_SETTINGS = 3;

function settingsOf(run) {
  return new Map(run.config.map((entry) => [words(entry.key), entry]));
}

// The keys whose values are not the same in all runs, with those that someone typed first.
function differingKeys(runs) {
  const all = runs.map(settingsOf);
  const keys = [...new Set(all.flatMap((own) => [...own.keys()]))];
  const text = (own, key) => words(own.get(key)?.value);
  const typed = (key) => all.some((own) => words(own.get(key)?.origin).startsWith("override"));
  const differ = keys.filter((key) => all.some((own) => text(own, key) !== text(all[0], key)));
  return [...differ.filter(typed), ...differ.filter((key) => !typed(key))];
}

// The shortest end of a key that no other setting of the run has: learning_rate, model.kind.
function shortKey(key, keys) {
  const parts = key.split(".");
  for (let from = parts.length - 1; from > 0; from--) {
    const end = parts.slice(from).join(".");
    if (!keys.some((other) => other !== key && other.endsWith(`.${end}`))) return end;
  }
  return key;
}

// A value as one would type it: 1e-3, 512, adamw.
function brief(value) {
  const small = isNumber(value) && value !== 0 && Math.abs(value) < 0.01;
  return small ? value.toExponential(2).replace(/\.?0+e/, "e") : words(value);
}

// What is different about each run, in a few words; empty if nothing is known to be.
function differences(runs) {
  if (runs.length < 2 || runs.some((run) => !run.config.length)) return runs.map(() => "");
  const keys = differingKeys(runs);
  const known = [...new Set(runs.flatMap((run) => run.config.map((entry) => words(entry.key))))];
  const isMesh = (key) => key.startsWith("mesh.");
  // Sizes that are left to Meshwright say less than the mesh that came of them.
  const parts = keys.filter((key) => !isMesh(key)).map((key) => (run) => {
    const value = settingsOf(run).get(key)?.value;
    return `${shortKey(key, known)}=${brief(value)}`;
  });
  if (keys.some(isMesh)) parts.splice(MOST_SETTINGS - 1, 0, (run) => meshText(run) || "one device");
  return runs.map((run) => parts.slice(0, MOST_SETTINGS).map((part) => part(run)).join(", "));
}

// What runs are compared by: the loss on held-out data if all have one.
function bestLoss(runs) {
  return [evalLoss, finalLoss].find((loss) => runs.every((run) => isNumber(loss(run))));
}

function labelled(runs) {
  const loss = runs.length > 1 ? bestLoss(runs) : undefined;
  const losses = loss ? runs.map(loss) : [];
  const [lowest, highest] = [Math.min(...losses), Math.max(...losses)];
  const names = new Set(runs.map((run) => run.name)).size === runs.length ? runs.map((run) => run.name) : runs.map((run) => run.path);
  const said = differences(runs);
  const alike = (text) => said.filter((other) => other === text).length > 1;
  return runs.map((run, index) => ({ ...run, color: index % COLORS, best: lowest < highest && losses[index] === lowest,
    label: !said[index] ? names[index] : alike(said[index]) ? `${said[index]} (${names[index]})` : said[index] }));
}
