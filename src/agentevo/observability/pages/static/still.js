// A page that is a file: parts that need scripts are shown if scripts run.
"use strict";
document.documentElement.classList.add("scripted");
// For printing, charts are redrawn in print colours.
addEventListener("beforeprint", () => { document.documentElement.dataset.was = document.documentElement.dataset.theme || ""; document.documentElement.dataset.theme = "light"; document.dispatchEvent(new CustomEvent("theme")); });
addEventListener("afterprint", () => { const was = document.documentElement.dataset.was; if (was) document.documentElement.dataset.theme = was; else delete document.documentElement.dataset.theme; document.dispatchEvent(new CustomEvent("theme")); });
