// What every device holds through one step: tensors by what they are for after each call, the process, and the plan hatched beside.
import { coalesced, fmtBytes, fmtSeconds, frame, H, hatches, isMissing, keyboard, S, swatch } from "./core.js";

const W = 470,
  H_ = 176,
  LEFT = 64,
  STACK = 50,
  TOP = 22,
  BOTTOM = H_ - 20,
  RIGHT_EDGE = W - STACK - 14;

function render({ model, el }) {
  const f = frame(el, "memory");
  let view,
    marks = [],
    current = -1;
  const colorOf = (name) => view.parts.find((p) => p.name === name).color;

  function point(i, x, y, spoken) {
    const m = marks[i];
    if (m) f.showTip(x, y, m.heading, m.rows, spoken);
  }
  function addMark(node, heading, rows) {
    node.classList.add("hf-mark");
    const i = marks.push({ node, heading, rows }) - 1;
    node.addEventListener("pointermove", (ev) => point(i, ev.clientX, ev.clientY, false));
    node.addEventListener("pointerleave", () => f.hideTip());
  }

  function device(d, host) {
    const svg = S(
      "svg",
      {
        width: W,
        height: H_,
        viewBox: `0 0 ${W} ${H_}`,
        role: "img",
        class: "hf-device-memory",
        "data-device": d.device,
        "font-size": 10,
        "aria-label": `memory of device ${d.device}`,
      },
      host,
    );
    const hatch = hatches(svg),
      X = (t) => LEFT + (t / view.duration_s) * (RIGHT_EDGE - LEFT),
      Y = (b) => BOTTOM - (b / d.top_bytes) * (BOTTOM - TOP);
    S("text", { x: 4, y: 13, "font-weight": 600, class: "hf-fg" }, svg, `device ${d.device} (${d.name})`);
    S("rect", { x: LEFT, y: TOP, width: RIGHT_EDGE - LEFT, height: BOTTOM - TOP, class: "hf-panel" }, svg);
    for (const share of [0, 0.5, 1]) {
      const amount = (share * d.top_bytes) / 1.08;
      S("line", { x1: LEFT, x2: RIGHT_EDGE, y1: Y(amount), y2: Y(amount), class: "hf-grid" }, svg);
      S(
        "text",
        { x: LEFT - 4, y: Y(amount) + 3, "text-anchor": "end", "font-size": 9, class: "hf-sub" },
        svg,
        fmtBytes(Math.round(amount)),
      );
    }
    for (const c of d.calls) {
      const g = S("g", { "data-row": c.row, "data-call": c.call, class: "hf-held" }, svg);
      let base = 0;
      const rows = [
        ["row", String(c.row)],
        ["from, to", `${fmtSeconds(c.start_s)}, ${fmtSeconds(c.end_s)}`],
      ];
      for (const p of view.parts) {
        const held = c[p.name + "_bytes"];
        if (!held) continue;
        S(
          "rect",
          {
            x: X(c.start_s),
            y: Y(base + held),
            width: Math.max(1, X(c.end_s) - X(c.start_s)),
            height: Y(base) - Y(base + held),
            fill: view.predicted ? hatch(p.color) : p.color,
            "data-part": p.name,
            "data-bytes": held,
          },
          g,
        );
        rows.push([p.label, fmtBytes(held)]);
        base += held;
      }
      rows.push(["tensors in all", fmtBytes(base)]);
      for (const names of d.bases) rows.push(["one base for", names]);
      if (c.asleep_bytes) {
        S(
          "rect",
          {
            x: X(c.start_s),
            y: Y(base + c.asleep_bytes),
            width: Math.max(1, X(c.end_s) - X(c.start_s)),
            height: Y(base) - Y(base + c.asleep_bytes),
            fill: "transparent",
            stroke: colorOf("rollout"),
            "stroke-dasharray": "2 2",
            "data-part": "asleep",
            "data-bytes": c.asleep_bytes,
          },
          g,
        );
        rows.push(["asleep: not there", fmtBytes(c.asleep_bytes)]);
      }
      if (!isMissing(c.rss_bytes)) rows.push(["resident (process)", fmtBytes(c.rss_bytes)]);
      if (!isMissing(c.allocated_bytes))
        rows.push(["allocated on the GPU", fmtBytes(c.allocated_bytes)], ["reserved on the GPU", fmtBytes(c.reserved_bytes)]);
      addMark(g, `after ${c.call}${view.predicted ? ": predicted" : ""}`, rows);
    }
    const line = (k, dash) => {
      const known = d.samples.filter((s) => !isMissing(s[k]));
      if (known.length)
        S(
          "path",
          {
            d: known.map((s, i) => `${i ? "L" : "M"}${X(s[0]).toFixed(1)},${Y(s[k]).toFixed(1)}`).join(""),
            fill: "none",
            class: "hf-edge hf-gauge",
            "stroke-width": 1.5,
            "stroke-dasharray": dash,
            "pointer-events": "none",
          },
          svg,
        );
    };
    line(1, view.predicted ? "4 3" : null);
    line(2, view.predicted ? "4 3" : "4 2");
    line(3, "1.5 2");
    if (!d.samples.length)
      S("text", { x: LEFT + 8, y: (TOP + BOTTOM) / 2, "font-style": "italic", class: "hf-sub hf-nomeasure" }, svg, "not measured");
    if (d.planned) {
      const y = Y(d.planned.asked);
      S("line", { x1: LEFT, x2: W - 4, y1: y, y2: y, class: "hf-edge hf-planned-peak", "stroke-dasharray": "5 3" }, svg);
      S(
        "text",
        { x: RIGHT_EDGE - 4, y: y + 11, "text-anchor": "end", "font-size": 9, class: "hf-sub" },
        svg,
        `planned at most ${fmtBytes(d.planned.asked)}`,
      );
      const g = S("g", { class: "hf-predicted" }, svg),
        rows = [];
      let base = 0;
      for (const p of view.parts) {
        const held = d.planned[p.name];
        if (!held) continue;
        S(
          "rect",
          {
            x: RIGHT_EDGE + 10,
            y: Y(base + held),
            width: STACK - 12,
            height: Math.max(0.5, Y(base) - Y(base + held)),
            fill: hatch(p.color),
            stroke: p.color,
            "data-part": p.name,
          },
          g,
        );
        rows.push([p.label, fmtBytes(held)]);
        base += held;
      }
      rows.push(["in all", fmtBytes(d.planned.asked)], ["the device has", fmtBytes(d.limit_bytes)]);
      for (const names of d.bases) rows.push(["one base for", names]);
      addMark(g, `device ${d.device}: predicted`, rows);
      S("text", { x: RIGHT_EDGE + 10, y: BOTTOM + 12, "font-size": 9, class: "hf-sub" }, svg, "predicted");
    }
    if (d.calls.length || d.samples.length)
      for (const [t, anchor] of [
        [0, "start"],
        [view.duration_s, "end"],
      ])
        S("text", { x: X(t), y: BOTTOM + 12, "text-anchor": anchor, "font-size": 9, class: "hf-sub" }, svg, fmtSeconds(t));
  }

  function draw() {
    view = model.get("view");
    marks = [];
    f.title.textContent = view.title;
    const grid = H("div", { style: "display:flex;flex-wrap:wrap;gap:6px 14px" });
    for (const d of view.devices) device(d, grid);
    if (!view.devices.length) H("p", { class: "hf-dim" }, grid, "no device has a role yet");
    if (view.left_out)
      H("p", { class: "hf-dim" }, grid, `the ${view.devices.length} fullest devices; ${view.left_out} more are in to_pandas()`);
    f.host.replaceChildren(grid);
    f.below.replaceChildren();
    for (const names of new Set(view.devices.flatMap((d) => d.bases)))
      H("p", { class: "hf-dim hf-base" }, f.below, `weights: one frozen base for ${names}`);
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const p of view.parts)
      swatch(legend, p.label, (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: p.color }, s));
    swatch(legend, "predicted", (s) =>
      S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: hatches(s)("#77808a"), stroke: "#77808a" }, s),
    );
    if (view.devices.some((d) => d.calls.some((c) => c.asleep_bytes)))
      swatch(legend, "rollout asleep: not there", (s) =>
        S(
          "rect",
          { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: "none", stroke: colorOf("rollout"), "stroke-dasharray": "2 2" },
          s,
        ),
      );
    const dashed = (dash) => (s) =>
      S("path", { d: "M1,6 h14", fill: "none", class: "hf-edge", "stroke-width": 1.5, "stroke-dasharray": dash }, s);
    swatch(legend, "resident memory of the process, at each span's end", dashed(null));
    if (view.devices.some((d) => d.samples.some((s) => !isMissing(s[2])))) {
      swatch(legend, "allocated on the GPU", dashed("4 2"));
      swatch(legend, "reserved on the GPU", dashed("1.5 2"));
    }
  }
  keyboard(f.host, {
    step: (dx, dy) => {
      current = Math.max(0, Math.min(marks.length - 1, current + (dx || dy)));
    },
    show: () => {
      const m = marks[current];
      if (!m) return;
      const r = m.node.getBoundingClientRect();
      point(current, r.left + r.width / 2, r.top + r.height / 2, true);
    },
    keys: { Escape: () => f.hideTip() },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  draw();
  const again = coalesced(draw);
  model.on("change:view", again);
  return () => model.off("change:view", again);
}
export default { render };
