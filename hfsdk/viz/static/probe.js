// A reward sample by sample: small panels of scores over what they may follow, and of seconds; one sample is a mark in each.
import { group, hovered, legend, mark, paint, redrawn, roomOf } from "./chart.js";
import { coalesced, fmtCount, fmtSeconds, frame, H, isMissing, keyboard, shorten, titledSvg } from "./core.js";

const HEIGHT = 196,
  TOP = 34,
  BOTTOM = 40,
  LEFT = 52,
  RIGHT = 14,
  STRIP = 12,
  WORDS = {
    scored: "scored",
    flat: "in a group of equal scores",
    failed: "failed",
    unscored: "not scored (None)",
  };

// ---- layout: panels as groups; the tip of a mark is {i, x, y}, its sample and where in the picture it stands
function layout(view, width) {
  const across = Math.max(1, Math.min(view.panels.length, Math.floor(width / 290))),
    cell = width / across,
    order = view.rows.map((_, i) => i).sort((a, b) => (view.rows[b].seconds || 0) - (view.rows[a].seconds || 0));
  const marks = view.panels.map((p, k) => {
    const left = (k % across) * cell,
      top = Math.floor(k / across) * HEIGHT,
      w = cell - LEFT - RIGHT,
      inside = p.key === "seconds" ? secondsMarks(view, p, w, order) : scatterMarks(view, p, w);
    for (const m of inside) if (m.tip) Object.assign(m.tip, { x: left + m.tip.x, y: top + m.tip.y });
    return group({ transform: `translate(${left} ${top})`, "data-panel": p.key }, inside);
  });
  return { marks, height: HEIGHT * Math.ceil(view.panels.length / across) };
}
// the room that values take: with a margin, and the least and the most of them
function extent(values) {
  const known = values.filter((x) => !isMissing(x));
  let low = Math.min(...known),
    high = Math.max(...known);
  if (!known.length) [low, high] = [0, 1];
  const room = high > low ? 0.05 * (high - low) : Math.abs(high) || 1;
  return [low - room, high + room, known.length ? Math.min(...known) : null, known.length ? Math.max(...known) : null];
}
function axisMarks(p, x, y, w, yText, xText) {
  const bottom = HEIGHT - BOTTOM,
    tick = { "font-size": 10, class: "hf-sub" },
    end = LEFT + w;
  const marks = [
    mark("rect", { x: LEFT, y: TOP, width: w, height: bottom - TOP, class: "hf-panel" }),
    mark("line", { x1: LEFT, x2: end, y1: bottom, y2: bottom, class: "hf-edge" }),
    mark("text", { x: LEFT, y: 14, "font-weight": 600, class: "hf-fg" }, p.key === "seconds" ? "seconds" : "score"),
  ];
  const strong = { "font-weight": p.strong ? 600 : null, class: p.strong ? "hf-fg" : "hf-sub", "data-strong": p.strong ? 1 : null };
  if (p.note) marks.push(mark("text", { x: end, y: 14, "text-anchor": "end", ...strong }, (p.strong ? "! " : "") + p.note));
  for (const value of y[2] === y[3] ? [y[2]] : [y[2], y[3]])
    if (!isMissing(value))
      marks.push(mark("text", { x: LEFT - 5, y: y.at(value) + 3.5, "text-anchor": "end", ...tick }, yText(value)));
  if (!isMissing(x[2])) {
    const under = { y: bottom + 13, ...tick };
    marks.push(mark("text", { x: Math.max(LEFT, x.at(x[2])), ...under }, xText(x[2])));
    const right = { x: Math.min(end, x.at(x[3])), y: bottom + 13, "text-anchor": "end", ...tick };
    if (x[3] !== x[2]) marks.push(mark("text", right, xText(x[3])));
  }
  const label = { x: LEFT + w / 2, y: bottom + 25, "text-anchor": "middle", class: "hf-sub" };
  return [...marks, mark("text", label, shorten(p.label, 34))];
}
function scatterMarks(view, p, w) {
  const bottom = HEIGHT - BOTTOM - STRIP,
    x = extent(view.rows.map((r) => r[p.key])),
    y = extent(view.rows.map((r) => r.score));
  x.at = (v) => LEFT + ((v - x[0]) / (x[1] - x[0])) * w;
  y.at = (v) => bottom - ((v - y[0]) / (y[1] - y[0])) * (bottom - TOP);
  const samples = view.rows.flatMap((r, i) =>
    isMissing(r[p.key])
      ? []
      : [sampleMark(view, r, x.at(r[p.key]), isMissing(r.score) ? HEIGHT - BOTTOM - STRIP / 2 : y.at(r.score), i)],
  );
  return [...axisMarks(p, x, y, w, fmtCount, fmtCount), ...samples];
}
// a cross where the reward failed, hollow where it said nothing or the same of all
function sampleMark(view, r, x, y, i) {
  const color = view.colors[r.kind],
    base = { class: "hf-mark hf-sample", "data-row": r.row, "data-kind": r.kind, stroke: color },
    tip = { i, x, y, all: true };
  if (r.kind === "failed") {
    const d = `M${x - 3.5} ${y - 3.5}l7 7M${x - 3.5} ${y + 3.5}l7 -7`;
    return mark("path", { ...base, d, "stroke-width": 1.8, fill: "none" }, undefined, tip);
  }
  const hollow = r.kind !== "scored",
    look = { fill: hollow ? "none" : color, "fill-opacity": hollow ? null : 0.65, "stroke-width": hollow ? 1.6 : 0.6 };
  return mark("circle", { ...base, cx: x, cy: y, r: 3.4, ...look }, undefined, tip);
}
function secondsMarks(view, p, w, order) {
  const bottom = HEIGHT - BOTTOM,
    most = Math.max(...view.rows.map((r) => r.seconds || 0)) || 1,
    each = w / Math.max(1, order.length),
    x = [0, order.length, null, null],
    y = [0, most, 0, most];
  x.at = (v) => LEFT + v * each;
  y.at = (v) => bottom - (v / most) * (bottom - TOP - 4);
  const bars = order.map((i, k) => {
    const r = view.rows[i],
      top = y.at(r.seconds || 0),
      gap = each > 4 ? 0.5 : 0,
      box = {
        x: x.at(k) + gap,
        y: Math.min(bottom - 1, top),
        width: Math.max(0.5, each - 2 * gap),
        height: Math.max(1, bottom - top),
      },
      look = { fill: view.colors[r.kind], class: "hf-mark hf-second", "data-row": r.row };
    return mark("rect", { ...box, ...look }, undefined, { i, x: x.at(k) + each / 2, y: top });
  });
  return [...axisMarks(p, x, y, w, fmtSeconds, fmtCount), ...bars];
}
function legendOf(view) {
  const cross = (stroke) => mark("path", { d: "M4.5 2l7 7M4.5 9l7 -7", stroke, "stroke-width": 1.8 }),
    dot = (stroke, fill) => mark("circle", { cx: 8, cy: 5.5, r: 3.6, stroke, "stroke-width": 1.6, fill });
  return Object.entries(WORDS)
    .map(([kind, words]) => [kind, words, view.rows.filter((r) => r.kind === kind).length, view.colors[kind]])
    .filter(([, , count]) => count)
    .map(([kind, words, count, color]) => [
      `${words} (${count})`,
      [kind === "failed" ? cross(color) : dot(color, kind === "scored" ? color : "none")],
    ]);
}
function tipRows(r) {
  return [
    ["sample", String(r.row)],
    ["score", isMissing(r.score) ? WORDS[r.kind] : fmtCount(r.score)],
    ...("other_score" in r ? [["other score", fmtCount(r.other_score)]] : []),
    ...(isMissing(r.seconds) ? [] : [["seconds", fmtSeconds(r.seconds)]]),
    ["tokens", fmtCount(r.tokens)],
    ...("group" in r ? [["group", String(r.group)]] : []),
    ...(r.message ? [["why", shorten(r.message, 60)]] : []),
  ];
}

