// Prompts and responses token by token: each token's box coloured by a number of its own; list, search, filter, groups.
import { redrawn } from "./chart.js";
import { coalesced, frame, H, keyboard, unpack } from "./core.js";

const POSITIVE = "#2f7fd0",
  NEGATIVE = "#e0761b",
  STRONG = "#8a63c9";
const MOST_SPANS = 3000,
  MOST_LISTED = 400,
  PROMPT_SHOWN = 120,
  PROMPT_BESIDE = 24,
  ON_PAPER = { samples: 3, tokens: 240, prompt: 40 };
const CSS = `
.hf-tokens .hf-controls{display:flex;flex-wrap:wrap;gap:4px 10px;align-items:center;margin:2px 0 6px}
.hf-tokens label{display:inline-flex;gap:4px;align-items:center;color:var(--hf-dim)}
.hf-tokens select,.hf-tokens input{font:inherit;color:var(--hf-fg);background:var(--hf-panel);border:1px solid var(--hf-line);
border-radius:4px;
min-height:22px;padding:0 4px;max-width:230px;box-sizing:border-box}
.hf-tokens input[type=number]{width:74px}.hf-tokens input[type=search]{width:150px}
.hf-tokens select:focus-visible,.hf-tokens input:focus-visible{outline:2px solid var(--hf-busy)}
.hf-tokens button[aria-pressed=true]{background:var(--hf-idle);border-color:var(--hf-dim)}
.hf-tokens .hf-host{display:flex;gap:14px;align-items:flex-start}
.hf-tokens .hf-list{flex:0 0 auto;width:340px;max-height:440px;overflow:auto;border-right:1px solid var(--hf-line)}
.hf-tokens .hf-list table{width:100%;margin:0!important}
.hf.hf-tokens .hf-list td,.hf.hf-tokens .hf-list th{padding:2px 8px 2px 4px}
.hf.hf-tokens .hf-list th{white-space:normal;max-width:74px}
.hf-tokens .hf-list thead th{position:sticky;top:0;background:var(--hf-paper)!important;cursor:pointer}
.hf-tokens .hf-list tbody tr{cursor:pointer}
.hf-tokens .hf-list tr.hf-chosen{background:var(--hf-idle)!important;box-shadow:inset 3px 0 var(--hf-busy)}
.hf-tokens .hf-list .hf-preview{max-width:150px;overflow:hidden;text-overflow:ellipsis;text-align:left!important}
.hf-tokens .hf-panes{flex:1 1 0;min-width:0;display:grid;gap:10px 16px;max-height:640px;overflow:auto}
.hf-tokens .hf-panes.hf-side{grid-template-columns:repeat(auto-fit,minmax(230px,1fr))}
.hf-tokens .hf-pane.hf-chosen>.hf-head{border-color:var(--hf-busy)}
.hf-tokens .hf-head{display:flex;flex-wrap:wrap;gap:2px 12px;border-bottom:2px solid var(--hf-line);margin-bottom:6px;
padding-bottom:2px}
.hf-tokens .hf-flow{line-height:2;font-family:var(--jp-code-font-family,ui-monospace,"DejaVu Sans Mono",monospace);
font-size:12.5px;overflow-wrap:anywhere}
.hf-tokens .hf-tok{display:inline-block;line-height:1.3;padding:1px 2px 5px;margin:0 1px 1px 0;border-radius:2px;
border:0 solid transparent;
border-width:2px 0;white-space:pre-wrap;cursor:default;unicode-bidi:isolate;min-width:.5em;text-align:center;max-width:100%;
box-sizing:border-box}
.hf-tokens .hf-tok small{display:block;font-size:9px;line-height:1.1;font-variant-numeric:tabular-nums}
.hf-tokens .hf-given{color:var(--hf-dim);background:var(--hf-panel)}
.hf-tokens .hf-bytes{font-style:italic;font-size:10px}
.hf-tokens .hf-nan{outline:1px dashed var(--hf-dim);outline-offset:-1px;font-style:italic}
.hf-tokens .hf-clipped{outline:1.5px dashed var(--hf-fg);outline-offset:-1px;background-repeat:no-repeat;background-size:100% 6px;
background-position:bottom;background-image:repeating-linear-gradient(45deg,var(--hf-fg) 0 1px,transparent 1px 4px),
repeating-linear-gradient(-45deg,var(--hf-fg) 0 1px,transparent 1px 4px)}
.hf-tokens .hf-hit{text-decoration:underline wavy var(--hf-bad) 1.5px;text-underline-offset:2px}
.hf-tokens .hf-tok.hf-current{outline:2px solid var(--hf-mark);outline-offset:0}
.hf-tokens .hf-end{color:var(--hf-dim);font-size:11px;margin-left:6px}
.hf-tokens .hf-scale{display:inline-flex;flex-direction:column;align-items:stretch!important;gap:1px!important}
.hf-tokens .hf-scale>span{display:flex!important;gap:0!important}.hf-tokens .hf-scale i{flex:1 0 26px;height:12px;
box-sizing:border-box;outline:.5px solid var(--hf-line);border:0 solid transparent;border-width:2px 0}
.hf-tokens .hf-scale>span:last-child{justify-content:space-between;gap:10px!important}
.hf-tokens .hf-sample{width:16px;height:13px;min-width:0;padding:0}
.hf-tokens{container-type:inline-size;width:100%}
@container (max-width:900px){.hf-tokens .hf-host{flex-direction:column}.hf-tokens .hf-list{width:100%;max-height:180px;border:0}
.hf-tokens .hf-panes{width:100%;flex:none}}
@media print{.hf-tokens .hf-list,.hf-tokens .hf-panes{max-height:none}.hf-tokens .hf-tok{print-color-adjust:exact}}`;

