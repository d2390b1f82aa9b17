// A picture on paper: what its module rendered, laid out as one SVG. Its drawings stay as they are, side by side where there is
// room; title, words, legends and tables become SVG text, by estimated widths. Controls, tips, what unfolds and what says
// data-paper="no" are left out.
//
//   render({model, el}) --> elements (dom.js) --> box(element, style, room) = {width, height, body} --> <svg>
import { hatches, S } from "./core.js";
import { furnish, PaperElement } from "./dom.js";

const WIDTH = 980,
  LEAST = 420,
  GAP = 4,
  MOST_ROWS = 40,
  MOST_CELL = 420;
const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
  MONO = "ui-monospace, 'DejaVu Sans Mono', monospace";
const LEFT_OUT = ["canvas", "details", "input", "option", "script", "style", "textarea"],
  ASIDE = ["hf-say", "hf-tip"],
  ROWS = ["hf-bar", "hf-controls", "hf-head", "hf-legend"];

// what an element's tag or class does to the text in it
const STYLES = {
  b: { bold: true },
  code: { mono: true },
  small: { size: 9 },
  th: { bold: true },
  "hf-title": { bold: true, size: 13 },
  "hf-legend": { size: 11.5, color: "dim" },
  "hf-dim": { color: "dim" },
  "hf-missing": { color: "dim", italic: true },
  "hf-bad": { color: "bad" },
  "hf-busy": { color: "busy" },
  "hf-good": { color: "good" },
  "hf-flow": { mono: true, size: 12.5 },
  "hf-given": { color: "dim" },
  "hf-bytes": { italic: true, size: 10 },
};
const styled = (e, style) =>
  Object.assign({ ...style }, ...[e.tag, ...e.classList.names].filter((n) => Object.hasOwn(STYLES, n)).map((n) => STYLES[n]));

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const LONG = /-?\d+\.\d{3,}(?:e-?\d+)?/g;
const rounded = (text) =>
  text.length > 4 && text.includes(".") ? text.replace(LONG, (x) => String(Number(Number(x).toFixed(2)))) : text;
const NO_BOX = { width: 0, height: 0, body: "" };
const moved = (box, x, y) => (box.body ? `<g transform="translate(${rounded(`${x} ${y}`)})">${box.body}</g>` : "");

// ---- colours: the variables and classes of frame.css, as they are in light and in dark
let themes, used, hatch, defs, classRules, ruled;
function readStyles(css) {
  const block = (text) => Object.fromEntries([...text.matchAll(/--hf-(\w+):([^;}]+)/g)].map(([, name, value]) => [name, value]));
  const [, light, dark] = /\.hf\{([^}]*)\}\s*@media \(prefers-color-scheme:dark\)\{\.hf\{([^}]*)\}/.exec(css);
  themes = [block(light), block(dark)];
  classRules = [...css.matchAll(/\.hf ((?:circle)?\.hf-[\w-]+)\{([^}]*)\}/g)]
    .map(([, selector, text]) => [
      selector,
      text
        .split(";")
        .filter((d) => /^(fill|stroke|opacity)/.test(d.trim()))
        .join(";"),
    ])
    .filter(([, text]) => text);
  ruled = new Set(classRules.map(([selector]) => /hf-[\w-]+/.exec(selector)[0]));
  used = new Set();
  defs = S("svg", {});
  hatch = hatches(defs);
}
// "var(--hf-mark)" has no meaning in a file: a class takes its place
function themed(property, value) {
  const name = /^var\(--hf-(\w+)\)$/.exec(value)?.[1];
  if (!name) return null;
  used.add(`${property} ${name}`);
  return `hf-${property}-${name}`;
}
function sheet() {
  const own = [...used].map((use) => {
    const [property, name] = use.split(" ");
    return [`.hf-${property}-${name}`, `${property}:var(--hf-${name})`];
  });
  const rules = [...classRules, ...own],
    text = (theme, list) => list.map(([s, t]) => `${s}{${t.replace(/var\(--hf-(\w+)\)/g, (_, name) => theme[name])}}`).join("");
  const changing = rules.filter(([, t]) => t.includes("var("));
  return `${text(themes[0], rules)}@media (prefers-color-scheme:dark){${text(themes[1], changing)}}`;
}