// ---- draw
function drawBelow(view, below) {
  below.replaceChildren();
  const words = legend(below, legendOf(view));
  if (view.left_out) H("span", {}, words, `${view.left_out} more samples are not drawn`);
  for (const line of view.lines) H("div", { class: "hf-dim" }, below, line);
  for (const one of view.findings) H("div", { class: "hf-finding" }, below, "! " + one);
  if (!view.findings.length) H("div", { class: "hf-good" }, below, "nothing strikes");
}

function render({ model, el }) {
  const f = frame(el, "probe"),
    wide = () => roomOf(f, 300, 1080);
  let view,
    width = 0,
    marks = [],
    current = -1;
  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const scene = layout(view, width),
      svg = titledSvg(view, width, scene.height);
    marks = paint(scene.marks, svg, null).map(([node, m]) => [node, m.tip]);
    for (const [node, { i, all }] of marks) {
      if (all) node.style.pointerEvents = "all";
      hovered(f, node, (x, y) => tip(i, x, y, false));
    }
    f.host.replaceChildren(svg);
    outline();
    drawBelow(view, f.below);
  }

  // ---- interact
  // the sample that the keyboard is at, in every panel
  function outline() {
    for (const [node, { i }] of marks) node.classList.toggle("hf-current", i === current);
  }
  function tip(i, x, y, spoken) {
    f.showTip(x, y, shorten(view.rows[i].text || "(empty)", 48), tipRows(view.rows[i]), spoken);
  }
  const clear = () => {
    current = -1;
    outline();
    f.hideTip();
  };
  keyboard(f.host, {
    step: (dx, dy) => {
      current = current < 0 ? 0 : Math.max(0, Math.min(view.rows.length - 1, current + (dx || dy)));
    },
    show: () => {
      if (!view.rows.length) return;
      outline();
      const at = marks.find(([, { i }]) => i === current),
        box = f.host.getBoundingClientRect();
      if (at) tip(current, box.left + at[1].x, box.top + at[1].y, true);
    },
    keys: { Escape: clear },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  draw();
  const again = coalesced(draw);
  return redrawn({ model, f, onView: again, onResize: () => Math.abs(wide() - width) > 2 && again() });
}
export default { render };