const f32 = Math.fround;
function numText(x, signed, digits = 4) {
  if (x === undefined || x === null) return null;
  if (typeof x !== "number") return String(x);
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const a = Math.abs(x),
    t = a !== 0 && (a < 1e-4 || a >= 1e7) ? a.toExponential(digits - 2) : String(Number(a.toPrecision(digits)));
  return (x < 0 ? "−" : signed && x > 0 ? "+" : "") + t;
}
const OPS = {
  column: (a) => a,
  subtract: (a, b) => a.map((x, i) => x - b[i]),
  k3: (a, b) =>
    a.map((x, i) => {
      const r = Math.min(f32(b[i] - x), 20);
      return Math.expm1(r) - r;
    }),
  ratio: (a, b) => a.map((x, i) => Math.exp(Math.min(f32(x - b[i]), 20))),
};

// ---- numbers: a value for each field and response token, where each sample's begin, and which are clipped
function numbersOf(view) {
  const columns = {},
    values = new Map(),
    starts = [0];
  for (const name in view.columns) columns[name] = unpack(view.columns[name]);
  for (const s of view.samples) starts.push(starts[starts.length - 1] + s.response.length);
  for (const d of view.fields) values.set(d.name, OPS[d.op](...d.of.map((n) => columns[n])));
  const data = { view, values, starts, clippedAt: new Uint8Array(starts[starts.length - 1]), texts: new Map() };
  if (view.clip?.known) {
    const low = f32(1 - view.clip.low),
      high = f32(1 + view.clip.high),
      ratio = values.get("ratio"),
      adv = columns.advantages;
    for (let i = 0; i < data.clippedAt.length; i++)
      data.clippedAt[i] = (adv[i] > 0 && f32(ratio[i]) > high) || (adv[i] < 0 && f32(ratio[i]) < low) ? 1 : 0;
  }
  data.means = view.samples.map((s, i) => meansOf(data, s, i));
  return data;
}
function meansOf({ view, values, starts, clippedAt }, s, i) {
  const n = { row: s.row, tokens: s.response.length, ...s.numbers },
    [a, b] = [starts[i], starts[i + 1]];
  for (const d of view.fields) {
    let sum = 0;
    const v = values.get(d.name);
    for (let k = a; k < b; k++) sum += v[k];
    n["mean " + d.name] = b > a ? sum / (b - a) : null;
    if (d.name === "kl") n["sum of KL"] = sum;
  }
  if (view.clip?.known) n["clipped tokens"] = clippedAt.slice(a, b).reduce((x, y) => x + y, 0);
  return n;
}
const keysOf = (data) => [...new Set(data.means.flatMap((m) => Object.keys(m)))];
const nameOf = (key) => (key === "scores" ? "score" : key);
const wordAt = (view, s, k) => view.vocabulary[k < s.prompt.length ? s.prompt[k] : s.response[k - s.prompt.length]];

