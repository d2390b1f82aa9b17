// A score flowing back through GAE: rewards and values as the batch has them, the rest recomputed for gamma and lambda.
import { group, hatched, legend, mark, paint, planned, redrawn, sample, sliderOf } from "./chart.js";
import { coalesced, frame, H, hatches, keyboard, S, unpack } from "./core.js";

const BLUE = "#2f7fd0",
  ORANGE = "#e0761b",
  GREEN = "#2a9d8f",
  GREY = "#77808a";
const LEFT = 158,
  RIGHT = 14,
  MOST = 160;
const CSS = `
.hf-credit .hf-controls{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:center;margin:2px 0 6px}
.hf-credit label{display:inline-flex;gap:6px;align-items:center}.hf-credit input[type=range]{width:170px;
accent-color:var(--hf-busy)}
.hf-credit output{min-width:44px;font-variant-numeric:tabular-nums}.hf-credit .hf-words{margin:2px 0}`;

function gae(r, v, gamma, lam) {
  const n = r.length,
    deltas = new Array(n),
    advantages = new Array(n);
  for (let t = n - 1, running = 0; t >= 0; t--) {
    deltas[t] = r[t] + gamma * (t + 1 < n ? v[t + 1] : 0) - v[t];
    running = advantages[t] = deltas[t] + gamma * lam * running;
  }
  return { deltas, advantages };
}
function num(x) {
  if (x === null || x === undefined) return null;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const a = Math.abs(x),
    t = a !== 0 && (a < 1e-4 || a >= 1e7) ? a.toExponential(2) : String(Number(a.toPrecision(4)));
  return (x < 0 ? "−" : "") + t;
}

// everything that follows from the columns for a gamma and a lambda; `arriving` is what arrives of each delta at the chosen token
function recomputed(col, gamma, lam, chosen) {
  const { deltas, advantages } = gae(col.rewards, col.values, gamma, lam),
    weights = deltas.map((_, t) => (t < chosen ? 0 : (gamma * lam) ** (t - chosen)));
  return {
    deltas,
    advantages,
    weights,
    returns: advantages.map((a, t) => a + col.values[t]),
    arriving: deltas.map((d, t) => weights[t] * d),
  };
}