// ---- SVG that a module drew
const UNSEEN = /^(style|tabindex|role|aria-.*|pointer-events|xmlns|data-(?!(row|role|devices)$).*)$/;
function serialized(node) {
  if (!(node instanceof PaperElement)) return escaped(node.textContent);
  const { fill, stroke } = node.attributes,
    style = node.ownStyle || {};
  if (node.hidden || style.display === "none") return "";
  if ((fill === "transparent" && !stroke) || (stroke === "transparent" && fill === "none")) return "";
  const classes = node.classList.names.filter((name) => ruled.has(name));
  let text = "";
  for (const [name, value] of Object.entries(style.fill ? { ...node.attributes, fill: style.fill } : node.attributes)) {
    const theme = name === "fill" || name === "stroke" ? themed(name, value) : null;
    if (theme) classes.push(theme);
    else if (name !== "class" && !UNSEEN.test(name)) text += ` ${name}="${escaped(rounded(value))}"`;
  }
  if (classes.length) text += ` class="${classes.join(" ")}"`;
  const inside = node.childNodes.map((n) => serialized(n)).join("");
  if (node.tag === "g" && !text) return inside;
  return inside ? `<${node.tag}${text}>${inside}</${node.tag}>` : `<${node.tag}${text}/>`;
}
function drawing(svg) {
  const { width, height, class: _, viewBox: __, ...rest } = svg.attributes;
  const holder = new PaperElement("g", true);
  Object.assign(holder.attributes, rest);
  holder.childNodes = svg.childNodes.filter((n) => n.tag !== "title" && n.tag !== "desc");
  return { width: Number(width), height: Number(height), body: serialized(holder) };
}

// ---- text
const NARROW = new Set("iljtfrI.,:;'|![]() -·"),
  WIDE = new Set("mwMW%@<>=+#&→×−±…");
function measure(text, { size, bold, mono }) {
  let ems = 0;
  for (const c of text)
    ems +=
      c.codePointAt(0) >= 0x2e80
        ? 1.03
        : mono
          ? 0.62
          : NARROW.has(c)
            ? 0.37
            : WIDE.has(c)
              ? 0.92
              : c >= "A" && c <= "Z"
                ? 0.68
                : c >= "0" && c <= "9"
                  ? 0.64
                  : 0.61;
  return ems * size * (bold ? 1.15 : 1);
}
function textMark(text, x, y, style, anchor) {
  const cls = style.color === "fg" ? "hf-fg" : style.color === "dim" ? "hf-sub" : themed("fill", `var(--hf-${style.color})`);
  const extra =
    (style.bold ? ' font-weight="600"' : "") +
    (style.italic ? ' font-style="italic"' : "") +
    (style.mono ? ` font-family="${MONO}"` : "") +
    (anchor ? ` text-anchor="${anchor}"` : "");
  return `<text x="${rounded(String(x))}" y="${rounded(String(y))}" font-size="${style.size}"${extra} class="${cls}">${escaped(text)}</text>`;
}
function cutTo(word, room, style) {
  let kept = "";
  for (const c of word) {
    if (kept && measure(kept + c + "…", style) > room) break;
    kept += c;
  }
  return kept + "…";
}
// runs: [[text, style], ...]; words that do not fit go to the next line, words longer than a line are cut
function lines(runs, room) {
  const out = [[]];
  let x = 0;
  for (const [text, style] of runs)
    for (const word of text.match(/\S+\s*|\s+/g) || []) {
      const width = measure(word.trimEnd(), style);
      if (x && x + width > room) {
        out.push([]);
        x = 0;
      }
      if (!x && !word.trim()) continue;
      const fitting = width > room ? cutTo(word, room, style) : word;
      const last = out[out.length - 1],
        before = last[last.length - 1];
      if (before && before.style === style) before.text += fitting;
      else last.push({ text: fitting, style, x });
      x += measure(fitting, style);
    }
  return out;
}
function paragraph(runs, room) {
  const all = lines(runs, room).filter((line) => line.length);
  let y = 0,
    width = 0,
    body = "";
  for (const line of all) {
    const size = Math.max(...line.map((r) => r.style.size)),
      end = line[line.length - 1];
    for (const r of line) body += textMark(r.text.trimEnd(), r.x, y + size * 1.08, r.style);
    width = Math.max(width, end.x + measure(end.text.trimEnd(), end.style));
    y += size * 1.45;
  }
  return { width, height: y, body };
}

