// A weight transition step by step: boxes of every rank before and after.
// Who sends what to whom, bytes per pair, the ladder of bytes.
import { group, hatched, legend, mark, paint, planned, redrawn, sample, tableOf } from "./chart.js";
import { fmtBytes, fmtCount, frame, H, hatches, inkOn, isMissing, keyboard, S, shade, shorten, stripes, swatch } from "./core.js";
import { walkedMatrix } from "./matrix.js";

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

const moved = (piece) => piece[WAY] >= 2;
const color = (piece) => PALETTE[piece[T] % PALETTE.length];
const bytesOf = (view, piece) => piece[ROWS] * piece[COLS] * view.dtype_bytes;

// ---- what happens in which step: `has` says of a piece whether it arrives there, `ways` of whole ranks
function stepsOf(view, plan, p) {
  return [
    { text: "before: every rank holds its training shard", has: () => false },
    ...(p ? stepsOfParameter(view, plan, p) : stepsOfAll(plan)),
    { text: "after: every rank has its rollout shard", ways: [], has: () => false, last: true },
  ];
}
function stepsOfAll(plan) {
  const link = (name) => (plan.links.find((l) => l[0] === name) || [name, 0])[1],
    out = [
      { text: `what a rank has already stays or is copied: ${fmtBytes(link("same rank"))}`, ways: [0, 1], has: (x) => !moved(x) },
    ];
  if (link("same node"))
    out.push({ text: `moved within a node: ${fmtBytes(link("same node"))}`, ways: [2], has: (x) => x[WAY] === 2 });
  if (link("network"))
    out.push({ text: `moved across the network: ${fmtBytes(link("network"))}`, ways: [3], has: (x) => x[WAY] === 3 });
  return out;
}
function stepsOfParameter(view, plan, p) {
  const pieces = p.after.flat(),
    sum = (test) => fmtBytes(pieces.filter(test).reduce((n, x) => n + bytesOf(view, x), 0)),
    stays = (x) => x[WAY] === 0,
    copied = (x) => x[WAY] === 1,
    out = [];
  if (pieces.some(stays)) out.push({ text: `lies the same way in both, may stay in place: ${sum(stays)}`, has: stays });
  if (pieces.some(copied)) out.push({ text: `copied on its own rank, in the rollout's order: ${sum(copied)}`, has: copied });
  const sources = [...new Set(pieces.filter(moved).map((x) => x[FROM]))].sort((a, b) => a - b);
  for (const s of sources) {
    const mine = (x) => moved(x) && x[FROM] === s,
      to = p.ranks.filter((_, k) => p.after[k].some(mine));
    const ways = [...new Set(pieces.filter(mine).map((x) => (x[WAY] === 2 ? "within a node" : "across the network")))];
    const text =
      `rank ${s} sends ${sum(mine)} to ${to.length > 1 ? "ranks" : "rank"} ${to.join(", ")}` +
      `${p.ranks.length < plan.num_ranks ? " (of those shown)" : ""}, ${ways.join(" and ")}`;
    out.push({ text, has: mine });
  }
  return out;
}
const arrivesIn = (steps, piece) => steps.findIndex((s) => s.has(piece));

// ---- layout: `look` is {variant, chosen, at, width, flying}, where pieces that arrive now may be still on their way
function chosenOf(view, { variant, chosen }) {
  const plan = view.variants[variant],
    p = plan.parameters.find((q) => q.name === chosen) || null;
  return { view, plan, p, steps: stepsOf(view, plan, p) };
}
function layout(view, look) {
  const { at, width, flying } = look,
    seen = { ...chosenOf(view, look), at, flying },
    { p } = seen;
  if (!p) return { ...seen, width, ...barMarks(seen, width) };
  const g = geometry(p, width);
  return { ...seen, g, width: g.width, height: g.height, marks: p.ranks.flatMap((rank, k) => rankMarks(seen, g, rank, k)) };
}

