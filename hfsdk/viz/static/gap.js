// Why trainer and generating engine disagree: a bar for each cause, and below them, layer by layer on a logarithmic axis, how far
// each engine's hidden states are from those of transformers in fp32.
import { drawnRows, group, legend, mark, paint, roomOf, sample } from "./chart.js";
import { fmtShare, frame, H, isMissing, shorten, titledSvg } from "./core.js";

const LEFT = 210,
  RIGHT = 150,
  ROW_HEIGHT = 22,
  LAYER_HEIGHT = 17,
  NAMED = "#b3403a";
const nats = (x) => (isMissing(x) ? "–" : `${x.toPrecision(2)} nats`);
const words = (c) => (c.named ? `${nats(c.nats)}, ${fmtShare(c.share) ?? "–"}` : c.changed ? "explains nothing" : "not needed");

// ---- layout
function layout(view, width, current) {
  const causes = 12 + ROW_HEIGHT * view.causes.length,
    layers = view.layers.length;
  return {
    height: causes + (layers ? 48 + LAYER_HEIGHT * layers : 0),
    marks: [
      ...view.causes.map((c, i) => causeMark(view, c, i, width, i === current)),
      ...(layers ? layerMarks(view, causes + 26, width) : []),
    ],
  };
}
function causeMark(view, c, i, width, isCurrent) {
  const y = 6 + i * ROW_HEIGHT,
    back = { x: 0, y: y - 2, width, height: ROW_HEIGHT - 2, class: "hf-panel", "fill-opacity": isCurrent ? 1 : 0 },
    look = { "font-weight": c.named ? 600 : null, class: c.named ? "hf-fg" : "hf-sub" },
    marks = [mark("rect", back), mark("text", { x: LEFT - 8, y: y + 13, "text-anchor": "end", ...look }, shorten(c.words, 34))];
  if (c.named) {
    const w = Math.max(2, ((width - LEFT - RIGHT) * Math.max(0, c.nats ?? 0)) / view.most_nats);
    marks.push(mark("rect", { x: LEFT, y: y + 2, width: w, height: 13, rx: 2, fill: NAMED, "data-part": c.cause }));
    marks.push(mark("text", { x: LEFT + w + 5, y: y + 13, class: "hf-fg" }, words(c)));
  } else marks.push(mark("text", { x: LEFT + 2, y: y + 13, "font-size": 10, class: "hf-sub" }, words(c)));
  return group({ class: "hf-mark hf-row", "data-row": c.cause, "data-nats": c.nats }, marks, { row: i });
}
function layerMarks(view, top, width) {
  const [least, most] = view.axis.map(Math.log10),
    room = width - LEFT - RIGHT,
    within = (x) => Math.min(most, Math.max(least, Math.log10(x || view.axis[0]))),
    place = (x) => LEFT + (room * (within(x) - least)) / (most - least),
    bottom = top + LAYER_HEIGHT * view.layers.length,
    heading = "Hidden states at the worst token: relative distance from transformers in fp32";
  const marks = [mark("text", { x: 0, y: top - 8, class: "hf-fg", "font-weight": 600 }, heading)];
  for (let power = least; power <= most; power += 2) {
    const x = place(10 ** power),
      under = { x, y: bottom + 13, "text-anchor": "middle", "font-size": 10, class: "hf-sub" };
    marks.push(mark("line", { x1: x, x2: x, y1: top, y2: bottom, class: "hf-grid" }));
    marks.push(mark("text", under, power ? `1e${power}` : "1"));
  }
  const layers = view.layers.map((l, i) => {
    const y = top + i * LAYER_HEIGHT,
      name = mark("text", { x: LEFT - 8, y: y + 12, "text-anchor": "end", class: "hf-fg" }, l.place),
      known = view.engines.filter((e) => !isMissing(l[e.name]));
    const engines = known.map((e) => engineMark(e, place(l[e.name]), y, l[e.name]));
    return group({ class: "hf-layer", "data-place": l.place }, [name, ...engines]);
  });
  return [...marks, ...layers];
}
// a square for the generating engine, a ring for bf16, a dot for the others
function engineMark(e, x, y, far) {
  const look = { fill: e.name === "bf16" ? "none" : e.color, stroke: e.color, "stroke-width": 1.4 },
    at = { ...look, "data-engine": e.name, "data-far": far };
  return e.name === "rollout"
    ? mark("rect", { x: x - 4, y: y + 4, width: 8, height: 8, ...at, "fill-opacity": 0.75 })
    : mark("circle", { cx: x, cy: y + 8, r: e.name === "bf16" ? 5 : 3.5, ...at });
}
function legendOf(view) {
  const square = (e) => mark("rect", { x: 4, y: 1, width: 8, height: 8, fill: e.color }),
    ring = (e) => ({ cx: 8, cy: 5, r: 4, stroke: e.color, "stroke-width": 1.4, fill: e.name === "bf16" ? "none" : e.color }),
    engines = view.layers.length ? view.engines : [];
  return [
    ["what a cause has of the gap", [sample({ rx: 2, fill: NAMED })]],
    ...engines.map((e) => [e.words, [e.name === "rollout" ? square(e) : mark("circle", ring(e))]]),
  ];
}
const tipRows = (c) => [
  ["row", c.cause],
  ["changed", c.changed || "nothing"],
  ["comes to", words(c)],
  ...(c.detail ? [["exactly", c.detail]] : []),
];

// ---- draw
function drawBelow(view, below) {
  below.replaceChildren();
  const l = legend(below, legendOf(view)),
    w = view.worst,
    three = (x) => (isMissing(x) ? "–" : x.toFixed(3));
  if (view.left_out) H("span", {}, l, `${view.left_out} layers in the middle are left out`);
  const token = `row ${w.row}, response token ${w.token}${w.text ? `, the end of “${w.text}”` : ""}`;
  H("p", { class: "hf-dim" }, below, `worst token: ${token}: trainer ${three(w.trainer)}, recorded ${three(w.recorded)}`);
}

function render({ model, el }) {
  const f = frame(el, "gap"),
    verdict = f.root.insertBefore(H("p", {}), f.host),
    current = { row: -1 },
    wide = () => roomOf(f, 520, 1000);
  let view,
    width = 0;
  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const { height, marks } = layout(view, width, current.row),
      svg = titledSvg(view, width, height),
      rows = paint(marks, svg, null);
    verdict.textContent = view.summary.slice(view.title.length + 2);
    f.host.replaceChildren(svg);
    drawBelow(view, f.below);
    return rows;
  }
  const tip = (i, x, y, spoken) => f.showTip(x, y, view.causes[i].words, tipRows(view.causes[i]), spoken),
    moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.causes, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
