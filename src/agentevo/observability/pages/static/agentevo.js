// Theme, keyboard, live news. Pages are readable without scripts.
"use strict";
(() => {
  const root = document.documentElement;
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // --- theme: a cookie, so that the server sends the page in it
  function toggleTheme() {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `agentevo-theme=${root.dataset.theme}; path=/; max-age=31536000; SameSite=Strict`;
    document.dispatchEvent(new CustomEvent("theme"));
  }

  // --- scroll the page's tab into view if the tabs do not fit
  const tab = one(".tabs a[aria-current]");
  if (tab) tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft - (tab.parentElement.clientWidth - tab.offsetWidth) / 2;

  // --- rows by keyboard
  let row = "";
  function mark() {
    for (const one of all("[data-row]")) one.classList.toggle("here", Boolean(row) && one.id === row);
  }
  function move(by) {
    const rows = all("[data-row]").filter((one) => one.offsetParent !== null);
    rows.forEach((one, place) => { one.id ||= `row-number-${place}`; });
    if (!rows.length) return;
    const here = rows.findIndex((one) => one.id === row);
    const next = Math.min(Math.max(here + by, 0), rows.length - 1);
    row = rows[next].id;
    mark();
    rows[next].scrollIntoView({ block: "nearest" });
    const link = one("a[href]", rows[next]);
    if (link) link.focus({ preventScroll: true });
  }

  let before = "";
  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const target = event.target;
    if (event.key === "Escape" && target.matches("input")) { event.preventDefault(); return target.blur(); }
    if (target.matches("input:not([type=checkbox]), textarea, select")) return;
    const key = event.key;
    const go = before === "g" ? one(`[data-go="${CSS.escape(key)}"]`) : null;
    before = key;
    if (go) return location.assign(go.href);
    if (key === "/") {
      const search = one("input[type=search]");
      if (search) { event.preventDefault(); search.focus(); search.select(); }
    } else if (key === "j") move(1);
    else if (key === "k") move(-1);
    else if (key === "x") {
      const box = one(".here input[type=checkbox]");
      if (box) box.click();
    } else if (key === "?") { const help = one("#help"); if (help) help.showModal(); }
    else if (key === "t") toggleTheme();
  }

  document.addEventListener("keydown", press);
  document.addEventListener("click", (event) => {
    const asked = event.target.closest("[data-do]");
    if (!asked) return;
    if (asked.dataset.do === "theme") toggleTheme();
    if (asked.dataset.do === "help") one("#help").showModal();
    if (asked.dataset.do === "close") asked.closest("dialog").close();
  });

  // --- how many runs are chosen
  function countChosen() {
    for (const bar of all("[data-chosen]")) {
      const form = bar.closest("form") || document;
      const chosen = all("input[name=run]:checked", form).length;
      bar.hidden = chosen === 0;
      const shown = one("[data-number]", bar);
      if (shown) shown.textContent = String(chosen);
    }
  }
  document.addEventListener("change", countChosen);

  // --- live: one stream of news while the page is visible; changed parts are requested again
  let stream = null;
  function tell(on, why) {
    const pulse = one(".pulse");
    if (pulse) { pulse.dataset.on = on ? "yes" : "no"; pulse.textContent = on ? "live" : why; }
  }
  // a part that fails to load stays unchanged, and is requested again at the next news
  document.addEventListener("htmx:response:error", (event) => tell(false, `not up to date (${event.detail.ctx.response.status})`));
  const known = new Map(Object.entries(JSON.parse(document.body.dataset.versions || "{}")));
  function news(event) {
    const told = JSON.parse(event.data);
    moment(told);
    if (known.get(told.run) === told.version) return;
    known.set(told.run, told.version);
    document.dispatchEvent(new CustomEvent("news", { detail: told }));
    if (window.htmx) for (const part of all("[data-live]")) window.htmx.trigger(part, "news");
  }
  // text between two backticks is code, as in `marked` of observability/pages/rendering.py
  function marked(text) {
    const pieces = text.split("`");
    if (pieces.length % 2 === 0) pieces.splice(-2, 2, pieces.slice(-2).join("`"));
    return pieces.map((piece, place) => {
      if (place % 2 === 0) return document.createTextNode(piece);
      const code = document.createElement("code");
      code.textContent = piece;
      return code;
    });
  }
  // --- the current activity of a run comes with the news; the page counts the seconds
  let ahead = 0;
  function moment(told) {
    if (told.at) ahead = told.at - Date.now() / 1000;
    const now = told.now, of = (name) => all(`[data-${name}]`).filter((part) => [part.dataset[name], part.dataset.of].includes(told.run));
    for (const part of of("moment")) part.textContent = now ? now.words : "";
    for (const part of of("share")) part.value = now && now.share !== null ? now.share : 0;
    for (const part of of("state")) {
      part.firstElementChild.className = `state ${told.state}`;
      part.firstElementChild.textContent = told.state;
    }
    for (const part of of("why")) {
      part.hidden = !told.why;
      part.classList.toggle("bad", told.state === "failed");
      part.lastElementChild.replaceChildren(...marked(told.why));
    }
    for (const part of of("since")) part.dataset.since = now ? now.since : "";
    if (window.htmx) for (const part of all("[data-beat]")) window.htmx.trigger(part, "beat");
    tick();
  }
  function tick() {
    for (const part of all("[data-since]")) {
      const seconds = Math.max(Math.floor(Date.now() / 1000 + ahead - Number(part.dataset.since)), 0);
      part.textContent = part.dataset.since ? (seconds < 60 ? `for ${seconds} s` : `for ${Math.floor(seconds / 60)} m ${String(seconds % 60).padStart(2, "0")} s`) : "";
    }
  }
  tick();
  setInterval(tick, 1000);
  function listen() {
    const about = document.body.dataset.news;
    if (!about || document.hidden || stream) return;
    stream = new EventSource(about);
    stream.addEventListener("open", () => tell(true));
    stream.addEventListener("error", () => tell(false, "not connected"));
    stream.addEventListener("run", news);
  }
  function rest() {
    if (document.hidden && stream) { stream.close(); stream = null; } else listen();
  }
  document.addEventListener("visibilitychange", rest);
  addEventListener("pagehide", () => { if (stream) { stream.close(); stream = null; } });
  addEventListener("pageshow", () => { listen(); countChosen(); });
  document.addEventListener("htmx:after:swap", () => { if (stream) tell(stream.readyState === EventSource.OPEN, "not connected"); countChosen(); mark(); document.dispatchEvent(new CustomEvent("swapped")); });

  window.agentevo = { one, all, toggleTheme };
})();
