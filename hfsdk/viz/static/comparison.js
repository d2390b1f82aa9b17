// Two accounts of the same calls as paired bars; measured solid, predicted and guessed hatched; signed errors at the right.
import { drawnRows, fmtSeconds, frame, H, hatches, isMissing, S, shorten, swatch, titledSvg } from "./core.js";

const LEFT = 210,
  RIGHT = 190,
  ROW_HEIGHT = 34;

function render({ model, el }) {
  const f = frame(el, "comparison");
  let view;
  const current = { row: -1 };
  function errorText(r) {
    if (isMissing(r.error_s)) return "";
    const sign = r.error_s >= 0 ? "+" : "−";
    return (
      (isMissing(r.error) ? "" : `${sign}${Math.abs(100 * r.error).toFixed(0)} % `) + `(${sign}${fmtSeconds(Math.abs(r.error_s))})`
    );
  }
  function draw() {
    view = model.get("view");
    f.title.textContent = view.title;
    const width = Math.max(520, Math.min(1000, f.root.clientWidth - 16 || 900)),
      height = 10 + ROW_HEIGHT * view.rows.length;
    const svg = titledSvg(view, width, height);
    const hatch = hatches(svg),
      scale = (width - LEFT - RIGHT) / view.most_s;
    view.rows.forEach((r, i) => {
      const y = 6 + i * ROW_HEIGHT,
        total = i === view.rows.length - 1;
      const g = S(
        "g",
        { class: "hf-mark hf-row" + (i === current.row ? " hf-current-row" : ""), "data-row": i, "data-error": r.error_s },
        svg,
      );
      S("rect", { x: 0, y: y - 2, width, height: ROW_HEIGHT - 3, class: "hf-panel", "fill-opacity": i === current.row ? 1 : 0 }, g);
      if (total) S("line", { x1: 8, x2: width - 8, y1: y - 4, y2: y - 4, class: "hf-grid" }, g);
      S(
        "text",
        { x: LEFT - 8, y: y + 17, "text-anchor": "end", "font-weight": total ? 600 : null, class: "hf-fg" },
        g,
        shorten(r.call, 32),
      );
      ["this", "other"].forEach((key, k) => {
        const s = r[key + "_s"],
          color = view.colors[key],
          y0 = y + 1 + 13 * k;
        if (isMissing(s)) {
          S("text", { x: LEFT + 2, y: y0 + 10, "font-size": 10, "font-style": "italic", class: "hf-sub" }, g, "no such call");
          return;
        }
        const predicted = view[key].source !== "measured";
        S(
          "rect",
          {
            x: LEFT,
            y: y0,
            width: Math.max(1, s * scale),
            height: 11,
            rx: 2,
            fill: predicted ? hatch(color) : color,
            stroke: color,
            class: `hf-bar-${key}` + (predicted ? " hf-predicted" : ""),
          },
          g,
        );
        S("text", { x: LEFT + s * scale + 5, y: y0 + 9.5, "font-size": 10, class: "hf-sub" }, g, fmtSeconds(s));
      });
      S("text", { x: width - 8, y: y + 17, "text-anchor": "end", class: "hf-fg hf-error-text" }, g, errorText(r));
      g.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
      g.addEventListener("pointerleave", () => f.hideTip());
    });
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const key of ["this", "other"]) {
      const a = view[key],
        color = view.colors[key];
      swatch(legend, a.source === "guess" ? a.title : `${a.title} (${a.source})`, (s) =>
        S(
          "rect",
          { x: 1, y: 1, width: 14, height: 9, rx: 2, stroke: color, fill: a.source === "measured" ? color : hatches(s)(color) },
          s,
        ),
      );
    }
  }
  function tip(i, x, y, spoken) {
    const r = view.rows[i];
    f.showTip(
      x,
      y,
      r.call,
      [
        ["row", String(i)],
        [view.this.title, fmtSeconds(r.this_s)],
        [view.other.title, fmtSeconds(r.other_s)],
        ["error", errorText(r) || null],
      ],
      spoken,
    );
  }
  return drawnRows({ model, f, current, rows: () => view.rows, draw, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