// ---- text: bytes that belong to one character are read together
function textOf(data, i) {
  if (!data.texts.has(i)) data.texts.set(i, readText(data.view, data.view.samples[i]));
  return data.texts.get(i);
}
function readText(view, s) {
  const all = [...s.prompt, ...s.response],
    at = [],
    parts = new Map();
  let text = "",
    run = [],
    from = 0;
  const flush = (end) => {
    if (!run.length) return;
    const char = new TextDecoder().decode(Uint8Array.from(run));
    for (let k = from; k < end; k++) {
      at[k] = text.length;
      if (end - from > 1) parts.set(k, `byte token ${k - from + 1} of ${end - from} of “${char}”`);
    }
    text += char;
    run = [];
  };
  all.forEach((w, k) => {
    const [, shown, raw, hex] = view.vocabulary[w];
    if (hex !== null) {
      const bytes = hex.match(/../g).map((h) => parseInt(h, 16));
      if ((bytes[0] & 0xc0) !== 0x80) flush(k);
      if (!run.length) from = k;
      run.push(...bytes);
      return;
    }
    flush(k);
    at[k] = text.length;
    text += raw === null ? shown : raw;
  });
  flush(all.length);
  at.push(text.length);
  const cut = at[s.prompt.length];
  return { text, at, parts, prompt: text.slice(0, cut), response: text.slice(cut) };
}
// which tokens a search finds
function hitsOf(data, i, query) {
  const out = new Set();
  if (!query) return out;
  const { text, at } = textOf(data, i),
    low = text.toLowerCase();
  for (let p = low.indexOf(query); p >= 0; p = low.indexOf(query, p + 1))
    for (let k = 0; k + 1 < at.length; k++) if (at[k] < p + query.length && at[k + 1] > p) out.add(k);
  return out;
}

// ---- colour: -1 to 1, or null for what is no number
function strength(x, d) {
  if (Number.isNaN(x)) return null;
  const y = d.kind === "ratio" ? Math.log(x) : x,
    t = Number.isFinite(y) ? y / d.end : Math.sign(y) * Math.sign(d.end);
  return Math.max(d.kind === "sequential" ? 0 : -1, Math.min(1, t));
}
function tint(node, t, d) {
  if (t === null) return;
  const hue = d.kind === "sequential" ? STRONG : t < 0 ? NEGATIVE : POSITIVE,
    share = Math.round(64 * Math.abs(t) ** 0.8);
  node.style.backgroundColor = `color-mix(in srgb, ${hue} ${share}%, var(--hf-paper))`;
  if (d.kind !== "sequential" && Math.abs(t) > 0.04) node.style[t < 0 ? "borderBottomColor" : "borderTopColor"] = hue;
}