// ---- one parameter: boxes
function geometry(p, room) {
  const all = [...p.before.flat(), ...p.after.flat()];
  const rows = Math.max(1, ...all.map((b) => b[LR] + b[ROWS])),
    cols = Math.max(1, ...all.map((b) => b[LC] + b[COLS]));
  const perRow = Math.max(1, Math.floor(room / PANEL));
  return {
    sx: SEE / cols,
    sy: TALL / rows,
    corner: (k, side) => [8 + (k % perRow) * PANEL + side * (SEE + 14), HEAD + Math.floor(k / perRow) * (HEAD + TALL + 18)],
    width: Math.min(room, perRow * PANEL),
    height: Math.ceil(p.ranks.length / perRow) * (HEAD + TALL + 18),
  };
}
// where a piece stands with rank k, before (side 0) or after (side 1), at row r and column c
function spot(g, k, side, r, c, b) {
  const [x, y] = g.corner(k, side);
  return { x: x + c * g.sx, y: y + r * g.sy, width: Math.max(1, b[COLS] * g.sx - 0.8), height: Math.max(1, b[ROWS] * g.sy - 0.8) };
}
const byColumns = (p) => [...p.before.flat(), ...p.after.flat()].some((b) => b[C0] > 0);
const rowsOf = (p, b) => (byColumns(p) ? `:, ${b[C0]}:${b[C0] + b[COLS]}` : `${b[R0]}:${b[R0] + b[ROWS]}`);
const wordsOf = (p, b) => (p.tensors.length > 1 ? p.tensors[b[T]] + " " : "") + rowsOf(p, b);
const tipRows = (view, p, b) => [
  ["tensor", p.tensors[b[T]]],
  ["rows", `${b[R0]}:${b[R0] + b[ROWS]}`],
  ["columns", `${b[C0]}:${b[C0] + b[COLS]}`],
  ["at row, column here", `${b[LR]}, ${b[LC]}`],
  ["bytes", fmtBytes(bytesOf(view, b))],
  ["parameters", fmtCount(b[ROWS] * b[COLS])],
];
// the words of a box, as far as they fit; those of a narrow, tall box are turned
function boxText(box, text, ink) {
  const upright = text.length * 5.3 + 5 > box.width && box.height > 2 * box.width;
  const [along, across] = upright ? [box.height, box.width] : [box.width, box.height],
    x = box.x + box.width / 2 + 3,
    y = box.y + box.height - 5;
  if (across < 10.5 || along < 26) return [];
  const place = upright
    ? { x, y, transform: `rotate(-90 ${x} ${y})` }
    : { x: box.x + 3, y: box.y + Math.min(box.height / 2 + 3.5, box.height - 3) };
  const fits = shorten(text, Math.max(2, Math.floor((along - 5) / 5.3)));
  return [mark("text", { ...place, "font-size": 9, "pointer-events": "none", ...ink }, fits)];
}
function rankMarks(seen, g, rank, k) {
  const { plan, p } = seen,
    [x, y] = g.corner(k, 0),
    [x1] = g.corner(k, 1),
    info = plan.ranks.find((r) => r.rank === rank),
    small = (left, top, text) => mark("text", { x: left, y: top, "font-size": 9.5, class: "hf-sub" }, text);
  const marks = [mark("text", { x, y: y - 30, class: "hf-fg", "font-weight": 600 }, `rank ${rank}`)];
  if (info)
    marks.push(
      small(x + 50, y - 30, `node ${info.node}`),
      small(x, y - 18, info.train || "does not train"),
      small(x1, y - 18, info.rollout || "does not generate"),
    );
  marks.push(small(x, y - 6, "trainer"), small(x1, y - 6, "rollout"));
  const none = { x, y: y + 12, "font-size": 9.5, "font-style": "italic", class: "hf-sub" };
  if (!p.before[k].length) marks.push(mark("text", none, "has none of it"));
  for (const b of p.before[k]) marks.push(beforeMark(seen, g, rank, k, b));
  for (const b of p.after[k]) marks.push(afterMark(seen, g, rank, k, b));
  return marks;
}
function beforeMark({ view, p, steps, at }, g, rank, k, b) {
  const box = spot(g, k, 0, b[LR], b[LC], b),
    name = { class: "hf-mark hf-before", "data-rank": rank, "data-bytes": bytesOf(view, b) };
  const marks = [mark("rect", { ...box, fill: color(b) }), ...boxText(box, wordsOf(p, b), { fill: inkOn(color(b)) })],
    heading = `rank ${rank} trains ${p.tensors[b[T]]} ${rowsOf(p, b)}`;
  return group({ ...name, opacity: steps[at].last ? 0.5 : null }, marks, { group: k, heading, rows: tipRows(view, p, b) });
}
function afterMark({ view, plan, p, steps, at, flying }, g, rank, k, b) {
  const box = spot(g, k, 1, b[LR], b[LC], b),
    step = arrivesIn(steps, b),
    there = step <= at && !(flying && step === at),
    look = there ? { fill: color(b) } : { fill: "transparent", class: "hf-edge", "stroke-dasharray": "2 3" };
  const marks = [mark("rect", { ...box, ...look })];
  const ring = { x: box.x + 1, y: box.y + 1, width: Math.max(1, box.width - 2), height: Math.max(1, box.height - 2), fill: "none" },
    dashes = { stroke: MOVED, "stroke-width": 2, "stroke-dasharray": b[WAY] === 3 ? "4 2" : null };
  if (there && moved(b)) marks.push(mark("rect", { ...ring, ...dashes }));
  if (there && plan.boxes) marks.push(...proofMarks(box, b[PROVED]));
  const words = (moved(b) ? `← ${b[FROM]} ` : b[WAY] ? "" : "= ") + wordsOf(p, b);
  marks.push(...boxText(box, words, there ? { fill: inkOn(color(b)) } : { class: "hf-sub" }));
  const rows = [
    ...tipRows(view, p, b),
    ["from", moved(b) ? `rank ${b[FROM]}` : "its own shard"],
    ["way", view.ways[b[WAY]]],
    ...(plan.boxes ? [["fingerprints", view.proofs[b[PROVED]]]] : []),
  ];
  const name = {
    class: "hf-mark hf-after",
    "data-rank": rank,
    "data-way": b[WAY],
    "data-from": b[FROM],
    "data-bytes": bytesOf(view, b),
    "data-arrived": there ? 1 : 0,
    "data-proof": there && plan.boxes ? view.proofs[b[PROVED]] : null,
  };
  return group(name, marks, { group: k, heading: `rank ${rank} generates with ${p.tensors[b[T]]} ${rowsOf(p, b)}`, rows });
}
// a strip at the right; what is wrong is crossed out as well
function proofMarks(box, proof) {
  const width = Math.min(4, box.width / 3),
    right = box.x + box.width,
    strip = { x: right - width, y: box.y, width, height: box.height, fill: PROOF[proof] };
  const marks = [mark("rect", { ...strip, stroke: "#fff", "stroke-width": 0.8, class: "hf-proof" })];
  if (proof < 2) return marks;
  const [x1, y1, x2, y2] = [box.x, box.y, right, box.y + box.height];
  for (const d of [`M${x1} ${y1}L${x2} ${y2}`, `M${x1} ${y2}L${x2} ${y1}`])
    for (const [stroke, width] of [
      ["#fff", 4],
      [PROOF[2], 2],
    ])
      marks.push(mark("path", { d, stroke, "stroke-width": width, fill: "none" }));
  return marks;
}
// the pieces that arrive in this step, each where it comes from and where it goes
function flightOf({ p, g, steps, at }) {
  return p.ranks.flatMap((_, to) =>
    p.after[to]
      .filter((b) => arrivesIn(steps, b) === at)
      .map((b) => {
        const from = p.ranks.indexOf(b[FROM]),
          b1 = spot(g, to, 1, b[LR], b[LC], b),
          b0 = from >= 0 ? spot(g, from, 0, b[SR], b[SC], b) : { ...b1, x: -b1.width };
        return { b0, b1, look: { fill: color(b), stroke: moved(b) ? MOVED : null } };
      }),
  );
}