// ---- layout: `look` is {gamma, lam, chosen, from, width}; `at` places columns
function layout(view, col, look) {
  const n = view.tokens.length,
    { chosen, from, width } = look,
    to = Math.min(n, from + MOST),
    cell = Math.min(44, (width - LEFT - RIGHT) / Math.max(1, to - from)),
    at = { view, from, to, cell, width: cell * (to - from), X: (k) => LEFT + (k - from) * cell },
    made = recomputed(col, look.gamma, look.lam, chosen);
  if (!n) {
    const marks = [
      mark("rect", { class: "hf-idlefill hf-chosen" }),
      mark("text", { x: LEFT, y: 30, class: "hf-sub" }, "no response tokens"),
    ];
    return { at, made, height: 50, marks };
  }
  const marks = [];
  let y = tokenMarks(at, chosen, marks);
  for (const spec of panelsOf(view, col, made, to)) {
    marks.push(panelMark(at, { y, ...spec }));
    y += spec.height + 16;
  }
  const place = { x: at.X(chosen), y: 2, width: cell, height: y - 6, rx: 2, opacity: 0.7 };
  return { at, made, height: y, marks: [mark("rect", { class: "hf-idlefill hf-chosen", ...place }), ...marks] };
}
// the tokens over the panels, turned where they are wider than a column; returns where the panels begin
function tokenMarks({ view, from, to, cell, X }, chosen, marks) {
  const longest = Math.max(...view.tokens.slice(from, to).map((t) => Math.min(6, t.length))),
    turn = longest * 7.2 > cell,
    top = turn ? 8 : -16,
    y = top + 36;
  for (let k = from; k < to; k++) {
    const x = X(k) + cell / 2 + (turn ? 4 : 0);
    if (cell < 9 && k % 5 && k !== chosen) continue;
    const look = { "text-anchor": turn ? "start" : "middle", "font-family": "monospace", class: "hf-fg" },
      bold = { transform: turn ? `rotate(-90 ${x} ${y})` : null, "font-weight": k === chosen ? 700 : null };
    marks.push(mark("text", { x, y, ...look, ...bold }, view.tokens[k].slice(0, 6)));
  }
  return top + 48;
}
// a panel for every row of the arithmetic; with `tone` its bars have colours of their own, by default they follow the sign
function panelsOf(view, col, made, to) {
  const n = view.tokens.length,
    kl = view.kl_coef ? `−${num(view.kl_coef)} KL` : "",
    score = view.score === null ? "" : `score ${num(view.score)}`;
  // the last reward has the score in it, and its colour
  const rewardTone = (k, x) => (view.score !== null && n <= to && k === n - 1 ? (x < 0 ? ORANGE : BLUE) : GREY);
  return [
    { name: "rewards", hint: [kl, score].filter(Boolean).join(", "), numbers: col.rewards, height: 56, tone: rewardTone },
    { name: "values", hint: "critic", numbers: col.values, height: 48, tone: () => GREEN },
    { name: "deltas", hint: "r + γV′ − V", numbers: made.deltas, height: 76, outline: true, filled: made.arriving, hatch: true },
    { name: "weight", hint: "(γλ)^k", numbers: made.weights, height: 36, tone: () => GREY, hatch: true },
    { name: "advantages", hint: "Σ (γλ)^k δ", numbers: made.advantages, height: 84, hatch: true, line: col.own },
    { name: "returns", hint: "A + V", numbers: made.returns, height: 48, hatch: true, tone: () => GREEN, line: col.returns },
  ];
}
function panelMark(at, spec) {
  const { name, hint, numbers, y, height, line } = spec,
    { from, to, cell, X } = at;
  let low = 0,
    high = 0;
  for (let k = from; k < to; k++)
    for (const x of [numbers[k], line ? line[k] : 0])
      if (Number.isFinite(x)) {
        low = Math.min(low, x);
        high = Math.max(high, x);
      }
  const size = high - low || 1,
    Y = (x) => y + ((high - x) / size) * height,
    zero = Y(0),
    small = (top, text) => mark("text", { x: LEFT - 8, y: top, "text-anchor": "end", "font-size": 9.5, class: "hf-sub" }, text);
  const marks = [
    mark("rect", { x: LEFT, y: y - 2, width: at.width, height: height + 4, class: "hf-panel" }),
    mark("text", { x: LEFT - 8, y: y + 10, "text-anchor": "end", "font-weight": 600, class: "hf-fg" }, name),
    small(y + 22, `${num(low)} to ${num(high)}`),
    ...(hint && height > 34 ? [small(y + 34, hint)] : []),
  ];
  for (let k = from; k < to; k++) marks.push(...columnMarks(at, spec, k, Y));
  marks.push(mark("line", { x1: LEFT, x2: LEFT + at.width, y1: zero, y2: zero, class: "hf-edge", "stroke-width": 0.8 }));
  if (line) {
    let d = "";
    for (let k = from; k < to; k++) if (Number.isFinite(line[k])) d += `M${X(k)},${Y(line[k]).toFixed(2)}h${cell}`;
    marks.push(mark("path", { d, fill: "none", stroke: "var(--hf-mark)", "stroke-width": 2, class: "hf-own" }));
  }
  return group({ "data-panel": name }, marks);
}
// one token's bar in a panel: solid as the batch has it, hatched where it is recomputed, a dashed frame for no number
function columnMarks({ view, cell, X }, { numbers, y, height, outline, filled, hatch, tone }, k, Y) {
  const x = numbers[k],
    row = { "data-row": view.first_row + k };
  if (!Number.isFinite(x)) {
    const box = { x: X(k) + 1, y, width: Math.max(1, cell - 2), height, fill: "none", class: "hf-edge hf-nomeasure" };
    return [mark("rect", { ...box, "stroke-dasharray": "2 2", ...row })];
  }
  const zero = Y(0),
    hue = tone ? tone(k, x) : x < 0 ? ORANGE : BLUE;
  const box = (v, look) => {
    const size = { y: Math.min(zero, Y(v)), height: Math.max(0.6, Math.abs(Y(v) - zero)) };
    return mark("rect", {
      x: X(k) + 0.75,
      width: Math.max(1, cell - 1.5),
      ...size,
      ...row,
      "data-k": k,
      "data-value": v,
      ...look,
    });
  };
  if (!outline)
    return [box(x, { fill: hatch ? hatched(hue) : hue, stroke: hatch ? hue : null, "stroke-width": 0.6, class: "hf-bar" })];
  const edge = box(x, { fill: "none", stroke: hue, "stroke-width": 0.8, class: "hf-bar" });
  return filled[k] ? [edge, box(filled[k], { fill: hatched(hue), class: "hf-arriving" })] : [edge];
}
function legendOf(col) {
  const arriving = [
    sample({ fill: "none", stroke: BLUE }),
    mark("rect", { x: 1, y: 5, width: 14, height: 5, fill: hatched(BLUE) }),
  ];
  const own = mark("path", { d: "M1,6h14", stroke: "var(--hf-mark)", "stroke-width": 2 });
  return [
    ["the batch's own columns", [sample({ fill: GREY })]],
    ["recomputed for these γ, λ", [planned(GREY)]],
    ["delta, filled as far as it arrives at the chosen token", arriving],
    ...(col.own ? [["the batch's own advantages, returns", [own]]] : []),
  ];
}

