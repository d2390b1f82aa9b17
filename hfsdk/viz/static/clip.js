// The histogram of the ratio, A > 0 above and A < 0 below the line, with what clipping leaves without gradient.
import { coalesced, fmtCount, frame, freshId, H, keyboard, S, shorten, swatch, unpack } from "./core.js";

const BLUE = "#2f7fd0",
  ORANGE = "#e0761b",
  GREY = "#8b949e";
const LEFT = 70,
  RIGHT = 20,
  HALF = 120,
  TOP = 20,
  BINS = 61;
const CSS = `
.hf-clip .hf-controls{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:center;margin:2px 0 6px}
.hf-clip label{display:inline-flex;gap:6px;align-items:center}.hf-clip input[type=range]{width:170px;accent-color:var(--hf-busy)}
.hf-clip output{min-width:36px;font-variant-numeric:tabular-nums}.hf-clip button[aria-pressed=true]{background:var(--hf-idle);
border-color:var(--hf-dim)}`;
const percent = (x) => (x === null ? "not known" : (100 * x).toFixed(2) + " %");
const f32 = Math.fround;

function crosshatch(svg) {
  // unlike the diagonal hatch, which is what is predicted
  const id = freshId(),
    p = S(
      "pattern",
      { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      S("defs", {}, svg),
    );
  S("path", { d: "M0,0H4M0,0V4", fill: "none", stroke: "var(--hf-fg)", "stroke-width": 1 }, p);
  return `url(#${id})`;
}

function render({ model, el }) {
  const f = frame(el, "clip");
  H("style", {}, f.root, CSS);
  const controls = H("div", { class: "hf-controls" }),
    words = H("div", { class: "hf-num hf-words", role: "status" });
  for (const e of [controls, words]) f.root.insertBefore(e, f.host);
  let view,
    g,
    ratios,
    low,
    high,
    logCounts = false,
    current = -1,
    bars = [],
    width = 980,
    highUi,
    lowUi;

  function slider(name, label, most, set) {
    const l = H("label", {}, controls);
    H("span", {}, l, label);
    const input = H(
        "input",
        {
          type: "range",
          min: 0.01,
          max: most,
          step: 0.01,
          "aria-label": name,
          class: "hf-" + name,
          "data-lm-suppress-shortcuts": "true",
        },
        l,
      ),
      output = H("output", {}, l);
    input.oninput = () => {
      set(Number(input.value));
      request();
    };
    return { input, output };
  }
  function build() {
    controls.replaceChildren();
    if (view.linked) {
      lowUi = slider("clip", "clip ε", 0.99, (x) => {
        low = high = x;
      });
      highUi = null;
    } else {
      lowUi = slider("clip", "clip ε below", 0.99, (x) => {
        low = x;
      });
      highUi = slider("clip-high", "above", Math.max(2, view.high), (x) => {
        high = x;
      });
    }
    H("button", { type: "button", class: "hf-reset", title: "back to the clip given" }, controls, "reset").onclick = () => {
      low = view.low;
      high = view.high;
      request();
    };
    const log = H(
      "button",
      { type: "button", class: "hf-log", "aria-pressed": String(logCounts), title: "logarithmic counts" },
      controls,
      "log counts",
    );
    log.onclick = () => {
      logCounts = !logCounts;
      log.setAttribute("aria-pressed", String(logCounts));
      request();
    };
  }
  function take() {
    const first = view === undefined;
    view = model.get("view");
    g = {};
    for (const k in view.groups) g[k] = unpack(view.groups[k]);
    ratios = g.log_ratio.map((x) => Math.exp(x));
    if (first) {
      low = view.low;
      high = view.high;
    }
  }
  function count() {
    const top = f32(1 + high),
      bottom = f32(1 - low),
      n = { positive: 0, negative: 0, lost: 0, mass: 0 };
    const bins = Array.from({ length: BINS }, () => ({
      positive: 0,
      positiveCut: 0,
      negative: 0,
      negativeCut: 0,
      zero: 0,
      lost: 0,
    }));
    for (let i = 0; i < ratios.length; i++) {
      const above = f32(ratios[i]) > top,
        below = f32(ratios[i]) < bottom;
      const bin = bins[Math.max(0, Math.min(BINS - 1, Math.floor(((g.log_ratio[i] + view.span) / (2 * view.span)) * BINS)))];
      bin[above ? "positiveCut" : "positive"] += g.positive[i];
      bin[below ? "negativeCut" : "negative"] += g.negative[i];
      bin.zero += g.zero[i];
      const lost = (above ? g.positive_mass[i] : 0) + (below ? g.negative_mass[i] : 0);
      bin.lost += lost;
      n.lost += lost;
      n.mass += g.positive_mass[i] + g.negative_mass[i];
      if (above) n.positive += g.positive[i];
      if (below) n.negative += g.negative[i];
    }
    return { bins, n };
  }
  const digits = (x) => String(Number(x.toFixed(4)));

  function draw() {
    width = Math.max(480, Math.min(1180, f.root.clientWidth - 16));
    f.title.textContent = view.title;
    for (const [ui, x] of [
      [lowUi, low],
      [highUi, high],
    ])
      if (ui) {
        ui.input.value = x;
        ui.output.textContent = x.toFixed(2);
      }
    const { bins, n } = count(),
      total = view.num_tokens,
      plot = width - LEFT - RIGHT,
      middle = TOP + HALF;
    const clipped = n.positive + n.negative,
      share = total ? clipped / total : null,
      mass = n.mass ? n.lost / n.mass : null;
    Object.assign(words.dataset, {
      clipped,
      positive: n.positive,
      negative: n.negative,
      share: share === null ? "" : share,
      mass: mass === null ? "" : mass,
    });
    words.textContent = total
      ? `${clipped} of ${total} tokens (${percent(share)}) have zero gradient: ` +
        `${n.positive} with A > 0 above ${digits(1 + high)}, ${n.negative} with A < 0 below ${digits(1 - low)}; ` +
        `they hold ${percent(mass)} of all |A|` +
        (view.num_missing ? `; ${view.num_missing} tokens without a number are not counted` : "")
      : "no token has a ratio";
    const svg = S("svg", {
      width,
      height: middle + HALF + 44,
      viewBox: `0 0 ${width} ${middle + HALF + 44}`,
      role: "img",
      "aria-label": view.summary,
      "font-size": 11,
    });
    S("title", {}, svg, view.title);
    S("desc", {}, svg, view.summary);
    const cross = crosshatch(svg),
      scaled = (x) => (logCounts ? Math.log10(1 + x) : x);
    const most = Math.max(
      1e-9,
      ...bins.map((b) => scaled(Math.max(b.positive + b.positiveCut + b.zero, b.negative + b.negativeCut))),
    );
    const x = (logRatio) => LEFT + ((logRatio + view.span) / (2 * view.span)) * plot;
    S("rect", { x: LEFT, y: TOP, width: plot, height: 2 * HALF, class: "hf-panel" }, svg);
    for (const [name, sign] of [
      ["A > 0", -1],
      ["A < 0", 1],
    ])
      S(
        "text",
        { x: LEFT - 8, y: middle + (sign * HALF) / 2 + 4, "text-anchor": "end", "font-weight": 600, class: "hf-fg" },
        svg,
        name,
      );
    const top = Math.max(...bins.map((b) => Math.max(b.positive + b.positiveCut + b.zero, b.negative + b.negativeCut)));
    S(
      "text",
      { x: LEFT - 8, y: TOP + 10, "text-anchor": "end", class: "hf-sub", "font-size": 9.5 },
      svg,
      `${top} token${top === 1 ? "" : "s"}`,
    );
    bars = [];
    bins.forEach((b, k) => {
      const left = LEFT + (k / BINS) * plot,
        w = Math.max(1, plot / BINS - 1),
        node = S("g", { class: "hf-mark hf-bin", "data-bin": k }, svg);
      const stack = (sign, parts) => {
        // heights share the bar's in proportion, so that they add up on either scale
        const sum = parts.reduce((s, p) => s + p[0], 0),
          height = (scaled(sum) / most) * (HALF - 6);
        let at = 0;
        for (const [c, color, cut, name] of parts) {
          if (!c) continue;
          const h = (height * c) / sum,
            y = sign < 0 ? middle - at - h : middle + at;
          S(
            "rect",
            {
              x: left + 0.5,
              y,
              width: w,
              height: h,
              fill: color,
              "fill-opacity": cut ? 0.25 : null,
              stroke: cut ? color : null,
              "data-count": c,
              class: name,
            },
            node,
          );
          if (cut) S("rect", { x: left + 0.5, y, width: w, height: h, fill: cross }, node);
          at += h;
        }
      };
      stack(-1, [
        [b.positive, BLUE, false, "hf-positive"],
        [b.zero, GREY, false, "hf-zero"],
        [b.positiveCut, BLUE, true, "hf-positive hf-clipped"],
      ]);
      stack(1, [
        [b.negative, ORANGE, false, "hf-negative"],
        [b.negativeCut, ORANGE, true, "hf-negative hf-clipped"],
      ]);
      if (k === current) S("rect", { x: left, y: TOP, width: w + 1, height: 2 * HALF, fill: "none", class: "hf-current" }, node);
      bars.push({ b, left, w });
    });
    S("line", { x1: LEFT, x2: LEFT + plot, y1: middle, y2: middle, class: "hf-edge" }, svg);
    const drawn = [];
    for (const t of [1, 0.5, 2, 0.2, 5, 0.1, 10, 0.05, 20, 0.8, 1.25, 0.9, 1.1]) {
      const at = x(Math.log(t));
      if (Math.abs(Math.log(t)) > view.span || drawn.some((d) => Math.abs(d - at) < 30)) continue;
      drawn.push(at);
      S(
        "text",
        { x: x(Math.log(t)), y: middle + HALF + 14, "text-anchor": "middle", class: "hf-sub", "font-size": 10 },
        svg,
        digits(t),
      );
    }
    for (const [bound, side] of [
      [1 - low, "end"],
      [1 + high, "start"],
    ]) {
      if (Math.abs(Math.log(bound)) > view.span) continue;
      const at = x(Math.log(bound));
      S(
        "line",
        { x1: at, x2: at, y1: TOP - 4, y2: middle + HALF, stroke: "var(--hf-mark)", "stroke-dasharray": "4 3", class: "hf-bound" },
        svg,
      );
      S("text", { x: at + (side === "end" ? -4 : 4), y: TOP - 6, "text-anchor": side, class: "hf-fg" }, svg, digits(bound));
    }
    S(
      "text",
      { x: LEFT + plot / 2, y: middle + HALF + 32, "text-anchor": "middle", class: "hf-sub" },
      svg,
      `ratio exp(${shorten(view.new, 30)} − ${shorten(view.old, 30)}), logarithmic; beyond the ends: in the last bars`,
    );
    f.host.replaceChildren(svg);
    drawLegend();
  }
  function drawLegend() {
    f.below.replaceChildren();
    const l = H("div", { class: "hf-legend" }, f.below),
      rect = (s, attrs) => S("rect", { x: 1, y: 1, width: 14, height: 9, ...attrs }, s);
    swatch(l, "A > 0: pushed up", (s) => rect(s, { fill: BLUE }));
    swatch(l, "A < 0: pushed down", (s) => rect(s, { fill: ORANGE }));
    if (g.zero.some((z) => z)) swatch(l, "A = 0", (s) => rect(s, { fill: GREY }));
    swatch(l, "clipped: zero gradient", (s) => {
      rect(s, { fill: "none", stroke: GREY });
      rect(s, { fill: crosshatch(s) });
    });
    H("span", {}, l, "outside the bounds but solid: the loss moves it back inside");
    if (view.merged)
      H(
        "div",
        { class: "hf-dim" },
        f.below,
        `${view.num_tokens} tokens, merged into ${ratios.length} groups; exact at every step of the slider`,
      );
    H("div", { class: "hf-dim", "data-paper": "no" }, f.below, "← → bars · Esc");
  }
  function point(k, px, py, spoken) {
    const { b } = bars[k],
      at = (i) => digits(Math.exp(-view.span + (2 * view.span * i) / BINS));
    f.showTip(
      px,
      py,
      `ratio ${k ? at(k) : "below " + at(1)}${k && k < BINS - 1 ? " to " + at(k + 1) : k ? " and more" : ""}`,
      [
        ["tokens", fmtCount(b.positive + b.positiveCut + b.negative + b.negativeCut + b.zero)],
        ["A > 0", `${b.positive} + ${b.positiveCut} clipped`],
        ["A < 0", `${b.negative} + ${b.negativeCut} clipped`],
        ...(b.zero ? [["A = 0", String(b.zero)]] : []),
        ["clipped |A|", fmtCount(b.lost)],
      ],
      spoken,
    );
  }
  f.host.addEventListener("pointermove", (ev) => {
    const left = ev.clientX - f.host.getBoundingClientRect().left,
      k = bars.findIndex((b) => left >= b.left && left < b.left + b.w + 1);
    if (k >= 0) point(k, ev.clientX, ev.clientY, false);
    else f.hideTip();
  });
  f.host.addEventListener("pointerleave", () => f.hideTip());
  keyboard(f.host, {
    step: (dx) => {
      current = current < 0 ? Math.floor(BINS / 2) : Math.max(0, Math.min(BINS - 1, current + dx));
      draw();
    },
    show: () => {
      const r = f.host.getBoundingClientRect();
      point(current, r.left + bars[current].left, r.top + TOP + 2 * HALF, true);
    },
    keys: {
      Escape: () => {
        current = -1;
        f.hideTip();
        draw();
      },
    },
  });
  f.host.addEventListener("blur", () => f.hideTip());

  const request = coalesced(draw),
    onView = () => {
      take();
      build();
      request();
    };
  take();
  build();
  draw();
  model.on("change:view", onView);
  const resize = new ResizeObserver(() => {
    if (Math.abs(Math.max(480, Math.min(1180, f.root.clientWidth - 16)) - width) > 2) request();
  });
  resize.observe(f.root);
  return () => {
    model.off("change:view", onView);
    resize.disconnect();
  };
}
export default { render };
