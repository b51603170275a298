// Chat: each side sends its own requests and shows the events. Only the page keeps the messages.
"use strict";
(() => {
  const root = document.querySelector("[data-try]");
  if (!root) return;
  const form = document.getElementById("ask");
  const sides = [...root.querySelectorAll("[data-side]")].map((element) => ({ element, name: element.dataset.side, history: [], conversation: newName(), asked: "" }));
  const stop = form.querySelector("[data-stop]");
  const send = form.querySelector("[type=submit]");
  const problem = form.querySelector("[data-problem]");
  const box = document.getElementById("token-box");
  let running = null;

  function newName() {
    return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }
  const chosen = () => sides.filter((side) => form.elements[side.name].value);
  function tell(side, text, html = false) {
    const state = side.element.querySelector("[data-state]");
    if (html) state.innerHTML = text; else state.textContent = text;
  }
  function show() {
    const both = Boolean(form.elements.right.value);
    root.querySelector(".sides").classList.toggle("both", both);
    for (const side of sides) {
      const select = form.elements[side.name];
      side.element.hidden = !select.value;
      side.element.querySelector("[data-name]").textContent = select.value ? select.selectedOptions[0].textContent : "";
    }
  }
  form.addEventListener("change", show);

  function add(side, role, words) {
    const message = document.createElement("div");
    message.className = `message ${role}`;
    message.dir = "auto";
    const who = document.createElement("h4");
    who.textContent = role;
    const text = document.createElement("div");
    text.className = "words";
    text.textContent = words;
    message.append(who, text);
    log(side).append(message);
    return message;
  }
  const log = (side) => side.element.querySelector("[data-log]");
  function fail(side, words) {
    const note = document.createElement("p");
    note.className = "bad small";
    note.setAttribute("role", "alert");
    note.textContent = words;
    log(side).append(note);
  }

  // --- one stream
  async function listen(path, fields, signal, heard) {
    const body = new URLSearchParams({ form: form.elements.form.value, ...fields });
    const answer = await fetch(`${root.dataset.url}/${path}`, { method: "POST", body, signal });
    if (!answer.ok) {
      const text = await answer.text();
      let told = text;
      try { told = JSON.parse(text).text; } catch (error) { /* the door's own words */ }
      heard("failed", { text: told.slice(0, 500) });
      return;
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const name = /^event: (\w+)$/m.exec(event);
        const data = /^data: (.*)$/m.exec(event);
        if (name && data) heard(name[1], JSON.parse(data[1]));
        if (name && name[1] === "done") return;
      }
    }
    heard("failed", { text: "The answer stopped early: is the dashboard still running?" });
  }

  // --- chat
  async function ask(side, message, signal) {
    const setting = `${form.elements[side.name].value} ${form.elements.system.value}`;
    if (side.asked && side.asked !== setting) { side.history = []; side.conversation = newName(); log(side).textContent = ""; }
    side.asked = setting;
    add(side, "user", message);
    const shown = add(side, "assistant", "");
    const words = shown.querySelector(".words");
    words.classList.add("drawing");
    const system = form.elements.system.value.trim();
    const history = [...side.history, { role: "user", content: message }];
    const messages = system ? [{ role: "system", content: system }, ...history] : history;
    let said = "", ended = false;
    const fields = { which: form.elements[side.name].value, device: form.elements.device.value, conversation: side.conversation, messages: JSON.stringify(messages), temperature: form.elements.temperature.value, max_new_tokens: form.elements.max_new_tokens.value };
    try {
      await listen("chat", fields, signal, (name, data) => {
        if (name === "state") tell(side, data.html, true);
        if (name === "text") { said += data.text; words.textContent = said; }
        if (name === "reply") {
          ended = true;
          said = data.text;
          words.textContent = said;
          const more = document.createElement("div");
          more.innerHTML = data.html;
          shown.after(more);
        }
        if (name === "failed") fail(side, data.text);
      });
    } catch (error) {
      fail(side, error.name === "AbortError" ? "stopped" : "The dashboard does not answer: is it still running?");
    }
    words.classList.remove("drawing");
    if (ended || said) side.history = [...history, { role: "assistant", content: said }];
    else shown.remove();
  }

  async function go(event) {
    event.preventDefault();
    if (running) return;
    const field = form.elements.message;
    const message = field.value;
    problem.textContent = "";
    if (!message.trim()) return;
    if (message.length > Number(root.dataset.most)) { problem.textContent = `A message has at most ${root.dataset.most} characters.`; return; }
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    show();
    field.value = "";
    await Promise.all(chosen().map((side) => ask(side, message, running.signal)));
    running = null;
    send.disabled = false;
    stop.disabled = true;
    const players = document.getElementById("players");
    if (players && window.htmx) window.htmx.trigger(players, "tried");
  }
  form.addEventListener("submit", go);
  stop.addEventListener("click", () => { if (running) running.abort(); });
  form.elements.message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.querySelector("[data-clear]").addEventListener("click", () => {
    if (running) running.abort();
    for (const side of sides) { side.history = []; side.conversation = newName(); log(side).textContent = ""; }
    form.elements.message.focus();
  });
  root.addEventListener("toggle", (event) => {
    if (event.target.matches("[data-tokens]")) box.hidden = !root.querySelector("[data-tokens][open]");
  }, true);
  show();
})();
