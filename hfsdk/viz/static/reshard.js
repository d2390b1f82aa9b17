// A weight transition step by step: boxes of every rank before and after.
// Who sends what to whom, bytes per pair, the ladder of bytes.
import { fmtBytes, fmtCount, frame, H, hatches, inkOn, isMissing, keyboard, S, shade, shorten, stripes, swatch } from "./core.js";

const PALETTE = ["#6b8e23", "#8c6d46", "#4a90a4", "#a0528d", "#5d6d7e"],
  OWN = "#3b76c4",
  MOVED = "#d64545",
  ASIDE = "#8a94a0",
  PROOF = ["#2e9e5b", "#8a94a0", "#d64545"];
const [T, R0, C0, ROWS, COLS, LR, LC, FROM, WAY, SR, SC, PROVED] = Array(12).keys();
const SEE = 88,
  TALL = 150,
  PANEL = 224,
  HEAD = 46,
  PAUSE_MS = 1500,
  FLY_MS = 700;

function render({ model, el }) {
  if (document.paper && model.get("view").variants.length > 1) {
    // a file has no switch: all of them, one below the other
    const { variants, ...rest } = model.get("view");
    for (const v of variants) {
      const view = { ...rest, variants: [{ ...v, title: `${v.title}, grouped ${v.grouping}` }] };
      render({ el, model: { ...model, get: () => view } });
    }
    return;
  }
  const f = frame(el, "reshard"),
    still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const quiet = { "data-lm-suppress-shortcuts": "true" };
  const switcher = H("span", { role: "group", "aria-label": "how ranks are grouped", style: "display:inline-flex;gap:3px" }, f.bar);
  const chooser = H("select", { "aria-label": "parameter", ...quiet, style: "font:inherit;max-width:330px" }, f.bar);
  const play = f.button("▶", "play the steps", () => (timer ? pause() : start()));
  play.classList.add("hf-play");
  const line = H("div", { class: "hf-bar" }),
    slider = H("input", { type: "range", min: 0, max: 1, value: 0, step: 1, "aria-label": "step", ...quiet, style: "width:180px" });
  const label = H("span", { class: "hf-steplabel", "aria-live": "polite" });
  line.append(play, slider, label);
  f.root.insertBefore(line, f.host);
  const below = H("div", { style: "display:flex;flex-wrap:wrap;gap:6px 44px;align-items:flex-start;margin-top:8px" }, f.below),
    foot = H("div", {}, f.below);
  let view,
    variant = 0,
    chosen = "",
    at = 0,
    timer = 0,
    flight = 0,
    marks = [],
    current = -1,
    steps = [];

  const plan = () => view.variants[variant];
  const parameter = () => plan().parameters.find((p) => p.name === chosen) || null;
  const bytesOf = (piece) => piece[ROWS] * piece[COLS] * view.dtype_bytes;
  const moved = (piece) => piece[WAY] >= 2;

  // ---- what happens in which step
  function listSteps() {
    const p = parameter(),
      out = [{ text: "before: every rank holds its training shard", has: () => false }],
      own = (x) => !moved(x);
    const link = (name) => (plan().links.find((l) => l[0] === name) || [name, 0])[1];
    if (!p) {
      out.push({ text: `what a rank has already stays or is copied: ${fmtBytes(link("same rank"))}`, ways: [0, 1], has: own });
      if (link("same node"))
        out.push({ text: `moved within a node: ${fmtBytes(link("same node"))}`, ways: [2], has: (x) => x[WAY] === 2 });
      if (link("network"))
        out.push({ text: `moved across the network: ${fmtBytes(link("network"))}`, ways: [3], has: (x) => x[WAY] === 3 });
    } else {
      const pieces = p.after.flat(),
        sum = (test) => fmtBytes(pieces.filter(test).reduce((n, x) => n + bytesOf(x), 0));
      if (pieces.some((x) => x[WAY] === 0))
        out.push({ text: `lies the same way in both, may stay in place: ${sum((x) => x[WAY] === 0)}`, has: (x) => x[WAY] === 0 });
      if (pieces.some((x) => x[WAY] === 1))
        out.push({ text: `copied on its own rank, in the rollout's order: ${sum((x) => x[WAY] === 1)}`, has: (x) => x[WAY] === 1 });
      const sources = [...new Set(pieces.filter(moved).map((x) => x[FROM]))].sort((a, b) => a - b);
      for (const s of sources) {
        const mine = (x) => moved(x) && x[FROM] === s,
          to = p.ranks.filter((_, k) => p.after[k].some(mine));
        const ways = [...new Set(pieces.filter(mine).map((x) => (x[WAY] === 2 ? "within a node" : "across the network")))];
        out.push({
          text:
            `rank ${s} sends ${sum(mine)} to ${to.length > 1 ? "ranks" : "rank"} ${to.join(", ")}` +
            `${p.ranks.length < plan().num_ranks ? " (of those shown)" : ""}, ${ways.join(" and ")}`,
          has: mine,
        });
      }
    }
    out.push({ text: "after: every rank has its rollout shard", ways: [], has: () => false, last: true });
    return out;
  }
  const arrived = (piece, k) => steps.findIndex((s) => s.has(piece)) <= k;
  const arrivesIn = (piece) => steps.findIndex((s) => s.has(piece));

  // ---- one parameter: boxes
  function geometry(p) {
    const all = [...p.before.flat(), ...p.after.flat()];
    const rows = Math.max(1, ...all.map((b) => b[LR] + b[ROWS])),
      cols = Math.max(1, ...all.map((b) => b[LC] + b[COLS]));
    const width = Math.max(440, Math.min(1160, f.root.clientWidth - 16 || 900)),
      perRow = Math.max(1, Math.floor(width / PANEL));
    const corner = (k, side) => [8 + (k % perRow) * PANEL + side * (SEE + 14), HEAD + Math.floor(k / perRow) * (HEAD + TALL + 18)];
    return {
      sx: SEE / cols,
      sy: TALL / rows,
      corner,
      width: Math.min(width, perRow * PANEL),
      height: Math.ceil(p.ranks.length / perRow) * (HEAD + TALL + 18),
    };
  }
  const spot = (g, k, side, r, c, b) => {
    const [x, y] = g.corner(k, side);
    return {
      x: x + c * g.sx,
      y: y + r * g.sy,
      width: Math.max(1, b[COLS] * g.sx - 0.8),
      height: Math.max(1, b[ROWS] * g.sy - 0.8),
    };
  };
  const byColumns = (p) => [...p.before.flat(), ...p.after.flat()].some((b) => b[C0] > 0);
  const rows = (p, b) => (byColumns(p) ? `:, ${b[C0]}:${b[C0] + b[COLS]}` : `${b[R0]}:${b[R0] + b[ROWS]}`);
  const words = (p, b) => (p.tensors.length > 1 ? p.tensors[b[T]] + " " : "") + rows(p, b);
  const color = (b) => PALETTE[b[T] % PALETTE.length];
  function boxText(g, box, text, ink) {
    const upright = text.length * 5.3 + 5 > box.width && box.height > 2 * box.width; // a narrow, tall box has its words turned
    const [along, across] = upright ? [box.height, box.width] : [box.width, box.height],
      x = box.x + box.width / 2 + 3,
      y = box.y + box.height - 5;
    if (across < 10.5 || along < 26) return;
    const fits = shorten(text, Math.max(2, Math.floor((along - 5) / 5.3)));
    S(
      "text",
      {
        ...(upright
          ? { x, y, transform: `rotate(-90 ${x} ${y})` }
          : { x: box.x + 3, y: box.y + Math.min(box.height / 2 + 3.5, box.height - 3) }),
        "font-size": 9,
        "pointer-events": "none",
        ...ink,
      },
      g,
      fits,
    );
  }
  function drawBoxes(svg, p, g, flying) {
    p.ranks.forEach((rank, k) => {
      const [x, y] = g.corner(k, 0),
        [x1] = g.corner(k, 1),
        info = plan().ranks.find((r) => r.rank === rank);
      S("text", { x, y: y - 30, class: "hf-fg", "font-weight": 600 }, svg, `rank ${rank}`);
      if (info) S("text", { x: x + 50, y: y - 30, "font-size": 9.5, class: "hf-sub" }, svg, `node ${info.node}`);
      if (info) S("text", { x, y: y - 18, "font-size": 9.5, class: "hf-sub" }, svg, info.train || "does not train");
      if (info) S("text", { x: x1, y: y - 18, "font-size": 9.5, class: "hf-sub" }, svg, info.rollout || "does not generate");
      S("text", { x, y: y - 6, "font-size": 9.5, class: "hf-sub" }, svg, "trainer");
      S("text", { x: x1, y: y - 6, "font-size": 9.5, class: "hf-sub" }, svg, "rollout");
      if (!p.before[k].length)
        S("text", { x, y: y + 12, "font-size": 9.5, "font-style": "italic", class: "hf-sub" }, svg, "has none of it");
      for (const b of p.before[k]) {
        const box = spot(g, k, 0, b[LR], b[LC], b),
          node = S(
            "g",
            { class: "hf-mark hf-before", "data-rank": rank, "data-bytes": bytesOf(b), opacity: steps[at].last ? 0.5 : null },
            svg,
          );
        S("rect", { ...box, fill: color(b) }, node);
        boxText(node, box, words(p, b), { fill: inkOn(color(b)) });
        addMark(node, k, `rank ${rank} trains ${p.tensors[b[T]]} ${rows(p, b)}`, boxRows(p, b));
      }
      for (const b of p.after[k]) {
        const box = spot(g, k, 1, b[LR], b[LC], b),
          there = arrived(b, at) && !flying.has(b);
        const node = S(
          "g",
          {
            class: "hf-mark hf-after",
            "data-rank": rank,
            "data-way": b[WAY],
            "data-from": b[FROM],
            "data-bytes": bytesOf(b),
            "data-arrived": there ? 1 : 0,
          },
          svg,
        );
        S(
          "rect",
          {
            ...box,
            fill: there ? color(b) : "transparent",
            class: there ? null : "hf-edge",
            "stroke-dasharray": there ? null : "2 3",
          },
          node,
        );
        if (there && moved(b))
          S(
            "rect",
            {
              x: box.x + 1,
              y: box.y + 1,
              width: Math.max(1, box.width - 2),
              height: Math.max(1, box.height - 2),
              fill: "none",
              stroke: MOVED,
              "stroke-width": 2,
              "stroke-dasharray": b[WAY] === 3 ? "4 2" : null,
            },
            node,
          );
        if (there && plan().boxes) proofOf(node, box, b[PROVED]);
        boxText(
          node,
          box,
          (moved(b) ? `← ${b[FROM]} ` : b[WAY] ? "" : "= ") + words(p, b),
          there ? { fill: inkOn(color(b)) } : { class: "hf-sub" },
        );
        addMark(node, k, `rank ${rank} generates with ${p.tensors[b[T]]} ${rows(p, b)}`, [
          ...boxRows(p, b),
          ["from", moved(b) ? `rank ${b[FROM]}` : "its own shard"],
          ["way", view.ways[b[WAY]]],
          ...(plan().boxes ? [["fingerprints", view.proofs[b[PROVED]]]] : []),
        ]);
      }
    });
  }
  function proofOf(node, box, proof) {
    // a strip at the right; what is wrong is crossed out as well
    node.dataset.proof = view.proofs[proof];
    const w = Math.min(4, box.width / 3),
      right = box.x + box.width;
    S(
      "rect",
      {
        x: right - w,
        y: box.y,
        width: w,
        height: box.height,
        fill: PROOF[proof],
        stroke: "#fff",
        "stroke-width": 0.8,
        class: "hf-proof",
      },
      node,
    );
    if (proof < 2) return;
    const [x1, y1, x2, y2] = [box.x, box.y, right, box.y + box.height];
    for (const d of [`M${x1} ${y1}L${x2} ${y2}`, `M${x1} ${y2}L${x2} ${y1}`]) {
      S("path", { d, stroke: "#fff", "stroke-width": 4, fill: "none" }, node);
      S("path", { d, stroke: PROOF[2], "stroke-width": 2, fill: "none" }, node);
    }
  }
  const boxRows = (p, b) => [
    ["tensor", p.tensors[b[T]]],
    ["rows", `${b[R0]}:${b[R0] + b[ROWS]}`],
    ["columns", `${b[C0]}:${b[C0] + b[COLS]}`],
    ["at row, column here", `${b[LR]}, ${b[LC]}`],
    ["bytes", fmtBytes(bytesOf(b))],
    ["parameters", fmtCount(b[ROWS] * b[COLS])],
  ];

  // ---- all parameters: bars
  function drawBars(svg, width) {
    const ranks = plan().ranks,
      high = ranks.length <= 16,
      h = high ? 20 : 9,
      gap = high ? 6 : 2,
      left = 150,
      hatch = hatches(svg);
    const scale = (width - left - 190) / Math.max(1, ...ranks.map((r) => r.own + r.received + r.aside));
    const on = (way) => steps.findIndex((s) => s.ways?.includes(way)),
      done = (way) => {
        const k = on(way);
        return k >= 0 && k <= at;
      };
    const ways = [2, 3].filter((way) => on(way) >= 0),
      came = steps[at].last || ways.every(done);
    S("text", { x: left, y: 12, class: "hf-sub" }, svg, "bytes of weights on each rank");
    ranks.forEach((r, k) => {
      const y = 22 + k * (h + gap),
        g = S("g", { class: "hf-mark hf-rank", "data-row": r.row, "data-rank": r.rank }, svg);
      if (high || k % 4 === 0)
        S("text", { x: 4, y: y + h / 2 + 4, class: "hf-fg", "font-size": high ? 11 : 9 }, g, `rank ${r.rank}`);
      if (high) S("text", { x: 58, y: y + h / 2 + 4, "font-size": 9.5, class: "hf-sub" }, g, r.train || r.rollout);
      let x = left;
      const bar = (name, bytes, fill, stroke) => {
        if (bytes)
          S(
            "rect",
            {
              x,
              y,
              width: Math.max(0.5, bytes * scale),
              height: h,
              fill,
              stroke: high ? stroke : null,
              class: "hf-part",
              "data-part": name,
              "data-bytes": bytes,
            },
            g,
          );
        if (bytes && high && bytes * scale > 60 && name === "own") {
          if (fill.startsWith("url"))
            S("rect", { x: x + 3, y: y + 4, width: fmtBytes(bytes).length * 5.8 + 4, height: h - 8, class: "hf-paper" }, g);
          S(
            "text",
            {
              x: x + 5,
              y: y + h / 2 + 3.5,
              "font-size": 9.5,
              ...(fill.startsWith("url") ? { class: "hf-fg" } : { fill: inkOn(fill) }),
            },
            g,
            fmtBytes(bytes),
          );
        }
        x += bytes * scale;
      };
      if (!at) bar("held", r.held, hatch(OWN), OWN);
      else {
        bar("own", isMissing(r.own_measured) ? r.own : r.own_measured, isMissing(r.own_measured) ? hatch(OWN) : OWN, OWN);
        if (came) bar("received", r.measured === null ? r.received : r.measured, r.measured === null ? hatch(MOVED) : MOVED, MOVED);
        else {
          if (r.received)
            S("rect", { x, y, width: r.received * scale, height: h, fill: "none", class: "hf-edge", "stroke-dasharray": "2 3" }, g);
          x += r.received * scale;
        }
        bar("aside", r.aside, hatch(ASIDE), ASIDE);
      }
      if (high)
        S(
          "text",
          { x: x + 6, y: y + h / 2 + 4, "font-size": 9.5, class: "hf-sub" },
          g,
          !at
            ? `holds ${fmtBytes(r.held)}`
            : r.received
              ? `${fmtBytes(r.received)} ${came ? "received" : "to receive"}` +
                (r.aside ? `, ${fmtBytes(r.aside)} redundant` : r.sources.length <= 6 ? ` from ${r.sources.join(", ")}` : "")
              : r.aside
                ? `${fmtBytes(r.aside)} redundant`
                : "nothing to receive",
        );
      addMark(g, 0, `rank ${r.rank} on node ${r.node}`, [
        ["row", String(r.row)],
        ["trains", r.train || "no"],
        ["generates", r.rollout || "no"],
        ["holds", fmtBytes(r.held)],
        ["needs", fmtBytes(r.needed)],
        ["its own", fmtBytes(r.own)],
        ["to receive, planned", fmtBytes(r.received)],
        ["from ranks", r.sources.length ? r.sources.slice(0, 12).join(", ") + (r.sources.length > 12 ? " …" : "") : "none"],
        ["received, measured", fmtBytes(r.measured)],
        ["redundant: kept, not needed", fmtBytes(r.aside)],
        ...(r.boxes ? view.proofs.map((word, k) => [`boxes ${word}`, fmtCount(r.boxes[k])]) : []),
      ]);
    });
    return 30 + ranks.length * (h + gap);
  }

  function addMark(node, group, heading, rows) {
    marks.push({ node, group, heading, rows });
    node.addEventListener("mousemove", (ev) => f.showTip(ev.clientX, ev.clientY, heading, rows, false));
    node.addEventListener("mouseleave", () => f.hideTip());
  }

  // ---- the picture of this step
  function draw(flying = new Set()) {
    const p = parameter(),
      width = Math.max(440, Math.min(1160, f.root.clientWidth - 16 || 900));
    marks = [];
    const g = p ? geometry(p) : null;
    const svg = S("svg", {
      width: g ? g.width : width,
      role: "img",
      "aria-label": `${plan().title}; ${steps[at].text}`,
      "font-size": 11,
    });
    S("title", {}, svg, plan().title);
    S("desc", {}, svg, plan().summary);
    if (p) drawBoxes(svg, p, g, flying);
    const height = p ? g.height : drawBars(svg, width);
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${g ? g.width : width} ${height}`);
    f.host.replaceChildren(svg);
    label.replaceChildren();
    H("b", {}, label, `step ${at} of ${steps.length - 1} `);
    H("span", {}, label, steps[at].text);
    if (p && plan().num_ranks > p.ranks.length)
      H("span", { class: "hf-dim" }, label, ` (${p.ranks.length} of ${plan().num_ranks} ranks)`);
    if (!p && plan().num_ranks > plan().ranks.length)
      H("span", { class: "hf-dim" }, label, ` (${plan().ranks.length} of ${plan().num_ranks} ranks)`);
    if (current >= 0 && marks[current]) marks[current].node.querySelector("rect").classList.add("hf-current");
    return { svg, p, g };
  }
  function go(k, fly) {
    cancelAnimationFrame(flight);
    at = Math.max(0, Math.min(steps.length - 1, k));
    slider.value = at;
    slider.setAttribute("aria-valuetext", steps[at].text);
    const p = parameter();
    if (!p || !fly || still) {
      draw();
      return;
    }
    const flying = new Set(p.after.flat().filter((b) => arrivesIn(b) === at));
    const { svg, g } = draw(flying),
      birds = [];
    p.ranks.forEach((_rank, to) =>
      p.after[to].forEach((b) => {
        if (!flying.has(b)) return;
        const from = p.ranks.indexOf(b[FROM]),
          b1 = spot(g, to, 1, b[LR], b[LC], b);
        const b0 = from >= 0 ? spot(g, from, 0, b[SR], b[SC], b) : { ...b1, x: -b1.width };
        birds.push({
          b0,
          b1,
          node: S(
            "rect",
            { ...b0, fill: color(b), stroke: moved(b) ? MOVED : null, "stroke-width": 2, opacity: 0.9, class: "hf-bird" },
            svg,
          ),
        });
      }),
    );
    if (!birds.length) return;
    const begun = performance.now();
    const frameOf = (now) => {
      if (!f.root.isConnected) return;
      const t = Math.min(1, Math.max(0, (now - begun) / FLY_MS)),
        ease = t * t * (3 - 2 * t);
      for (const { b0, b1, node } of birds) {
        node.setAttribute("x", b0.x + (b1.x - b0.x) * ease);
        node.setAttribute("y", b0.y + (b1.y - b0.y) * ease);
      }
      if (t < 1) flight = requestAnimationFrame(frameOf);
      else draw();
    };
    flight = requestAnimationFrame(frameOf);
  }
  function start() {
    if (at >= steps.length - 1) go(0, false);
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "pause");
    const tick = () => {
      if (!f.root.isConnected) {
        pause();
        return;
      }
      if (at >= steps.length - 1) {
        pause();
        return;
      }
      go(at + 1, true);
    };
    timer = setInterval(tick, PAUSE_MS);
    tick();
  }
  function pause() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶";
    play.setAttribute("aria-label", "play the steps");
  }
  slider.oninput = () => {
    pause();
    go(Number(slider.value), true);
  };

  // ---- bytes by pair
  function matrix(parent) {
    const p = parameter(),
      names = plan().groups,
      n = names.length,
      planned = p ? p.matrix : plan().matrix,
      measured = p ? null : plan().measured,
      shown = measured || planned;
    const host = H("div", { tabindex: 0, ...quiet, class: "hf-matrix" }, parent),
      cw = n <= 4 ? 84 : n <= 8 ? 64 : n <= 16 ? 30 : 15,
      ch = n <= 8 ? 26 : n <= 16 ? 20 : 13,
      narrow = cw < 64;
    H(
      "div",
      { class: "hf-dim" },
      host,
      `bytes from ${view.by} (row) to ${view.by} (column), ${measured ? "measured" : "planned"}` +
        (p ? `: this parameter${p.count > 1 ? `, one of ${p.count} layers that move alike` : ""}` : ", all parameters"),
    );
    const left = 14 + 6.2 * Math.max(...names.map((t) => t.length)),
      top = 18,
      width = left + n * cw + 8,
      height = top + n * ch + 6,
      most = Math.max(1, ...shown.flat());
    const svg = S(
        "svg",
        {
          width,
          height,
          viewBox: `0 0 ${width} ${height}`,
          role: "img",
          "aria-label": `bytes between ${n} ${view.by}s`,
          "font-size": 10,
        },
        host,
      ),
      hatch = hatches(svg),
      cells = [];
    S("rect", { x: left, y: top, width: n * cw, height: n * ch, class: "hf-panel" }, svg);
    names.forEach((name, k) => {
      const short = name.replace(/^(ranks?|node) /, "");
      if (cw >= 30 || k % 4 === 0)
        S("text", { x: left + k * cw + cw / 2, y: 12, "text-anchor": "middle", class: "hf-fg" }, svg, narrow ? short : name);
      S("text", { x: left - 6, y: top + k * ch + ch / 2 + 3.5, "text-anchor": "end", class: "hf-fg" }, svg, name);
    });
    shown.forEach((row, s) =>
      row.forEach((bytes, t) => {
        if (!bytes) return;
        const paint = s === t ? OWN : MOVED,
          x = left + t * cw,
          y = top + s * ch,
          fill = shade(paint, 0.8 - (0.6 * bytes) / most),
          far = plan().far[s][t];
        const g = S("g", { class: "hf-mark hf-cell", "data-source": s, "data-target": t, "data-bytes": bytes }, svg);
        S(
          "rect",
          {
            x: x + 1,
            y: y + 1,
            width: cw - 2,
            height: ch - 2,
            rx: 2,
            fill: measured ? fill : hatch(paint),
            "fill-opacity": measured ? null : 0.3 + (0.7 * bytes) / most,
            stroke: paint,
            "stroke-opacity": narrow ? 0.5 : null,
            "stroke-dasharray": far ? "3 2" : null,
          },
          g,
        );
        if (!narrow) {
          const text = (far ? "⇄ " : "") + fmtBytes(bytes);
          if (!measured)
            S(
              "rect",
              { x: x + cw / 2 - text.length * 3.1, y: y + 4, width: text.length * 6.2, height: ch - 8, class: "hf-paper" },
              g,
            );
          S(
            "text",
            {
              x: x + cw / 2,
              y: y + ch / 2 + 3.5,
              "text-anchor": "middle",
              ...(measured ? { fill: inkOn(fill) } : { class: "hf-fg" }),
            },
            g,
            text,
          );
        }
        const info = [
          ["bytes, planned", fmtBytes(planned[s][t])],
          ["bytes, measured", measured ? fmtBytes(measured[s][t]) : null],
          ["parameters", fmtCount(Math.round(bytes / view.dtype_bytes))],
          ["way", s === t ? (view.by === "rank" ? "same rank" : `within the ${view.by}`) : far ? "network" : "same node"],
        ];
        const c = { s, t, g, heading: `${names[s]} → ${names[t]}`, info };
        cells.push(c);
        g.addEventListener("mousemove", (ev) => f.showTip(ev.clientX, ev.clientY, c.heading, info, false));
        g.addEventListener("mouseleave", () => f.hideTip());
      }),
    );
    let here = -1;
    keyboard(host, {
      keys: { Escape: () => f.hideTip() },
      step: (dx, dy) => {
        if (here < 0) {
          here = 0;
          return;
        }
        const c = cells[here],
          next = cells
            .filter((o) => (dx ? o.s === c.s && Math.sign(o.t - c.t) === dx : o.t === c.t && Math.sign(o.s - c.s) === dy))
            .sort((a, b) => Math.abs(a.s - c.s) + Math.abs(a.t - c.t) - Math.abs(b.s - c.s) - Math.abs(b.t - c.t))[0];
        if (next) here = cells.indexOf(next);
      },
      show: () => {
        cells.forEach((c, k) => c.g.firstChild.classList.toggle("hf-current", k === here));
        if (here < 0 || !cells[here]) return;
        const b = cells[here].g.getBoundingClientRect();
        f.showTip(b.left + b.width / 2, b.bottom - 6, cells[here].heading, cells[here].info, true);
      },
    });
    host.addEventListener("blur", () => f.hideTip());
  }
  function ladder(parent) {
    const rows = plan().ladder,
      most = Math.max(1, ...rows.map((r) => r.received)),
      box = H("div", {}, parent);
    H("div", { class: "hf-dim" }, box, "bytes a rank receives, all parameters: by formula, as planned, as measured");
    const table = H("table", { class: "hf-ladder" }, box),
      tr = H("tr", {}, H("thead", {}, table)),
      body = H("tbody", {}, table);
    for (const [k, text] of ["", "received", "", "on the rank at the end", ""].entries())
      H("th", { class: k === 0 || k === 1 || k === 4 ? "hf-left" : null, scope: "col" }, tr, text);
    rows.forEach((r, k) => {
      const line = H("tr", { "data-row": r.measured ? null : k, "data-name": r.name, "data-bytes": r.received }, body);
      H("td", { class: "hf-left" }, line, r.name);
      const track = H("span", { class: "hf-track", style: "width:150px;background:none" }, H("td", { class: "hf-left" }, line));
      H(
        "i",
        {
          style:
            `width:${(100 * r.received) / most}%;background:${r.measured ? MOVED : stripes(MOVED)};` +
            `outline:${r.received && !r.measured ? `1px solid ${MOVED}` : "none"};outline-offset:-1px`,
        },
        track,
      );
      H("td", {}, line, fmtBytes(Math.round(r.received)));
      H(
        "td",
        { class: r.peak === null ? "hf-missing" : null },
        line,
        r.peak === null ? "not measured" : fmtBytes(Math.round(r.peak)),
      );
      H("td", { class: "hf-left hf-dim hf-wrap" }, line, r.counts);
    });
    const ways = H("div", { class: "hf-links hf-dim" }, box);
    ways.textContent = plan()
      .links.map(
        ([way, bytes, real]) => `${way}: ${fmtBytes(bytes)} planned` + (real === null ? "" : `, ${fmtBytes(real)} measured`),
      )
      .join(" · ");
    H(
      "div",
      { class: "hf-dim hf-sums", "data-moved": plan().moved, "data-redundant": plan().redundant },
      box,
      `${plan().grouping} grouping: ${fmtBytes(plan().moved)} cross between ranks, ` +
        `${fmtBytes(plan().redundant)} redundant (kept of a training shard, and not part of the rollout's)`,
    );
    if (plan().boxes) proofs(box);
  }
  function proofs(parent) {
    const key = H("div", { class: "hf-legend hf-proofs", "data-boxes": plan().boxes.join(" ") }, parent);
    H("span", { class: "hf-dim" }, key, "boxes by fingerprints:");
    plan().boxes.forEach((count, k) =>
      swatch(key, `${fmtCount(count)} ${view.proofs[k]}`, (s) =>
        S("rect", { x: 1, y: 1, width: 14, height: 9, fill: PROOF[k], opacity: count ? null : 0.35 }, s),
      ),
    );
    for (const text of plan().wrong) H("div", { class: "hf-bad hf-wrap" }, parent, text);
  }

  function tables() {
    below.replaceChildren();
    foot.replaceChildren();
    matrix(below);
    ladder(below);
    const p = parameter(),
      key = H("div", { class: "hf-legend" }, foot);
    if (p?.note) H("div", { class: "hf-dim" }, foot, `${p.name}: ${p.note}.`);
    if (p)
      p.tensors.forEach((t, k) =>
        swatch(key, t, (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, fill: PALETTE[k % PALETTE.length] }, s)),
      );
    if (p)
      swatch(key, "← r: came from rank r", (s) =>
        S("rect", { x: 2, y: 2, width: 12, height: 7, fill: "none", stroke: MOVED, "stroke-width": 2 }, s),
      );
    if (p) swatch(key, "may stay in place", (s) => S("text", { x: 4, y: 9, class: "hf-fg", "font-size": 10 }, s, "="));
    if (p)
      swatch(key, "not there yet", (s) =>
        S("rect", { x: 1, y: 1, width: 14, height: 9, fill: "none", class: "hf-edge", "stroke-dasharray": "2 3" }, s),
      );
    const sample = (paint, hatched) => (s) =>
      S("rect", { x: 1, y: 1, width: 14, height: 9, fill: hatched ? hatches(s)(paint) : paint, stroke: paint }, s);
    swatch(key, "its own, planned", sample(OWN, true));
    swatch(key, "from another, planned", sample(MOVED, true));
    if (plan().ladder.some((r) => r.measured)) {
      swatch(key, "its own, measured", sample(OWN, false));
      swatch(key, "from another, measured", sample(MOVED, false));
    }
    const planned = p ? p.matrix : plan().matrix;
    if (planned.some((row, a) => row.some((n, b) => n && plan().far[a][b])))
      swatch(key, "⇄ across the network", (s) =>
        S("rect", { x: 1, y: 1, width: 14, height: 9, fill: "none", stroke: MOVED, "stroke-dasharray": "3 2" }, s),
      );
    if (!p && plan().redundant) swatch(key, "redundant", sample(ASIDE, true));
  }
  function reset() {
    pause();
    current = -1;
    f.title.textContent = view.variants.length > 1 ? view.title : plan().title;
    steps = listSteps();
    slider.max = steps.length - 1;
    tables();
    go(steps.length - 1, false);
  }
  function take() {
    view = model.get("view");
    variant = Math.min(variant, view.variants.length - 1);
    switcher.replaceChildren();
    if (view.variants.length > 1)
      view.variants.forEach((v, k) => {
        const b = H("button", { type: "button", "data-grouping": v.grouping, "aria-pressed": k === variant }, switcher, v.grouping);
        b.onclick = () => {
          variant = k;
          [...switcher.children].forEach((c, i) => {
            c.setAttribute("aria-pressed", i === k);
            c.style.borderColor = i === k ? "var(--hf-fg)" : "";
          });
          const kept = at;
          reset();
          go(kept, false);
        };
        b.style.borderColor = k === variant ? "var(--hf-fg)" : "";
      });
    chooser.replaceChildren();
    H("option", { value: "" }, chooser, "all parameters, by rank");
    for (const p of plan().parameters)
      H("option", { value: p.name }, chooser, p.name + (p.count > 1 ? ` (× ${p.count} layers)` : ""));
    chooser.value = chosen;
    reset();
  }
  chooser.onchange = () => {
    chosen = chooser.value;
    reset();
  };

  function step(dx, dy) {
    if (!marks.length) return;
    if (current < 0) {
      current = 0;
      return;
    }
    const here = marks[current];
    if (dy || !parameter()) {
      const next = current + (dy || dx);
      if (marks[next]) current = next;
      return;
    }
    const next = marks.findIndex((m) => m.group === here.group + dx);
    if (next >= 0) current = next;
  }
  function show() {
    marks.forEach((m, i) => m.node.querySelector("rect").classList.toggle("hf-current", i === current));
    const m = marks[current];
    if (!m) return;
    const b = m.node.getBoundingClientRect();
    f.showTip(b.left + b.width / 2, b.bottom, m.heading, m.rows, true);
  }
  keyboard(f.host, {
    step,
    show,
    keys: {
      "+": () => go(at + 1, true),
      "=": () => go(at + 1, true),
      "-": () => go(at - 1, false),
      " ": () => play.click(),
      Escape: () => f.hideTip(),
    },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  take();
  model.on("change:view", take);
  return () => {
    pause();
    cancelAnimationFrame(flight);
    model.off("change:view", take);
  };
}
export default { render };