// ---- layout: words
function chosenWords(view, made, { gamma, lam, chosen }) {
  const weight = gamma * lam,
    last = view.tokens.length - 1;
  const half =
    weight > 0 && weight < 1
      ? `half is left after ${(Math.log(0.5) / Math.log(weight)).toFixed(1)} tokens`
      : weight === 1
        ? "nothing is lost on the way"
        : "only its own delta counts";
  return (
    `A[${chosen}] “${view.tokens[chosen]}” = ${num(made.advantages[chosen])}; ` +
    `of the last token's delta ${num(made.deltas[last])} arrives ${num(made.weights[last])} of it, ${num(made.arriving[last])}` +
    `; ${half}`
  );
}
// how far the recomputed advantages are from the batch's own: the largest difference, and words
function agreementOf(col, made) {
  if (!col.own) return { gap: "", words: "" };
  let gap = 0;
  made.advantages.forEach((a, t) => {
    const d = Math.abs(a - col.own[t]);
    gap = Number.isNaN(d) || d > gap ? d : gap;
  });
  const same = gap <= 1e-5 * Math.max(1, ...col.own.map(Math.abs));
  const words = same
    ? `Equal to the batch's own advantages (largest difference ${gap.toExponential(1)}). `
    : `Largest difference to the batch's own advantages: ${num(gap)}. `;
  return { gap, words };
}
const upper = (t) => t.charAt(0).toUpperCase() + t.slice(1);
function tipRows(view, col, made, chosen, k) {
  const own = (name) => (col[name] ? num(col[name][k]) : null),
    scored = k === view.tokens.length - 1 && view.score !== null;
  return [
    ["row in to_pandas", String(view.first_row + k)],
    ["reward", num(col.rewards[k])],
    ...(scored ? [["of it the score", num(view.score)]] : []),
    ...(scored ? [["of it the rest (KL penalty)", num(col.rewards[k] - view.score)]] : []),
    ["value", num(col.values[k])],
    ["delta", num(made.deltas[k])],
    ["distance k", k < chosen ? "before the chosen token" : String(k - chosen)],
    ["weight (γλ)^k", num(made.weights[k])],
    [`arrives at token ${chosen}`, num(made.arriving[k])],
    ["advantage, recomputed", num(made.advantages[k])],
    ["advantage, batch's own", own("own")],
    ...(view.whitening.state === "whitened" ? [["the same, whitened", own("advantages")]] : []),
    ["return, recomputed", num(made.returns[k])],
    ["return, batch's own", own("returns")],
  ];
}

// ---- draw
function drawPanels(view, scene, width, host) {
  const size = { width, height: scene.height, viewBox: `0 0 ${width} ${scene.height}` },
    svg = S("svg", { ...size, role: "img", "aria-label": view.summary, "font-size": 11 });
  S("title", {}, svg, view.title);
  S("desc", {}, svg, `${view.summary}. ${view.note}`);
  paint(scene.marks, svg, hatches(svg));
  host.replaceChildren(svg);
}
// `go` shows another page, from a token on
function drawBelow(view, col, { from, to }, below, go) {
  below.replaceChildren();
  const l = legend(below, legendOf(col)),
    n = view.tokens.length;
  H("span", {}, l, "blue: positive, orange: negative");
  for (const name of view.missing) H("span", { class: "hf-missing" }, l, `${name} not measured`);
  const page = (text, target) => {
    H("button", { type: "button", class: "hf-page" }, below, text).onclick = () => go(target);
  };
  if (n > MOST && from) page(`‹ ${from} earlier tokens`, Math.max(0, from - MOST));
  if (n > MOST && to < n) page(`${n - to} later tokens ›`, to);
  H("div", { class: "hf-dim", "data-paper": "no" }, below, "click a token or ← → to choose it · Esc");
}

