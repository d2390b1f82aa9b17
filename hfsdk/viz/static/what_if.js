// Sliders over a plan: the kernel plans anew while one is dragged. One request under way at most; the newest value wins.
import { mark, paint, penPath, redrawn } from "./chart.js";
import { coalesced, fmtCount, fmtSeconds, frame, H, isMissing, keyboard, S, shorten } from "./core.js";
import { fmtMoney, fmtStep, planBoard } from "./plan_parts.js";

const CALM_MS = 450,
  CURVE_W = 404,
  CURVE_H = 168,
  [L, R, T, B] = [62, CURVE_W - 12, 24, CURVE_H - 34],
  LINE = "#3b76c4",
  METRICS = [
    { key: "seconds", title: "a step takes", fmt: fmtStep },
    { key: "dollars", title: "a step costs", fmt: fmtMoney },
  ];

// ---- layout of a curve over what was dragged: its marks, and `places`, where each of its points stands
function layout(view, metric) {
  const c = view.curve,
    points = c.points.map((p) => ({ ...p, y: p[metric.key] })),
    known = points.filter((p) => !isMissing(p.y)),
    title = `${metric.title} over ${shorten(c.label, 36)}` + (c.done ? "" : " …"),
    words = known.map((p) => `${fmtCount(p.value)}: ${metric.fmt(p.y)}`).join(", ");
  const marks = [
    mark("text", { x: L, y: 13, "font-weight": 600, class: "hf-fg" }, title),
    mark("rect", { x: L, y: T, width: R - L, height: B - T, class: "hf-panel" }),
  ];
  const label = `${metric.title} over ${c.label}: ${words}`;
  if (!known.length) return { label, marks, places: [] };
  const top = 1.05 * Math.max(...known.map((p) => p.y)) || 1,
    at = { X: (v) => L + share(c.stops, v) * (R - L), Y: (v) => B - (v / top) * (B - T) };
  marks.push(...axisMarks(c, points, metric, top, at));
  marks.push(...pointMarks(points, known, at));
  marks.push(...hereMarks(view, metric, at));
  const none = "×: nothing fits";
  if (known.length < points.length) marks.push(mark("text", { x: L, y: B + 26, "font-size": 9, class: "hf-sub" }, none));
  return { label, marks, places: points.map((p) => at.X(p.value)) };
}
// where a value stands among the stops, 0 to 1: between two of them by share
function share(stops, v) {
  const i = stops.findIndex((x) => x >= v);
  if (stops.length < 2) return 0.5;
  const place = i <= 0 ? (i < 0 ? stops.length - 1 : 0) : i - 1 + (v - stops[i - 1]) / (stops[i] - stops[i - 1]);
  return place / (stops.length - 1);
}
function axisMarks(c, points, { fmt }, top, { X, Y }) {
  const small = { "font-size": 9, class: "hf-sub" };
  const grid = [0, top / 2.1, top / 1.05].flatMap((v) => [
    mark("line", { x1: L, x2: R, y1: Y(v), y2: Y(v), class: "hf-grid" }),
    mark("text", { x: L - 5, y: Y(v) + 3, "text-anchor": "end", ...small }, shorten(fmt(v), 12)),
  ]);
  const line = {
    d: penPath(
      points.map((p) => [p.value, p.y]),
      X,
      Y,
    ),
    fill: "none",
    stroke: LINE,
    "stroke-width": 1.6,
  };
  const ends = [
    [c.stops[0], "start"],
    [c.stops[c.stops.length - 1], "end"],
  ].map(([at, anchor]) => mark("text", { x: X(at), y: B + 12, "text-anchor": anchor, ...small }, fmtCount(at)));
  return [...grid, mark("path", { ...line, "stroke-dasharray": "4 3", class: "hf-predicted" }), ...ends];
}
// a dot for each point, a cross where nothing fits, and a line where another plan is best from
function pointMarks(points, known, { X, Y }) {
  const rises = known[known.length - 1].y > known[0].y,
    marks = [];
  let turns = 0;
  points.forEach((p, i) => {
    const x = X(p.value),
      before = points
        .slice(0, i)
        .reverse()
        .find((q) => q.plan);
    if (p.plan && before && before.plan !== p.plan) marks.push(...turnMarks(p, x, rises, 11 * (turns++ % 3)));
    marks.push(
      isMissing(p.y)
        ? mark("text", { x, y: B - 3, "text-anchor": "middle", class: "hf-sub" }, "×")
        : mark("circle", { cx: x, cy: Y(p.y), r: 2.2, stroke: LINE, class: "hf-paper", "data-value": p.value }),
    );
  });
  return marks;
}
// its words stand in the corner that the curve leaves free
function turnMarks(p, x, rises, row) {
  const right = x > (L + R) / 2,
    place = { x: x + (right ? -4 : 4), y: right === rises ? T + 10 + row : B - 6 - row, "text-anchor": right ? "end" : "start" };
  return [
    mark("line", { x1: x, x2: x, y1: T, y2: B, class: "hf-edge hf-turn", "stroke-dasharray": "2 2" }),
    mark("text", { ...place, "font-size": 9, class: "hf-fg hf-turn-name" }, `from here: ${shorten(p.plan, 34)}`),
  ];
}
function hereMarks(view, { key }, { X, Y }) {
  const now = view.sliders.find((s) => s.name === view.curve.name),
    here = view.plan?.choices[0],
    value = here && { seconds: here.step_s, dollars: here.dollars_step }[key];
  if (!now || isMissing(value) || view.error) return [];
  const x = X(now.value);
  return [
    mark("line", { x1: x, x2: x, y1: T, y2: B, class: "hf-edge" }),
    mark("circle", { cx: x, cy: Math.max(T, Y(value)), r: 4, class: "hf-paper hf-current hf-here" }),
  ];
}
const nearest = (places, x) => places.reduce((best, p, k) => (Math.abs(p - x) < Math.abs(places[best] - x) ? k : best), 0);

