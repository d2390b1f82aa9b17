// The pictures of a notebook follow its host's theme as JupyterLab says it; this says furo's in the same words.
const dark = matchMedia("(prefers-color-scheme: dark)");
function follow() {
  const theme = document.body.dataset.theme;
  document.body.dataset.jpThemeLight = String(theme === "light" || (theme !== "dark" && !dark.matches));
}
document.addEventListener("DOMContentLoaded", () => {
  follow();
  dark.addEventListener("change", follow);
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-theme"] });
});
