// Players for some tasks of MiniWoB++. Each is a function of the task's words, and returns the next
// action: {x, y} clicks at a pixel, {text} types, {key} presses. null: no action helps.
(task) => {
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const one = (selector) => document.querySelector(selector);
  const words = () => document.querySelector("#query").textContent.replace(/\s+/g, " ").trim();
  const quoted = () => Array.from(words().matchAll(/"([^"]*)"/g), (match) => match[1]);
  const center = (element) => {
    if (!element) return null;
    const box = element.getBoundingClientRect();
    return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
  };
  const withText = (selector, text) =>
    center(all(selector).find((element) => element.textContent.trim() === text));

  // The next action that gives the fields these texts, then a click on the button.
  const fill = (texts, button) => {
    for (const [selector, text] of Object.entries(texts)) {
      const field = one(selector);
      if (field.value === text) continue;
      if (document.activeElement !== field) return center(field);
      const isSelected = field.selectionStart === 0 && field.selectionEnd === field.value.length;
      return isSelected ? { text } : { key: "Control+A" };
    }
    return center(one(button));
  };
  // The next action that checks exactly these boxes, then a click on the button.
  const check = (names, button) => {
    const wrong = all("#boxes label").find(
      (label) => label.querySelector("input").checked !== names.includes(label.textContent));
    return center(wrong ? wrong.querySelector("input") : one(button));
  };

  const textKind = (shape) => (/\d/.test(shape.textContent) ? "digit" : "letter");
  const shapeName = (shape) =>
    ({ rect: "rectangle", circle: "circle", polygon: "triangle" })[shape.tagName];
  const fitsShape = (shape) => {
    const name = shapeName(shape);
    const height = name ? shape.getBBox().width : parseFloat(shape.getAttribute("font-size"));
    const size = height > 0.87 * shapes.MAX_SIZE ? "large" : "small";
    const kind = name ? "shape" : textKind(shape);
    const traits = [size, shape.getAttribute("fill"), kind, "item", name ?? shape.textContent];
    return words().replace("Click on a ", "").split(" ").every((word) => traits.includes(word));
  };

  const solvers = {
    "click-test": () => center(one("#subbtn")),
    "click-test-2": () => center(one("#subbtn")),
    "click-button": () => withText("#area button", quoted()[0]),
    "click-color": () => {
      const color = core.getUtterance().match(/the (.*) colored/)[1];
      return center(one(`#area [data-color="${color}"]`));
    },
    "click-dialog": () => center(one(".ui-dialog-titlebar button")),
    "click-dialog-2": () => quoted()[0] === "x"
      ? center(one(".ui-dialog-titlebar button"))
      : withText(".ui-dialog-buttonset button", quoted()[0]),
    "click-link": () => withText("#area .alink", quoted()[0]),
    "click-tab": () => withText("#area ul a", words().match(/Tab #\d/)[0]),
    "click-shape": () => center(all("#area_svg > *").find(fitsShape)),
    "identify-shape": () => {
      const shape = one("#area_svg > *");
      return center(one(`#area-buttons [data-type="${shapeName(shape) ?? textKind(shape)}"]`));
    },
    "grid-coordinate": () => center(document.getElementById(words().match(/\(.*\)/)[0])),
    "focus-text": () => center(one("#tt")),
    "focus-text-2": () => center(one(`#tt${words().match(/\d/)[0]}`)),
    "click-checkboxes": () => {
      const names = words().match(/^Select (.*) and click Submit/)[1];
      return check(names.split(", "), "#subbtn");
    },
    "click-option": () => check([words().match(/^Select (.*) and click Submit/)[1]], "#subbtn"),
    "enter-text": () => fill({ "#tt": quoted()[0] }, "#subbtn"),
    "enter-password": () => fill({ "#password": quoted()[0], "#verify": quoted()[0] }, "#subbtn"),
    "login-user": () => fill({ "#username": quoted()[0], "#password": quoted()[1] }, "#subbtn"),
  };
  return solvers[task]();
}