// ---- all parameters: bars
function barMarks(seen, width) {
  const ranks = seen.plan.ranks,
    high = ranks.length <= 16,
    h = high ? 20 : 9,
    gap = high ? 6 : 2,
    left = 150,
    scale = (width - left - 190) / Math.max(1, ...ranks.map((r) => r.own + r.received + r.aside)),
    title = mark("text", { x: left, y: 12, class: "hf-sub" }, "bytes of weights on each rank");
  const bars = ranks.map((r, k) => barMark(seen, r, { y: 22 + k * (h + gap), h, high, left, scale, named: high || k % 4 === 0 }));
  return { height: 30 + ranks.length * (h + gap), marks: [title, ...bars] };
}
// the parts of a rank's bar, from the left: [name, bytes, paint, hatched or not, or null for one that has not come yet]
function partsOf({ steps, at }, r) {
  if (!at) return [["held", r.held, OWN, true]];
  const on = (way) => steps.findIndex((s) => s.ways?.includes(way)),
    ways = [2, 3].filter((way) => on(way) >= 0),
    came = steps[at].last || ways.every((way) => on(way) <= at),
    own = isMissing(r.own_measured);
  return [
    ["own", own ? r.own : r.own_measured, OWN, own],
    came
      ? ["received", r.measured === null ? r.received : r.measured, MOVED, r.measured === null]
      : ["to come", r.received, MOVED, null],
    ["aside", r.aside, ASIDE, true],
  ];
}
function barMark(seen, r, { y, h, high, left, scale, named }) {
  const marks = [],
    parts = partsOf(seen, r),
    middle = y + h / 2 + 4;
  if (named) marks.push(mark("text", { x: 4, y: middle, class: "hf-fg", "font-size": high ? 11 : 9 }, `rank ${r.rank}`));
  if (high) marks.push(mark("text", { x: 58, y: middle, "font-size": 9.5, class: "hf-sub" }, r.train || r.rollout));
  let x = left;
  for (const [name, bytes, paintOf, isHatched] of parts) {
    const width = bytes * scale,
      box = { x, y, width: Math.max(0.5, width), height: h };
    if (bytes && isHatched === null)
      marks.push(mark("rect", { ...box, width, fill: "none", class: "hf-edge", "stroke-dasharray": "2 3" }));
    else if (bytes) {
      const fill = isHatched ? hatched(paintOf) : paintOf;
      marks.push(
        mark("rect", { ...box, fill, stroke: high ? paintOf : null, class: "hf-part", "data-part": name, "data-bytes": bytes }),
      );
      const text = fmtBytes(bytes),
        back = { x: x + 3, y: y + 4, width: text.length * 5.8 + 4, height: h - 8, class: "hf-paper" },
        ink = isHatched ? { class: "hf-fg" } : { fill: inkOn(paintOf) };
      if (high && width > 60 && name === "own") {
        if (isHatched) marks.push(mark("rect", back));
        marks.push(mark("text", { x: x + 5, y: y + h / 2 + 3.5, "font-size": 9.5, ...ink }, text));
      }
    }
    x += width;
  }
  const came = parts.some(([name]) => name === "received");
  if (high) marks.push(mark("text", { x: x + 6, y: middle, "font-size": 9.5, class: "hf-sub" }, barWords(seen, r, came)));
  const tip = { group: 0, heading: `rank ${r.rank} on node ${r.node}`, rows: rankRows(seen.view, r) };
  return group({ class: "hf-mark hf-rank", "data-row": r.row, "data-rank": r.rank }, marks, tip);
}
function barWords({ at }, r, came) {
  if (!at) return `holds ${fmtBytes(r.held)}`;
  if (!r.received) return r.aside ? `${fmtBytes(r.aside)} redundant` : "nothing to receive";
  const from = r.sources.length <= 6 ? ` from ${r.sources.join(", ")}` : "";
  return `${fmtBytes(r.received)} ${came ? "received" : "to receive"}` + (r.aside ? `, ${fmtBytes(r.aside)} redundant` : from);
}
const rankRows = (view, r) => [
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
];

