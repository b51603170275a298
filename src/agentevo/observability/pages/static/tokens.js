// Tokens: shading, the numbers of one token by pointer and by keyboard, its history to the gradient.
"use strict";
(() => {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (link) location.assign(link.href);
  });
  begin();
  document.addEventListener("htmx:after:swap", begin); // the page waited for its tokenizer

  function begin() {
  const stream = document.getElementById("stream");
  const box = document.getElementById("token-box");
  if (!stream || !box || stream.dataset.ready) return;
  stream.dataset.ready = "yes";

  const numbers = new WeakMap();
  const of = (block) => {
    if (!numbers.has(block)) numbers.set(block, JSON.parse(block.querySelector("script").textContent));
    return numbers.get(block);
  };
  const place = (token) => {
    const block = token.closest("[data-block]");
    const at = [...block.querySelectorAll("[data-t]")].indexOf(token);
    return { block, at, of: of(block) };
  };

  // --- shading
  const LEVELS = [0.9, 0.5, 0.2, 0.05, 0.01];
  const ENTROPIES = [0.1, 0.3, 0.7, 1.4, 2.5]; // nats
  const MOVES = [0.01, 0.05, 0.1, 0.2, 0.5]; // of a log-prob: a ratio of 1.01 to 1.65
  let shade = "lp";
  function level(data, at, largest) {
    if (shade === "lp") {
      if (!data.lp) return "";
      const chance = Math.exp(data.lp[at]);
      const found = LEVELS.findIndex((lowest) => chance >= lowest);
      return found === 0 ? "" : `s${found < 0 ? 5 : found}`;
    }
    if (shade === "adv") {
      if (!data.adv) return "";
      const size = Math.min(5, Math.ceil((5 * Math.abs(data.adv[at])) / largest));
      return size ? `${data.adv[at] > 0 ? "a" : "b"}${size}` : "";
    }
    if (shade === "ent") {
      if (!data.ent || data.ent[at] == null) return "";
      const size = ENTROPIES.filter((least) => data.ent[at] >= least).length;
      return size ? `s${size}` : "";
    }
    if (shade === "mov") {
      if (!data.mov || data.mov[at] == null) return "";
      const size = MOVES.filter((least) => Math.abs(data.mov[at]) >= least).length;
      return size ? `${data.mov[at] > 0 ? "a" : "b"}${size}` : "";
    }
    if (shade === "ver") return `v${((data.ver[at] % 6) + 6) % 6}`;
    return data.on[at] ? "m1" : "m0";
  }
  function paint(root) {
    let largest = 0;
    for (const block of stream.querySelectorAll("[data-block]")) for (const value of of(block).adv || []) largest = Math.max(largest, Math.abs(value));
    for (const block of root.querySelectorAll("[data-block]")) {
      const data = of(block);
      block.querySelectorAll("[data-t]").forEach((token, at) => {
        const here = token.classList.contains("here");
        token.className = level(data, at, largest || 1);
        if (here) token.classList.add("here");
      });
    }
  }
  for (const button of document.querySelectorAll("[data-shade]")) {
    button.addEventListener("click", () => {
      shade = button.dataset.shade;
      for (const other of document.querySelectorAll("[data-shade]")) other.setAttribute("aria-pressed", String(other === button));
      paint(stream);
    });
  }
  document.addEventListener("htmx:after:swap", () => { if (shade !== "lp") paint(stream); });

  // --- one token
  let here = null;
  function tell(token) {
    if (!token || token === here) return;
    if (here) here.classList.remove("here");
    here = token;
    token.classList.add("here");
    const { at, of: data } = place(token);
    const add = (name, value) => {
      const part = document.createElement("span");
      const label = document.createElement("span");
      label.className = "soft";
      label.textContent = `${name} `;
      const shown = document.createElement("b");
      shown.textContent = value;
      part.append(label, shown);
      box.append(part);
    };
    box.textContent = "";
    add("token", JSON.stringify(token.textContent));
    add("id", data.id[at]);
    if (data.lp) {
      add("log-prob", data.lp[at].toFixed(4));
      const chance = 100 * Math.exp(data.lp[at]);
      add("chance", `${chance < 0.1 ? chance.toExponential(1) : chance.toFixed(1)}%`);
    } else add("drawn", "greedily");
    if (data.adv) add("advantage", data.adv[at].toFixed(4));
    if (data.ent && data.ent[at] != null) add("entropy", `${data.ent[at].toFixed(3)} nats`);
    if (data.mov && data.mov[at] != null) add("ratio after the update", Math.exp(data.mov[at]).toFixed(4));
    add("version of the weights", data.ver[at]);
    if (dialog) add("trained", data.on[at] ? "yes" : "no"); // a file does not know
    add("place", `turn ${data.turn}, ${data.at + at}`);
  }
  stream.addEventListener("pointerover", (event) => tell(event.target.closest("[data-t]")));
  function step(by) {
    const all = [...stream.querySelectorAll("[data-t]")].filter((token) => token.offsetParent !== null);
    const next = all[Math.min(Math.max((here ? all.indexOf(here) : -1) + by, 0), all.length - 1)];
    if (next) { tell(next); next.scrollIntoView({ block: "nearest" }); }
  }
  stream.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "Enter" && here) follow(here);
    else return;
    event.preventDefault();
  });

  // --- its history to the gradient
  const dialog = document.getElementById("token-history");
  async function follow(token) {
    if (!dialog) return; // a file, or a reply that no run has recorded: nobody can be asked
    const { at, of: data } = place(token);
    const body = dialog.querySelector("[data-body]");
    body.textContent = "…";
    dialog.showModal();
    try {
      const answer = await fetch(`${box.dataset.follow}&turn=${data.turn}&position=${data.at + at}`, { headers: { "hx-request": "true" } });
      const found = new DOMParser().parseFromString(await answer.text(), "text/html");
      body.replaceChildren(...(answer.ok ? found.body.childNodes : [document.createTextNode("This can't be shown now: load the page again.")]));
    } catch (error) {
      body.textContent = "The dashboard does not answer: is it still running?";
    }
  }
  stream.addEventListener("click", (event) => {
    const token = event.target.closest("[data-t]");
    if (token) { tell(token); follow(token); }
  });
  }
})();