// ---- layout: `look` is {field, sort, query, filter, current, token, side, printed, pages, paper}
// which samples, in which order
function orderOf(data, { sort, query, filter }) {
  const { view, means } = data,
    low = filter.low === "" ? -Infinity : Number(filter.low),
    high = filter.high === "" ? Infinity : Number(filter.high);
  const isChosen = (i) => {
    const s = view.samples[i];
    if (filter.clipped && !means[i]["clipped tokens"]) return false;
    for (const k in filter.words) if (filter.words[k] !== "" && s.words[k] !== filter.words[k]) return false;
    if (filter.key && (filter.low !== "" || filter.high !== "")) {
      const x = means[i][filter.key];
      if (typeof x !== "number" || !(x >= low && x <= high)) return false;
    }
    return !query || textOf(data, i).text.toLowerCase().includes(query);
  };
  const value = (i) => {
    const x = means[i][sort.key];
    return typeof x === "number" && !Number.isNaN(x) ? x : null;
  };
  return [...view.samples.keys()].filter(isChosen).sort((i, j) => {
    const [a, b] = [value(i), value(j)];
    if (a === null || b === null) return (a === null) - (b === null) || i - j; // without a number: last, either way
    return (sort.down ? b - a : a - b) || i - j;
  });
}
function matchWords({ view }, order) {
  return [`${order.length} of ${view.samples.length} match`, view.note]
    .filter((t, k) => t && (k || order.length !== view.samples.length))
    .join(" · ");
}
// the list's heads as [key, text, how it is sorted], and its rows
function listOf(data, order, { sort, current }) {
  const { means, view } = data,
    wide = !["row", "tokens", "scores"].includes(sort.key),
    scored = means.some((m) => m.scores !== undefined),
    keys = ["row", ...(scored ? ["scores"] : []), "tokens", ...(wide ? [sort.key] : [])];
  const heads = keys.map((key) =>
    sort.key === key
      ? [key, nameOf(key) + (sort.down ? "\u00a0▼" : "\u00a0▲"), sort.down ? "descending" : "ascending"]
      : [key, nameOf(key), "none"],
  );
  const rows = order.slice(0, MOST_LISTED).map((i) => ({
    i,
    sample: view.samples[i].row,
    chosen: i === current,
    cells: keys.map((key) => numText(means[i][key])),
    preview: textOf(data, i).response.slice(0, 60).replace(/\s+/g, " ") || "(empty)",
  }));
  return { heads, rows, rest: order.length - rows.length };
}
const groupOf = (s) => (s.numbers.group === undefined ? s.prompt.join() : s.numbers.group);
// which samples stand side by side, and how many tokens of each
function panesOf({ view }, order, { side, current, paper }) {
  const of = (i) => groupOf(view.samples[i]);
  const shown = paper
    ? order.slice(0, ON_PAPER.samples)
    : side
      ? [...view.samples.keys()].filter((i) => of(i) === of(current))
      : [current];
  return { shown, room: paper ? ON_PAPER.tokens : Math.max(60, Math.floor(MOST_SPANS / shown.length)) };
}
// the first token that is shown of a sample
function pageOf({ view }, i, room, { side, current, token, pages, paper }) {
  const before = paper ? ON_PAPER.prompt : side ? PROMPT_BESIDE : PROMPT_SHOWN,
    from = pages.has(i) ? pages.get(i) : Math.max(0, view.samples[i].prompt.length - before);
  const isAway = i === current && token >= 0 && (token < from || token >= from + room);
  return isAway ? Math.floor(token / room) * room : from;
}
// what stands over a sample: [text, class]
function headOf({ view, means }, i) {
  const s = view.samples[i],
    n = means[i],
    out = [];
  const say = (label, x, signed) => {
    if (x === null) out.push([`${label} not measured`, "hf-missing"]);
    else if (x !== undefined) out.push([`${label} ${numText(x, signed)}`]);
  };
  say("score", n.scores === undefined ? null : n.scores, true);
  out.push([`${n.tokens} token${n.tokens === 1 ? "" : "s"}`]);
  say("sum of KL", n["sum of KL"]);
  if (view.clip?.known) out.push([`${n["clipped tokens"]} clipped`]);
  else if (view.clip) out.push(["clipping not known without advantages", "hf-missing"]);
  if (n.group !== undefined) out.push([`prompt ${n.group}`, "hf-dim"]);
  for (const k in s.words) if (s.words[k].length < 30) out.push([`${k.replace(/_/g, " ")} ${s.words[k]}`, "hf-dim"]);
  return out;
}
// the tokens of a sample from one to another; what is of the prompt has no row and no number
function tokensOf(data, i, from, to, { field, query, printed, current, token }) {
  const { view, values, starts, clippedAt } = data,
    s = view.samples[i],
    P = s.prompt.length,
    found = hitsOf(data, i, query),
    { parts } = textOf(data, i),
    v = field ? values.get(field.name) : null;
  return Array.from({ length: Math.max(0, to - from) }, (_, n) => {
    const k = from + n,
      [, shown, raw, hex] = wordAt(view, s, k),
      at = starts[i] + k - P,
      given = k < P,
      value = given || !v ? undefined : v[at];
    const names = [
      [hex !== null, "hf-bytes"],
      [found.has(k), "hf-hit"],
      [given, "hf-given"],
      [Number.isNaN(value), "hf-nan"],
      [!given && clippedAt[at], "hf-clipped"],
      [i === current && k === token, "hf-current"],
    ];
    return {
      k,
      shown,
      row: given ? null : s.first_row + k - P,
      names: names.filter(([is]) => is).map(([, name]) => name),
      part: parts.get(k),
      value,
      number: printed && value !== undefined ? numText(value, false, 3) : null,
      ends: (raw === null ? shown : raw).includes("\n"),
    };
  });
}
function describe(data, i, k) {
  const { view, values, starts, clippedAt } = data,
    s = view.samples[i],
    P = s.prompt.length,
    [id, , , hex] = wordAt(view, s, k),
    at = starts[i] + k - P;
  const rows = [
    ["token id", String(id)],
    ["position", k < P ? `${k} of the prompt` : String(k - P)],
  ];
  if (hex !== null) rows.push(["bytes", hex.match(/../g).join(" ")]);
  const { parts } = textOf(data, i);
  if (parts.has(k)) rows.push(["part of", parts.get(k)]);
  if (k < P) return rows;
  rows.splice(0, 0, ["row in to_pandas", String(s.first_row + k - P)]);
  for (const d of view.fields) rows.push([d.label, numText(values.get(d.name)[at])]);
  for (const m of view.missing) rows.push([m.label, null]);
  if (view.clip?.known) rows.push(["clipped", clippedAt[at] ? "yes: zero gradient" : "no"]);
  return rows;
}

