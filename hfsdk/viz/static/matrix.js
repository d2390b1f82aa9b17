// A matrix whose cells arrow keys walk: [element, mark], where a tip has `row` and `column` beside what it says.
import { keyboard } from "./core.js";

// the cell that an arrow key comes to: the nearest one in that direction, in the same row or column
export function nextCell(tips, at, dx, dy) {
  if (at < 0) return 0;
  const here = tips[at],
    far = (c) => Math.abs(c.row - here.row) + Math.abs(c.column - here.column);
  const there = tips
    .filter((c) =>
      dx
        ? c.row === here.row && Math.sign(c.column - here.column) === dx
        : c.column === here.column && Math.sign(c.row - here.row) === dy,
    )
    .sort((a, b) => far(a) - far(b));
  return there.length ? tips.indexOf(there[0]) : at;
}
export function walkedMatrix(f, host, cells, { below, leave }) {
  let at = -1;
  const tips = cells.map(([, m]) => m.tip);
  for (const [node, { tip }] of cells) {
    node.addEventListener("mousemove", (ev) => f.showTip(ev.clientX, ev.clientY, tip.heading, tip.rows, false));
    node.addEventListener("mouseleave", () => f.hideTip());
  }
  keyboard(host, {
    step: (dx, dy) => {
      at = nextCell(tips, at, dx, dy);
    },
    show: () => {
      cells.forEach(([node], k) => node.firstChild.classList.toggle("hf-current", k === at));
      if (!cells[at]) return;
      const b = cells[at][0].getBoundingClientRect(),
        tip = tips[at];
      f.showTip(b.left + b.width / 2, b.bottom - below, tip.spoken ?? tip.heading, tip.rows, true);
    },
    keys: { Escape: leave },
  });
  host.addEventListener("blur", () => f.hideTip());
}
