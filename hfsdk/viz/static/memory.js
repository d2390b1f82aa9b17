// What every device holds through one step: tensors by what they are for after each call, the process, and the plan hatched beside.
import { group, hatched, hovered, legend, mark, paint, planned, redrawn, sample } from "./chart.js";
import { coalesced, fmtBytes, fmtSeconds, frame, H, hatches, isMissing, keyboard, S } from "./core.js";

const W = 470,
  H_ = 176,
  LEFT = 64,
  STACK = 50,
  TOP = 22,
  BOTTOM = H_ - 20,
  RIGHT_EDGE = W - STACK - 14;
const colorOf = (view, name) => view.parts.find((p) => p.name === name).color;

// ---- layout: the marks of one device
function layout(view, d) {
  const at = {
    X: (t) => LEFT + (t / view.duration_s) * (RIGHT_EDGE - LEFT),
    Y: (b) => BOTTOM - (b / d.top_bytes) * (BOTTOM - TOP),
  };
  const { X } = at,
    times = [
      [0, "start"],
      [view.duration_s, "end"],
    ];
  return [
    ...axisMarks(d, at),
    ...d.calls.map((c) => callMark(view, d, c, at)),
    ...gaugeMarks(view, d, at),
    ...(d.planned ? plannedMarks(view, d, at) : []),
    ...(d.calls.length || d.samples.length
      ? times.map(([t, anchor]) =>
          mark("text", { x: X(t), y: BOTTOM + 12, "text-anchor": anchor, "font-size": 9, class: "hf-sub" }, fmtSeconds(t)),
        )
      : []),
  ];
}
function axisMarks(d, { Y }) {
  return [
    mark("text", { x: 4, y: 13, "font-weight": 600, class: "hf-fg" }, `device ${d.device} (${d.name})`),
    mark("rect", { x: LEFT, y: TOP, width: RIGHT_EDGE - LEFT, height: BOTTOM - TOP, class: "hf-panel" }),
    ...[0, 0.5, 1].flatMap((share) => {
      const amount = (share * d.top_bytes) / 1.08,
        words = { x: LEFT - 4, y: Y(amount) + 3, "text-anchor": "end", "font-size": 9, class: "hf-sub" };
      return [
        mark("line", { x1: LEFT, x2: RIGHT_EDGE, y1: Y(amount), y2: Y(amount), class: "hf-grid" }),
        mark("text", words, fmtBytes(Math.round(amount))),
      ];
    }),
  ];
}
// what is held from a call on, one part on the other; what sleeps is drawn above as not there
function callMark(view, d, c, { X, Y }) {
  const marks = [],
    rows = [
      ["row", String(c.row)],
      ["from, to", `${fmtSeconds(c.start_s)}, ${fmtSeconds(c.end_s)}`],
    ];
  let base = 0;
  const part = (bytes, more) => ({
    x: X(c.start_s),
    y: Y(base + bytes),
    width: Math.max(1, X(c.end_s) - X(c.start_s)),
    height: Y(base) - Y(base + bytes),
    ...more,
    "data-bytes": bytes,
  });
  for (const p of view.parts) {
    const held = c[p.name + "_bytes"];
    if (!held) continue;
    marks.push(mark("rect", part(held, { fill: view.predicted ? hatched(p.color) : p.color, "data-part": p.name })));
    rows.push([p.label, fmtBytes(held)]);
    base += held;
  }
  rows.push(["tensors in all", fmtBytes(base)]);
  for (const names of d.bases) rows.push(["one base for", names]);
  if (c.asleep_bytes) {
    const dashes = { fill: "transparent", stroke: colorOf(view, "rollout"), "stroke-dasharray": "2 2", "data-part": "asleep" };
    marks.push(mark("rect", part(c.asleep_bytes, dashes)));
    rows.push(["asleep: not there", fmtBytes(c.asleep_bytes)]);
  }
  if (!isMissing(c.rss_bytes)) rows.push(["resident (process)", fmtBytes(c.rss_bytes)]);
  if (!isMissing(c.allocated_bytes))
    rows.push(["allocated on the GPU", fmtBytes(c.allocated_bytes)], ["reserved on the GPU", fmtBytes(c.reserved_bytes)]);
  const tip = { heading: `after ${c.call}${view.predicted ? ": predicted" : ""}`, rows };
  return group({ "data-row": c.row, "data-call": c.call, class: "hf-held hf-mark" }, marks, tip);
}
function gaugeMarks(view, d, { X, Y }) {
  const line = (k, dash) => {
    const known = d.samples.filter((s) => !isMissing(s[k])),
      path = known.map((s, i) => `${i ? "L" : "M"}${X(s[0]).toFixed(1)},${Y(s[k]).toFixed(1)}`).join("");
    const look = { fill: "none", class: "hf-edge hf-gauge", "stroke-width": 1.5, "stroke-dasharray": dash };
    return known.length ? [mark("path", { d: path, ...look, "pointer-events": "none" })] : [];
  };
  const none = { x: LEFT + 8, y: (TOP + BOTTOM) / 2, "font-style": "italic", class: "hf-sub hf-nomeasure" };
  return [
    ...line(1, view.predicted ? "4 3" : null),
    ...line(2, view.predicted ? "4 3" : "4 2"),
    ...line(3, "1.5 2"),
    ...(d.samples.length ? [] : [mark("text", none, "not measured")]),
  ];
}
function plannedMarks(view, d, { Y }) {
  const y = Y(d.planned.asked),
    stack = [],
    rows = [];
  let base = 0;
  for (const p of view.parts) {
    const held = d.planned[p.name];
    if (!held) continue;
    const height = Math.max(0.5, Y(base) - Y(base + held)),
      look = { fill: hatched(p.color), stroke: p.color, "data-part": p.name };
    stack.push(mark("rect", { x: RIGHT_EDGE + 10, y: Y(base + held), width: STACK - 12, height, ...look }));
    rows.push([p.label, fmtBytes(held)]);
    base += held;
  }
  rows.push(["in all", fmtBytes(d.planned.asked)], ["the device has", fmtBytes(d.limit_bytes)]);
  for (const names of d.bases) rows.push(["one base for", names]);
  const most = { x: RIGHT_EDGE - 4, y: y + 11, "text-anchor": "end", "font-size": 9, class: "hf-sub" };
  return [
    mark("line", { x1: LEFT, x2: W - 4, y1: y, y2: y, class: "hf-edge hf-planned-peak", "stroke-dasharray": "5 3" }),
    mark("text", most, `planned at most ${fmtBytes(d.planned.asked)}`),
    group({ class: "hf-predicted hf-mark" }, stack, { heading: `device ${d.device}: predicted`, rows }),
    mark("text", { x: RIGHT_EDGE + 10, y: BOTTOM + 12, "font-size": 9, class: "hf-sub" }, "predicted"),
  ];
}
function legendOf(view) {
  const entries = view.parts.map((p) => [p.label, [sample({ rx: 2, fill: p.color })]]),
    dashed = (dash) => [
      mark("path", { d: "M1,6 h14", fill: "none", class: "hf-edge", "stroke-width": 1.5, "stroke-dasharray": dash }),
    ];
  entries.push(["predicted", [planned("#77808a", { rx: 2 })]]);
  if (view.devices.some((d) => d.calls.some((c) => c.asleep_bytes)))
    entries.push([
      "rollout asleep: not there",
      [sample({ rx: 2, fill: "none", stroke: colorOf(view, "rollout"), "stroke-dasharray": "2 2" })],
    ]);
  entries.push(["resident memory of the process, at each span's end", dashed(null)]);
  if (view.devices.some((d) => d.samples.some((s) => !isMissing(s[2]))))
    entries.push(["allocated on the GPU", dashed("4 2")], ["reserved on the GPU", dashed("1.5 2")]);
  return entries;
}

