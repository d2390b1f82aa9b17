// A reward sample by sample: small panels of scores over what they may follow, and of seconds; one sample is a mark in each.
import { coalesced, fmtCount, fmtSeconds, frame, H, isMissing, keyboard, S, shorten, swatch, titledSvg } from "./core.js";

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

function render({ model, el }) {
  const f = frame(el, "probe");
  let view,
    width = 0,
    marks = [],
    order = [],
    current = -1;
  const wide = () => Math.max(300, Math.min(1080, f.root.clientWidth - 16 || 900));
  const extent = (values) => {
    const known = values.filter((x) => !isMissing(x));
    let low = Math.min(...known),
      high = Math.max(...known);
    if (!known.length) [low, high] = [0, 1];
    const room = high > low ? 0.05 * (high - low) : Math.abs(high) || 1;
    return [low - room, high + room, known.length ? Math.min(...known) : null, known.length ? Math.max(...known) : null];
  };

  function axes(g, p, x, y, w, yText, xText) {
    const bottom = HEIGHT - BOTTOM;
    S("rect", { x: LEFT, y: TOP, width: w, height: bottom - TOP, class: "hf-panel" }, g);
    S("line", { x1: LEFT, x2: LEFT + w, y1: bottom, y2: bottom, class: "hf-edge" }, g);
    S("text", { x: LEFT, y: 14, "font-weight": 600, class: "hf-fg" }, g, p.key === "seconds" ? "seconds" : "score");
    if (p.note)
      S(
        "text",
        {
          x: LEFT + w,
          y: 14,
          "text-anchor": "end",
          "font-weight": p.strong ? 600 : null,
          class: p.strong ? "hf-fg" : "hf-sub",
          "data-strong": p.strong ? 1 : null,
        },
        g,
        (p.strong ? "! " : "") + p.note,
      );
    const tick = { "font-size": 10, class: "hf-sub" };
    for (const value of y[2] === y[3] ? [y[2]] : [y[2], y[3]])
      if (!isMissing(value)) S("text", { x: LEFT - 5, y: y.at(value) + 3.5, "text-anchor": "end", ...tick }, g, yText(value));
    if (!isMissing(x[2])) {
      S("text", { x: Math.max(LEFT, x.at(x[2])), y: bottom + 13, ...tick }, g, xText(x[2]));
      if (x[3] !== x[2])
        S("text", { x: Math.min(LEFT + w, x.at(x[3])), y: bottom + 13, "text-anchor": "end", ...tick }, g, xText(x[3]));
    }
    S("text", { x: LEFT + w / 2, y: bottom + 25, "text-anchor": "middle", class: "hf-sub" }, g, shorten(p.label, 34));
  }

  function mark(g, r, x, y, i) {
    const color = view.colors[r.kind],
      base = { class: "hf-mark hf-sample", "data-row": r.row, "data-kind": r.kind, stroke: color };
    let e;
    if (r.kind === "failed") {
      const d = `M${x - 3.5} ${y - 3.5}l7 7M${x - 3.5} ${y + 3.5}l7 -7`;
      e = S("path", { ...base, d, "stroke-width": 1.8, fill: "none" }, g);
    } else {
      const hollow = r.kind !== "scored";
      e = S("circle", { ...base, cx: x, cy: y, r: 3.4, fill: hollow ? "none" : color, "fill-opacity": hollow ? null : 0.65 }, g);
      e.setAttribute("stroke-width", hollow ? 1.6 : 0.6);
    }
    e.style.pointerEvents = "all";
    e.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
    e.addEventListener("pointerleave", () => f.hideTip());
    marks.push([i, e, x, y]);
  }

  function scatter(g, p, w) {
    const bottom = HEIGHT - BOTTOM - STRIP,
      x = extent(view.rows.map((r) => r[p.key])),
      y = extent(view.rows.map((r) => r.score));
    x.at = (v) => LEFT + ((v - x[0]) / (x[1] - x[0])) * w;
    y.at = (v) => bottom - ((v - y[0]) / (y[1] - y[0])) * (bottom - TOP);
    axes(g, p, x, y, w, fmtCount, fmtCount);
    view.rows.forEach((r, i) => {
      if (isMissing(r[p.key])) return;
      mark(g, r, x.at(r[p.key]), isMissing(r.score) ? HEIGHT - BOTTOM - STRIP / 2 : y.at(r.score), i);
    });
  }

  function seconds(g, p, w) {
    const bottom = HEIGHT - BOTTOM,
      most = Math.max(...view.rows.map((r) => r.seconds || 0)) || 1,
      each = w / Math.max(1, order.length),
      x = [0, order.length, null, null],
      y = [0, most, 0, most];
    x.at = (v) => LEFT + v * each;
    y.at = (v) => bottom - (v / most) * (bottom - TOP - 4);
    axes(g, p, x, y, w, fmtSeconds, fmtCount);
    order.forEach((i, k) => {
      const r = view.rows[i],
        top = y.at(r.seconds || 0);
      const e = S(
        "rect",
        {
          x: x.at(k) + (each > 4 ? 0.5 : 0),
          y: Math.min(bottom - 1, top),
          width: Math.max(0.5, each - (each > 4 ? 1 : 0)),
          height: Math.max(1, bottom - top),
          fill: view.colors[r.kind],
          class: "hf-mark hf-second",
          "data-row": r.row,
        },
        g,
      );
      e.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
      e.addEventListener("pointerleave", () => f.hideTip());
      marks.push([i, e, x.at(k) + each / 2, top]);
    });
  }

  function draw() {
    view = model.get("view");
    width = wide();
    marks = [];
    order = view.rows.map((_, i) => i).sort((a, b) => (view.rows[b].seconds || 0) - (view.rows[a].seconds || 0));
    f.title.textContent = view.title;
    const across = Math.max(1, Math.min(view.panels.length, Math.floor(width / 290))),
      cell = width / across,
      svg = titledSvg(view, width, HEIGHT * Math.ceil(view.panels.length / across));
    view.panels.forEach((p, k) => {
      const left = (k % across) * cell,
        top = Math.floor(k / across) * HEIGHT,
        g = S("g", { transform: `translate(${left} ${top})`, "data-panel": p.key }, svg),
        from = marks.length;
      (p.key === "seconds" ? seconds : scatter)(g, p, cell - LEFT - RIGHT);
      for (const m of marks.slice(from)) m.push(left, top);
    });
    f.host.replaceChildren(svg);
    point();
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const [kind, words] of Object.entries(WORDS)) {
      const count = view.rows.filter((r) => r.kind === kind).length;
      if (count)
        swatch(legend, `${words} (${count})`, (s) =>
          kind === "failed"
            ? S("path", { d: "M4.5 2l7 7M4.5 9l7 -7", stroke: view.colors[kind], "stroke-width": 1.8 }, s)
            : S(
                "circle",
                {
                  cx: 8,
                  cy: 5.5,
                  r: 3.6,
                  stroke: view.colors[kind],
                  "stroke-width": 1.6,
                  fill: kind === "scored" ? view.colors[kind] : "none",
                },
                s,
              ),
        );
    }
    if (view.left_out) H("span", {}, legend, `${view.left_out} more samples are not drawn`);
    for (const line of view.lines) H("div", { class: "hf-dim" }, f.below, line);
    for (const one of view.findings) H("div", { class: "hf-finding" }, f.below, "! " + one);
    if (!view.findings.length) H("div", { class: "hf-good" }, f.below, "nothing strikes");
  }

  // the sample that the keyboard is at, in every panel
  function point() {
    for (const [i, e] of marks) e.classList.toggle("hf-current", i === current);
  }

  function tip(i, x, y, spoken) {
    const r = view.rows[i];
    f.showTip(
      x,
      y,
      shorten(r.text || "(empty)", 48),
      [
        ["sample", String(r.row)],
        ["score", isMissing(r.score) ? WORDS[r.kind] : fmtCount(r.score)],
        ...("other_score" in r ? [["other score", fmtCount(r.other_score)]] : []),
        ...(isMissing(r.seconds) ? [] : [["seconds", fmtSeconds(r.seconds)]]),
        ["tokens", fmtCount(r.tokens)],
        ...("group" in r ? [["group", String(r.group)]] : []),
        ...(r.message ? [["why", shorten(r.message, 60)]] : []),
      ],
      spoken,
    );
  }

  keyboard(f.host, {
    step: (dx, dy) => {
      current = current < 0 ? 0 : Math.max(0, Math.min(view.rows.length - 1, current + (dx || dy)));
    },
    show: () => {
      if (!view.rows.length) return;
      point();
      const at = marks.find(([i]) => i === current),
        box = f.host.getBoundingClientRect();
      if (at) tip(current, box.left + at[4] + at[2], box.top + at[5] + at[3], true);
    },
    keys: {
      Escape: () => {
        current = -1;
        point();
        f.hideTip();
      },
    },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  draw();
  const again = coalesced(draw);
  model.on("change:view", again);
  const resize = new ResizeObserver(() => Math.abs(wide() - width) > 2 && again());
  resize.observe(f.root);
  return () => {
    model.off("change:view", again);
    resize.disconnect();
  };
}
export default { render };
