// Classes that must be set before the first paint, hence a classic script: start page or answer, and light or dark.
// The system chooses light or dark until the button is used.
document.documentElement.classList.toggle("start", !/[?&](q|similar)=[^&]/.test(location.search));
{
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // Storage may be forbidden. Then the choice is kept as long as the page.
  const remembered = use => { try { return use(localStorage); } catch { return null; } };

  const choice = remembered(storage => storage.getItem("theme"));
  if (choice === "light" || choice === "dark") root.dataset.theme = choice;

  addEventListener("DOMContentLoaded", () => {
    const button = document.querySelector("#theme");
    const show = () => button.setAttribute("aria-pressed", dark());
    button.addEventListener("click", () => {
      const wanted = dark() ? "light" : "dark";
      if ((wanted === "dark") === system.matches) {
        // The choice is that of the system again: follow the system.
        delete root.dataset.theme;
        remembered(storage => storage.removeItem("theme"));
      } else {
        root.dataset.theme = wanted;
        remembered(storage => storage.setItem("theme", wanted));
      }
      show();
    });
    system.addEventListener("change", show);
    show();
  });
}
