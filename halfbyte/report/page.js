"use strict";
// Tells the numbers of a map's cell, under the pointer or reached by the arrow keys.
{
  const hint = document.getElementById("hint");
  const text = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : value);

  for (const map of document.querySelectorAll("[data-map]")) {
    const data = JSON.parse(document.querySelector(`[data-of="${map.dataset.map}"]`).textContent);
    const frame = document.createElement("div");
    frame.className = "at";
    let column = 0, row = 0;

    const show = () => {
      const at = row * data.columns + column;
      const lines = [`layer ${data.rows[row]}, ${data.column} ${column}`];
      for (const [name, values] of Object.entries(data.hints))
        if (values[at] !== null) lines.push(`${name}: ${text(values[at])}`);
      hint.textContent = lines.join("\n");
      hint.hidden = false;
      const box = map.getBoundingClientRect();
      const width = box.width / data.columns, height = box.height / data.rows.length;
      Object.assign(frame.style, {
        left: `${column * width - 1}px`, top: `${row * height - 1}px`,
        width: `${width + 2}px`, height: `${height + 2}px`,
      });
      map.append(frame);
      const x = box.left + (column + 1) * width + 8, y = box.top + (row + 1) * height + 8;
      hint.style.left = `${Math.max(4, Math.min(x, document.documentElement.clientWidth - hint.offsetWidth - 8))}px`;
      hint.style.top = `${y + hint.offsetHeight > innerHeight ? box.top + row * height - hint.offsetHeight - 8 : y}px`;
    };
    const hide = () => { hint.hidden = true; frame.remove(); };
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));

    map.addEventListener("pointermove", (event) => {
      const box = map.getBoundingClientRect();
      column = within(Math.floor((event.clientX - box.left) / box.width * data.columns), data.columns);
      row = within(Math.floor((event.clientY - box.top) / box.height * data.rows.length), data.rows.length);
      show();
    });
    map.addEventListener("pointerleave", hide);
    map.addEventListener("blur", hide);
    map.addEventListener("focus", () => { if (map.matches(":focus-visible")) show(); });
    map.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      column = within(column + step[0], data.columns);
      row = within(row + step[1], data.rows.length);
      show();
    });
  }
}
