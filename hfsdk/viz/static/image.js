// A picture that is drawn outside the browser, as an image.
import { frame } from "./core.js";

function render({ model, el }) {
  const f = frame(el, "image", model);
  const show = () => {
    const view = model.get("view");
    f.title.textContent = view.title;
    f.host.innerHTML = view.html; // of hfsdk's own: an image, or text that is escaped
  };
  show();
  model.on("change:view", show);
  return () => {
    model.off("change:view", show);
    f.leave();
  };
}

export default { render };