// ---- draw
function drawCurves(f, view, host) {
  host.replaceChildren();
  const c = view.curve;
  if (!c || !c.points.length) return;
  for (const metric of METRICS)
    if (metric.key === "seconds" || c.points.some((p) => !isMissing(p.dollars))) drawCurve(f, view, metric, host);
}
function drawCurve(f, view, metric, host) {
  const c = view.curve,
    { label, marks, places } = layout(view, metric),
    size = { width: CURVE_W, height: CURVE_H, viewBox: `0 0 ${CURVE_W} ${CURVE_H}`, role: "img", "font-size": 10 };
  const svg = S("svg", { ...size, class: "hf-curve", "data-curve": metric.title, "aria-label": label }, host);
  paint(marks, svg, null);
  if (!places.length) return;
  svg.addEventListener("pointermove", (ev) => {
    const r = svg.getBoundingClientRect(),
      p = c.points[nearest(places, ((ev.clientX - r.left) / r.width) * CURVE_W)],
      rows = [...METRICS.map((m) => [m.title, m.fmt(p[m.key])]), ["plan", p.plan || "nothing fits"]];
    f.showTip(ev.clientX, ev.clientY, `${c.label} ${fmtCount(p.value)}`, rows, false);
  });
  svg.addEventListener("pointerleave", () => f.hideTip());
}
function drawRow(c, controls) {
  const line = H("label", { class: "hf-control", style: "display:flex;align-items:center;gap:8px;min-width:0" }, controls);
  H("span", { style: "flex:0 0 140px" }, line, c.label);
  return line;
}
// returns what shows a value; `hold` says whether a hand is on it
function drawSlider(s, off, controls, { ask, hold }) {
  const line = drawRow(s, controls),
    name = { name: s.name, "aria-label": s.label, "data-lm-suppress-shortcuts": "true" },
    look = { style: "flex:1 1 90px;min-width:60px", ...(off || s.fixed ? { disabled: "" } : {}) },
    input = H("input", { type: "range", min: 0, max: s.stops.length - 1, step: 1, ...name, ...look }, line),
    style = "flex:0 0 92px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis",
    out = H("output", { class: "hf-num", style, "data-of": s.name }, line);
  const say = (v) => {
    out.textContent = isMissing(v) ? "–" : `${fmtCount(v)}${s.unit ? " " + s.unit : ""}`;
    input.setAttribute("aria-valuetext", out.textContent);
  };
  input.addEventListener("input", () => {
    const v = s.stops[Number(input.value)];
    say(v);
    ask(s.name, v);
  });
  input.addEventListener("pointerdown", () => hold(true));
  for (const end of ["pointerup", "pointercancel", "change"]) input.addEventListener(end, () => hold(false));
  return (v) => {
    input.value = String(s.stops.reduce((best, x, i) => (Math.abs(x - v) < Math.abs(s.stops[best] - v) ? i : best), 0));
    say(v);
  };
}
function drawMenu(m, off, controls, { ask }) {
  const line = drawRow(m, controls),
    name = { name: m.name, style: "min-width:0;flex:0 1 auto", "aria-label": m.label, "data-lm-suppress-shortcuts": "true" },
    pick = H("select", { ...name, ...(off ? { disabled: "" } : {}) }, line);
  for (const o of m.options) H("option", { value: o }, pick, o);
  pick.addEventListener("change", () => ask(m.name, pick.value));
  return (v) => {
    pick.value = v;
  };
}
// controls are kept while only their values change, so that a drag goes on
function controlsOf(controls, asked) {
  const shown = new Map(); // name -> what shows a value
  let made = "";
  return {
    redo() {
      made = "";
    },
    draw(view, live) {
      const stops = view.sliders.map((s) => [s.name, s.stops, s.fixed]),
        key = JSON.stringify([stops, view.menus.map((m) => [m.name, m.options]), live]);
      if (key !== made) {
        made = key;
        controls.replaceChildren();
        shown.clear();
        for (const s of view.sliders) shown.set(s.name, drawSlider(s, !live, controls, asked));
        for (const m of view.menus) shown.set(m.name, drawMenu(m, !live, controls, asked));
      }
      for (const c of [...view.sliders, ...view.menus]) if (!asked.isMoving(c.name)) shown.get(c.name)(c.value);
    },
  };
}