// ---- draw
function drawDevice(view, d, host) {
  const size = { width: W, height: H_, viewBox: `0 0 ${W} ${H_}`, role: "img", class: "hf-device-memory" };
  const svg = S("svg", { ...size, "data-device": d.device, "font-size": 10, "aria-label": `memory of device ${d.device}` }, host);
  return paint(layout(view, d), svg, hatches(svg));
}
function drawBelow(view, below) {
  below.replaceChildren();
  for (const names of new Set(view.devices.flatMap((d) => d.bases)))
    H("p", { class: "hf-dim hf-base" }, below, `weights: one frozen base for ${names}`);
  legend(below, legendOf(view));
}

function render({ model, el }) {
  const f = frame(el, "memory");
  let marks = [],
    current = -1;
  function draw() {
    const view = model.get("view"),
      grid = H("div", { style: "display:flex;flex-wrap:wrap;gap:6px 14px" });
    f.title.textContent = view.title;
    marks = view.devices.flatMap((d) => drawDevice(view, d, grid));
    marks.forEach(([node], i) => hovered(f, node, (x, y) => point(i, x, y, false)));
    if (!view.devices.length) H("p", { class: "hf-dim" }, grid, "no device has a role yet");
    if (view.left_out)
      H("p", { class: "hf-dim" }, grid, `the ${view.devices.length} fullest devices; ${view.left_out} more are in to_pandas()`);
    f.host.replaceChildren(grid);
    drawBelow(view, f.below);
  }

  // ---- interact
  function point(i, x, y, spoken) {
    const { heading, rows } = marks[i][1].tip;
    f.showTip(x, y, heading, rows, spoken);
  }
  keyboard(f.host, {
    step: (dx, dy) => {
      current = Math.max(0, Math.min(marks.length - 1, current + (dx || dy)));
    },
    show: () => {
      if (!marks[current]) return;
      const r = marks[current][0].getBoundingClientRect();
      point(current, r.left + r.width / 2, r.top + r.height / 2, true);
    },
    keys: { Escape: () => f.hideTip() },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  draw();
  return redrawn({ model, f, onView: coalesced(draw) });
}
export default { render };