// ---- draw
function drawList(list, host, { sortBy, choose }) {
  const top = host.scrollTop;
  host.replaceChildren();
  const table = H("table", {}, host),
    head = H("tr", {}, H("thead", {}, table)),
    body = H("tbody", {}, table);
  for (const [key, text, sorted] of list.heads)
    H("th", { scope: "col", "aria-sort": sorted, title: "sort by " + key }, head, text).onclick = () => sortBy(key);
  H("th", { class: "hf-left" }, head, "response");
  for (const { i, sample, chosen, cells, preview } of list.rows) {
    const tr = H("tr", { "data-sample": sample, class: chosen ? "hf-chosen" : null }, body);
    for (const x of cells) H("td", x === null ? { class: "hf-missing" } : {}, tr, x === null ? "–" : x);
    H("td", { class: "hf-preview" }, tr, preview);
    tr.onclick = () => choose(i);
  }
  if (list.rest) H("div", { class: "hf-dim" }, host, `and ${list.rest} more: search or filter`);
  if (!list.rows.length) H("div", { class: "hf-dim" }, host, "no sample matches");
  host.scrollTop = top;
}
// `turn` shows a sample from another token on
function drawPane(data, look, i, room, panes, turn) {
  const { view } = data,
    s = view.samples[i],
    name = { class: "hf-pane" + (i === look.current ? " hf-chosen" : ""), "data-sample": s.row, "aria-label": `sample ${s.row}` };
  const pane = H("section", name, panes),
    head = H("div", { class: "hf-head" }, pane),
    flow = H("div", { class: "hf-flow" }, pane);
  H("b", {}, head, `sample ${s.row}`);
  for (const [text, cls] of headOf(data, i)) H("span", cls ? { class: cls } : {}, head, text);
  const total = s.prompt.length + s.response.length,
    from = look.pages.get(i),
    to = Math.min(total, from + room);
  const page = (text, target) => {
    H("button", { type: "button" }, flow, text).onclick = () => turn(i, target);
  };
  if (from) page(`‹ ${from} earlier tokens`, Math.max(0, from - room));
  for (const t of tokensOf(data, i, from, to, look)) {
    const node = H(
      "span",
      { class: ["hf-tok", ...t.names].join(" "), "data-i": i, "data-k": t.k, "data-row": t.row },
      flow,
      t.shown,
    );
    if (t.part !== undefined) node.dataset.part = t.part;
    if (t.value !== undefined) tint(node, strength(t.value, look.field), look.field);
    if (t.number !== null) H("small", {}, node, t.number);
    if (t.ends) H("br", {}, flow);
  }
  if (to < total) page(`${total - to} later tokens ›`, to);
  H("span", { class: "hf-end" }, flow, s.response.length ? "" : "(empty response)");
}
function drawPanes(data, order, look, panes, turn) {
  const { view } = data,
    words = (text) => H("div", { class: "hf-dim" }, panes, text);
  panes.replaceChildren();
  panes.classList.toggle("hf-side", look.side);
  if (!order.length) {
    words(view.samples.length ? "Nothing to show: no sample matches the search and the filters." : "No samples.");
    return;
  }
  const { shown, room } = panesOf(data, order, look);
  if (look.side && shown.length === 1) words("The samples shown hold no other response to this prompt.");
  for (const i of shown) {
    look.pages.set(i, pageOf(data, i, room, look));
    drawPane(data, look, i, room, panes, turn);
  }
  if (look.paper && order.length > shown.length) words(`and ${order.length - shown.length} more samples`);
}
function drawScale(legend, field) {
  const sequential = field.kind === "sequential",
    steps = sequential ? [0, 0.25, 0.5, 0.75, 1] : [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1];
  const valueAt = (t) => numText(field.kind === "ratio" ? Math.exp(t * field.end) : t * field.end);
  H("span", {}, legend, field.label + ":");
  const scale = H("span", { class: "hf-scale" }, legend),
    boxes = H("span", {}, scale),
    ends = H("span", {}, scale);
  for (const t of steps) tint(H("i", {}, boxes), t, field);
  for (const t of sequential ? [0, 0.5, 1] : [-1, 0, 1]) H("span", {}, ends, valueAt(t));
  if (sequential) return;
  H(
    "span",
    {},
    legend,
    field.kind === "ratio" ? "line above: over 1; line below: under 1" : "line above: positive; line below: negative",
  );
}
function drawLegend({ view, values }, field, below) {
  below.replaceChildren();
  const legend = H("div", { class: "hf-legend" }, below),
    dim = (text, more) => H("div", { class: "hf-dim", ...more }, below, text);
  if (field) drawScale(legend, field);
  else H("span", { class: "hf-missing" }, legend, "no numbers per token yet");
  const box = (text, cls) => {
    const e = H("span", {}, legend);
    H("i", { class: "hf-tok hf-sample " + cls }, e);
    H("span", {}, e, text);
  };
  box("prompt", "hf-given");
  if (field && values.get(field.name).some(Number.isNaN)) box("no number (NaN)", "hf-nan");
  if (view.clip?.known) {
    const [high, low] = [numText(1 + view.clip.high), numText(1 - view.clip.low)];
    box(`clipped: zero gradient (ratio > ${high} with A > 0, < ${low} with A < 0)`, "hf-clipped");
  }
  if (view.missing.length) {
    const d = H("details", {}, below);
    H("summary", {}, d, `not measured: ${view.missing.map((m) => m.label).join(", ")}`);
    for (const m of view.missing) H("div", { class: "hf-dim" }, d, `${m.label}: written by ${m.hint}`);
  }
  for (const text of view.ignored) dim("not drawn: " + text);
  dim("← → tokens · ↑ ↓ samples · / search · g side by side · n numbers · Esc", { "data-paper": "no" });
}