// ---- bytes by pair
function matrixOf(view, plan, p) {
  const names = plan.groups,
    n = names.length,
    planned = p ? p.matrix : plan.matrix,
    measured = p ? null : plan.measured,
    shown = measured || planned,
    cw = n <= 4 ? 84 : n <= 8 ? 64 : n <= 16 ? 30 : 15,
    ch = n <= 8 ? 26 : n <= 16 ? 20 : 13,
    left = 14 + 6.2 * Math.max(...names.map((t) => t.length)),
    top = 18,
    m = { view, plan, names, planned, measured, cw, ch, left, top, narrow: cw < 64, most: Math.max(1, ...shown.flat()) };
  const marks = [mark("rect", { x: left, y: top, width: n * cw, height: n * ch, class: "hf-panel" })];
  names.forEach((name, k) => {
    const short = m.narrow ? name.replace(/^(ranks?|node) /, "") : name;
    if (cw >= 30 || k % 4 === 0)
      marks.push(mark("text", { x: left + k * cw + cw / 2, y: 12, "text-anchor": "middle", class: "hf-fg" }, short));
    marks.push(mark("text", { x: left - 6, y: top + k * ch + ch / 2 + 3.5, "text-anchor": "end", class: "hf-fg" }, name));
  });
  shown.forEach((row, s) => row.forEach((bytes, t) => bytes && marks.push(cellMark(m, s, t, bytes))));
  const of = p ? `: this parameter${p.count > 1 ? `, one of ${p.count} layers that move alike` : ""}` : ", all parameters";
  return {
    words: `bytes from ${view.by} (row) to ${view.by} (column), ${measured ? "measured" : "planned"}${of}`,
    summary: `bytes between ${n} ${view.by}s`,
    width: left + n * cw + 8,
    height: top + n * ch + 6,
    marks,
  };
}
function cellMark({ view, plan, names, planned, measured, cw, ch, left, top, narrow, most }, s, t, bytes) {
  const stroke = s === t ? OWN : MOVED,
    x = left + t * cw,
    y = top + s * ch,
    fill = shade(stroke, 0.8 - (0.6 * bytes) / most),
    far = plan.far[s][t],
    box = { x: x + 1, y: y + 1, width: cw - 2, height: ch - 2, rx: 2, fill: measured ? fill : hatched(stroke) };
  const faint = { "fill-opacity": measured ? null : 0.3 + (0.7 * bytes) / most, stroke, "stroke-opacity": narrow ? 0.5 : null },
    marks = [mark("rect", { ...box, ...faint, "stroke-dasharray": far ? "3 2" : null })];
  if (!narrow) {
    const text = (far ? "⇄ " : "") + fmtBytes(bytes),
      back = { x: x + cw / 2 - text.length * 3.1, y: y + 4, width: text.length * 6.2, height: ch - 8, class: "hf-paper" },
      ink = measured ? { fill: inkOn(fill) } : { class: "hf-fg" };
    if (!measured) marks.push(mark("rect", back));
    marks.push(mark("text", { x: x + cw / 2, y: y + ch / 2 + 3.5, "text-anchor": "middle", ...ink }, text));
  }
  const rows = [
    ["bytes, planned", fmtBytes(planned[s][t])],
    ["bytes, measured", measured ? fmtBytes(measured[s][t]) : null],
    ["parameters", fmtCount(Math.round(bytes / view.dtype_bytes))],
    ["way", s === t ? (view.by === "rank" ? "same rank" : `within the ${view.by}`) : far ? "network" : "same node"],
  ];
  const tip = { row: s, column: t, heading: `${names[s]} → ${names[t]}`, rows };
  return group({ class: "hf-mark hf-cell", "data-source": s, "data-target": t, "data-bytes": bytes }, marks, tip);
}
function legendOf(plan, p) {
  const entries = [],
    box = (paintOf, isHatched) => (isHatched ? [planned(paintOf)] : [sample({ fill: paintOf, stroke: paintOf })]);
  if (p) {
    for (const [k, t] of p.tensors.entries()) entries.push([t, [sample({ fill: PALETTE[k % PALETTE.length] })]]);
    const ring = { x: 2, y: 2, width: 12, height: 7, fill: "none", stroke: MOVED, "stroke-width": 2 };
    entries.push(
      ["← r: came from rank r", [mark("rect", ring)]],
      ["may stay in place", [mark("text", { x: 4, y: 9, class: "hf-fg", "font-size": 10 }, "=")]],
      ["not there yet", [sample({ fill: "none", class: "hf-edge", "stroke-dasharray": "2 3" })]],
    );
  }
  entries.push(["its own, planned", box(OWN, true)], ["from another, planned", box(MOVED, true)]);
  if (plan.ladder.some((r) => r.measured))
    entries.push(["its own, measured", box(OWN, false)], ["from another, measured", box(MOVED, false)]);
  const bytes = p ? p.matrix : plan.matrix;
  if (bytes.some((row, a) => row.some((n, b) => n && plan.far[a][b])))
    entries.push(["⇄ across the network", [sample({ fill: "none", stroke: MOVED, "stroke-dasharray": "3 2" })]]);
  if (!p && plan.redundant) entries.push(["redundant", box(ASIDE, true)]);
  return entries;
}

