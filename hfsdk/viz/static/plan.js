// A plan: who lives where, the step as predicted, and the runners-up with why they lost.
// Up and down choose a plan, left and right walk.
import { coalesced, frame, H, keyboard } from "./core.js";
import { planBoard } from "./plan_parts.js";

function render({ model, el }) {
  const f = frame(el, "plan", model),
    subtitle = H("div", { class: "hf-dim" }),
    board = planBoard(f, f.host);
  f.root.insertBefore(subtitle, f.host);
  const draw = () => {
    const view = model.get("view");
    f.title.textContent = view.title;
    subtitle.textContent = view.subtitle;
    board.draw(view);
    if (!view.choices.length && !f.host.querySelector(".hf-nothing"))
      H("p", { class: "hf-dim hf-nothing" }, f.host, "there is no plan");
  };
  keyboard(f.host, { step: board.step, show: board.show, keys: { Escape: () => f.hideTip() } });
  f.host.addEventListener("blur", () => f.hideTip());
  draw();
  const again = coalesced(draw);
  model.on("change:view", again);
  const resize = new ResizeObserver(coalesced(() => board.resized()));
  resize.observe(f.root);
  return () => {
    model.off("change:view", again);
    f.leave();
    resize.disconnect();
  };
}
export default { render };
