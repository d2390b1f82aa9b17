// A score flowing back through GAE: rewards and values as the batch has them, the rest recomputed for gamma and lambda.
import { coalesced, frame, H, hatches, keyboard, S, swatch, unpack } from "./core.js";

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

function render({ model, el }) {
  const f = frame(el, "credit");
  H("style", {}, f.root, CSS);
  const controls = H("div", { class: "hf-controls" }),
    words = H("div", { class: "hf-words hf-num", role: "status" }),
    agreement = H("div", { class: "hf-dim" });
  for (const e of [controls, words, agreement]) f.root.insertBefore(e, f.host);
  let view,
    col,
    gamma,
    lam,
    chosen = 0,
    from = 0,
    made,
    width = 980,
    columnsAt = [];

  const slider = (name, label, set) => {
    const l = H("label", {}, controls),
      out = { input: null, output: null };
    H("span", {}, l, label);
    out.input = H(
      "input",
      { type: "range", min: 0, max: 1, step: 0.005, "aria-label": name, class: "hf-" + name, "data-lm-suppress-shortcuts": "true" },
      l,
    );
    out.output = H("output", {}, l);
    out.input.oninput = () => {
      set(Number(out.input.value));
      request();
    };
    return out;
  };
  const gammaUi = slider("gamma", "γ discount", (x) => {
      gamma = x;
    }),
    lamUi = slider("lambda", "λ of GAE", (x) => {
      lam = x;
    });
  const reset = H("button", { type: "button", class: "hf-reset", title: "back to the gamma and lambda given" }, controls, "reset");
  reset.onclick = () => {
    gamma = view.gamma;
    lam = view.lam;
    request();
  };

  function take() {
    const other = view === undefined;
    view = model.get("view");
    col = {};
    for (const k in view.columns) col[k] = unpack(view.columns[k]);
    if (other) {
      gamma = view.gamma;
      lam = view.lam;
    }
    chosen = Math.max(0, Math.min(chosen, view.tokens.length - 1));
  }
  const count = () => view.tokens.length;

  function panel(svg, spec) {
    const { name, hint, numbers, y, height, color, hatch, outline, filled, line } = spec,
      to = Math.min(count(), from + MOST);
    let low = 0,
      high = 0;
    for (let k = from; k < to; k++)
      for (const x of [numbers[k], line ? line[k] : 0])
        if (Number.isFinite(x)) {
          low = Math.min(low, x);
          high = Math.max(high, x);
        }
    const size = high - low || 1,
      yOf = (x) => y + ((high - x) / size) * height,
      zero = yOf(0);
    const g = S("g", { "data-panel": name }, svg);
    S("rect", { x: LEFT, y: y - 2, width: columnsAt.width, height: height + 4, class: "hf-panel" }, g);
    S("text", { x: LEFT - 8, y: y + 10, "text-anchor": "end", "font-weight": 600, class: "hf-fg" }, g, name);
    S(
      "text",
      { x: LEFT - 8, y: y + 22, "text-anchor": "end", "font-size": 9.5, class: "hf-sub" },
      g,
      `${num(low)} to ${num(high)}`,
    );
    if (hint && height > 34)
      S("text", { x: LEFT - 8, y: y + 34, "text-anchor": "end", "font-size": 9.5, class: "hf-sub" }, g, hint);
    const box = (k, x, attrs) =>
      S(
        "rect",
        {
          x: columnsAt(k) + 0.75,
          width: Math.max(1, columnsAt.cell - 1.5),
          y: Math.min(zero, yOf(x)),
          height: Math.max(0.6, Math.abs(yOf(x) - zero)),
          "data-row": view.first_row + k,
          "data-k": k,
          "data-value": x,
          ...attrs,
        },
        g,
      );
    for (let k = from; k < to; k++) {
      const x = numbers[k],
        hue = color || (x < 0 ? ORANGE : BLUE);
      if (!Number.isFinite(x)) {
        S(
          "rect",
          {
            x: columnsAt(k) + 1,
            y,
            width: Math.max(1, columnsAt.cell - 2),
            height,
            fill: "none",
            class: "hf-edge hf-nomeasure",
            "stroke-dasharray": "2 2",
            "data-row": view.first_row + k,
          },
          g,
        );
        continue;
      }
      if (outline) {
        box(k, x, { fill: "none", stroke: hue, "stroke-width": 0.8, class: "hf-bar" });
        if (filled?.[k]) box(k, filled[k], { fill: hatch(hue), class: "hf-arriving" });
      } else box(k, x, { fill: hatch ? hatch(hue) : hue, stroke: hatch ? hue : null, "stroke-width": 0.6, class: "hf-bar" });
    }
    S("line", { x1: LEFT, x2: LEFT + columnsAt.width, y1: zero, y2: zero, class: "hf-edge", "stroke-width": 0.8 }, g);
    if (line) {
      let d = "";
      for (let k = from; k < to; k++)
        if (Number.isFinite(line[k])) d += `M${columnsAt(k)},${yOf(line[k]).toFixed(2)}h${columnsAt.cell}`;
      S("path", { d, fill: "none", stroke: "var(--hf-mark)", "stroke-width": 2, class: "hf-own" }, g);
    }
    return { g, yOf };
  }

  function draw() {
    width = Math.max(520, Math.min(1180, f.root.clientWidth - 16));
    f.title.textContent = view.title;
    const n = count(),
      weight = gamma * lam;
    made = gae(col.rewards, col.values, gamma, lam);
    made.returns = made.advantages.map((a, t) => a + col.values[t]);
    made.weights = made.deltas.map((_, t) => (t < chosen ? 0 : weight ** (t - chosen)));
    made.arriving = made.deltas.map((d, t) => made.weights[t] * d);
    for (const [ui, x] of [
      [gammaUi, gamma],
      [lamUi, lam],
    ]) {
      ui.input.value = x;
      ui.output.textContent = x.toFixed(3);
    }
    if (chosen < from || chosen >= from + MOST) from = Math.floor(chosen / MOST) * MOST;
    const to = Math.min(n, from + MOST),
      cell = Math.min(44, (width - LEFT - RIGHT) / Math.max(1, to - from));
    columnsAt = Object.assign((k) => LEFT + (k - from) * cell, { cell, width: cell * (to - from) });
    const svg = S("svg", { width, role: "img", "aria-label": view.summary, "font-size": 11 });
    S("title", {}, svg, view.title);
    S("desc", {}, svg, `${view.summary}. ${view.note}`);
    const hatch = hatches(svg),
      highlight = S("rect", { class: "hf-idlefill hf-chosen" }, svg);
    let y = 8;
    if (n) {
      const longest = Math.max(...view.tokens.slice(from, to).map((t) => Math.min(6, t.length))),
        turn = longest * 7.2 > cell;
      if (!turn) y -= 24;
      for (let k = from; k < to; k++) {
        const word = view.tokens[k].slice(0, 6),
          x = columnsAt(k) + cell / 2;
        if (cell < 9 && k % 5 && k !== chosen) continue;
        S(
          "text",
          {
            x: turn ? x + 4 : x,
            y: y + 36,
            "text-anchor": turn ? "start" : "middle",
            "font-family": "monospace",
            class: "hf-fg",
            transform: turn ? `rotate(-90 ${x + 4} ${y + 36})` : null,
            "font-weight": k === chosen ? 700 : null,
          },
          svg,
          word,
        );
      }
      y += 48;
      const add = (spec) => {
        const p = panel(svg, { y, ...spec });
        y += spec.height + 16;
        return p;
      };
      const rewards = add({
        name: "rewards",
        hint: [view.kl_coef ? `−${num(view.kl_coef)} KL` : "", view.score === null ? "" : `score ${num(view.score)}`]
          .filter(Boolean)
          .join(", "),
        numbers: col.rewards,
        height: 56,
        color: GREY,
      });
      if (view.score !== null && n <= to) {
        const last = rewards.g.querySelector(`[data-k="${n - 1}"]`);
        if (last) last.setAttribute("fill", col.rewards[n - 1] < 0 ? ORANGE : BLUE);
      }
      add({ name: "values", hint: "critic", numbers: col.values, height: 48, color: GREEN });
      add({ name: "deltas", hint: "r + γV′ − V", numbers: made.deltas, height: 76, outline: true, filled: made.arriving, hatch });
      add({ name: "weight", hint: "(γλ)^k", numbers: made.weights, height: 36, color: GREY, hatch });
      add({ name: "advantages", hint: "Σ (γλ)^k δ", numbers: made.advantages, height: 84, hatch, line: col.own });
      add({ name: "returns", hint: "A + V", numbers: made.returns, height: 48, hatch, color: GREEN, line: col.returns });
      for (const [k, v] of Object.entries({ x: columnsAt(chosen), y: 2, width: cell, height: y - 6, rx: 2, opacity: 0.7 }))
        highlight.setAttribute(k, v);
    } else {
      S("text", { x: LEFT, y: 30, class: "hf-sub" }, svg, "no response tokens");
      y = 50;
    }
    svg.setAttribute("height", y);
    svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
    f.host.replaceChildren(svg);
    speak(n, weight);
    legend(to);
  }
  function speak(n, weight) {
    if (!n) {
      words.textContent = agreement.textContent = "";
      return;
    }
    const last = n - 1,
      at = made.weights[last];
    words.textContent =
      `A[${chosen}] “${view.tokens[chosen]}” = ${num(made.advantages[chosen])}; ` +
      `of the last token's delta ${num(made.deltas[last])} arrives ${num(at)} of it, ${num(made.arriving[last])}` +
      (weight > 0 && weight < 1
        ? `; half is left after ${(Math.log(0.5) / Math.log(weight)).toFixed(1)} tokens`
        : weight === 1
          ? "; nothing is lost on the way"
          : "; only its own delta counts");
    let gap = 0;
    if (col.own)
      made.advantages.forEach((a, t) => {
        const d = Math.abs(a - col.own[t]);
        gap = Number.isNaN(d) || d > gap ? d : gap;
      });
    const size = col.own ? Math.max(1, ...col.own.map(Math.abs)) : 1,
      same = gap <= 1e-5 * size;
    agreement.dataset.gap = col.own ? gap : "";
    agreement.textContent =
      (!col.own
        ? ""
        : same
          ? `Equal to the batch's own advantages (largest difference ${gap.toExponential(1)}). `
          : `Largest difference to the batch's own advantages: ${num(gap)}. `) +
      upper(view.note) +
      ".";
  }
  const upper = (t) => t.charAt(0).toUpperCase() + t.slice(1);
  function legend(to) {
    f.below.replaceChildren();
    const l = H("div", { class: "hf-legend" }, f.below);
    swatch(l, "the batch's own columns", (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, fill: GREY }, s));
    swatch(l, "recomputed for these γ, λ", (s) =>
      S("rect", { x: 1, y: 1, width: 14, height: 9, fill: hatches(s)(GREY), stroke: GREY }, s),
    );
    swatch(l, "delta, filled as far as it arrives at the chosen token", (s) => {
      S("rect", { x: 1, y: 1, width: 14, height: 9, fill: "none", stroke: BLUE }, s);
      S("rect", { x: 1, y: 5, width: 14, height: 5, fill: hatches(s)(BLUE) }, s);
    });
    if (col.own)
      swatch(l, "the batch's own advantages, returns", (s) =>
        S("path", { d: "M1,6h14", stroke: "var(--hf-mark)", "stroke-width": 2 }, s),
      );
    H("span", {}, l, "blue: positive, orange: negative");
    for (const name of view.missing) H("span", { class: "hf-missing" }, l, `${name} not measured`);
    if (count() > MOST) {
      const go = (text, target) => {
        H("button", { type: "button", class: "hf-page" }, f.below, text).onclick = () => {
          chosen = target;
          from = Math.floor(target / MOST) * MOST;
          request();
        };
      };
      if (from) go(`‹ ${from} earlier tokens`, Math.max(0, from - MOST));
      if (to < count()) go(`${count() - to} later tokens ›`, to);
    }
    H("div", { class: "hf-dim", "data-paper": "no" }, f.below, "click a token or ← → to choose it · Esc");
  }

  function point(k, x, y, spoken) {
    const own = (name) => (col[name] ? num(col[name][k]) : null);
    f.showTip(
      x,
      y,
      `“${view.tokens[k]}” token ${k}`,
      [
        ["row in to_pandas", String(view.first_row + k)],
        ["reward", num(col.rewards[k])],
        ...(k === count() - 1 && view.score !== null
          ? [
              ["of it the score", num(view.score)],
              ["of it the rest (KL penalty)", num(col.rewards[k] - view.score)],
            ]
          : []),
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
      ],
      spoken,
    );
  }
  const at = (ev) => {
    const k = from + Math.floor((ev.clientX - f.host.getBoundingClientRect().left - LEFT) / columnsAt.cell);
    return k >= from && k < Math.min(count(), from + MOST) ? k : -1;
  };
  f.host.addEventListener("pointermove", (ev) => {
    const k = at(ev);
    if (k >= 0) point(k, ev.clientX, ev.clientY, false);
    else f.hideTip();
  });
  f.host.addEventListener("pointerleave", () => f.hideTip());
  f.host.addEventListener("click", (ev) => {
    const k = at(ev);
    if (k >= 0) {
      chosen = k;
      draw();
    }
  });
  keyboard(f.host, {
    step: (dx) => {
      chosen = Math.max(0, Math.min(count() - 1, chosen + dx));
      draw();
    },
    show: () => {
      if (count()) {
        const r = f.host.getBoundingClientRect();
        point(chosen, r.left + columnsAt(chosen) + columnsAt.cell, r.top + 60, true);
      }
    },
    keys: { Escape: () => f.hideTip() },
  });
  f.host.addEventListener("blur", () => f.hideTip());

  const request = coalesced(draw),
    onView = () => {
      take();
      request();
    };
  take();
  draw();
  model.on("change:view", onView);
  const resize = new ResizeObserver(() => {
    if (Math.abs(Math.max(520, Math.min(1180, f.root.clientWidth - 16)) - width) > 2) request();
  });
  resize.observe(f.root);
  return () => {
    model.off("change:view", onView);
    resize.disconnect();
  };
}
export default { render };