// ---- boxes of HTML
const isSeen = (e) =>
  !(e instanceof PaperElement) ||
  !(
    e.hidden ||
    e.style.display === "none" ||
    LEFT_OUT.includes(e.tag) ||
    (e.tag === "select" && e.parentNode.tag !== "label") ||
    (e.tag === "button" && !(e.parentNode.tag === "td" || e.parentNode.classList.contains("hf-flow"))) ||
    e.attributes["data-paper"] === "no" ||
    ASIDE.some((c) => e.classList.contains(c))
  );
const INLINE = ["b", "button", "code", "i", "output", "small", "span", "select", "a"];
const isInline = (n) =>
  !(n instanceof PaperElement) ||
  (INLINE.includes(n.tag) && !isRow(n) && !isPainted(n) && n.childNodes.filter(isSeen).every(isInline));
const isRow = (e) => ROWS.some((c) => e.classList.contains(c)) || e.tag === "label" || /flex|grid/.test(e.style.display || "");
const isPainted = (e) => ["hf-track", "hf-tok", "hf-scale"].some((c) => e.classList.contains(c));

function chosenOption(select) {
  const at = select.options.find((o) =>
    select.value === undefined ? o.selected : (o.attributes.value ?? o.textContent) === select.value,
  );
  return (at || select.options[0])?.textContent || "";
}
function runsOf(node, style) {
  if (!(node instanceof PaperElement)) return [[node.textContent, style]];
  if (!isSeen(node)) return [];
  const own = styled(node, style);
  if (node.tag === "select") return [[chosenOption(node), own]];
  return node.childNodes.flatMap((n) => runsOf(n, own));
}

function box(node, given, room) {
  if (!(node instanceof PaperElement)) return paragraph([[node.textContent.replace(/\s+/g, " "), given]], room);
  if (!isSeen(node)) return NO_BOX;
  const style = styled(node, given);
  if (node.isSvg) return drawing(node);
  if (node.tag === "table") return table(node, style, room);
  if (node.classList.contains("hf-track")) return track(node);
  if (node.classList.contains("hf-tok")) return token(node, style);
  if (node.classList.contains("hf-scale")) return stacked(node, style, room, 1);
  const seen = node.childNodes.filter(isSeen);
  if (node.classList.contains("hf-flow")) return row(seen, style, room, 0, 2);
  if (node.parentNode?.classList.contains("hf-scale")) return scalePart(node, style);
  if (isRow(node)) return row(seen, style, room, node.tag === "label" ? 5 : node.classList.contains("hf-bar") ? 8 : 14);
  if (seen.every(isInline)) return paragraph(runsOf(node, given), room);
  return INLINE.includes(node.tag) ? row(seen, style, room, 5) : stacked(node, style, room, GAP);
}
function stacked(node, style, room, gap) {
  let y = 0,
    width = 0,
    body = "";
  for (const child of node.childNodes) {
    const b = box(child, style, room);
    if (!b.height) continue;
    body += moved(b, 0, y);
    width = Math.max(width, b.width);
    y += b.height + gap;
  }
  return { width, height: Math.max(0, y - gap), body };
}
// side by side, on the next line where the room ends; words and their swatches in the middle of a line, drawings at its top
function row(nodes, style, room, gap, below = GAP) {
  let x = 0,
    y = 0,
    width = 0,
    body = "",
    line = [];
  const end = () => {
    const tall = Math.max(0, ...line.map(([b]) => b.height));
    for (const [b, at] of line) body += moved(b, at, y + (tall <= 32 ? (tall - b.height) / 2 : 0));
    if (line.length) y += tall + below;
    [x, line] = [0, []];
  };
  for (const node of nodes) {
    if (node.tag === "br") {
      end();
      continue;
    }
    const b = box(node, style, room);
    if (!b.height) continue;
    if (x && x + b.width > room) end();
    line.push([b, x]);
    width = Math.max(width, x + b.width);
    x += b.width + gap;
  }
  end();
  return { width, height: Math.max(0, y - below), body };
}