// ---- controls: what they change in `look`, and what is drawn anew then
const GUARDED = { "data-lm-suppress-shortcuts": "true" };
function selectOf(controls, label, options, chosen, change) {
  const e = H("select", { ...GUARDED, "aria-label": label }, H("label", {}, controls, label));
  for (const [value, text, off] of options) H("option", { value, disabled: off ? "" : null }, e, text).selected = value === chosen;
  e.onchange = () => change(e.value);
  return e;
}
function inputOf(parent, label, type, value, change) {
  const placeholder = type === "search" ? "search text ( / )" : label.split(" ").pop(),
    e = H("input", { ...GUARDED, type, "aria-label": label, placeholder, step: type === "number" ? "any" : null }, parent);
  e.value = value;
  e.oninput = () => change(e.value);
  return e;
}
function drawControls(data, look, controls, { redraw, recolor, flip, away }) {
  const { view } = data,
    keys = keysOf(data).map((k) => [k, nameOf(k)]);
  controls.replaceChildren();
  const colors = [
    ...view.fields.map((d) => [d.name, d.label]),
    ...view.missing.map((m) => ["", `${m.label} (not measured)`, true]),
  ];
  selectOf(controls, "colour", colors, look.field ? look.field.name : "", (v) => {
    look.field = view.fields.find((d) => d.name === v) || look.field;
    recolor();
  }).classList.add("hf-color");
  selectOf(controls, "sort", keys, look.sort.key, (v) => {
    look.sort = { key: v, down: v !== "row" };
    redraw();
  }).classList.add("hf-sort");
  const turn = "turn the order round";
  H("button", { type: "button", class: "hf-order", title: turn, "aria-label": turn }, controls, "⇅").onclick = () => {
    look.sort.down = !look.sort.down;
    redraw();
  };
  drawSearch(look, controls, redraw, away);
  drawFilters(view, look.filter, keys, controls, redraw);
  const toggle = (name, text, label, on) => {
    const b = H("button", { type: "button", "aria-pressed": String(on), title: label, class: "hf-" + name }, controls, text);
    b.onclick = () => flip[name]();
  };
  if (view.clip?.known) toggle("onlyclipped", "clipped only", "only samples with clipped tokens", look.filter.clipped);
  toggle("group", "side by side", "all responses to this prompt (g)", look.side);
  toggle("numbers", "numbers", "print the numbers (n)", look.printed);
}
function drawSearch(look, controls, redraw, away) {
  const box = inputOf(controls, "search text", "search", look.query, (v) => {
    look.query = v.toLowerCase();
    redraw();
  });
  box.onkeydown = (ev) => {
    if (ev.key === "Escape" || ev.key === "Enter") {
      if (ev.key === "Escape") {
        box.value = look.query = "";
        redraw();
      }
      away();
      ev.preventDefault();
    }
    ev.stopPropagation();
  };
}
function drawFilters(view, filter, keys, controls, redraw) {
  const words = {};
  for (const s of view.samples)
    for (const k in s.words) {
      words[k] ??= new Set();
      words[k].add(s.words[k]);
    }
  for (const k in words)
    if (words[k].size > 1 && words[k].size <= 12) {
      const options = [["", "all"], ...[...words[k]].sort().map((w) => [w, w])];
      selectOf(controls, k.replace(/_/g, " "), options, filter.words[k] || "", (v) => {
        filter.words[k] = v;
        redraw();
      });
    }
  const set = (name) => (v) => {
    filter[name] = v;
    redraw();
  };
  const range = selectOf(controls, "only", [["", "all values"], ...keys], filter.key, set("key")).parentNode;
  inputOf(range, "from", "number", filter.low, set("low"));
  inputOf(range, "to", "number", filter.high, set("high"));
}