// ---- asking: `live` says whether anybody hears, `tell` shows that an answer is waited for
function asking({ model, f, live, tell }) {
  let wanted = null,
    sent = 0,
    waiting = 0,
    sentAt = 0,
    calm = 0,
    held = false,
    dragged = null;
  function pump() {
    if (waiting || !wanted || !live()) return;
    waiting = ++sent;
    sentAt = performance.now();
    f.root.dataset.sent = String(sent);
    model.send({ set: wanted, request: sent });
    wanted = null;
    const mine = sent;
    setTimeout(() => {
      if (waiting === mine) tell();
    }, 300);
  }
  // when nothing was moved or answered for a moment: the curve over what was dragged, and the notebook's copy
  function rest() {
    clearTimeout(calm);
    calm = setTimeout(() => {
      if (waiting || wanted || held) rest();
      else if (live()) model.send({ settle: dragged, request: sent });
    }, CALM_MS);
  }
  return {
    begin(request) {
      sent = request;
    },
    ask(name, value) {
      dragged = name;
      wanted = { ...wanted, [name]: value };
      pump();
      rest();
    },
    hold(on) {
      held = on;
    },
    hear(request) {
      if (waiting && request >= waiting) {
        waiting = 0;
        rest();
      }
      pump();
    },
    isMoving: (name) => Boolean(waiting || wanted) && name === dragged,
    words: () =>
      waiting ? `planning … (${((performance.now() - sentAt) / 1000).toFixed(0)} s; the kernel may be busy with a cell)` : null,
    end: () => clearTimeout(calm),
  };
}