// ---- draw
const QUIET = { "data-lm-suppress-shortcuts": "true" };
// the picture of a step; returns its svg and its marks as [element, mark]
function drawStep(scene, host, label) {
  const { plan, p, steps, at, width, height } = scene,
    words = { role: "img", "aria-label": `${plan.title}; ${steps[at].text}`, "font-size": 11 },
    svg = S("svg", { width, ...words, height, viewBox: `0 0 ${width} ${height}` });
  S("title", {}, svg, plan.title);
  S("desc", {}, svg, plan.summary);
  const marks = paint(scene.marks, svg, p ? null : hatches(svg)),
    shown = (p || plan).ranks.length;
  host.replaceChildren(svg);
  label.replaceChildren();
  H("b", {}, label, `step ${at} of ${steps.length - 1} `);
  H("span", {}, label, steps[at].text);
  if (plan.num_ranks > shown) H("span", { class: "hf-dim" }, label, ` (${shown} of ${plan.num_ranks} ranks)`);
  return { svg, marks };
}
function drawMatrix(f, view, plan, p, parent) {
  const host = H("div", { tabindex: 0, ...QUIET, class: "hf-matrix" }, parent),
    { words, summary, width, height, marks } = matrixOf(view, plan, p);
  H("div", { class: "hf-dim" }, host, words);
  const size = { width, height, viewBox: `0 0 ${width} ${height}` },
    svg = S("svg", { ...size, role: "img", "aria-label": summary, "font-size": 10 }, host);
  walkedMatrix(f, host, paint(marks, svg, hatches(svg)), { below: 6, leave: () => f.hideTip() });
}
function drawLadder(view, plan, parent) {
  const rows = plan.ladder,
    most = Math.max(1, ...rows.map((r) => r.received)),
    box = H("div", {}, parent);
  H("div", { class: "hf-dim" }, box, "bytes a rank receives, all parameters: by formula, as planned, as measured");
  const heads = ["", "received", "", "on the rank at the end", ""],
    body = tableOf(box, heads, (k) => [0, 1, 4].includes(k), { class: "hf-ladder" });
  rows.forEach((r, k) => {
    const line = H("tr", { "data-row": r.measured ? null : k, "data-name": r.name, "data-bytes": r.received }, body);
    H("td", { class: "hf-left" }, line, r.name);
    const track = H("span", { class: "hf-track", style: "width:150px;background:none" }, H("td", { class: "hf-left" }, line)),
      outline = r.received && !r.measured ? `1px solid ${MOVED}` : "none",
      fill = `width:${(100 * r.received) / most}%;background:${r.measured ? MOVED : stripes(MOVED)}`;
    H("i", { style: `${fill};outline:${outline};outline-offset:-1px` }, track);
    H("td", {}, line, fmtBytes(Math.round(r.received)));
    const peak = r.peak === null ? "not measured" : fmtBytes(Math.round(r.peak));
    H("td", { class: r.peak === null ? "hf-missing" : null }, line, peak);
    H("td", { class: "hf-left hf-dim hf-wrap" }, line, r.counts);
  });
  const way = ([name, bytes, real]) =>
    `${name}: ${fmtBytes(bytes)} planned` + (real === null ? "" : `, ${fmtBytes(real)} measured`);
  H("div", { class: "hf-links hf-dim" }, box).textContent = plan.links.map(way).join(" · ");
  const sums =
    `${plan.grouping} grouping: ${fmtBytes(plan.moved)} cross between ranks, ` +
    `${fmtBytes(plan.redundant)} redundant (kept of a training shard, and not part of the rollout's)`;
  H("div", { class: "hf-dim hf-sums", "data-moved": plan.moved, "data-redundant": plan.redundant }, box, sums);
  if (plan.boxes) drawProofs(view, plan, box);
}
function drawProofs(view, plan, parent) {
  const key = H("div", { class: "hf-legend hf-proofs", "data-boxes": plan.boxes.join(" ") }, parent);
  H("span", { class: "hf-dim" }, key, "boxes by fingerprints:");
  plan.boxes.forEach((count, k) =>
    swatch(key, `${fmtCount(count)} ${view.proofs[k]}`, (s) =>
      paint([sample({ fill: PROOF[k], opacity: count ? null : 0.35 })], s, null),
    ),
  );
  for (const text of plan.wrong) H("div", { class: "hf-bad hf-wrap" }, parent, text);
}
// moves what flies, frame by frame, until `end`; returns what stops it
function fly(f, svg, birds, end) {
  const begun = performance.now(),
    nodes = birds.map(({ b0, look }) => S("rect", { ...b0, ...look, "stroke-width": 2, opacity: 0.9, class: "hf-bird" }, svg));
  let flight = 0;
  const next = (now) => {
    if (!f.root.isConnected) return;
    const t = Math.min(1, Math.max(0, (now - begun) / FLY_MS)),
      ease = t * t * (3 - 2 * t);
    birds.forEach(({ b0, b1 }, k) => {
      nodes[k].setAttribute("x", b0.x + (b1.x - b0.x) * ease);
      nodes[k].setAttribute("y", b0.y + (b1.y - b0.y) * ease);
    });
    if (t < 1) flight = requestAnimationFrame(next);
    else end();
  };
  flight = requestAnimationFrame(next);
  return () => cancelAnimationFrame(flight);
}
// buttons that choose among variants; `choose` is called with the new one
function drawSwitch(view, host, variant, choose) {
  host.replaceChildren();
  if (view.variants.length < 2) return;
  const press = (chosen) =>
    [...host.children].forEach((c, k) => {
      c.setAttribute("aria-pressed", k === chosen);
      c.style.borderColor = k === chosen ? "var(--hf-fg)" : "";
    });
  view.variants.forEach((v, k) => {
    H("button", { type: "button", "data-grouping": v.grouping, "aria-pressed": k === variant }, host, v.grouping).onclick = () => {
      press(k);
      choose(k);
    };
  });
  press(variant);
}
function drawChooser(plan, chooser, chosen) {
  chooser.replaceChildren();
  H("option", { value: "" }, chooser, "all parameters, by rank");
  for (const p of plan.parameters) H("option", { value: p.name }, chooser, p.name + (p.count > 1 ? ` (× ${p.count} layers)` : ""));
  chooser.value = chosen;
}
// the bar above the picture, and the line with the steps below it
function drawBars(f) {
  const switcher = H("span", { role: "group", "aria-label": "how ranks are grouped", style: "display:inline-flex;gap:3px" }, f.bar),
    chooser = H("select", { "aria-label": "parameter", ...QUIET, style: "font:inherit;max-width:330px" }, f.bar),
    play = f.button("▶", "play the steps", null),
    line = H("div", { class: "hf-bar" }),
    range = { type: "range", min: 0, max: 1, value: 0, step: 1 },
    slider = H("input", { ...range, "aria-label": "step", ...QUIET, style: "width:180px" }),
    label = H("span", { class: "hf-steplabel", "aria-live": "polite" });
  play.classList.add("hf-play");
  line.append(play, slider, label);
  f.root.insertBefore(line, f.host);
  const side = "display:flex;flex-wrap:wrap;gap:6px 44px;align-items:flex-start;margin-top:8px";
  return { switcher, chooser, play, slider, label, below: H("div", { style: side }, f.below), foot: H("div", {}, f.below) };
}

