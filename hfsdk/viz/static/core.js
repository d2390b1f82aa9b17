// Shared by every picture: marks, text, tooltip, keyboard. No imports; concatenated in front of the picture's own module.
const SVG_NS = "http://www.w3.org/2000/svg";

export function S(tag, attrs, parent, text) {
  const e = document.createElementNS(SVG_NS, tag);
  for (const k in attrs) if (attrs[k] !== null && attrs[k] !== undefined) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  if (parent) parent.appendChild(e);
  return e;
}

export function H(tag, attrs, parent, text) {
  const e = document.createElement(tag);
  for (const k in attrs) if (attrs[k] !== null && attrs[k] !== undefined) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  if (tag === "td" && /\S{48}/.test(text)) e.classList.add("hf-long"); // a word that no column is wide enough for
  if (parent) parent.appendChild(e);
  return e;
}

// ---- numbers as text; null is missing and stays null
export const isMissing = (x) => x === null || x === undefined || Number.isNaN(x);
export function fmtSeconds(s) {
  if (isMissing(s)) return null;
  const a = Math.abs(s);
  if (a >= 3600) return (s / 3600).toFixed(2) + " h";
  if (a >= 120) return (s / 60).toFixed(1) + " min";
  if (a >= 1) return s.toFixed(2) + " s";
  if (a >= 1e-3) return (s * 1e3).toFixed(a >= 0.1 ? 0 : 1) + " ms";
  return a === 0 ? "0 s" : (s * 1e6).toFixed(0) + " µs";
}
export function fmtBytes(n) {
  if (isMissing(n)) return null;
  for (const [unit, size] of [
    ["TB", 1e12],
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ])
    if (Math.abs(n) >= size) return (n / size).toFixed(n / size >= 100 ? 0 : n / size >= 10 ? 1 : 2) + " " + unit;
  return n + " B";
}
export function fmtCount(n) {
  if (isMissing(n)) return null;
  if (typeof n !== "number") return String(n);
  if (Number.isInteger(n)) return String(n).replace(/\B(?=(\d{3})+$)/g, " ");
  return Math.abs(n) >= 100 ? n.toFixed(0) : String(Number(n.toPrecision(4)));
}
export const fmtShare = (x) => (isMissing(x) ? null : (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + " %");

// float32 numbers packed as base64 (tokenmath.pack)
export function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)),
    view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

// ---- colour
const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
// tone > 0 towards white, < 0 towards black
export function shade(hex, tone) {
  const end = tone > 0 ? 255 : 0,
    t = Math.abs(tone);
  return (
    "#" +
    channels(hex)
      .map((c) =>
        Math.round(c + (end - c) * t)
          .toString(16)
          .padStart(2, "0"),
      )
      .join("")
  );
}
export function inkOn(hex) {
  const [r, g, b] = channels(hex)
    .map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3 ? "#15181c" : "#ffffff";
}
export const alpha = (hex, a) =>
  hex +
  Math.round(a * 255)
    .toString(16)
    .padStart(2, "0");

// as much of a label as fits: "actor.compute_values", "compute_values", "values", "val…", nothing
// how many letters' room a text takes; those of East Asia, pictographs and the sign for what cannot be shown are as wide as two
const cellsOf = (text) => [...text].reduce((sum, c) => sum + (c.codePointAt(0) >= 0x2e80 ? 2 : 1), 0);
export function shorten(text, most) {
  if (cellsOf(text) <= most) return text;
  let kept = "",
    room = most - 1;
  for (const c of text) {
    room -= cellsOf(c);
    if (room < 0) break;
    kept += c;
  }
  return kept + "…";
}
export function fitText(text, width) {
  const method = text.replace(/^.*[. ]/, ""),
    short = method.replace(/^(compute|export)_/, "");
  for (const t of [text, method, short]) if (cellsOf(t) * 5.7 + 8 <= width) return t;
  const room = Math.floor((width - 8) / 5.7);
  return room >= 4 ? shorten(short, room) : "";
}
export const stripes = (color) => `repeating-linear-gradient(45deg,${color} 0 1.6px,transparent 1.6px 4px)`;

