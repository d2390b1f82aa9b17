// A training run: curves over its steps; a click or the arrow keys open a step: its time, numbers and samples.
import {
  coalesced,
  fitText,
  fmtBytes,
  fmtCount,
  fmtSeconds,
  fmtShare,
  frame,
  H,
  hatches,
  inkOn,
  isMissing,
  KERNEL_GONE,
  keyboard,
  S,
  shorten,
} from "./core.js";

const PANEL_W = 268,
  PANEL_H = 124,
  PAD_L = 50,
  PAD_T = 22,
  PAD_R = 10,
  PAD_B = 18,
  LINE = "#3b76c4";

function render({ model, el }) {
  const f = frame(el, "dashboard", model);
  const buttons = H("span", {}, f.bar),
    state = H("span", { class: "hf-dim hf-state", role: "status" }, f.bar);
  const bar = H("div", { class: "hf-bar" }, f.root);
  f.root.insertBefore(bar, f.host);
  const track = H(
    "span",
    { class: "hf-track", style: "width:220px", role: "progressbar", "aria-label": "steps done", "aria-valuemin": 0 },
    bar,
  );
  const done = H("i", {}, track),
    nowText = H("span", { class: "hf-dim hf-now-text" }, bar);
  const more = H("details", {}, f.below),
    chosen = H("div", { class: "hf-step" }, f.below);
  H("summary", {}, more, "all curves");
  const rest = H("div", {}, more);
  let view,
    selected = null,
    follow = true,
    buttonKey = "";

  // a cell that blocks cannot hear messages: there the kernel's interrupt pauses (once) and cancels (twice)
  function press(action) {
    if (view.background) {
      model.send({ action });
      return;
    }
    const kernel = model.widget_manager?.kernel;
    if (!kernel || !kernel.interrupt) {
      nowText.textContent = "this notebook gives no access to its kernel: interrupt it yourself, once to pause, twice to stop";
      return;
    }
    model.send({ action }); // heard at once, or when the run is over and it means nothing
    kernel.interrupt();
    if (action === "stop")
      setTimeout(() => {
        if (view.live && view.state === "running") kernel.interrupt();
      }, 600);
  }
  function drawButtons() {
    const going = view.live && !f.lost && ["running", "paused"].includes(view.state),
      key = going + view.state + view.background;
    if (key === buttonKey) return;
    buttonKey = key;
    buttons.replaceChildren();
    if (!going) return;
    const add = (action, title) => {
      const b = H("button", { type: "button", title, "data-action": action }, buttons, action);
      b.onclick = () => press(action);
    };
    if (view.state === "running") add("pause", "pause after the running step");
    if (view.state === "paused" && view.background) {
      add("resume", "go on");
      add("step", "run one more step");
    }
    add("stop", "cancel the running call and end the run");
  }

  function panel(curve, host) {
    const svg = S(
      "svg",
      {
        width: PANEL_W,
        height: PANEL_H,
        viewBox: `0 0 ${PANEL_W} ${PANEL_H}`,
        role: "img",
        class: "hf-curve",
        "data-curve": curve.name,
        "font-size": 10,
        "aria-label": `${curve.name}, last ${isMissing(curve.last) ? "not measured" : fmtValue(curve.name, curve.last)}`,
      },
      host,
    );
    const right = PANEL_W - PAD_R,
      bottom = PANEL_H - PAD_B,
      known = curve.points.filter((p) => !isMissing(p[1]));
    S("text", { x: PAD_L, y: 13, "font-weight": 600, class: "hf-fg" }, svg, curve.name === "cost" ? "cost so far" : curve.name);
    if (!known.length) {
      S("text", { x: PAD_L + 8, y: 60, "font-style": "italic", class: "hf-sub" }, svg, "not measured");
      return;
    }
    const xs = curve.points.map((p) => p[0]),
      x0 = Math.min(...xs),
      x1 = Math.max(...xs),
      ys = known.map((p) => p[1]);
    const y0 = Math.min(...ys),
      y1 = Math.max(...ys),
      pad = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1,
      low = y0 - pad,
      high = y1 + pad;
    const X = (x) => (x1 === x0 ? (PAD_L + right) / 2 : PAD_L + ((x - x0) / (x1 - x0)) * (right - PAD_L)),
      Y = (y) => bottom - ((y - low) / (high - low)) * (bottom - PAD_T);
    S("rect", { x: PAD_L, y: PAD_T, width: right - PAD_L, height: bottom - PAD_T, class: "hf-panel" }, svg);
    for (const y of [y0, (y0 + y1) / 2, y1].slice(0, y1 > y0 ? 3 : 1)) {
      S("line", { x1: PAD_L, x2: right, y1: Y(y), y2: Y(y), class: "hf-grid" }, svg);
      S(
        "text",
        { x: PAD_L - 4, y: Y(y) + 3.5, "text-anchor": "end", "font-size": 9, class: "hf-sub" },
        svg,
        fmtValue(curve.name, y),
      );
    }
    for (const x of x1 > x0 ? [x0, x1] : [x0])
      S("text", { x: X(x), y: bottom + 12, "text-anchor": "middle", "font-size": 9, class: "hf-sub" }, svg, String(x));
    let d = "",
      pen = false;
    for (const [x, y] of curve.points) {
      if (isMissing(y)) {
        pen = false;
        continue;
      }
      d += `${pen ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`;
      pen = true;
    }
    S(
      "path",
      {
        d,
        fill: "none",
        stroke: LINE,
        "stroke-width": 1.6,
        "stroke-linejoin": "round",
        "stroke-dasharray": view.predicted ? "4 3" : null,
        class: view.predicted ? "hf-predicted" : null,
      },
      svg,
    );
    const dot = view.predicted ? { stroke: LINE, class: "hf-paper" } : { fill: LINE };
    const alone = (i) => [i - 1, i + 1].every((k) => !curve.points[k] || isMissing(curve.points[k][1])); // no line reaches it
    curve.points.forEach(([x, y], i) => {
      if (!isMissing(y) && (known.length <= 40 || alone(i)))
        S("circle", { cx: X(x), cy: Y(y), r: 2.2, ...dot, "data-step": x }, svg);
    });
    const here = known.find((p) => p[0] === selected);
    if (here) {
      S("line", { x1: X(selected), x2: X(selected), y1: PAD_T, y2: bottom, class: "hf-edge" }, svg);
      S(
        "circle",
        { cx: X(selected), cy: Y(here[1]), r: 4, ...dot, class: "hf-current" + (view.predicted ? " hf-paper" : "") },
        svg,
      );
    }
    const [, last] = known[known.length - 1];
    S(
      "text",
      { x: right, y: 13, "text-anchor": "end", class: "hf-sub hf-last" },
      svg,
      here && here[1] !== last ? `step ${selected}: ${fmtValue(curve.name, here[1])}` : "last " + fmtValue(curve.name, last),
    );
    const nearest = (ev) => {
      const r = svg.getBoundingClientRect(),
        x = ((ev.clientX - r.left) / r.width) * PANEL_W;
      return known.reduce((best, p) => (Math.abs(X(p[0]) - x) < Math.abs(X(best[0]) - x) ? p : best), known[0]);
    };
    svg.addEventListener("pointermove", (ev) => {
      const [x] = nearest(ev),
        rows = view.curves
          .filter((c) => c.main)
          .map((c) => {
            const p = c.points.find((q) => q[0] === x);
            return [c.name, p && !isMissing(p[1]) ? fmtValue(c.name, p[1]) : null];
          });
      f.showTip(ev.clientX, ev.clientY, "step " + x, rows, false);
    });
    svg.addEventListener("pointerleave", () => f.hideTip());
    svg.addEventListener("click", (ev) => {
      open(nearest(ev)[0]);
    });
  }
  function fmtValue(name, v) {
    if (name.endsWith("_bytes")) return Math.abs(v) >= 1e9 ? (v / 1e9).toFixed(3) + " GB" : fmtBytes(v);
    if (name.endsWith("_share") || name.endsWith("_fraction")) return fmtShare(v);
    if (v && Math.abs(v) < 1e-3) return v.toExponential(1);
    return Number.isInteger(v) ? fmtCount(v) : String(Number(v.toPrecision(3)));
  }
  function open(step) {
    selected = step;
    follow = view.steps.length && step === view.steps[view.steps.length - 1].step;
    draw();
  }

  function stepDetails() {
    chosen.replaceChildren();
    const s = view.steps.find((q) => q.step === selected);
    if (!s) {
      if (selected !== null && view.steps.length)
        H(
          "p",
          { class: "hf-dim" },
          chosen,
          `step ${selected}: its samples are kept no more; of ${view.steps[0].step} and later they are`,
        );
      return;
    }
    H(
      "div",
      { class: "hf-title" },
      chosen,
      `step ${s.step}` + (isMissing(s.seconds) ? "" : `, ${fmtSeconds(s.seconds)}`) + (view.predicted ? " (predicted)" : ""),
    );
    H("div", { class: "hf-dim" }, chosen, `its timeline: session.trace[${s.trace_step}]`);
    const end = Math.max(...s.calls.map((c) => c.start_s + c.seconds), 0);
    if (end > 0) {
      const rows = [...new Set(s.calls.map((c) => c.row))].sort((a, b) => a - b),
        height = rows.length * 18 + 18,
        W = Math.max(340, Math.min(780, f.root.clientWidth - 16 || 780)),
        L = 84,
        scale = (W - L) / end;
      const svg = S(
        "svg",
        {
          width: W,
          height,
          viewBox: `0 0 ${W} ${height}`,
          role: "img",
          "aria-label": s.calls.map((c) => `${c.call} ${fmtSeconds(c.seconds)}`).join(", "),
          "font-size": 10,
          class: "hf-calls-bar",
        },
        chosen,
      );
      const hatch = hatches(svg);
      for (const [i, row] of rows.entries())
        S(
          "text",
          { x: L - 6, y: i * 18 + 13, "text-anchor": "end", class: "hf-sub" },
          svg,
          shorten(s.calls.find((c) => c.row === row).call.split(".")[0], 14),
        );
      for (const c of s.calls) {
        const x = L + c.start_s * scale,
          w = c.seconds * scale,
          y = rows.indexOf(c.row) * 18,
          text = fitText(c.call.replace(/^[^.]*\./, ""), w);
        const r = S(
          "rect",
          {
            x,
            y: y + 1,
            width: Math.max(1, w - 0.5),
            height: 16,
            rx: 2,
            "data-call": c.call,
            ...(view.predicted ? { fill: hatch(c.color), stroke: c.color, class: "hf-predicted" } : { fill: c.color }),
          },
          svg,
        );
        S("title", {}, r, `${c.call}: ${fmtSeconds(c.seconds)}`);
        if (text && view.predicted)
          S(
            "rect",
            { x: x + 2, y: y + 4, width: text.length * 5.7 + 4, height: 11, class: "hf-paper", "pointer-events": "none" },
            svg,
          );
        if (text)
          S(
            "text",
            { x: x + 4, y: y + 13, ...(view.predicted ? { class: "hf-fg" } : { fill: inkOn(c.color) }), "pointer-events": "none" },
            svg,
            text,
          );
      }
      for (const t of [0, end])
        S(
          "text",
          { x: L + t * scale, y: height - 3, "text-anchor": t ? "end" : "start", class: "hf-sub", "font-size": 9 },
          svg,
          fmtSeconds(t),
        );
    }
    if (s.samples.length) {
      const t = H("table", {}, chosen),
        head = H("tr", {}, H("thead", {}, t)),
        body = H("tbody", {}, t);
      for (const [i, word] of ["prompt", "response", "score"].entries())
        H("th", { scope: "col", class: i < 2 ? "hf-left" : null }, head, word);
      for (const q of s.samples) {
        const row = H("tr", {}, body);
        for (const word of ["prompt", "response"])
          H(
            "td",
            { class: "hf-wrap" + (q[word] ? "" : " hf-missing"), dir: "auto" },
            row,
            q[word] === null ? "not there" : q[word] || "(empty)",
          );
        H("td", isMissing(q.score) ? { class: "hf-missing" } : {}, row, isMissing(q.score) ? "–" : q.score.toFixed(3));
      }
    }
    const all = H("details", {}, chosen);
    H("summary", {}, all, "all numbers");
    const t = H("table", {}, all),
      body = H("tbody", {}, t);
    for (const [name, v] of s.numbers) {
      const row = H("tr", {}, body);
      H("td", { class: "hf-left" }, row, name);
      H("td", isMissing(v) ? { class: "hf-missing" } : {}, row, isMissing(v) ? "–" : fmtValue(name, v));
    }
  }

  function draw() {
    view = model.get("view");
    if (follow && view.steps.length) selected = view.steps[view.steps.length - 1].step;
    f.title.textContent = view.predicted ? "train (simulated)" : "train";
    const asked = { pause: ", pauses after this step", stop: ", stopping" }[view.live && !f.lost && view.asked] || "";
    const now = f.lost ? (model.get("kept_as") ? " when the kernel ended" : ", unfinished") : `, ${view.state}`;
    state.textContent = `${view.steps_done} of ${view.steps_asked} steps${now}${asked}` + (view.error ? `: ${view.error}` : "");
    state.classList.toggle("hf-bad", view.state === "failed");
    drawButtons();
    done.style.width = `${view.steps_asked ? (100 * view.steps_done) / view.steps_asked : 0}%`;
    track.setAttribute("aria-valuemax", view.steps_asked);
    track.setAttribute("aria-valuenow", view.steps_done);
    const n = view.now;
    nowText.textContent =
      n.call && !f.lost
        ? n.call + (isMissing(n.done) || isMissing(n.total) ? "" : ` ${fmtCount(n.done)} of ${fmtCount(n.total)} ${n.unit || ""}`)
        : "";
    const main = view.curves.filter((c) => c.main),
      others = view.curves.filter((c) => !c.main);
    const grid = H("div", { style: "display:flex;flex-wrap:wrap;gap:4px 5px" });
    for (const c of main) panel(c, grid);
    if (!view.curves.length) H("p", { class: "hf-dim" }, grid, "no step has ended yet");
    const warned = H("div", {});
    for (const text of view.restores || []) H("p", { class: "hf-wrap" }, warned, text);
    for (const text of view.warnings) H("p", { class: "hf-bad hf-wrap" }, warned, text);
    f.host.replaceChildren(warned, grid);
    more.hidden = !others.length;
    const drawRest = () => {
      const g = H("div", { style: "display:flex;flex-wrap:wrap;gap:4px 5px" });
      for (const c of others) panel(c, g);
      rest.replaceChildren(g);
    };
    if (more.open) drawRest();
    more.ontoggle = () => {
      if (more.open) drawRest();
    };
    const openBefore = chosen.querySelector("details");
    const wasOpen = openBefore?.open;
    stepDetails();
    if (wasOpen && chosen.querySelector("details")) chosen.querySelector("details").open = true;
  }
  keyboard(f.host, {
    step: (dx, dy) => {
      const at = view.steps.findIndex((s) => s.step === selected),
        next = view.steps[Math.max(0, Math.min(view.steps.length - 1, at + (dx || dy)))];
      if (next) open(next.step);
    },
    show: () => {
      if (selected !== null)
        f.say(
          `step ${selected}` +
            view.curves
              .filter((c) => c.main)
              .map((c) => {
                const p = c.points.find((q) => q[0] === selected);
                return p && !isMissing(p[1]) ? `, ${c.name} ${fmtValue(c.name, p[1])}` : "";
              })
              .join(""),
        );
    },
    keys: { Escape: () => f.hideTip() },
  });
  draw();
  const again = coalesced(draw);
  model.on("change:view", again);
  f.onlost = draw;
  f.gone = () => {
    if (!view.saved)
      return `${KERNEL_GONE}This run kept no saves of its own. With session.train(..., save_every=10, folder="runs/1") the next one does, and resume="runs/1" goes on from its last.`;
    const { folder, step } = view.saved;
    return `${KERNEL_GONE}Its save after step ${step} is in ${folder}: run the notebook from its first cell, with session.train(..., resume=${JSON.stringify(folder)}) to go on from there.`;
  };
  return () => {
    model.off("change:view", again);
    f.leave();
  };
}
export default { render };
