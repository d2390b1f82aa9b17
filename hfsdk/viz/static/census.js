// The weights on each rank: those counted as a solid bar by who holds them, those planned as a hatched one below it.
import { drawnRows, fmtBytes, frame, H, hatches, S, swatch, titledSvg } from "./core.js";

const LEFT = 70,
  RIGHT = 96,
  ROW_HEIGHT = 32,
  PLANNED = "#77808a";

function render({ model, el }) {
  const f = frame(el, "census");
  let view,
    width = 0;
  const current = { row: -1 };
  const wide = () => Math.max(420, Math.min(1000, f.root.clientWidth - 16 || 900));
  const partsOf = (r) => view.holders.filter((h) => r[h.name + "_bytes"]).map((h) => [h, r[h.name + "_bytes"]]);

  function bar(svg, hatch, r, i) {
    const y = 6 + i * ROW_HEIGHT,
      scale = (width - LEFT - RIGHT) / view.most_bytes,
      g = S("g", { class: "hf-mark hf-row", "data-row": r.rank, "data-bytes": r.total_bytes }, svg);
    S("rect", { x: 0, y: y - 2, width, height: ROW_HEIGHT - 3, class: "hf-panel", "fill-opacity": i === current.row ? 1 : 0 }, g);
    S("text", { x: LEFT - 8, y: y + 14, "text-anchor": "end", class: "hf-fg" }, g, `rank ${r.rank}`);
    let x = LEFT;
    for (const [holder, bytes] of partsOf(r)) {
      const w = Math.max(0.5, bytes * scale);
      S("rect", { x, y, width: w, height: 14, fill: holder.color, "data-part": holder.name, "data-bytes": bytes }, g);
      x += bytes * scale;
    }
    S(
      "rect",
      {
        x: LEFT,
        y: y + 17,
        width: Math.max(0.5, r.planned_bytes * scale),
        height: 7,
        fill: hatch(PLANNED),
        stroke: PLANNED,
        "stroke-width": 0.6,
        class: "hf-predicted",
      },
      g,
    );
    S("text", { x: width - 8, y: y + 11, "text-anchor": "end", class: "hf-fg" }, g, fmtBytes(r.total_bytes));
    S(
      "text",
      { x: width - 8, y: y + 24, "text-anchor": "end", "font-size": 10, class: "hf-sub" },
      g,
      r.redundant_bytes ? `${fmtBytes(r.redundant_bytes)} twice` : `of ${fmtBytes(r.planned_bytes)}`,
    );
    g.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
    g.addEventListener("pointerleave", () => f.hideTip());
  }

  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const height = 10 + ROW_HEIGHT * view.ranks.length;
    const svg = titledSvg(view, width, height);
    const hatch = hatches(svg);
    view.ranks.forEach((r, i) => bar(svg, hatch, r, i));
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    if (!view.ranks.length) H("p", { class: "hf-dim" }, f.below, "no rank holds weights");
    if (view.left_out) H("p", { class: "hf-dim" }, f.below, `and ${view.left_out} more ranks, which hold no more than these`);
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const h of view.holders)
      if (view.ranks.some((r) => r[h.name + "_bytes"]))
        swatch(legend, h.words, (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: h.color }, s));
    swatch(legend, "planned for this moment", (s) =>
      S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, stroke: PLANNED, fill: hatches(s)(PLANNED) }, s),
    );
    H("span", {}, legend, view.redundant_bytes ? `${fmtBytes(view.redundant_bytes)} are there twice` : "nothing is there twice");
  }

  function tip(i, x, y, spoken) {
    const r = view.ranks[i];
    const rows = [
      ["row", String(r.rank)],
      ["moment", r.moment],
      ...partsOf(r).map(([h, bytes]) => [h.words, fmtBytes(bytes)]),
      ["in all", fmtBytes(r.total_bytes)],
      ["planned", fmtBytes(r.planned_bytes)],
      ["there twice", fmtBytes(r.redundant_bytes)],
    ];
    f.showTip(x, y, `rank ${r.rank}`, rows, spoken);
  }
  const moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.ranks, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