function render({ model, el }) {
  const f = frame(el, "credit");
  H("style", {}, f.root, CSS);
  const controls = H("div", { class: "hf-controls" }),
    words = H("div", { class: "hf-words hf-num", role: "status" }),
    agreement = H("div", { class: "hf-dim" });
  for (const e of [controls, words, agreement]) f.root.insertBefore(e, f.host);
  let view, col, scene;
  const look = { gamma: 1, lam: 1, chosen: 0, from: 0, width: 980 },
    request = coalesced(draw),
    pageOf = (k) => Math.floor(k / MOST) * MOST,
    wide = () => Math.max(520, Math.min(1180, f.root.clientWidth - 16));
  const slider = (name, label, key) =>
    sliderOf(controls, name, label, { min: 0, max: 1, step: 0.005 }, (x) => {
      look[key] = x;
      request();
    });
  const showGamma = slider("gamma", "γ discount", "gamma"),
    showLam = slider("lambda", "λ of GAE", "lam"),
    reset = { type: "button", class: "hf-reset", title: "back to the gamma and lambda given" };
  H("button", reset, controls, "reset").onclick = () => {
    Object.assign(look, { gamma: view.gamma, lam: view.lam });
    request();
  };

  function take() {
    const first = view === undefined;
    view = model.get("view");
    col = {};
    for (const k in view.columns) col[k] = unpack(view.columns[k]);
    if (first) Object.assign(look, { gamma: view.gamma, lam: view.lam });
    look.chosen = Math.max(0, Math.min(look.chosen, view.tokens.length - 1));
  }
  function draw() {
    look.width = wide();
    f.title.textContent = view.title;
    showGamma(look.gamma, 3);
    showLam(look.lam, 3);
    if (look.chosen < look.from || look.chosen >= look.from + MOST) look.from = pageOf(look.chosen);
    scene = layout(view, col, look);
    drawPanels(view, scene, look.width, f.host);
    speak();
    drawBelow(view, col, scene.at, f.below, (target) => {
      look.chosen = target;
      look.from = pageOf(target);
      request();
    });
  }
  function speak() {
    if (!view.tokens.length) {
      words.textContent = agreement.textContent = "";
      return;
    }
    const { gap, words: same } = agreementOf(col, scene.made);
    words.textContent = chosenWords(view, scene.made, look);
    agreement.dataset.gap = gap;
    agreement.textContent = same + upper(view.note) + ".";
  }

  // ---- interact
  function point(k, x, y, spoken) {
    f.showTip(x, y, `“${view.tokens[k]}” token ${k}`, tipRows(view, col, scene.made, look.chosen, k), spoken);
  }
  const at = (ev) => {
    const k = look.from + Math.floor((ev.clientX - f.host.getBoundingClientRect().left - LEFT) / scene.at.cell);
    return k >= look.from && k < Math.min(view.tokens.length, look.from + MOST) ? k : -1;
  };
  f.host.addEventListener("pointermove", (ev) => {
    const k = at(ev);
    if (k >= 0) point(k, ev.clientX, ev.clientY, false);
    else f.hideTip();
  });
  f.host.addEventListener("pointerleave", () => f.hideTip());
  f.host.addEventListener("click", (ev) => {
    const k = at(ev);
    if (k < 0) return;
    look.chosen = k;
    draw();
  });
  keyboard(f.host, {
    step: (dx) => {
      look.chosen = Math.max(0, Math.min(view.tokens.length - 1, look.chosen + dx));
      draw();
    },
    show: () => {
      if (!view.tokens.length) return;
      const r = f.host.getBoundingClientRect();
      point(look.chosen, r.left + scene.at.X(look.chosen) + scene.at.cell, r.top + 60, true);
    },
    keys: { Escape: () => f.hideTip() },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  take();
  draw();
  const onView = () => {
    take();
    request();
  };
  return redrawn({ model, f, onView, onResize: () => Math.abs(wide() - look.width) > 2 && request() });
}
export default { render };