function table(node, style, room) {
  const all = [...node.descendants()].filter((e) => e.tag === "tr"),
    kept = all.slice(0, MOST_ROWS + 1);
  const cells = kept.map((tr) => tr.children.filter(isSeen)),
    columns = Math.max(0, ...cells.map((c) => c.length)),
    most = (cell) => Math.min(MOST_CELL, Number.parseFloat(cell.style.maxWidth) || MOST_CELL);
  const widths = Array.from({ length: columns }, (_, k) =>
    Math.max(0, ...cells.map((c) => (c[k] ? box(c[k], style, most(c[k])).width : 0))),
  );
  const wraps = widths.map((w, k) => w > 120 && cells.some((c) => c[k]?.classList.contains("hf-wrap")));
  const over = widths.reduce((n, w) => n + w + 12, 0) - room,
    soft = widths.reduce((n, w, k) => n + (wraps[k] ? w - 110 : 0), 0);
  if (over > 0 && soft > 0) for (const k of widths.keys()) if (wraps[k]) widths[k] -= Math.min(1, over / soft) * (widths[k] - 110);
  const width = widths.reduce((n, w) => n + w + 12, 0);
  let y = 0,
    body = "";
  for (const line of cells) {
    const boxes = line.map((cell, k) => box(cell, style, widths[k] + 0.01)),
      tall = Math.max(0, ...boxes.map((b) => b.height));
    let x = 0;
    for (const [k, b] of boxes.entries()) {
      const left = line[k].classList.contains("hf-left") || line[k].classList.contains("hf-wrap");
      body += moved(b, left ? x : x + widths[k] - b.width, y + 3);
      x += widths[k] + 12;
    }
    y += tall + 6;
    body += `<path d="M0 ${rounded(String(y))}H${rounded(String(width))}" class="${line[0]?.tag === "th" ? "hf-edge" : "hf-grid"}"/>`;
  }
  const rest = all.length - kept.length;
  if (rest > 0) {
    body += textMark(`and ${rest} more rows`, 0, y + 14, { ...style, color: "dim" });
    y += 18;
  }
  return { width, height: y, body };
}

// ---- what CSS paints in a page
const rect = (x, y, width, height, extra) =>
  `<rect x="${rounded(String(x))}" y="${y}" width="${rounded(String(width))}" height="${height}"${extra}/>`;