function render({ model, el }) {
  const f = frame(el, "tokens");
  H("style", {}, f.root, CSS);
  const info = H("span", { class: "hf-dim hf-info", role: "status" }, f.bar),
    controls = H("div", { class: "hf-controls", "data-paper": "no" });
  f.root.insertBefore(controls, f.host);
  const name = { class: "hf-list", "data-paper": "no", tabindex: 0, role: "region", "aria-label": "samples" },
    list = H("div", name, f.host),
    panes = H("div", { class: "hf-panes" }, f.host);
  let data,
    order = [];
  const look = {
    field: null,
    sort: { key: "row", down: false },
    query: "",
    filter: { key: "", low: "", high: "", words: {}, clipped: false },
    current: 0,
    token: -1,
    side: false,
    printed: false,
    pages: new Map(),
    paper: f.paper,
  };

  function take() {
    const view = model.get("view"),
      named = (wanted) => view.fields.find((d) => d.name === wanted);
    data = numbersOf(view);
    if (!view.fields.some((d) => d === look.field))
      look.field = named(look.field ? look.field.name : view.color) || named(view.color) || null;
    if (look.current >= view.samples.length) look.current = 0;
  }
  const redrawPanes = () => drawPanes(data, order, look, panes, turn);
  function turn(i, target) {
    look.pages.set(i, target);
    look.token = -1;
    redrawPanes();
  }
  function redrawList() {
    drawList(listOf(data, order, look), list, {
      sortBy(key) {
        look.sort = { key, down: look.sort.key === key ? !look.sort.down : key !== "row" };
        redraw();
      },
      choose(i) {
        look.current = i;
        look.token = -1;
        f.hideTip();
        redrawList();
        redrawPanes();
      },
    });
  }
  function redraw() {
    order = orderOf(data, look);
    if (order.length && !order.includes(look.current)) {
      look.current = order[0];
      look.token = -1;
    }
    info.textContent = matchWords(data, order);
    redrawList();
    redrawPanes();
  }
  function recolor() {
    redrawPanes();
    drawLegend(data, look.field, f.below);
  }
  const press = (button, on) => {
    const b = controls.querySelector(".hf-" + button);
    if (b) b.setAttribute("aria-pressed", String(on));
  };
  const flip = {
    group() {
      look.side = !look.side;
      look.pages.clear();
      press("group", look.side);
      redrawPanes();
    },
    numbers() {
      look.printed = !look.printed;
      press("numbers", look.printed);
      redrawPanes();
    },
    onlyclipped() {
      look.filter.clipped = !look.filter.clipped;
      press("onlyclipped", look.filter.clipped);
      redraw();
    },
  };
  function all() {
    take();
    f.title.textContent = data.view.title;
    f.host.setAttribute("role", "group");
    f.host.setAttribute("aria-label", data.view.summary);
    drawControls(data, look, controls, { redraw, recolor, flip, away: () => f.host.focus() });
    redraw();
    drawLegend(data, look.field, f.below);
  }
  all();
  interact({ f, list, panes, look, flip, get: () => ({ data, order }), redrawList, redrawPanes, controls });
  return redrawn({ model, f, onView: coalesced(all) });
}

