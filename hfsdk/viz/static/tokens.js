// Prompts and responses token by token: each token's box coloured by a number of its own; list, search, filter, groups.
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

function render({ model, el }) {
  const f = frame(el, "tokens");
  H("style", {}, f.root, CSS);
  const info = H("span", { class: "hf-dim hf-info", role: "status" }, f.bar);
  const controls = H("div", { class: "hf-controls", "data-paper": "no" });
  f.root.insertBefore(controls, f.host);
  const list = H("div", { class: "hf-list", "data-paper": "no", tabindex: 0, role: "region", "aria-label": "samples" }, f.host),
    panes = H("div", { class: "hf-panes" }, f.host);
  let view,
    columns,
    values,
    starts,
    clippedAt,
    means,
    texts,
    order = [];
  let field = null,
    sort = { key: "row", down: false },
    query = "",
    filter = { key: "", low: "", high: "", words: {}, clipped: false };
  let current = 0,
    token = -1,
    side = false,
    printed = false,
    pages = new Map();

  // ---- numbers
  function take() {
    view = model.get("view");
    columns = {};
    for (const name in view.columns) columns[name] = unpack(view.columns[name]);
    starts = [0];
    for (const s of view.samples) starts.push(starts[starts.length - 1] + s.response.length);
    values = new Map();
    for (const d of view.fields) values.set(d.name, OPS[d.op](...d.of.map((n) => columns[n])));
    const c = view.clip;
    clippedAt = new Uint8Array(starts[starts.length - 1]);
    if (c?.known) {
      const low = f32(1 - c.low),
        high = f32(1 + c.high),
        ratio = values.get("ratio"),
        adv = columns.advantages;
      for (let i = 0; i < clippedAt.length; i++)
        clippedAt[i] = (adv[i] > 0 && f32(ratio[i]) > high) || (adv[i] < 0 && f32(ratio[i]) < low) ? 1 : 0;
    }
    means = view.samples.map((s, i) => numbersOf(s, i));
    texts = new Map();
    if (!view.fields.some((d) => d === field))
      field =
        view.fields.find((d) => d.name === (field ? field.name : view.color)) ||
        view.fields.find((d) => d.name === view.color) ||
        null;
    if (current >= view.samples.length) current = 0;
  }
  function numbersOf(s, i) {
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
  const keys = () => [...new Set(means.flatMap((m) => Object.keys(m)))];

  // ---- text: bytes that belong to one character are read together
  function textOf(i) {
    if (texts.has(i)) return texts.get(i);
    const s = view.samples[i],
      all = [...s.prompt, ...s.response],
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
    const cut = at[s.prompt.length],
      found = { text, at, parts, prompt: text.slice(0, cut), response: text.slice(cut) };
    texts.set(i, found);
    return found;
  }
  function hits(i) {
    // which tokens a search finds
    const out = new Set();
    if (!query) return out;
    const { text, at } = textOf(i),
      low = text.toLowerCase();
    for (let p = low.indexOf(query); p >= 0; p = low.indexOf(query, p + 1))
      for (let k = 0; k + 1 < at.length; k++) if (at[k] < p + query.length && at[k + 1] > p) out.add(k);
    return out;
  }

  // ---- colour
  function strength(x, d) {
    if (Number.isNaN(x)) return null;
    const y = d.kind === "ratio" ? Math.log(x) : x,
      t = Number.isFinite(y) ? y / d.end : Math.sign(y) * Math.sign(d.end);
    return Math.max(d.kind === "sequential" ? 0 : -1, Math.min(1, t));
  }
  function paint(node, t, d) {
    if (t === null) {
      node.classList.add("hf-nan");
      return;
    }
    const hue = d.kind === "sequential" ? STRONG : t < 0 ? NEGATIVE : POSITIVE,
      share = Math.round(64 * Math.abs(t) ** 0.8);
    node.style.backgroundColor = `color-mix(in srgb, ${hue} ${share}%, var(--hf-paper))`;
    if (d.kind !== "sequential" && Math.abs(t) > 0.04) node.style[t < 0 ? "borderBottomColor" : "borderTopColor"] = hue;
  }

  // ---- which samples, in which order
  function choose() {
    const low = filter.low === "" ? -Infinity : Number(filter.low),
      high = filter.high === "" ? Infinity : Number(filter.high);
    order = view.samples
      .map((_, i) => i)
      .filter((i) => {
        const s = view.samples[i],
          n = means[i];
        if (filter.clipped && !n["clipped tokens"]) return false;
        for (const k in filter.words) if (filter.words[k] !== "" && s.words[k] !== filter.words[k]) return false;
        if (filter.key && (filter.low !== "" || filter.high !== "")) {
          const x = n[filter.key];
          if (typeof x !== "number" || !(x >= low && x <= high)) return false;
        }
        return !query || textOf(i).text.toLowerCase().includes(query);
      });
    const value = (i) => {
      const x = means[i][sort.key];
      return typeof x === "number" && !Number.isNaN(x) ? x : null;
    };
    order.sort((i, j) => {
      const [a, b] = [value(i), value(j)];
      if (a === null || b === null) return (a === null) - (b === null) || i - j; // without a number: last, either way
      return (sort.down ? b - a : a - b) || i - j;
    });
    if (order.length && !order.includes(current)) {
      current = order[0];
      token = -1;
    }
    info.textContent = [`${order.length} of ${view.samples.length} match`, view.note]
      .filter((t, k) => t && (k || order.length !== view.samples.length))
      .join(" · ");
  }

  // ---- drawing
  function drawList() {
    const wide = !["row", "tokens", "scores"].includes(sort.key),
      top = list.scrollTop;
    list.replaceChildren();
    const table = H("table", {}, list),
      head = H("tr", {}, H("thead", {}, table)),
      body = H("tbody", {}, table);
    const scored = means.some((m) => m.scores !== undefined);
    const shown = ["row", ...(scored ? ["scores"] : []), "tokens", ...(wide ? [sort.key] : [])];
    for (const key of shown) {
      const th = H(
        "th",
        {
          scope: "col",
          "aria-sort": sort.key === key ? (sort.down ? "descending" : "ascending") : "none",
          title: "sort by " + key,
        },
        head,
        (key === "scores" ? "score" : key) + (sort.key === key ? (sort.down ? "\u00a0▼" : "\u00a0▲") : ""),
      );
      th.onclick = () => {
        sort = { key, down: sort.key === key ? !sort.down : key !== "row" };
        redraw();
      };
    }
    H("th", { class: "hf-left" }, head, "response");
    for (const i of order.slice(0, MOST_LISTED)) {
      const tr = H("tr", { "data-sample": view.samples[i].row, class: i === current ? "hf-chosen" : null }, body);
      for (const key of shown) {
        const x = numText(means[i][key]);
        H("td", x === null ? { class: "hf-missing" } : {}, tr, x === null ? "–" : x);
      }
      H("td", { class: "hf-preview" }, tr, textOf(i).response.slice(0, 60).replace(/\s+/g, " ") || "(empty)");
      tr.onclick = () => {
        current = i;
        token = -1;
        f.hideTip();
        drawList();
        drawPanes();
      };
    }
    if (order.length > MOST_LISTED) H("div", { class: "hf-dim" }, list, `and ${order.length - MOST_LISTED} more: search or filter`);
    if (!order.length) H("div", { class: "hf-dim" }, list, "no sample matches");
    list.scrollTop = top;
  }
  const groupOf = (i) => {
    const g = view.samples[i].numbers.group;
    return g === undefined ? view.samples[i].prompt.join() : g;
  };
  const together = () =>
    f.paper
      ? order.slice(0, ON_PAPER.samples)
      : side
        ? view.samples.map((_, i) => i).filter((i) => groupOf(i) === groupOf(current))
        : [current];

  function drawPanes() {
    panes.replaceChildren();
    panes.classList.toggle("hf-side", side);
    if (!order.length) {
      H(
        "div",
        { class: "hf-dim" },
        panes,
        view.samples.length ? "Nothing to show: no sample matches the search and the filters." : "No samples.",
      );
      return;
    }
    const shown = together(),
      room = f.paper ? ON_PAPER.tokens : Math.max(60, Math.floor(MOST_SPANS / shown.length));
    if (side && shown.length === 1)
      H("div", { class: "hf-dim" }, panes, "The samples shown hold no other response to this prompt.");
    for (const i of shown) drawPane(i, room);
    if (f.paper && order.length > shown.length)
      H("div", { class: "hf-dim" }, panes, `and ${order.length - shown.length} more samples`);
  }
  function drawPane(i, room) {
    const s = view.samples[i],
      n = means[i],
      pane = H(
        "section",
        { class: "hf-pane" + (i === current ? " hf-chosen" : ""), "data-sample": s.row, "aria-label": `sample ${s.row}` },
        panes,
      );
    const head = H("div", { class: "hf-head" }, pane);
    H("b", {}, head, `sample ${s.row}`);
    const say = (label, x, signed) => {
      if (x !== undefined)
        H(
          "span",
          x === null ? { class: "hf-missing" } : {},
          head,
          x === null ? `${label} not measured` : `${label} ${numText(x, signed)}`,
        );
    };
    say("score", n.scores === undefined ? null : n.scores, true);
    H("span", {}, head, `${n.tokens} token${n.tokens === 1 ? "" : "s"}`);
    say("sum of KL", n["sum of KL"]);
    if (view.clip)
      H(
        "span",
        view.clip.known ? {} : { class: "hf-missing" },
        head,
        view.clip.known ? `${n["clipped tokens"]} clipped` : "clipping not known without advantages",
      );
    if (n.group !== undefined) H("span", { class: "hf-dim" }, head, `prompt ${n.group}`);
    for (const k in s.words)
      if (s.words[k].length < 30) H("span", { class: "hf-dim" }, head, `${k.replace(/_/g, " ")} ${s.words[k]}`);
    const flow = H("div", { class: "hf-flow" }, pane),
      P = s.prompt.length,
      total = P + s.response.length;
    let from = pages.has(i) ? pages.get(i) : Math.max(0, P - (f.paper ? ON_PAPER.prompt : side ? PROMPT_BESIDE : PROMPT_SHOWN));
    if (i === current && token >= 0 && (token < from || token >= from + room)) from = Math.floor(token / room) * room;
    pages.set(i, from);
    const to = Math.min(total, from + room),
      found = hits(i),
      { parts } = textOf(i),
      v = field ? values.get(field.name) : null;
    const page = (text, target) => {
      H("button", { type: "button" }, flow, text).onclick = () => {
        pages.set(i, target);
        token = -1;
        drawPanes();
      };
    };
    if (from) page(`‹ ${from} earlier tokens`, Math.max(0, from - room));
    for (let k = from; k < to; k++) {
      const [, shown, raw, hex] = view.vocabulary[k < P ? s.prompt[k] : s.response[k - P]],
        at = starts[i] + k - P;
      const node = H(
        "span",
        { class: "hf-tok", "data-i": i, "data-k": k, "data-row": k < P ? null : s.first_row + k - P },
        flow,
        shown,
      );
      if (hex !== null) node.classList.add("hf-bytes");
      if (parts.has(k)) node.dataset.part = parts.get(k);
      if (found.has(k)) node.classList.add("hf-hit");
      if (k < P) node.classList.add("hf-given");
      else {
        if (v) paint(node, strength(v[at], field), field);
        if (printed && v) H("small", {}, node, numText(v[at], false, 3));
        if (clippedAt[at]) node.classList.add("hf-clipped");
      }
      if (i === current && k === token) node.classList.add("hf-current");
      if ((raw === null ? shown : raw).includes("\n")) H("br", {}, flow);
    }
    if (to < total) page(`${total - to} later tokens ›`, to);
    H("span", { class: "hf-end" }, flow, s.response.length ? "" : "(empty response)");
  }
  function drawLegend() {
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    if (field) {
      const sequential = field.kind === "sequential",
        steps = sequential ? [0, 0.25, 0.5, 0.75, 1] : [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1];
      const valueAt = (t) => numText(field.kind === "ratio" ? Math.exp(t * field.end) : t * field.end);
      H("span", {}, legend, field.label + ":");
      const scale = H("span", { class: "hf-scale" }, legend),
        boxes = H("span", {}, scale),
        ends = H("span", {}, scale);
      for (const t of steps) paint(H("i", {}, boxes), t, field);
      for (const t of sequential ? [0, 0.5, 1] : [-1, 0, 1]) H("span", {}, ends, valueAt(t));
      if (!sequential)
        H(
          "span",
          {},
          legend,
          field.kind === "ratio" ? "line above: over 1; line below: under 1" : "line above: positive; line below: negative",
        );
    } else H("span", { class: "hf-missing" }, legend, "no numbers per token yet");
    const box = (text, cls) => {
      const e = H("span", {}, legend);
      H("i", { class: "hf-tok hf-sample " + cls }, e);
      H("span", {}, e, text);
    };
    box("prompt", "hf-given");
    if (field && values.get(field.name).some(Number.isNaN)) box("no number (NaN)", "hf-nan");
    if (view.clip?.known)
      box(
        `clipped: zero gradient (ratio > ${numText(1 + view.clip.high)} with A > 0, < ${numText(1 - view.clip.low)} with A < 0)`,
        "hf-clipped",
      );
    if (view.missing.length) {
      const d = H("details", {}, f.below);
      H("summary", {}, d, `not measured: ${view.missing.map((m) => m.label).join(", ")}`);
      for (const m of view.missing) H("div", { class: "hf-dim" }, d, `${m.label}: written by ${m.hint}`);
    }
    for (const text of view.ignored) H("div", { class: "hf-dim" }, f.below, "not drawn: " + text);
    H(
      "div",
      { class: "hf-dim", "data-paper": "no" },
      f.below,
      "← → tokens · ↑ ↓ samples · / search · g side by side · n numbers · Esc",
    );
  }
  const guarded = { "data-lm-suppress-shortcuts": "true" };
  function drawControls() {
    controls.replaceChildren();
    const select = (label, options, chosen, change) => {
      const e = H("select", { ...guarded, "aria-label": label }, H("label", {}, controls, label));
      for (const [value, text, off] of options) {
        const o = H("option", { value, disabled: off ? "" : null }, e, text);
        o.selected = value === chosen;
      }
      e.onchange = () => change(e.value);
      return e;
    };
    const input = (label, type, value, change, parent) => {
      const e = H(
        "input",
        {
          ...guarded,
          type,
          "aria-label": label,
          placeholder: type === "search" ? "search text ( / )" : label.split(" ").pop(),
          step: type === "number" ? "any" : null,
        },
        parent || controls,
      );
      e.value = value;
      e.oninput = () => change(e.value);
      return e;
    };
    const toggle = (name, text, label, on) => {
      const b = H("button", { type: "button", "aria-pressed": String(on), title: label, class: "hf-" + name }, controls, text);
      b.onclick = () => flip[name]();
    };
    select(
      "colour",
      [...view.fields.map((d) => [d.name, d.label]), ...view.missing.map((m) => ["", `${m.label} (not measured)`, true])],
      field ? field.name : "",
      (v) => {
        field = view.fields.find((d) => d.name === v) || field;
        drawPanes();
        drawLegend();
      },
    ).classList.add("hf-color");
    select(
      "sort",
      keys().map((k) => [k, k === "scores" ? "score" : k]),
      sort.key,
      (v) => {
        sort = { key: v, down: v !== "row" };
        redraw();
      },
    ).classList.add("hf-sort");
    H(
      "button",
      { type: "button", class: "hf-order", title: "turn the order round", "aria-label": "turn the order round" },
      controls,
      "⇅",
    ).onclick = () => {
      sort.down = !sort.down;
      redraw();
    };
    const box = input("search text", "search", query, (v) => {
      query = v.toLowerCase();
      redraw();
    });
    box.onkeydown = (ev) => {
      if (ev.key === "Escape" || ev.key === "Enter") {
        if (ev.key === "Escape") {
          box.value = query = "";
          redraw();
        }
        f.host.focus();
        ev.preventDefault();
      }
      ev.stopPropagation();
    };
    const words = {};
    for (const s of view.samples)
      for (const k in s.words) {
        words[k] ??= new Set();
        words[k].add(s.words[k]);
      }
    for (const k in words)
      if (words[k].size > 1 && words[k].size <= 12)
        select(k.replace(/_/g, " "), [["", "all"], ...[...words[k]].sort().map((w) => [w, w])], filter.words[k] || "", (v) => {
          filter.words[k] = v;
          redraw();
        });
    const range = select("only", [["", "all values"], ...keys().map((k) => [k, k === "scores" ? "score" : k])], filter.key, (v) => {
      filter.key = v;
      redraw();
    }).parentNode;
    input(
      "from",
      "number",
      filter.low,
      (v) => {
        filter.low = v;
        redraw();
      },
      range,
    );
    input(
      "to",
      "number",
      filter.high,
      (v) => {
        filter.high = v;
        redraw();
      },
      range,
    );
    if (view.clip?.known) toggle("onlyclipped", "clipped only", "only samples with clipped tokens", filter.clipped);
    toggle("group", "side by side", "all responses to this prompt (g)", side);
    toggle("numbers", "numbers", "print the numbers (n)", printed);
  }
  const press = (name, on) => {
    const b = controls.querySelector(".hf-" + name);
    if (b) b.setAttribute("aria-pressed", String(on));
  };
  const flip = {
    group() {
      side = !side;
      pages.clear();
      press("group", side);
      drawPanes();
    },
    numbers() {
      printed = !printed;
      press("numbers", printed);
      drawPanes();
    },
    onlyclipped() {
      filter.clipped = !filter.clipped;
      press("onlyclipped", filter.clipped);
      redraw();
    },
  };

  // ---- looking at one token
  function describe(i, k) {
    const s = view.samples[i],
      P = s.prompt.length,
      [id, , , hex] = view.vocabulary[k < P ? s.prompt[k] : s.response[k - P]],
      at = starts[i] + k - P;
    const rows = [
      ["token id", String(id)],
      ["position", k < P ? `${k} of the prompt` : String(k - P)],
    ];
    if (hex !== null) rows.push(["bytes", hex.match(/../g).join(" ")]);
    if (textOf(i).parts.has(k)) rows.push(["part of", textOf(i).parts.get(k)]);
    if (k < P) return rows;
    rows.splice(0, 0, ["row in to_pandas", String(s.first_row + k - P)]);
    for (const d of view.fields) rows.push([d.label, numText(values.get(d.name)[at])]);
    for (const m of view.missing) rows.push([m.label, null]);
    if (view.clip?.known) rows.push(["clipped", clippedAt[at] ? "yes: zero gradient" : "no"]);
    return rows;
  }
  function point(node, x, y, spoken) {
    const i = Number(node.dataset.i),
      k = Number(node.dataset.k),
      s = view.samples[i],
      P = s.prompt.length;
    f.showTip(x, y, `“${view.vocabulary[k < P ? s.prompt[k] : s.response[k - P]][1]}” sample ${s.row}`, describe(i, k), spoken);
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
    const moved = current !== Number(node.dataset.i);
    [current, token] = [Number(node.dataset.i), Number(node.dataset.k)];
    if (moved) drawList();
    drawPanes();
    show();
  });
  function step(dx, dy) {
    const s = view.samples[current];
    if (!s || !order.length) return;
    if (dx) {
      const last = s.prompt.length + s.response.length - 1;
      token = token < 0 ? Math.min(s.prompt.length, last) : Math.max(0, Math.min(last, token + dx));
    }
    if (dy) {
      const next = order[order.indexOf(current) + dy];
      if (next !== undefined) {
        current = next;
        token = -1;
        drawList();
        drawPanes();
      }
      return;
    }
    const node = panes.querySelector(`[data-i="${current}"][data-k="${token}"]`),
      before = panes.querySelector(".hf-current");
    if (!node) {
      drawPanes();
      return;
    }
    if (before) before.classList.remove("hf-current");
    node.classList.add("hf-current");
  }
  function show() {
    const row = list.querySelector(".hf-chosen");
    if (row) row.scrollIntoView({ block: "nearest" });
    const node = panes.querySelector(".hf-current");
    if (node) {
      node.scrollIntoView({ block: "nearest" });
      const r = node.getBoundingClientRect();
      point(node, r.left, r.bottom, true);
    } else if (view.samples[current]) {
      f.hideTip();
      const n = means[current];
      f.root.querySelector(".hf-say").textContent =
        `sample ${n.row}, score ${n.scores === undefined ? "not measured" : numText(n.scores)}, ` +
        `${n.tokens} tokens: ${textOf(current).response.slice(0, 120)}`;
    }
  }
  keyboard(f.host, {
    step,
    show,
    keys: {
      "/": () => controls.querySelector("input[type=search]").focus(),
      g: flip.group,
      n: flip.numbers,
      Escape: () => {
        token = -1;
        f.hideTip();
        drawPanes();
      },
    },
  });
  f.host.addEventListener("blur", () => f.hideTip());

  function redraw() {
    choose();
    drawList();
    drawPanes();
  }
  function all() {
    take();
    f.title.textContent = view.title;
    f.host.setAttribute("role", "group");
    f.host.setAttribute("aria-label", view.summary);
    drawControls();
    redraw();
    drawLegend();
  }
  const onView = coalesced(all);
  all();
  model.on("change:view", onView);
  return () => model.off("change:view", onView);
}
export default { render };