function track(node) {
  const width = Number.parseFloat(node.style.width) || 120,
    inner = node.children[0],
    share = Number.parseFloat(inner?.style.width) / 100 || 0,
    paint = inner?.style.background || "var(--hf-busy)";
  const striped = /^repeating-linear-gradient\([^,]*,(#\w+)/.exec(paint)?.[1],
    theme = themed("fill", paint);
  const fill = striped ? ` fill="${hatch(striped)}" stroke="${striped}"` : theme ? ` class="${theme}"` : ` fill="${paint}"`;
  const back = node.style.background === "none" ? "" : rect(0, 4, width, 7, ' rx="3.5" class="hf-idlefill"');
  return { width: width + 6, height: 14, body: back + (share ? rect(0, 4, width * Math.min(1, share), 7, ` rx="2"${fill}`) : "") };
}
// a box's colour as tokens.js paints it: a share of a hue, and a line above or below
function painted(node, width, height) {
  const [, hue, share] = /color-mix\(in srgb, (#\w+) ([\d.]+)%/.exec(node.style.backgroundColor || "") || [];
  let body = "";
  if (node.classList.contains("hf-given")) body += rect(0, 0, width, height, ' rx="2" class="hf-panel"');
  if (hue) body += rect(0, 0, width, height, ` rx="2" fill="${hue}" fill-opacity="${Number(share) / 100}"`);
  for (const [side, y] of [
    ["borderTopColor", 0],
    ["borderBottomColor", height - 2],
  ])
    if (node.style[side]) body += rect(0, y, width, 2, ` fill="${node.style[side]}"`);
  if (node.classList.contains("hf-clipped")) body += rect(0, height - 5.5, width, 5.5, ` fill="${crosshatch()}"`);
  if (node.classList.contains("hf-clipped") || node.classList.contains("hf-nan"))
    body += rect(0.5, 0.5, width - 1, height - 1, ' fill="none" class="hf-edge" stroke-dasharray="3 2"');
  return body;
}
function token(node, style) {
  const small = node.children.find((c) => c.tag === "small"),
    text = node.childNodes
      .filter((n) => !(n instanceof PaperElement))
      .map((n) => n.textContent)
      .join(""),
    shown = text.length > 40 ? text.slice(0, 39) + "…" : text;
  const numbers = small ? measure(small.textContent, { size: 9 }) : 0,
    width = node.classList.contains("hf-sample") ? 16 : Math.max(7, measure(shown, style) + 4, numbers + 4),
    height = node.classList.contains("hf-sample") ? 13 : small ? 31 : 22;
  let body = painted(node, width, height);
  if (shown) body += textMark(shown, width / 2, 14.5, style, "middle");
  if (small) body += textMark(small.textContent, width / 2, 25, { ...style, mono: false, size: 9 }, "middle");
  const name = node.attributes["data-row"];
  return { width: width + 1, height, body: name === undefined ? body : `<g data-row="${name}">${body}</g>` };
}
// colours side by side, and below them what their ends stand for
function scalePart(node, style) {
  const seen = node.children.filter(isSeen),
    colours = seen.every((c) => c.tag === "i"),
    width = colours ? 26 * seen.length : 234;
  if (colours) return { width, height: 13, body: seen.map((c, k) => moved({ body: painted(c, 25, 12) }, 26 * k, 0)).join("") };
  const anchors = ["start", "middle", "end"];
  const ends = seen.map((c, k) => {
    const share = seen.length > 1 ? k / (seen.length - 1) : 0;
    return textMark(c.textContent, width * share, 11, style, anchors[Math.round(2 * share)]);
  });
  return { width, height: 14, body: ends.join("") };
}
let crossed = null;
function crosshatch() {
  if (!crossed) {
    crossed = "hf-crossed";
    const size = { width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
    S("path", { d: "M0,0H4M0,0V4", fill: "none", class: "hf-edge" }, S("pattern", { id: crossed, ...size }, defs));
  }
  return `url(#${crossed})`;
}

function paper(picture, json, css) {
  const view = JSON.parse(json),
    el = new PaperElement("div", false);
  furnish(globalThis, WIDTH + 16);
  readStyles(css);
  picture.render({ el, model: { get: () => view, set() {}, on() {}, off() {}, send() {}, save_changes() {} } });
  const whole = stacked(el, { size: 12, color: "fg" }, WIDTH, 4 * GAP),
    width = Math.max(LEAST, Math.ceil(whole.width)) + 2 * GAP,
    height = Math.ceil(whole.height) + 2 * GAP;
  const body = moved(whole, GAP, GAP),
    patterns = defs.childNodes.map((n) => serialized(n)).join("");
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" ` +
    `font-family="${FONT}" font-size="11"><title>${escaped(String(view.title || ""))}</title>` +
    `<desc>${escaped(String(view.summary || ""))}</desc><style>${sheet()}</style>` +
    `<rect width="100%" height="100%" class="hf-paper"/>${patterns}${body}</svg>`
  );
}
export default { paper };