// ---- interact: looking at one token
function interact({ f, list, panes, look, flip, get, redrawList, redrawPanes, controls }) {
  function point(node, x, y, spoken) {
    const { data } = get(),
      i = Number(node.dataset.i),
      k = Number(node.dataset.k),
      s = data.view.samples[i];
    f.showTip(x, y, `“${wordAt(data.view, s, k)[1]}” sample ${s.row}`, describe(data, i, k), spoken);
  }
  panes.addEventListener("pointermove", (ev) => {
    const node = ev.target.closest(".hf-tok");
    if (node) point(node, ev.clientX, ev.clientY, false);
    else f.hideTip();
  });
  panes.addEventListener("pointerleave", () => f.hideTip());
  panes.addEventListener("click", (ev) => {
    const node = ev.target.closest(".hf-tok");
    if (!node) return;
    const moved = look.current !== Number(node.dataset.i);
    [look.current, look.token] = [Number(node.dataset.i), Number(node.dataset.k)];
    if (moved) redrawList();
    redrawPanes();
    show();
  });
  function step(dx, dy) {
    const { data, order } = get(),
      s = data.view.samples[look.current];
    if (!s || !order.length) return;
    if (dx) {
      const last = s.prompt.length + s.response.length - 1;
      look.token = look.token < 0 ? Math.min(s.prompt.length, last) : Math.max(0, Math.min(last, look.token + dx));
    }
    if (dy) {
      const next = order[order.indexOf(look.current) + dy];
      if (next === undefined) return;
      look.current = next;
      look.token = -1;
      redrawList();
      redrawPanes();
      return;
    }
    const node = panes.querySelector(`[data-i="${look.current}"][data-k="${look.token}"]`),
      before = panes.querySelector(".hf-current");
    if (!node) {
      redrawPanes();
      return;
    }
    if (before) before.classList.remove("hf-current");
    node.classList.add("hf-current");
  }
  function show() {
    const { data } = get(),
      row = list.querySelector(".hf-chosen"),
      node = panes.querySelector(".hf-current");
    if (row) row.scrollIntoView({ block: "nearest" });
    if (node) {
      node.scrollIntoView({ block: "nearest" });
      const r = node.getBoundingClientRect();
      point(node, r.left, r.bottom, true);
    } else if (data.view.samples[look.current]) {
      f.hideTip();
      const n = data.means[look.current];
      f.say(
        `sample ${n.row}, score ${n.scores === undefined ? "not measured" : numText(n.scores)}, ` +
          `${n.tokens} tokens: ${textOf(data, look.current).response.slice(0, 120)}`,
      );
    }
  }
  const clear = () => {
    look.token = -1;
    f.hideTip();
    redrawPanes();
  };
  const search = () => controls.querySelector("input[type=search]").focus();
  keyboard(f.host, { step, show, keys: { "/": search, g: flip.group, n: flip.numbers, Escape: clear } });
  f.host.addEventListener("blur", () => f.hideTip());
}
export default { render };
