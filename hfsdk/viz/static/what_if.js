// Sliders over a plan: the kernel plans anew while one is dragged. One request under way at most; the newest value wins.
import { coalesced, fmtCount, fmtSeconds, frame, H, isMissing, keyboard, S, shorten } from "./core.js";
import { fmtMoney, fmtStep, planBoard } from "./plan_parts.js";

const CALM_MS = 450,
  CURVE_W = 404,
  CURVE_H = 168;

function render({ model, el }) {
  const f = frame(el, "what-if", model);
  const status = H("span", { class: "hf-dim hf-status", role: "status" }, f.bar),
    note = H("div", { class: "hf-dim hf-frozen-note", "data-paper": "no" });
  const controls = H("div", {
    class: "hf-controls",
    style: "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,350px),1fr));gap:2px 18px;margin:4px 0 6px",
  });
  const subtitle = H("div", { class: "hf-dim" }),
    error = H("p", { class: "hf-bad hf-what-if-error", role: "alert", style: "white-space:pre-wrap;margin:4px 0" });
  for (const part of [note, controls, subtitle, error]) f.root.insertBefore(part, f.host);
  const curves = H("div", { class: "hf-curves", style: "display:flex;flex-wrap:wrap;gap:6px 14px" }),
    board = planBoard(f, f.host);
  f.root.insertBefore(curves, f.below);
  let view,
    wanted = null,
    sent = 0,
    waiting = 0,
    sentAt = 0,
    calm = 0,
    held = false,
    dragged = null,
    made = "";
  const inputs = new Map(); // name -> {input, show(value), stops}

  // ---- asking
  const live = () => view.live && !f.lost;
  function ask(name, value) {
    dragged = name;
    wanted = { ...wanted, [name]: value };
    pump();
    rest();
  }
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
  function rest() {
    // when nothing was moved or answered for a moment: the curve over what was dragged, and the notebook's copy
    clearTimeout(calm);
    calm = setTimeout(() => {
      if (waiting || wanted || held) rest();
      else if (live()) model.send({ settle: dragged, request: sent });
    }, CALM_MS);
  }
  function tell() {
    const took = isMissing(view.took_s) ? "" : `planned in ${fmtSeconds(view.took_s)}`;
    status.textContent = waiting
      ? `planning … (${((performance.now() - sentAt) / 1000).toFixed(0)} s; the kernel may be busy with a cell)`
      : took;
  }

  // ---- controls; kept while only their values change, so that a drag goes on
  function drawControls() {
    const key = JSON.stringify([
      view.sliders.map((s) => [s.name, s.stops, s.fixed]),
      view.menus.map((m) => [m.name, m.options]),
      live(),
    ]);
    if (key !== made) {
      made = key;
      controls.replaceChildren();
      inputs.clear();
      for (const s of view.sliders) slider(s);
      for (const m of view.menus) menu(m);
    }
    note.textContent = live() ? "" : "Frozen: without a kernel nothing can be planned anew. Run the cell to move the sliders.";
    note.hidden = live();
    const moving = waiting || wanted;
    for (const c of [...view.sliders, ...view.menus]) {
      const at = inputs.get(c.name);
      if (!(moving && c.name === dragged)) at.show(c.value);
    }
  }
  function row(c) {
    const line = H("label", { class: "hf-control", style: "display:flex;align-items:center;gap:8px;min-width:0" }, controls);
    H("span", { style: "flex:0 0 140px" }, line, c.label);
    return line;
  }
  function slider(s) {
    const line = row(s),
      off = !live() || s.fixed;
    const input = H(
      "input",
      {
        type: "range",
        min: 0,
        max: s.stops.length - 1,
        step: 1,
        name: s.name,
        "aria-label": s.label,
        "data-lm-suppress-shortcuts": "true",
        style: "flex:1 1 90px;min-width:60px",
        ...(off ? { disabled: "" } : {}),
      },
      line,
    );
    const out = H(
      "output",
      { class: "hf-num", style: "flex:0 0 92px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis", "data-of": s.name },
      line,
    );
    const show = (v) => {
      out.textContent = isMissing(v) ? "–" : `${fmtCount(v)}${s.unit ? " " + s.unit : ""}`;
      input.setAttribute("aria-valuetext", out.textContent);
    };
    inputs.set(s.name, {
      show(v) {
        input.value = String(s.stops.reduce((best, x, i) => (Math.abs(x - v) < Math.abs(s.stops[best] - v) ? i : best), 0));
        show(v);
      },
    });
    input.addEventListener("input", () => {
      const v = s.stops[Number(input.value)];
      show(v);
      ask(s.name, v);
    });
    input.addEventListener("pointerdown", () => {
      held = true;
    });
    for (const end of ["pointerup", "pointercancel", "change"])
      input.addEventListener(end, () => {
        held = false;
      });
  }
  function menu(m) {
    const line = row(m),
      pick = H(
        "select",
        {
          name: m.name,
          style: "min-width:0;flex:0 1 auto",
          "aria-label": m.label,
          "data-lm-suppress-shortcuts": "true",
          ...(live() ? {} : { disabled: "" }),
        },
        line,
      );
    for (const o of m.options) H("option", { value: o }, pick, o);
    inputs.set(m.name, {
      show(v) {
        pick.value = v;
      },
    });
    pick.addEventListener("change", () => ask(m.name, pick.value));
  }

  // ---- curves over what was dragged
  function drawCurves() {
    curves.replaceChildren();
    const c = view.curve;
    if (!c || !c.points.length) return;
    panel(c, "a step takes", (p) => p.seconds, fmtStep);
    if (c.points.some((p) => !isMissing(p.dollars))) panel(c, "a step costs", (p) => p.dollars, fmtMoney);
  }
  function panel(c, title, of, fmt) {
    const L = 62,
      R = CURVE_W - 12,
      T = 24,
      B = CURVE_H - 34,
      known = c.points.filter((p) => !isMissing(of(p)));
    const svg = S(
      "svg",
      {
        width: CURVE_W,
        height: CURVE_H,
        viewBox: `0 0 ${CURVE_W} ${CURVE_H}`,
        role: "img",
        "font-size": 10,
        class: "hf-curve",
        "data-curve": title,
        "aria-label": `${title} over ${c.label}: ${known.map((p) => `${fmtCount(p.value)}: ${fmt(of(p))}`).join(", ")}`,
      },
      curves,
    );
    S(
      "text",
      { x: L, y: 13, "font-weight": 600, class: "hf-fg" },
      svg,
      `${title} over ${shorten(c.label, 36)}` + (c.done ? "" : " …"),
    );
    S("rect", { x: L, y: T, width: R - L, height: B - T, class: "hf-panel" }, svg);
    if (!known.length) return;
    const stops = c.stops,
      top = 1.05 * Math.max(...known.map(of)) || 1,
      Y = (v) => B - (v / top) * (B - T);
    const place = (v) => {
      // between two stops by share
      const i = stops.findIndex((x) => x >= v);
      return i <= 0 ? (i < 0 ? stops.length - 1 : 0) : i - 1 + (v - stops[i - 1]) / (stops[i] - stops[i - 1]);
    };
    const X = (v) => L + (stops.length > 1 ? place(v) / (stops.length - 1) : 0.5) * (R - L);
    for (const v of [0, top / 2.1, top / 1.05]) {
      S("line", { x1: L, x2: R, y1: Y(v), y2: Y(v), class: "hf-grid" }, svg);
      S("text", { x: L - 5, y: Y(v) + 3, "text-anchor": "end", "font-size": 9, class: "hf-sub" }, svg, shorten(fmt(v), 12));
    }
    let d = "",
      pen = false;
    for (const p of c.points) {
      if (isMissing(of(p))) {
        pen = false;
        continue;
      }
      d += `${pen ? "L" : "M"}${X(p.value).toFixed(1)},${Y(of(p)).toFixed(1)}`;
      pen = true;
    }
    S("path", { d, fill: "none", stroke: "#3b76c4", "stroke-width": 1.6, "stroke-dasharray": "4 3", class: "hf-predicted" }, svg);
    for (const [at, anchor] of [
      [stops[0], "start"],
      [stops[stops.length - 1], "end"],
    ])
      S("text", { x: X(at), y: B + 12, "text-anchor": anchor, "font-size": 9, class: "hf-sub" }, svg, fmtCount(at));
    const rises = of(known[known.length - 1]) > of(known[0]);
    let turns = 0;
    c.points.forEach((p, i) => {
      const before = c.points
        .slice(0, i)
        .reverse()
        .find((q) => q.plan);
      if (p.plan && before && before.plan !== p.plan) {
        S("line", { x1: X(p.value), x2: X(p.value), y1: T, y2: B, class: "hf-edge hf-turn", "stroke-dasharray": "2 2" }, svg);
        const right = X(p.value) > (L + R) / 2,
          row = 11 * (turns++ % 3); // in the corner that the curve leaves free
        S(
          "text",
          {
            x: X(p.value) + (right ? -4 : 4),
            y: right === rises ? T + 10 + row : B - 6 - row,
            "text-anchor": right ? "end" : "start",
            "font-size": 9,
            class: "hf-fg hf-turn-name",
          },
          svg,
          `from here: ${shorten(p.plan, 34)}`,
        );
      }
      if (isMissing(of(p))) {
        S("text", { x: X(p.value), y: B - 3, "text-anchor": "middle", class: "hf-sub" }, svg, "×");
        return;
      }
      S("circle", { cx: X(p.value), cy: Y(of(p)), r: 2.2, stroke: "#3b76c4", class: "hf-paper", "data-value": p.value }, svg);
    });
    const now = view.sliders.find((s) => s.name === c.name),
      here = view.plan?.choices[0],
      value = here && of({ seconds: here.step_s, dollars: here.dollars_step });
    if (now && !isMissing(value) && !view.error) {
      S("line", { x1: X(now.value), x2: X(now.value), y1: T, y2: B, class: "hf-edge" }, svg);
      S("circle", { cx: X(now.value), cy: Math.max(T, Y(value)), r: 4, class: "hf-paper hf-current hf-here" }, svg);
    }
    if (c.points.some((p) => isMissing(of(p))))
      S("text", { x: L, y: B + 26, "font-size": 9, class: "hf-sub" }, svg, "×: nothing fits");
    svg.addEventListener("pointermove", (ev) => {
      const r = svg.getBoundingClientRect(),
        x = ((ev.clientX - r.left) / r.width) * CURVE_W,
        p = c.points.reduce((best, q) => (Math.abs(X(q.value) - x) < Math.abs(X(best.value) - x) ? q : best));
      f.showTip(
        ev.clientX,
        ev.clientY,
        `${c.label} ${fmtCount(p.value)}`,
        [
          ["a step takes", fmtStep(p.seconds)],
          ["a step costs", fmtMoney(p.dollars)],
          ["plan", p.plan || "nothing fits"],
        ],
        false,
      );
    });
    svg.addEventListener("pointerleave", () => f.hideTip());
  }

  function draw() {
    f.title.textContent = view.title;
    drawControls();
    subtitle.textContent = view.plan ? view.plan.subtitle : "";
    error.textContent = view.error;
    error.hidden = !view.error;
    f.host.classList.toggle("hf-faded", !!view.error);
    if (view.plan) board.draw(view.plan);
    drawCurves();
    tell();
    f.root.dataset.drawn = String(view.request);
  }
  const request = coalesced(draw);
  function onView() {
    view = model.get("view");
    if (waiting && view.request >= waiting) {
      waiting = 0;
      rest();
    }
    pump();
    request();
  }
  f.onlost = () => {
    made = "";
    draw();
  };
  keyboard(f.host, { step: board.step, show: board.show, keys: { Escape: () => f.hideTip() } });
  f.host.addEventListener("blur", () => f.hideTip());
  view = model.get("view");
  sent = view.request || 0;
  draw();
  model.on("change:view", onView);
  const resize = new ResizeObserver(coalesced(() => board.resized()));
  resize.observe(f.root);
  return () => {
    model.off("change:view", onView);
    clearTimeout(calm);
    f.leave();
    resize.disconnect();
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