function render({ model, el }) {
  const { variants, ...rest } = model.get("view");
  if (document.paper && variants.length > 1) {
    // a file has no switch: all of them, one below the other
    for (const v of variants) {
      const view = { ...rest, variants: [{ ...v, title: `${v.title}, grouped ${v.grouping}` }] };
      render({ el, model: { ...model, get: () => view } });
    }
    return;
  }
  const f = frame(el, "reshard"),
    still = matchMedia("(prefers-reduced-motion: reduce)").matches,
    parts = drawBars(f),
    { chooser, slider } = parts,
    look = { variant: 0, chosen: "", at: 0 };
  let view,
    scene,
    marks = [],
    current = -1,
    land = () => {}; // ends what flies

  function draw(flying = false) {
    scene = layout(view, { ...look, width: Math.max(440, Math.min(1160, f.root.clientWidth - 16 || 900)), flying });
    const drawn = drawStep(scene, f.host, parts.label);
    marks = drawn.marks;
    for (const [node, { tip }] of marks) {
      node.addEventListener("mousemove", (ev) => f.showTip(ev.clientX, ev.clientY, tip.heading, tip.rows, false));
      node.addEventListener("mouseleave", () => f.hideTip());
    }
    if (marks[current]) marks[current][0].querySelector("rect").classList.add("hf-current");
    return drawn.svg;
  }

  // ---- interact
  function go(k, flying) {
    land();
    look.at = Math.max(0, Math.min(scene.steps.length - 1, k));
    slider.value = look.at;
    slider.setAttribute("aria-valuetext", scene.steps[look.at].text);
    if (!scene.p || !flying || still) {
      draw();
      return;
    }
    const svg = draw(true),
      birds = flightOf(scene);
    if (birds.length) land = fly(f, svg, birds, draw);
  }
  const player = playing(f, parts.play, { isLast: () => look.at >= scene.steps.length - 1, at: () => look.at, go });
  slider.oninput = () => {
    player.pause();
    go(Number(slider.value), true);
  };
  function reset() {
    scene = chosenOf(view, look);
    const { plan, p, steps } = scene;
    player.pause();
    current = -1;
    f.title.textContent = view.variants.length > 1 ? view.title : plan.title;
    slider.max = steps.length - 1;
    parts.below.replaceChildren();
    parts.foot.replaceChildren();
    drawMatrix(f, view, plan, p, parts.below);
    drawLadder(view, plan, parts.below);
    legend(parts.foot, legendOf(plan, p));
    if (p?.note) H("div", { class: "hf-dim" }, parts.foot, `${p.name}: ${p.note}.`);
    go(steps.length - 1, false);
  }
  function take() {
    view = model.get("view");
    look.variant = Math.min(look.variant, view.variants.length - 1);
    drawSwitch(view, parts.switcher, look.variant, (k) => {
      const kept = look.at;
      look.variant = k;
      reset();
      go(kept, false);
    });
    drawChooser(view.variants[look.variant], chooser, look.chosen);
    reset();
  }
  chooser.onchange = () => {
    look.chosen = chooser.value;
    reset();
  };
  function step(dx, dy) {
    if (!marks.length) return;
    const tips = marks.map(([, m]) => m.tip);
    if (current < 0) current = 0;
    else if (dy || !scene.p) current = marks[current + (dy || dx)] ? current + (dy || dx) : current;
    else {
      const next = tips.findIndex((t) => t.group === tips[current].group + dx);
      if (next >= 0) current = next;
    }
  }
  function show() {
    marks.forEach(([node], i) => node.querySelector("rect").classList.toggle("hf-current", i === current));
    if (!marks[current]) return;
    const [node, { tip }] = marks[current],
      b = node.getBoundingClientRect();
    f.showTip(b.left + b.width / 2, b.bottom, tip.heading, tip.rows, true);
  }
  const on = () => go(look.at + 1, true),
    keys = { "+": on, "=": on, "-": () => go(look.at - 1, false), " ": () => parts.play.click(), Escape: () => f.hideTip() };
  keyboard(f.host, { step, show, keys });
  f.host.addEventListener("blur", () => f.hideTip());
  take();
  const leave = redrawn({ model, f, onView: take });
  return () => {
    player.pause();
    land();
    leave();
  };
}

// goes on by itself, a step at a time, until the last or a press
function playing(f, button, { isLast, at, go }) {
  let timer = 0;
  function pause() {
    clearInterval(timer);
    timer = 0;
    button.textContent = "▶";
    button.setAttribute("aria-label", "play the steps");
  }
  function tick() {
    if (!f.root.isConnected || isLast()) pause();
    else go(at() + 1, true);
  }
  function start() {
    if (isLast()) go(0, false);
    button.textContent = "❚❚";
    button.setAttribute("aria-label", "pause");
    timer = setInterval(tick, PAUSE_MS);
    tick();
  }
  button.onclick = () => (timer ? pause() : start());
  return { pause };
}
export default { render };
