// A page that is a file: what needs scripts is shown where there are some.
"use strict";
document.documentElement.classList.add("scripted");
// Charts that a browser has drawn in its own colours are drawn again in those of paper.
addEventListener("beforeprint", () => { document.documentElement.dataset.was = document.documentElement.dataset.theme || ""; document.documentElement.dataset.theme = "light"; document.dispatchEvent(new CustomEvent("theme")); });
addEventListener("afterprint", () => { const was = document.documentElement.dataset.was; if (was) document.documentElement.dataset.theme = was; else delete document.documentElement.dataset.theme; document.dispatchEvent(new CustomEvent("theme")); });
