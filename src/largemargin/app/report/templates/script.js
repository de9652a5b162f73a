"use strict";
(function () {
  const payload = JSON.parse(document.getElementById("payload").textContent);
  const root = document.documentElement;
  const plots = Array.from(document.querySelectorAll(".plot"));
  const drawn = new Set();
  let ready = false;
  const chosen = new Set();

  for (const details of document.querySelectorAll("details")) details.open = false;

  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const palette = () => Array.from({ length: 8 }, (_, at) => variable("--c" + at));

  /* Places in the palette become colours of the theme. */
  function colored(value) {
    if (Array.isArray(value)) return value;
    if (value && typeof value === "object") {
      const made = {};
      for (const key of Object.keys(value)) {
        const each = value[key];
        made[key] = key === "color" && /^(c[0-7]|neutral|ink)$/.test(each) ? variable("--" + each) : colored(each);
      }
      return made;
    }
    return value;
  }

  function trace(given) {
    const made = colored(given);
    if (given.meta && given.meta.labels) {
      const colors = palette();
      const labels = given.meta.labels;
      const small = given.type === "scatter3d";
      const symbols = payload.symbols;
      made.marker = {
        color: labels.map((c) => colors[c % 8]),
        symbol: small ? "circle" : labels.map((c) => symbols[Math.floor(c / 8) % symbols.length]),
        size: small ? 3 : 6,
        opacity: small ? 0.85 : labels.map((c) => shown(c)),
        line: { width: 0 },
      };
      /* Points in space have one opacity for all: those not chosen become small and pale. */
      if (small && chosen.size > 0) {
        made.marker.size = labels.map((c) => (chosen.has(c) ? 4 : 1.5));
        made.marker.color = labels.map((c) => (chosen.has(c) ? colors[c % 8] : variable("--line")));
      }
    }
    if (given.meta && given.meta.classes) {
      made.marker = Object.assign({}, made.marker, { opacity: given.meta.classes.map((c) => (chosen.size === 0 || chosen.has(c) ? 1 : 0.15)) });
    }
    return made;
  }

  const shown = (label) => (chosen.size === 0 ? 0.85 : chosen.has(label) ? 1 : 0.06);
  const className = (label) => {
    const names = Object.values(payload.classes)[0] || [];
    return label in names ? names[label] : "class " + label;
  };
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  /* Chosen classes in a figure of distributions: a mark at the mean of each. */
  function marks(given, box) {
    if (!given.marks || chosen.size === 0) return [];
    const labels = Array.from(chosen);
    return given.marks.filter((each) => !hiddenNamed(box, each.name)).map((each) => ({
      type: "scatter", mode: "markers", x: labels.map((c) => each.x[c]), y: labels.map(() => 0),
      text: labels.map((c) => plain(className(c)) + ", mean"), name: each.name,
      hovertemplate: "%{text}: %{x:.4g}<extra>" + each.name.replace(/\{/g, "&#123;") + "</extra>", cliponaxis: false,
      marker: { symbol: "triangle-up", size: 13, color: variable("--" + each.color), line: { width: 1.5, color: variable("--ink") } },
    }));
  }

  /* Chosen classes in a matrix: a frame around row and column. */
  function frames(given) {
    const framed = given.data.map((each) => each.meta && each.meta.framed).find(Boolean);
    if (!framed) return [];
    const line = { color: variable("--mark"), width: 2.5 }, last = framed.length - 0.5;
    return framed.flatMap((label, at) => (chosen.has(label) ? [
      { type: "rect", x0: at - 0.5, x1: at + 0.5, y0: -0.5, y1: last, line },
      { type: "rect", y0: at - 0.5, y1: at + 0.5, x0: -0.5, x1: last, line },
    ] : []));
  }

  function layout(given, box) {
    const ink = variable("--ink"), soft = variable("--soft"), line = variable("--line");
    const axis = { gridcolor: line, zerolinecolor: soft, linecolor: line, zeroline: false, automargin: true };
    const merged = (extra) => Object.assign({}, axis, extra, extra && extra.title ? { title: Object.assign({ standoff: 8, font: { size: 12 } }, extra.title) } : {});
    const made = Object.assign({}, given, {
      font: { family: getComputedStyle(document.body).fontFamily, size: 11.5, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 46, r: 10, t: 10, b: 38 },
      xaxis: merged(given.xaxis),
      yaxis: merged(given.yaxis),
      hovermode: "closest",
      dragmode: box.clientWidth < 520 ? false : "zoom",
      hoverlabel: { namelength: 40 },
      modebar: { bgcolor: variable("--paper"), color: soft, activecolor: ink },
    });
    made.shapes = frames(payload.charts[box.id]);
    if (given.scene) {
      const side = { visible: false };
      made.scene = Object.assign({ xaxis: side, yaxis: side, zaxis: side }, given.scene);
      made.dragmode = "orbit";
      made.margin = { l: 0, r: 0, t: 0, b: 0 };
    }
    return made;
  }

  /* Plotly shows its buttons for good where nothing can hover: on phones, over the figure. */
  const buttons = matchMedia("(hover: none)").matches ? false : "hover";
  const options = { displayModeBar: buttons, displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"], showSendToCloud: false, plotlyServerURL: "" };

  function draw(box) {
    const given = payload.charts[box.id];
    if (!given || !ready) return;
    const first = !drawn.has(box);
    drawn.add(box);
    const data = given.data.map((each, at) => Object.assign(trace(each), hiddenIn(box, at) ? { visible: false } : {})).concat(marks(given, box));
    if (!first) { Plotly.react(box, data, layout(given.layout, box), options); return; }
    Plotly.newPlot(box, data, layout(given.layout, box), options);
    if (given.data.some((each) => each.meta && each.meta.labels)) {
      box.on("plotly_hover", (event) => look(event));
      box.on("plotly_unhover", hide);
    }
    if (given.data.some((each) => each.meta)) {
      box.on("plotly_click", (event) => {
        const point = event.points[0], meta = point.data.meta;
        if (!meta) return;
        if (meta.framed) choose(meta.framed[point.pointNumber[0]]);
        else choose((meta.labels || meta.classes)[point.pointNumber]);
      });
    }
  }

  /* Legends show and hide all lines of what they name; a faint histogram goes with its curve. */
  const keyOf = (box, at) => box.parentElement.querySelector('.keys [data-trace="' + at + '"]');
  function hiddenIn(box, at) {
    const data = payload.charts[box.id].data;
    const first = data.findIndex((each, other) => each.legendgroup === data[at].legendgroup && keyOf(box, other));
    return first >= 0 && keyOf(box, first).getAttribute("aria-pressed") === "false";
  }
  function hiddenNamed(box, name) {
    const at = payload.charts[box.id].data.findIndex((each) => each.name === name);
    return at >= 0 && hiddenIn(box, at);
  }
  for (const key of document.querySelectorAll(".keys button")) {
    key.addEventListener("click", () => {
      key.setAttribute("aria-pressed", String(key.getAttribute("aria-pressed") !== "true"));
      draw(key.closest("figure").querySelector(".plot"));
    });
  }

  /* Figures are drawn when they come into view, and all of them before printing. */
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target)) { watcher.unobserve(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "300px" });
  /* The page is there to read before the library of the figures is. */
  function start() {
    if (ready) return;
    const library = document.createElement("script");
    library.textContent = document.getElementById("plotly").textContent;
    document.head.append(library);
    ready = true;
    plots.forEach((box) => watcher.observe(box));
  }
  window.addEventListener("load", () => setTimeout(start, 30));
  /* On paper: light, every figure, as wide as half a page or the whole one. */
  let onScreen, unfolded = [];
  window.addEventListener("beforeprint", () => {
    unfolded = Array.from(document.querySelectorAll("details.more:not([open])"));
    for (const details of unfolded) details.open = true;
    onScreen = root.dataset.theme;
    root.dataset.theme = "light";
    start();
    for (const box of plots) {
      draw(box);
      if (drawn.has(box)) Plotly.relayout(box, { width: box.parentElement.classList.contains("wide") ? 640 : 300, autosize: false });
    }
  });
  window.addEventListener("afterprint", () => {
    if (onScreen === undefined) delete root.dataset.theme; else root.dataset.theme = onScreen;
    for (const details of unfolded) details.open = false;
    for (const box of drawn) { Plotly.relayout(box, { width: null, autosize: true }); draw(box); }
  });

  /* What a sample is, beside the pointer. Texts are set as text, never as HTML. */
  const card = document.getElementById("look");
  function look(event) {
    const point = event.points[0], meta = point.data.meta;
    if (!meta) return;
    const at = point.pointNumber, index = meta.index[at];
    const classes = payload.classes[meta.data] || [];
    const name = (label) => (label in classes ? classes[label] : "class " + label);
    const names = payload.names[meta.data] || {};
    const lines = [names[index] || "sample " + index, "label: " + name(meta.labels[at])];
    if (meta.predicted.length) lines.push("predicted: " + name(meta.predicted[at]));
    if (meta.margins.length && meta.margins[at] !== null) lines.push(meta.margin + ": " + meta.margins[at].toPrecision(4));
    card.querySelector("p").textContent = lines.join("\n");
    const picture = (payload.pictures[meta.data] || {})[index];
    const image = card.querySelector("img");
    image.hidden = !picture;
    if (picture) image.src = picture; else image.removeAttribute("src");
    card.hidden = false;
    const x = event.event.clientX, y = event.event.clientY;
    card.style.left = Math.max(4, Math.min(x + 14, window.innerWidth - card.offsetWidth - 8)) + "px";
    card.style.top = Math.max(4, Math.min(y + 14, window.innerHeight - card.offsetHeight - 8)) + "px";
  }
  function hide() { card.hidden = true; }
  window.addEventListener("scroll", hide, { passive: true });

  /* One choice of classes for every figure, table and list. */
  const bar = document.getElementById("chosen");
  function choose(label) {
    if (!payload.linked) return;
    if (label === null) chosen.clear();
    else if (chosen.has(label)) chosen.delete(label);
    else chosen.add(label);
    const any = chosen.size > 0;
    for (const button of document.querySelectorAll("[data-class][aria-pressed], [data-all][aria-pressed]")) {
      const on = "all" in button.dataset ? !any : chosen.has(Number(button.dataset.class));
      button.setAttribute("aria-pressed", String(on));
    }
    for (const item of document.querySelectorAll(".worst > li, tr[data-class]")) {
      item.classList.toggle("dim", any && !chosen.has(Number(item.dataset.class)));
    }
    const names = Array.from(chosen, className);
    bar.hidden = !any;
    bar.querySelector("b").textContent = names.slice(0, 3).join(", ") + (names.length > 3 ? " and " + (names.length - 3) + " more" : "");
    for (const box of drawn) {
      const given = payload.charts[box.id];
      if (given.marks || given.data.some((each) => each.meta)) draw(box);
    }
  }
  for (const button of document.querySelectorAll(".chooser button, #chosen button")) {
    button.addEventListener("click", () => choose("all" in button.dataset ? null : Number(button.dataset.class)));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen.size > 0) choose(null);
  });
  for (const row of payload.linked ? document.querySelectorAll("tr[data-class]") : []) {
    const cell = row.cells[1], button = document.createElement("button");
    button.type = "button";
    button.className = "pick";
    button.dataset.class = row.dataset.class;
    button.setAttribute("aria-pressed", "false");
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => choose(Number(row.dataset.class)));
  }
  for (const input of document.querySelectorAll("input[data-finds]")) {
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const chip of input.closest(".chooser").querySelectorAll(".chips [data-class]")) {
        const text = chip.textContent.toLowerCase();
        chip.hidden = !words.every((word) => text.includes(word));
      }
    });
  }

  /* Tables that sort by their headings and are searched. */
  function value(row, column) {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
  }
  function before(a, b) {
    const numbers = typeof a === "number", others = typeof b === "number";
    if (numbers && others) return a - b;
    if (numbers !== others) return numbers ? -1 : 1;
    return a.localeCompare(b, undefined, { numeric: true });
  }
  for (const table of document.querySelectorAll("table[data-sorts]")) {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = Array.from(body.rows).map((row) => [value(row, column), row]);
        /* What is not known stays at the end, whichever way. */
        rows.sort(([a], [b]) => (a === "–") - (b === "–") || (up ? before(a, b) : before(b, a)));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }
  for (const input of document.querySelectorAll("input[data-searches]")) {
    const table = document.getElementById(input.dataset.searches);
    const count = input.closest(".tools").querySelector("output");
    const search = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        left += !row.hidden;
      }
      count.textContent = left + " of " + table.tBodies[0].rows.length + " rows";
    };
    input.addEventListener("input", search);
    search();
  }

  /* Tables with more columns than fit. */
  const tables = Array.from(document.querySelectorAll(".scroll"));
  function cut(box) {
    box.classList.toggle("wider", box.scrollWidth > box.clientWidth + 1);
    box.classList.toggle("cut", box.scrollWidth - box.clientWidth - box.scrollLeft > 4);
  }
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => cut(entry.target)));
  for (const box of tables) { sizes.observe(box); box.addEventListener("scroll", () => cut(box), { passive: true }); }

  /* Light and dark. */
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => drawn.forEach(draw);
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);

  /* Where one is. */
  const links = new Map(Array.from(document.querySelectorAll("nav a"), (a) => [a.hash.slice(1), a]));
  const place = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((a) => a.removeAttribute("aria-current"));
      const link = links.get(entry.target.id);
      if (link) link.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > section").forEach((section) => place.observe(section));
})();