function render({ model, el }) {
  const f = frame(el, "what-if", model),
    status = H("span", { class: "hf-dim hf-status", role: "status" }, f.bar),
    note = H("div", { class: "hf-dim hf-frozen-note", "data-paper": "no" }),
    grid = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,350px),1fr));gap:2px 18px;margin:4px 0 6px",
    controls = H("div", { class: "hf-controls", style: grid }),
    subtitle = H("div", { class: "hf-dim" }),
    error = H("p", { class: "hf-bad hf-what-if-error", role: "alert", style: "white-space:pre-wrap;margin:4px 0" });
  for (const part of [note, controls, subtitle, error]) f.root.insertBefore(part, f.host);
  const curves = H("div", { class: "hf-curves", style: "display:flex;flex-wrap:wrap;gap:6px 14px" }),
    board = planBoard(f, f.host);
  f.root.insertBefore(curves, f.below);
  let view = model.get("view");
  const live = () => view.live && !f.lost,
    asked = asking({ model, f, live, tell }),
    parts = controlsOf(controls, asked);
  function tell() {
    status.textContent = asked.words() ?? (isMissing(view.took_s) ? "" : `planned in ${fmtSeconds(view.took_s)}`);
  }
  function draw() {
    f.title.textContent = view.title;
    parts.draw(view, live());
    note.textContent = live() ? "" : "Frozen: without a kernel nothing can be planned anew. Run the cell to move the sliders.";
    note.hidden = live();
    subtitle.textContent = view.plan ? view.plan.subtitle : "";
    error.textContent = view.error;
    error.hidden = !view.error;
    f.host.classList.toggle("hf-faded", !!view.error);
    if (view.plan) board.draw(view.plan);
    drawCurves(f, view, curves);
    tell();
    f.root.dataset.drawn = String(view.request);
  }

  // ---- interact
  const request = coalesced(draw);
  function onView() {
    view = model.get("view");
    asked.hear(view.request);
    request();
  }
  f.onlost = () => {
    parts.redo();
    draw();
  };
  keyboard(f.host, { step: board.step, show: board.show, keys: { Escape: () => f.hideTip() } });
  f.host.addEventListener("blur", () => f.hideTip());
  asked.begin(view.request || 0);
  draw();
  const leave = redrawn({ model, f, onView, onResize: coalesced(() => board.resized()) });
  return () => {
    leave();
    asked.end();
  };
}

// Live, the picture moves into the newest output that carries its key, in place of the frozen one that a saved notebook keeps.
function initialize({ model }) {
  const key = model.get("key"),
    el = document.createElement("div");
  if (!key) return; // it stands where its host puts it
  el.className = "hf-picture hf-live";
  let leave = null,
    home = null,
    focus = null; // a hand on a slider stays there when the output under it is replaced
  el.addEventListener("focusin", (ev) => {
    focus = ev.target;
  });
  el.addEventListener("focusout", () =>
    setTimeout(() => {
      if (el.isConnected && !el.contains(document.activeElement)) focus = null;
    }),
  );
  const show = (place, frozen) => {
    for (const child of place.children) if (child !== el) child.style.display = frozen ? "" : "none";
  };
  const look = () => {
    const places = document.querySelectorAll(`[data-hf-live="${key}"]`),
      place = places[places.length - 1];
    if (!place || (place === home && el.parentNode === home)) return;
    if (home && home !== place) show(home, true);
    home = place;
    show(place, false);
    place.append(el);
    if (!leave) leave = render({ model, el });
    if (focus && document.activeElement !== focus) focus.focus({ preventScroll: true });
  };
  const watch = new MutationObserver(look);
  watch.observe(document.body, { childList: true, subtree: true });
  look();
  return () => {
    watch.disconnect();
    if (leave) leave();
    if (home) show(home, true);
    el.remove();
  };
}
export default { render, initialize };
