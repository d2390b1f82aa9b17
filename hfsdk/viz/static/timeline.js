// When what ran: one lane of calls per role, one lane per device, sub-spans nested, idle shaded, phases as bands.
import {
  alpha,
  coalesced,
  fitText,
  fmtBytes,
  fmtCount,
  fmtSeconds,
  fmtShare,
  frame,
  freshId,
  H,
  hatches,
  inkOn,
  isMissing,
  keyboard,
  S,
  shade,
  stripes,
  swatch,
  titledSvg,
} from "./core.js";

const [ROW, LANE, SUB, DEPTH, START, DURATION, NAME, ROLE, METHOD, LABEL, FLAGS, CALL, RANK, ATTRS] = Array(14).keys();
const PREDICTED = 1,
  RUNNING = 2,
  PARENT = 4;
const DRAIN = "#2a78a8";
const CANVAS_ABOVE = 3000,
  MANY_GAPS = 60,
  LEFT = 150,
  RIGHT = 64,
  TOP = 24;

function render({ model, el }) {
  const f = frame(el, "timeline", model);
  const fit = f.button("fit", "show the whole trace", () => {
    window_ = null;
    request();
  });
  fit.classList.add("hf-fit");
  f.button("+", "zoom in", () => zoom(0.7));
  f.button("−", "zoom out", () => zoom(1 / 0.7));
  const pathButton = f.button("critical path", "mark the calls that decided how long it took", () => {
    critical = !critical;
    request();
  });
  const pipeButton = f.button("pipeline", "zoom to the next call that ran through pipeline stages", () => {
    const calls = [...new Map(view.pipelines.map((r) => [r.call_id, 0])).keys()];
    const rows = view.pipelines.filter((r) => r.call_id === calls[pipe++ % calls.length]);
    clampWindow(Math.min(...rows.map((r) => r.start_s)), Math.max(...rows.map((r) => r.end_s)));
    request();
  });
  const steps = H("select", { "aria-label": "step", "data-lm-suppress-shortcuts": "true" }, f.bar);
  steps.onchange = () => {
    const k = steps.selectedIndex - 1,
      starts = view.steps.map((s) => s.start_s);
    if (k < 0) window_ = null;
    else clampWindow(starts[k], k + 1 < starts.length ? starts[k + 1] : total());
    request();
  };
  const info = H("span", { class: "hf-dim hf-info" }, f.bar);
  const pathWords = H("div", { class: "hf-dim hf-path-words" }, f.below);
  const picture = f.host,
    breakdown = H("div", {}, f.below);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let view,
    arrived,
    window_ = null,
    current = -1,
    canvas = null,
    shapes = [],
    width = 900,
    drawnAt = 0,
    lastTables = "";
  let critical = false,
    pipe = 0,
    onPath = new Set();

  // ---- time
  const elapsed = () => (view.live && !still ? Math.min(5, (performance.now() - arrived) / 1000) : 0);
  const now = () => view.now_s + elapsed();
  let isOpen = false; // whether a mark has no end yet
  const open = () => isOpen,
    running = () => view.live && isOpen;
  const total = () => Math.max(view.duration_s, running() ? now() : 0, 1e-6);
  const range = () => window_ || [0, total() * (open() ? 1.03 : 1)]; // room for the open ends
  const endOf = (m) => (m[DURATION] === null ? Math.max(view.live ? now() : view.now_s, m[START]) : m[START] + m[DURATION]);
  const plot = () => width - LEFT - RIGHT;
  let from_ = 0,
    scale_ = 1; // of the drawing under way
  const xOf = (t) => LEFT + (t - from_) * scale_;
  function measure() {
    const [a, b] = range();
    from_ = a;
    scale_ = plot() / (b - a);
  }

  function clampWindow(a, b) {
    const all = total(),
      span = Math.min(b - a, all);
    if (span >= all * 0.999) {
      window_ = null;
      return;
    }
    a = Math.max(0, Math.min(a, all - span));
    window_ = [a, a + Math.max(span, all * 1e-6)];
  }
  function zoom(factor, at) {
    const [a, b] = range(),
      c = at === undefined ? (a + b) / 2 : at;
    clampWindow(c - (c - a) * factor, c + (b - c) * factor);
    request();
  }

  let colors = [];
  function colorOf(m) {
    const key = m[NAME] * view.roles.length + m[ROLE],
      name = view.names[m[NAME]];
    colors[key] ??= shade(name.color || view.roles[m[ROLE]].color, name.tone);
    return colors[key];
  }
  // a mark's box, and where its text goes
  function shapeOf(i) {
    const m = view.marks[i],
      lane = view.lanes[m[LANE]];
    const inset = lane.row_height >= 30 ? 13 : lane.row_height >= 16 ? 4 : 1,
      pad = lane.row_height >= 16 ? 2 : 0.5;
    const y = TOP + view.bands_height + lane.y + m[SUB] * lane.row_height + pad + m[DEPTH] * inset;
    const h = Math.max(1.5, lane.row_height - 2 * pad - m[DEPTH] * (inset + 1));
    const x0 = Math.max(xOf(m[START]), LEFT - 4),
      x1 = Math.min(xOf(endOf(m)), LEFT + plot() + 4);
    const text = h >= 11 ? fitText(view.labels[m[LABEL]], x1 - Math.max(x0, LEFT)) : "";
    return {
      i,
      m,
      x: x0,
      y,
      w: Math.max(1, x1 - x0),
      h,
      color: colorOf(m),
      text,
      ty: m[FLAGS] & PARENT && h > 20 ? y + 10 : y + h / 2 + 3.5,
    };
  }
  function visible() {
    const [a, b] = range(),
      out = [];
    for (let i = 0; i < view.marks.length; i++) {
      const m = view.marks[i];
      if (m[START] <= b && endOf(m) >= a) out.push(shapeOf(i));
    }
    return out;
  }

  // of the calls, without those that end where, to the eye, the one drawn before them in their row ends
  function thinned(all) {
    const calls = all.filter((s) => s.m[DEPTH] === 0),
      rowOf = (s) => `${s.m[LANE]} ${s.m[SUB]}`;
    const least = Math.max(0.8, (new Set(calls.map(rowOf)).size * plot()) / CANVAS_ABOVE),
      ends = new Map();
    return calls.filter((s) => {
      const end = Math.min(xOf(endOf(s.m)), LEFT + plot());
      if (end - (ends.get(rowOf(s)) ?? -Infinity) < least) return false;
      ends.set(rowOf(s), end);
      return true;
    });
  }

  function ticks() {
    const [a, b] = range(),
      raw = (b - a) / Math.max(2, plot() / 110),
      p = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((k) => k * p).find((s) => s >= raw),
      out = [];
    for (let k = Math.ceil(a / size - 1e-9); k * size <= b + 1e-12; k++) out.push(k * size);
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(size) + 1e-9)));
    return out.map((t) => [t, t.toFixed(digits) + " s"]);
  }

  // lanes, bands, idle, axis: SVG in both modes
  function scenery(svg) {
    const bottom = TOP + view.bands_height + view.height,
      [a, b] = range();
    const clip = freshId();
    S("rect", { x: LEFT, y: 0, width: plot(), height: bottom + 22 }, S("clipPath", { id: clip }, svg));
    const inner = S("g", { "clip-path": `url(#${clip})` }, svg),
      laneTop = TOP + view.bands_height;
    for (const lane of view.lanes) {
      const y = laneTop + lane.y;
      S("rect", { x: LEFT, y, width: plot(), height: lane.height, class: "hf-panel" }, svg).parentNode.insertBefore(
        svg.lastChild,
        inner,
      );
      if (lane.case) S("text", { x: 2, y: y - 6, "font-size": 12, "font-weight": 600, class: "hf-fg hf-case" }, svg, lane.case);
      if (lane.pool)
        S("text", { x: LEFT, y: y - 4, "font-size": 10, "font-weight": 600, class: "hf-sub hf-pool" }, svg, "pool " + lane.pool);
      if (lane.show_label)
        S(
          "text",
          {
            x: LEFT - 8,
            y: y + lane.height / 2 + 4,
            "text-anchor": "end",
            class: "hf-fg",
            "font-size": lane.height < 14 ? 9 : lane.label.length > 22 ? 9.5 : 11,
            "font-style": lane.predicted ? "italic" : null,
          },
          svg,
          lane.label,
        );
      if (lane.show_label && lane.busy_share !== null)
        S(
          "text",
          { x: width - RIGHT + 6, y: y + lane.height / 2 + 4, class: "hf-sub", "font-size": lane.height < 14 ? 9 : 10.5 },
          svg,
          fmtShare(lane.busy_share) + " busy",
        );
      const idle = lane.idle.filter(([i0, i1]) => i1 >= a && i0 <= b);
      if (idle.length > MANY_GAPS)
        S(
          "path",
          {
            d: idle
              .map(
                ([i0, i1]) => `M${xOf(i0).toFixed(1)},${y + 1}H${xOf(i1).toFixed(1)}V${y + lane.height - 1}H${xOf(i0).toFixed(1)}Z`,
              )
              .join(""),
            class: "hf-idlefill hf-idle",
          },
          inner,
        );
      else
        for (const [i0, i1] of idle)
          S(
            "rect",
            { x: xOf(i0), y: y + 1, width: Math.max(0, xOf(i1) - xOf(i0)), height: lane.height - 2, class: "hf-idlefill hf-idle" },
            inner,
          );
    }
    for (const p of view.phases) {
      const x0 = xOf(p.start_s),
        x1 = xOf(p.end_s === null ? now() : p.end_s),
        color = view.phase_colors[p.phase] || "#77808a",
        y = TOP + p.row * 16;
      S("rect", { x: x0, y: laneTop, width: Math.max(1, x1 - x0), height: view.height, fill: alpha(color, 0.1) }, inner);
      S(
        "rect",
        {
          x: x0,
          y,
          width: Math.max(1, x1 - x0 - 1),
          height: 14,
          rx: 2,
          fill: alpha(color, 0.22),
          class: "hf-phase",
          "data-phase": p.phase,
        },
        inner,
      );
      S("rect", { x: x0, y: y + 12, width: Math.max(1, x1 - x0 - 1), height: 2, fill: color }, inner);
      const from = Math.max(x0, LEFT) + 4;
      S(
        "text",
        { x: from, y: y + 10, "font-size": 10, class: "hf-fg" },
        inner,
        fitText(p.phase, Math.min(x1, LEFT + plot()) - from + 4),
      );
    }
    for (const d of view.drains) drain(d, svg, inner);
    for (const [t, text] of ticks()) {
      const x = xOf(t);
      S("line", { x1: x, x2: x, y1: laneTop, y2: bottom, class: "hf-grid" }, inner);
      S("text", { x, y: 14, "text-anchor": "middle", "font-size": 10, class: "hf-sub" }, svg, text);
    }
    if (view.steps.length > 1)
      for (const s of view.steps) {
        S(
          "line",
          { x1: xOf(s.start_s), x2: xOf(s.start_s), y1: TOP - 4, y2: bottom, class: "hf-edge", "stroke-width": 1.2 },
          inner,
        );
        S("text", { x: xOf(s.start_s) + 3, y: bottom + 12, "font-size": 10, class: "hf-sub" }, inner, "step " + s.step);
      }
    if (running())
      S(
        "line",
        {
          x1: xOf(now()),
          x2: xOf(now()),
          y1: TOP,
          y2: bottom,
          stroke: "#0a66c2",
          "stroke-width": 1.2,
          "stroke-dasharray": "2 2",
          class: "hf-now",
        },
        inner,
      );
    return inner;
  }

  // sequences running as an area of steps, the share of the cache in use dashed
  function drain(d, svg, inner) {
    const lane = view.lanes[d.lane],
      top = TOP + view.bands_height + lane.y + 2,
      bottom = top + lane.height - 3,
      room = bottom - top;
    for (const run of d.runs) {
      let area = `M${xOf(run[0][0])},${bottom}`,
        usage = "";
      run.forEach(([t, n, , kv], i) => {
        const y = bottom - (room * n) / Math.max(1, d.most),
          x = xOf(t);
        area += `L${x},${y}L${i + 1 < run.length ? xOf(run[i + 1][0]) : x},${y}`;
        usage += `${i ? "L" : "M"}${x},${bottom - room * Math.min(1, kv)}`;
      });
      S(
        "path",
        {
          d: area + `L${xOf(run[run.length - 1][0])},${bottom}Z`,
          fill: alpha(DRAIN, 0.45),
          stroke: DRAIN,
          class: "hf-drain",
          "data-device": d.device,
        },
        inner,
      );
      S("path", { d: usage, fill: "none", class: "hf-edge", "stroke-dasharray": "3 2" }, inner);
    }
    S("text", { x: width - RIGHT + 6, y: top + 12, class: "hf-sub", "font-size": 10.5 }, svg, "most " + d.most);
  }
  function drainAt(x, y) {
    // the last point at or before the pointer
    const t = range()[0] + ((x - LEFT) / plot()) * (range()[1] - range()[0]),
      at = TOP + view.bands_height;
    const d = view.drains.find((q) => y >= at + view.lanes[q.lane].y && y <= at + view.lanes[q.lane].y + view.lanes[q.lane].height);
    const run = d?.runs.find((r) => r[0][0] <= t && t <= r[r.length - 1][0]);
    return run && [d, run.filter((p) => p[0] <= t).pop()];
  }

  function drawSvg(svg, inner) {
    const hatch = hatches(svg);
    for (const s of shapes) {
      const flags = s.m[FLAGS],
        predicted = flags & PREDICTED;
      S(
        "rect",
        {
          x: s.x,
          y: s.y,
          width: s.w,
          height: s.h,
          rx: s.w > 4 ? 2 : 0,
          "data-row": s.m[ROW],
          "data-mark": s.i,
          class:
            "hf-mark hf-span" +
            (predicted ? " hf-predicted" : "") +
            (flags & RUNNING ? " hf-running" : "") +
            (s.i === current ? " hf-current" : "") +
            pathClass(s.m),
          fill: flags & PARENT ? alpha(s.color, predicted ? 0.08 : 0.3) : predicted ? hatch(s.color) : s.color,
          stroke: predicted || flags & PARENT ? s.color : null,
          "stroke-dasharray": flags & RUNNING ? "3 2" : null,
          "fill-opacity": flags & RUNNING && !(flags & PARENT) ? 0.72 : null,
        },
        inner,
      );
      if (isDecisive(s.m))
        S(
          "rect",
          {
            x: s.x,
            y: s.y + s.h - 3,
            width: s.w,
            height: 3,
            class: "hf-on-path",
            fill: "var(--hf-mark)",
            "pointer-events": "none",
          },
          inner,
        );
      if (flags & RUNNING) S("path", { d: `M${s.x + s.w},${s.y} l5,${s.h / 2} l-5,${s.h / 2} z`, fill: s.color }, inner);
      if (!s.text) continue;
      const x = Math.max(s.x, LEFT) + 4,
        plain = predicted || flags & PARENT;
      if (predicted && !(flags & PARENT))
        S(
          "rect",
          { x: x - 2, y: s.ty - 9, width: s.text.length * 5.7 + 4, height: 12, class: "hf-paper", "pointer-events": "none" },
          inner,
        );
      S(
        "text",
        { x, y: s.ty, "font-size": 10, "pointer-events": "none", ...(plain ? { class: "hf-fg" } : { fill: inkOn(s.color) }) },
        inner,
        s.text,
      );
    }
  }
  // a call on the critical path, where others are not, has a line below it
  const isDecisive = (m) => view.decisive && view.lanes[m[LANE]].kind === "calls" && onPath.has(m[CALL]);
  // with the critical path shown: its calls and what ran for them keep their colour, the rest fades
  const pathClass = (m) => (!critical ? "" : onPath.has(m[CALL]) ? " hf-critical" : " hf-faded");
  function drawCanvas(height) {
    const ratio = window.devicePixelRatio || 1,
      css = getComputedStyle(f.root);
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.cssText = `position:absolute;left:0;top:0;width:${width}px;height:${height}px;pointer-events:none`;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.beginPath();
    c.rect(LEFT, 0, plot(), height);
    c.clip();
    c.font = "10px system-ui, sans-serif";
    for (const s of shapes) {
      const flags = s.m[FLAGS];
      c.globalAlpha = pathClass(s.m) === " hf-faded" ? 0.12 : flags & PREDICTED ? 0.25 : flags & PARENT ? 0.3 : 1;
      c.fillStyle = s.color;
      c.fillRect(s.x, s.y, s.w, s.h);
      c.globalAlpha = 1;
      if (flags & (PREDICTED | PARENT) && s.w > 2) {
        c.strokeStyle = s.color;
        c.strokeRect(s.x + 0.5, s.y + 0.5, s.w - 1, s.h - 1);
      }
      if (isDecisive(s.m)) {
        c.fillStyle = css.getPropertyValue("--hf-mark");
        c.fillRect(s.x, s.y + s.h - 3, s.w, 3);
      }
      if (s.text) {
        c.fillStyle = flags & (PREDICTED | PARENT) ? css.getPropertyValue("--hf-fg") : inkOn(s.color);
        c.fillText(s.text, Math.max(s.x, LEFT) + 4, s.ty);
      }
    }
    const here = shapes.find((s) => s.i === current);
    if (here) {
      c.strokeStyle = css.getPropertyValue("--hf-mark");
      c.lineWidth = 2;
      c.strokeRect(here.x, here.y, here.w, here.h);
    }
  }

  function draw() {
    if (!f.root.isConnected && drawnAt) return;
    drawnAt = performance.now();
    width = Math.max(520, Math.min(1180, f.root.clientWidth - 16 || 900));
    const height = TOP + view.bands_height + view.height + 18;
    measure();
    f.title.textContent = view.title;
    shapes = visible();
    const svg = titledSvg(view, width, height, { style: "touch-action:none" });
    const inner = scenery(svg),
      many = view.marks.length > CANVAS_ABOVE,
      useCanvas = many && !f.paper;
    if (many && f.paper) shapes = thinned(shapes);
    picture.style.position = "relative";
    if (useCanvas) {
      canvas = canvas || H("canvas", { "aria-hidden": "true" });
      drawCanvas(height);
      picture.replaceChildren(svg, canvas);
    } else {
      drawSvg(svg, inner);
      picture.replaceChildren(svg);
    }
    const [a, b] = range();
    info.textContent =
      `${view.marks.length} span${view.marks.length === 1 ? "" : "s"}` +
      (shapes.length < view.marks.length ? `, ${shapes.length} in view` : "") +
      `, ${fmtSeconds(b - a)}` +
      (window_ ? ` of ${fmtSeconds(total())}` : "") +
      (running() ? ", running" : "");
    pathButton.hidden = !view.decisive;
    pathWords.textContent = view.critical_words;
    pathButton.setAttribute("aria-pressed", String(critical));
    pipeButton.hidden = !view.pipelines.length;
    const words = view.steps.length > 1 ? ["all steps", ...view.steps.map((s) => "step " + s.step)] : [];
    steps.hidden = !words.length;
    if (words.length && steps.options.length !== words.length) {
      steps.replaceChildren();
      for (const w of words) H("option", {}, steps, w);
    }
    tables();
    if (running() && !still)
      setTimeout(() => {
        if (performance.now() - drawnAt > 80) request();
      }, 100);
  }

  function tables() {
    const key = JSON.stringify([view.breakdown, view.activities, view.overlaps, view.cases, view.pipelines, view.decisive]);
    if (key === lastTables) return;
    lastTables = key;
    breakdown.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, breakdown),
      sample = "#77808a";
    const box = (extra) => (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, ...extra }, s);
    for (const r of view.roles) swatch(legend, r.name, box({ fill: r.color }));
    for (const n of view.names) if (n.color) swatch(legend, `${n.name} (${n.note})`, box({ fill: shade(n.color, n.tone) }));
    for (const n of view.names) if (!n.color && n.tone) swatch(legend, n.name, box({ fill: shade(sample, n.tone) }));
    for (const p of Object.keys(view.phase_colors))
      if (view.phases.some((q) => q.phase === p))
        swatch(legend, p, (s) => {
          box({ fill: alpha(view.phase_colors[p], 0.22) })(s);
          S("rect", { x: 1, y: 8, width: 14, height: 2, fill: view.phase_colors[p] }, s);
        });
    swatch(legend, "measured", box({ fill: sample }));
    swatch(legend, "predicted", (s) => box({ fill: hatches(s)(sample), stroke: sample })(s));
    swatch(legend, "running", (s) => {
      box({ fill: sample, "fill-opacity": 0.72, stroke: sample, "stroke-dasharray": "3 2", width: 9 })(s);
      S("path", { d: "M10,1 l5,4.5 l-5,4.5 z", fill: sample }, s);
    });
    swatch(legend, "idle", box({ class: "hf-idlefill" }));
    if (view.decisive)
      swatch(legend, "on the critical path", (s) => {
        box({ fill: sample })(s);
        S("rect", { x: 1, y: 7, width: 14, height: 3, fill: "var(--hf-mark)" }, s);
      });
    if (view.drains.length)
      swatch(legend, "sequences running (dashed: share of the KV cache in use)", box({ fill: alpha(DRAIN, 0.45), stroke: DRAIN }));
    const details = H("details", { open: "" }, breakdown);
    H("summary", {}, details, "Share of the time");
    const grid = H("div", { style: "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 36px" }, details);
    const table = (head, rows) => {
      if (!rows.length) return;
      const t = H("table", {}, grid),
        tr = H("tr", {}, H("thead", {}, t)),
        body = H("tbody", {}, t);
      head.forEach((text, i) => H("th", { class: i ? null : "hf-left", scope: "col" }, tr, text));
      for (const cells of rows) {
        const row = H("tr", {}, body);
        cells.forEach((c, i) => {
          if (c && c.share !== undefined) {
            const td = H("td", {}, row),
              track = H("span", { class: "hf-track", style: "width:70px;margin-right:6px" }, td);
            const color = c.color || "var(--hf-dim)";
            H(
              "i",
              { style: `width:${Math.min(100, 100 * (c.share || 0))}%;background:${c.predicted ? stripes(color) : color}` },
              track,
            );
            H("span", {}, td, fmtShare(c.share) || "–");
          } else
            H(
              "td",
              { class: (i ? "" : "hf-left") + (c === null ? " hf-missing" : ""), title: c === null ? "not measured" : null },
              row,
              c === null ? "–" : c,
            );
        });
      }
    };
    table(
      ["call", "time", "of the time", "cpu", "tokens", "tokens/s", "bytes"],
      view.breakdown.map((r) => [
        r.call + (r.num_calls > 1 ? ` × ${r.num_calls}` : "") + (r.predicted ? " (predicted)" : ""),
        fmtSeconds(r.seconds),
        { share: r.share, color: r.color, predicted: r.predicted },
        fmtSeconds(r.cpu_s),
        fmtCount(r.tokens),
        isMissing(r.tokens_per_s) ? null : fmtCount(Math.round(r.tokens_per_s)),
        fmtBytes(r.bytes),
      ]),
    );
    table(
      ["on the devices", "mean time", "of the time"],
      view.activities.map((r) => [
        r.name + (r.predicted ? " (predicted)" : ""),
        fmtSeconds(r.seconds),
        { share: r.share, predicted: r.predicted },
      ]),
    );
    table(
      ["stage", "micro-batches", "forward", "backward", "waiting", "bubble"],
      view.pipelines.map((r) => [
        `${r.call}, device ${r.device}`,
        fmtCount(r.micro_batches),
        fmtSeconds(r.forward_s),
        fmtSeconds(r.backward_s),
        fmtSeconds(r.wait_s),
        { share: r.bubble },
      ]),
    );
    table(
      ["trace", "time", "devices", "device-seconds", "of them idle", "idle"],
      view.cases.map((r) => [
        r.title + (r.predicted ? " (predicted)" : ""),
        fmtSeconds(r.seconds),
        fmtCount(r.num_devices),
        fmtSeconds(r.device_s),
        fmtSeconds(r.idle_device_s),
        { share: r.idle_share, predicted: r.predicted },
      ]),
    );
    table(
      ["pools at work", "time", "of the time"],
      view.overlaps.map((r) => [r.pools, fmtSeconds(r.seconds), { share: r.share }]),
    );
  }

  // ---- looking at one mark
  function describe(m) {
    const a = m[ATTRS] || {},
      seconds = m[DURATION],
      lane = view.lanes[m[LANE]],
      rest = { ...a };
    for (const k of ["tokens", "bytes", "cpu_s", "rss_bytes", "allocated_bytes", "reserved_bytes"]) delete rest[k];
    return [
      ["row", String(m[ROW])],
      ["role", view.roles[m[ROLE]].name],
      ["method", view.methods[m[METHOD]] || "–"],
      ...(lane.device === null ? [] : [["device", String(lane.device) + (m[RANK] === null ? "" : `, rank ${m[RANK]}`)]]),
      ["start", fmtSeconds(m[START])],
      [
        "wall time",
        seconds === null
          ? `${fmtSeconds(endOf(m) - m[START])} so far, ${view.live ? "running" : "no end recorded"}`
          : fmtSeconds(seconds),
      ],
      ["cpu time", fmtSeconds(a.cpu_s)],
      ["tokens", fmtCount(a.tokens)],
      ["tokens/s", isMissing(a.tokens) || !seconds ? null : fmtCount(Math.round(a.tokens / seconds))],
      ["bytes", fmtBytes(a.bytes)],
      ...[
        ["resident in host memory", "rss_bytes"],
        ["allocated on the GPU", "allocated_bytes"],
        ["reserved on the GPU", "reserved_bytes"],
      ]
        .filter(([, k]) => !isMissing(a[k]))
        .map(([label, k]) => [label, fmtBytes(a[k])]),
      ...Object.keys(rest).map((k) => [
        k,
        k.endsWith("_bytes") ? fmtBytes(rest[k]) : k.endsWith("_s") ? fmtSeconds(rest[k]) : fmtCount(rest[k]),
      ]),
    ];
  }
  function point(i, x, y, spoken) {
    const m = view.marks[i];
    f.showTip(x, y, view.labels[m[LABEL]] + (m[FLAGS] & PREDICTED ? " (predicted)" : ""), describe(m), spoken);
  }
  function hit(x, y) {
    // the deepest mark under the pointer
    let best = null;
    for (const s of shapes)
      if (x >= s.x - 1 && x <= s.x + s.w + 1 && y >= s.y && y <= s.y + s.h && (!best || s.m[DEPTH] >= best.m[DEPTH])) best = s;
    return best;
  }
  const local = (ev) => {
    const r = picture.getBoundingClientRect();
    return [ev.clientX - r.left, ev.clientY - r.top];
  };

  let drag = null;
  picture.addEventListener("pointerdown", (ev) => {
    const [x] = local(ev);
    if (ev.button === 0 && x > LEFT && x < LEFT + plot()) {
      drag = { x, range: range() };
      picture.setPointerCapture(ev.pointerId);
    }
  });
  picture.addEventListener("pointermove", (ev) => {
    const [x, y] = local(ev);
    if (drag) {
      const [a, b] = drag.range,
        shift = ((drag.x - x) / plot()) * (b - a);
      if (Math.abs(drag.x - x) > 2) {
        clampWindow(a + shift, b + shift);
        f.hideTip();
        request();
      }
      return;
    }
    const s = hit(x, y);
    const dry = s ? null : drainAt(x, y);
    if (s) point(s.i, ev.clientX, ev.clientY, false);
    else if (dry)
      f.showTip(ev.clientX, ev.clientY, `device ${dry[0].device}`, [
        ["at", fmtSeconds(dry[1][0])],
        ["sequences running", `${dry[1][1]} of ${dry[0].most}`],
        ["waiting", fmtCount(dry[1][2])],
        ["KV cache in use", fmtShare(dry[1][3])],
      ]);
    else f.hideTip();
  });
  for (const end of ["pointerup", "pointercancel"])
    picture.addEventListener(end, () => {
      drag = null;
    });
  picture.addEventListener("pointerleave", () => f.hideTip());
  // the wheel zooms, unless this turn of the wheel began outside: then the page goes on scrolling
  let wheelAt = 0,
    wheelOurs = false;
  const watchWheel = (ev) => {
    if (ev.timeStamp - wheelAt > 250) wheelOurs = picture.contains(ev.target);
    wheelAt = ev.timeStamp;
  };
  window.addEventListener("wheel", watchWheel, { capture: true, passive: true });
  picture.addEventListener(
    "wheel",
    (ev) => {
      const [x] = local(ev),
        [a, b] = range();
      if (!wheelOurs || x < LEFT || x > LEFT + plot() || (!window_ && ev.deltaY > 0)) return;
      ev.preventDefault();
      if (ev.shiftKey || Math.abs(ev.deltaX) > Math.abs(ev.deltaY)) {
        const shift = ((ev.deltaX || ev.deltaY) / plot()) * (b - a);
        clampWindow(a + shift, b + shift);
        request();
      } else zoom(Math.exp(Math.max(-100, Math.min(100, ev.deltaY)) * 0.002), a + ((x - LEFT) / plot()) * (b - a));
    },
    { passive: false },
  );

  function step(dx, dy) {
    const marks = view.marks;
    if (!marks.length) return;
    if (current < 0) {
      current = 0;
      return;
    }
    const here = marks[current],
      order = (i, j) => marks[i][START] - marks[j][START] || marks[i][DEPTH] - marks[j][DEPTH];
    const inLane = (lane) =>
      marks
        .map((_, i) => i)
        .filter((i) => marks[i][LANE] === lane)
        .sort(order);
    if (dx) {
      const list = inLane(here[LANE]),
        next = list[list.indexOf(current) + dx];
      if (next !== undefined) current = next;
    }
    for (let lane = here[LANE] + dy; dy && lane >= 0 && lane < view.lanes.length; lane += dy) {
      const list = inLane(lane);
      if (!list.length) continue;
      current = list.reduce(
        (best, i) => (Math.abs(marks[i][START] - here[START]) < Math.abs(marks[best][START] - here[START]) ? i : best),
        list[0],
      );
      break;
    }
  }
  function show() {
    if (current < 0) return;
    const m = view.marks[current],
      [a, b] = range();
    if (m[START] > b || endOf(m) < a) clampWindow(m[START] - (b - a) / 4, m[START] + (3 * (b - a)) / 4);
    draw();
    const s = shapes.find((q) => q.i === current),
      r = picture.getBoundingClientRect();
    if (s) point(current, r.left + Math.max(s.x, LEFT) + Math.min(s.w, plot()) / 2, r.top + s.y + s.h, true);
  }
  keyboard(picture, {
    step,
    show,
    keys: {
      "+": () => zoom(0.7),
      "=": () => zoom(0.7),
      "-": () => zoom(1 / 0.7),
      0: () => fit.onclick(),
      Escape: () => f.hideTip(),
    },
  });
  picture.addEventListener("blur", () => f.hideTip());

  function take() {
    view = model.get("view");
    onPath = new Set(view.critical.map((row) => view.marks[row][CALL]));
    critical &&= view.decisive;
    isOpen = view.marks.some((m) => m[FLAGS] & RUNNING);
    colors = [];
    arrived = performance.now();
    if (current >= view.marks.length) current = -1;
  }
  const request = coalesced(draw),
    onView = () => {
      take();
      request();
    };
  f.onlost = () => {
    view = { ...view, live: false, now_s: now() };
    request();
  };
  take();
  draw();
  model.on("change:view", onView);
  const resize = new ResizeObserver(() => {
    if (Math.abs(Math.min(1180, f.root.clientWidth - 16) - width) > 2) request();
  });
  resize.observe(f.root);
  return () => {
    model.off("change:view", onView);
    f.leave();
    resize.disconnect();
    window.removeEventListener("wheel", watchWheel, { capture: true });
  };
}
export default { render };