// predicted is hatched and outlined, measured is solid
// ids are the whole page's, and every frozen picture has its own copy of this module
const idPrefix = "hf-" + Math.random().toString(36).slice(2, 10) + "-";
let idCount = 0;
export const freshId = () => idPrefix + ++idCount;
export function hatches(svg) {
  const defs = S("defs", {}, svg),
    made = new Map();
  return (color) => {
    if (!made.has(color)) {
      const id = freshId();
      const p = S("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
      S("rect", { width: 5, height: 5, class: "hf-paper" }, p);
      S("rect", { width: 1.6, height: 5, fill: color }, p);
      made.set(color, `url(#${id})`);
    }
    return made.get(color);
  };
}

// ---- frame: title bar, picture, tooltip, spoken text; with a model it says when the kernel that kept the picture live has gone
const GONE = ["restarting", "autorestarting", "terminating", "dead"];
export const KERNEL_GONE =
  "The kernel was restarted or has ended; the session, its models and what they learned are gone with it. ";
const sessionGone = () => `${KERNEL_GONE}This picture shows how far it was. Run the notebook again from its first cell.`;
// a kept session has lost nothing with its kernel
const sessionKept = (name) =>
  `The kernel was restarted or has ended; the session ${JSON.stringify(name)} goes on without it, and so does its run. This picture stays as it was then: hf.Session.attach(${JSON.stringify(name)}) comes back to the session, and session.watch() to its run.`;
export function frame(el, name, model) {
  const root = H("div", { class: `hf hf-${name}` }, el);
  const bar = H("div", { class: "hf-bar" }, root);
  const title = H("span", { class: "hf-title" }, bar);
  const host = H("div", { tabindex: 0, "data-lm-suppress-shortcuts": "true", class: "hf-host" }, root);
  const below = H("div", {}, root);
  const say = H("div", { class: "hf-say", "aria-live": "polite" }, root);
  const tip = H("div", { class: "hf-tip", role: "tooltip", hidden: "" }, root);
  const kernel = model?.widget_manager?.kernel;
  const lose = () => {
    if (f.lost) return;
    f.lost = true;
    const kept = model.get("kept_as"),
      words = kept ? sessionKept(kept) : (f.gone || sessionGone)();
    root.insertBefore(H("p", { class: `hf-lost${kept ? "" : " hf-bad"}`, role: "status" }, null, words), host);
    if (f.onlost) f.onlost();
  };
  const heard = (_, status) => {
    if (GONE.includes(status)) lose();
  };
  if (kernel) model.on("comm_live_update", lose);
  if (kernel?.statusChanged) kernel.statusChanged.connect(heard);
  const f = {
    paper: document.paper === true, // drawn into a file: nothing moves, and there is no canvas
    lost: false,
    onlost: null,
    gone: null, // returns what is gone and what brings it back, where a picture knows more of it
    leave() {
      if (kernel) {
        model.off("comm_live_update", lose);
        if (kernel.statusChanged) kernel.statusChanged.disconnect(heard);
      }
    },
    root,
    bar,
    title,
    host,
    below,
    button(text, label, onclick) {
      const b = H("button", { type: "button", "aria-label": label, title: label }, bar, text);
      b.onclick = onclick;
      return b;
    },
    // rows: [label, text or null]; null is drawn as missing
    showTip(x, y, heading, rows, spoken) {
      tip.replaceChildren();
      H("b", {}, tip, heading);
      const dl = H("dl", {}, tip);
      for (const [label, value] of rows) {
        H("dt", {}, dl, label);
        H("dd", value === null ? { class: "hf-missing" } : {}, dl, value === null ? "not measured" : value);
      }
      tip.hidden = false;
      const box = root.getBoundingClientRect(),
        w = tip.offsetWidth,
        h = tip.offsetHeight;
      let left = x - box.left + 14,
        top = y - box.top + 14;
      if (left + w > box.width) left = Math.max(0, x - box.left - w - 10);
      if (y + 14 + h > window.innerHeight && top - h - 24 > 0) top -= h + 24;
      tip.style.left = left + "px";
      tip.style.top = top + "px";
      if (spoken) say.textContent = heading + ", " + rows.map(([l, v]) => `${l} ${v === null ? "not measured" : v}`).join(", ");
    },
    hideTip() {
      tip.hidden = true;
    },
    say(text) {
      say.textContent = text;
    },
  };
  return f;
}

// many requests, one draw per frame
export function coalesced(draw) {
  let handle = 0;
  return () => {
    if (!handle)
      handle = requestAnimationFrame(() => {
        handle = 0;
        draw();
      });
  };
}

// the drawing of a view, which has a title and a summary
export function titledSvg(view, width, height, more) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  const svg = S("svg", { ...size, role: "img", "aria-label": view.summary, "font-size": 11, ...more });
  S("title", {}, svg, view.title);
  S("desc", {}, svg, view.summary);
  return svg;
}

export function swatch(parent, label, paint) {
  const span = H("span", {}, parent);
  const svg = S("svg", { width: 16, height: 11, "aria-hidden": "true" }, span);
  paint(svg);
  H("span", {}, span, label);
}

// arrow keys walk over marks; `step(current, dx, dy)` returns the next mark
export function keyboard(host, { step, show, keys }) {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  host.addEventListener("keydown", (ev) => {
    if (ev.ctrlKey || ev.metaKey || ev.altKey) return;
    if (moves[ev.key]) {
      step(...moves[ev.key]);
      show();
    } else if (keys?.[ev.key]) keys[ev.key]();
    else return;
    ev.preventDefault();
    ev.stopPropagation();
  });
}
