// The weights on each rank: those counted as a solid bar by who holds them, those planned as a hatched one below it.
import { drawnRows, group, hatched, legend, mark, paint, roomOf, sample } from "./chart.js";
import { fmtBytes, frame, H, hatches, titledSvg } from "./core.js";

const LEFT = 70,
  RIGHT = 96,
  ROW_HEIGHT = 32,
  PLANNED = "#77808a";
const partsOf = (view, r) => view.holders.filter((h) => r[h.name + "_bytes"]).map((h) => [h, r[h.name + "_bytes"]]);

// ---- layout: a row for each rank
const layout = (view, width, current) => view.ranks.map((r, i) => rowMark(view, r, i, width, i === current));
function rowMark(view, r, i, width, isCurrent) {
  const y = 6 + i * ROW_HEIGHT,
    scale = (width - LEFT - RIGHT) / view.most_bytes,
    back = { x: 0, y: y - 2, width, height: ROW_HEIGHT - 3, class: "hf-panel", "fill-opacity": isCurrent ? 1 : 0 };
  const marks = [
    mark("rect", back),
    mark("text", { x: LEFT - 8, y: y + 14, "text-anchor": "end", class: "hf-fg" }, `rank ${r.rank}`),
  ];
  let x = LEFT;
  for (const [holder, bytes] of partsOf(view, r)) {
    const box = { x, y, width: Math.max(0.5, bytes * scale), height: 14, fill: holder.color };
    marks.push(mark("rect", { ...box, "data-part": holder.name, "data-bytes": bytes }));
    x += bytes * scale;
  }
  const below = { x: LEFT, y: y + 17, width: Math.max(0.5, r.planned_bytes * scale), height: 7, fill: hatched(PLANNED) },
    twice = r.redundant_bytes ? `${fmtBytes(r.redundant_bytes)} twice` : `of ${fmtBytes(r.planned_bytes)}`;
  marks.push(
    mark("rect", { ...below, stroke: PLANNED, "stroke-width": 0.6, class: "hf-predicted" }),
    mark("text", { x: width - 8, y: y + 11, "text-anchor": "end", class: "hf-fg" }, fmtBytes(r.total_bytes)),
    mark("text", { x: width - 8, y: y + 24, "text-anchor": "end", "font-size": 10, class: "hf-sub" }, twice),
  );
  return group({ class: "hf-mark hf-row", "data-row": r.rank, "data-bytes": r.total_bytes }, marks, { row: i });
}
const legendOf = (view) => [
  ...view.holders
    .filter((h) => view.ranks.some((r) => r[h.name + "_bytes"]))
    .map((h) => [h.words, [sample({ rx: 2, fill: h.color })]]),
  ["planned for this moment", [sample({ rx: 2, stroke: PLANNED, fill: hatched(PLANNED) })]],
];
const tipRows = (view, r) => [
  ["row", String(r.rank)],
  ["moment", r.moment],
  ...partsOf(view, r).map(([h, bytes]) => [h.words, fmtBytes(bytes)]),
  ["in all", fmtBytes(r.total_bytes)],
  ["planned", fmtBytes(r.planned_bytes)],
  ["there twice", fmtBytes(r.redundant_bytes)],
];

// ---- draw
function drawBelow(view, below) {
  below.replaceChildren();
  if (!view.ranks.length) H("p", { class: "hf-dim" }, below, "no rank holds weights");
  if (view.left_out) H("p", { class: "hf-dim" }, below, `and ${view.left_out} more ranks, which hold no more than these`);
  const words = view.redundant_bytes ? `${fmtBytes(view.redundant_bytes)} are there twice` : "nothing is there twice";
  H("span", {}, legend(below, legendOf(view)), words);
}

function render({ model, el }) {
  const f = frame(el, "census"),
    current = { row: -1 },
    wide = () => roomOf(f, 420, 1000);
  let view,
    width = 0;
  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const svg = titledSvg(view, width, 10 + ROW_HEIGHT * view.ranks.length),
      rows = paint(layout(view, width, current.row), svg, hatches(svg));
    f.host.replaceChildren(svg);
    drawBelow(view, f.below);
    return rows;
  }
  const tip = (i, x, y, spoken) => f.showTip(x, y, `rank ${view.ranks[i].rank}`, tipRows(view, view.ranks[i]), spoken),
    moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.ranks, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
