"use strict";
// Shared by all parts. Every number comes from the document; text is set as text, never as HTML.

const doc = JSON.parse(document.getElementById("document").textContent);
const { about, maps, tiles, caches } = doc;
const T = about.tokens.length;
const L = about.n_layer;
const H = about.n_head;

// ------------------------------------------------------------------------------- elements, numbers

const $ = (id) => document.getElementById(id);

/** An element with attributes ("on..." are listeners) and children; strings become text. */
function h(tag, attributes = {}, ...children) {
  const svg = /^(svg|path)$/.test(tag);
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) e.setAttribute(name, value === true ? "" : value);
  }
  e.append(...children.flat().filter((c) => c != null));
  return e;
}

const NUMBERS = { uint8: Uint8Array, uint16: Uint16Array, float32: Float32Array };
const unpacked = new WeakMap();

/** The numbers of a Packed, cached. */
function unpack(packed) {
  if (!unpacked.has(packed)) {
    const text = atob(packed.data);
    const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0)); // little endian, as all browsers
    unpacked.set(packed, new NUMBERS[packed.dtype](bytes.buffer));
  }
  return unpacked.get(packed);
}

const int = (n) => Math.round(n).toLocaleString("en");
const many = (n, one, more = one + "s") => `${int(n)} ${n === 1 ? one : more}`;
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** 1.2e-7 as 1.2 × 10⁻⁷. */
function sci(x) {
  if (!x) return "0";
  const [digits, power] = x.toExponential(1).split("e");
  if (power >= -3 && power <= 3) return String(Number(x.toPrecision(2)));
  const raised = [...power.replace("+", "")].map((c) => (c === "-" ? "⁻" : SUPERSCRIPT[c]));
  return `${digits}\u00a0×\u00a010${raised.join("")}`;
}

/** With a unit prefix: scaled(12345, "B") is "12.3 kB". */
function scaled(x, unit) {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let k = 0;
  for (; Math.abs(x) >= 999.5 && k < prefixes.length - 1; k++) x /= 1000;
  return `${Number(x.toPrecision(k || x >= 100 ? 3 : 2))} ${prefixes[k]}${unit}`;
}

function real(x, decimals = 4) {
  if (Number.isNaN(x)) return "";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const shown = Math.abs(x) >= 1e5 ? x.toExponential(decimals) : x.toFixed(decimals);
  return shown.replace("-", "−");
}

/** A number with its exact value as an attribute. */
const num = (value, shown) => h("data", { value: String(value) }, shown);
const count = (n) => num(n, int(n));
const small = (x) => num(x, sci(x));

const td = (...children) => h("td", {}, ...children);
const th = (child, more) => h("th", { scope: "col", ...more }, child);
const rowHead = (child) => h("th", { scope: "row" }, child);
const hint = (...children) => h("p", { class: "hint" }, ...children);
const entry = (...children) => h("span", {}, ...children); // of a legend
const judged = (good) => `verdict ${good ? "good" : "bad"}`;
const compared = (id, said, name, found) => h("p",
  { class: judged(found.error <= found.allowed), id }, said, small(found.difference),
  `. From the formula in float64 ${name} differs by `, small(found.error), "; allowed are ",
  small(found.allowed), ".");
const refusal = (r) => h("p", { class: "note" }, `${r.name} was refused: ${r.why.join("; ")}.`);

const quote = (token) => `“${token.label}”`;

// ----------------------------------------------------------------------------------------- colours

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/** 256 colours [r, g, b]; of(t), t from 0 to 1, returns lightness, chroma and hue (OKLCH). */
function colours(of) {
  const c = h("canvas", { width: 256, height: 1 }).getContext("2d");
  for (let n = 0; n < 256; n++) {
    const [light, chroma, hue] = of(n / 255);
    c.fillStyle = `oklch(${light} ${chroma} ${hue})`;
    c.fillRect(n, 0, 1, 1);
  }
  const { data } = c.getImageData(0, 0, 256, 1);
  return Array.from({ length: 256 }, (_, n) => [...data.slice(4 * n, 4 * n + 3)]);
}

// Lightness alone gives the order, for any colour vision.
const more = (t) => 0.02 + 0.09 * t + 0.05 * Math.sin(Math.PI * t);
const ramp = {
  light: colours((t) => [0.965 - 0.645 * t, more(t), 105 + 190 * t]),
  dark: colours((t) => [0.245 + 0.675 * t, more(t), 295 - 190 * t]),
};
const table = () => (dark.matches ? ramp.dark : ramp.light);
const place = (t) => Math.round(255 * clamp(t, 0, 1)); // in a table
const shade = (t) => table()[place(t)];
const css = (rgb) => `rgb(${rgb.join(" ")})`;
/** Black or white on that colour (relative luminance of WCAG 2.2). */
function inkOn(rgb) {
  const [r, g, b] = rgb.map((v) => (v <= 10 ? v / 3295 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}
const weightShade = (w) => shade(Math.sqrt(w)); // most are small: the root lets them be seen

const rampBar = () => picture(1, 256, (_, n) => n / 255,
  h("canvas", { class: "ramp", "aria-hidden": "true" }));

/** An image of rows x cols pixels; level(r, c): 0 to 1, or NaN for transparent. */
function picture(rows, cols, level, canvas = document.createElement("canvas")) {
  canvas.width = cols;
  canvas.height = rows;
  const image = new ImageData(cols, rows);
  const pixels = new Uint32Array(image.data.buffer); // a large page has ten million of them
  const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  const colours = Uint32Array.from(table(), packed);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < cols; c++) {
      const found = level(r, c);
      if (!Number.isNaN(found)) pixels[r * cols + c] = colours[place(found)];
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** Row and column of a T x T picture where an event happens; null: outside of it. */
function cellAt(e, { left, top, cell }) {
  const box = e.currentTarget.getBoundingClientRect();
  return [[e.clientY - box.top, top], [e.clientX - box.left, left]].map(([at, start]) => {
    const n = Math.floor((at - start) / cell);
    return n >= 0 && n < T ? n : null;
  });
}

/** The context of a canvas, cleared and resized (CSS pixels). */
function fresh(canvas, width, height) {
  const sharp = devicePixelRatio || 1;
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(height * sharp);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const c = canvas.getContext("2d");
  c.scale(sharp, sharp);
  c.imageSmoothingEnabled = false;
  c.font = "12px system-ui, sans-serif";
  return c;
}

function outline(c, x, y, width, height, name, thickness) {
  c.strokeStyle = colour(name);
  c.lineWidth = thickness;
  c.strokeRect(x, y, width, height);
}

function hatch(c, x, y, width, height) {
  c.save();
  c.beginPath();
  c.rect(x, y, width, height);
  c.clip();
  c.strokeStyle = colour("hatch");
  c.lineWidth = 1;
  c.beginPath();
  for (let d = Math.floor((x + y) / 6) * 6; d < x + y + width + height; d += 6) {
    c.moveTo(d - y, y); // where x + y is d
    c.lineTo(d - y - height, y + height);
  }
  c.stroke();
  c.restore();
}

// --------------------------------------------------------------------------------- tokens in a row

/** Tokens as a row of buttons. look(i) shows the token pointed at, else the chosen one, `pinned`.
 *
 * cuts: each token's document.
 */
function tokenStrip(box, tokens, name, look, pinned, cuts = null) {
  let current = 0;
  const pick = (i) => {
    self.pinned = i;
    self.go(i);
    look(i);
  };
  const chips = tokens.map((token, i) => h("button", {
    type: "button", tabindex: -1, "aria-label": `Token ${i}, ${token.label}`,
    onclick: () => pick(i), onfocus: () => pick(i),
    onpointerenter: (e) => e.pointerType === "mouse" && look(i),
  }, h("b", {}, token.label), h("small", { "aria-hidden": "true" })));
  box.setAttribute("role", "toolbar");
  box.setAttribute("aria-label", name);
  box.addEventListener("pointerleave", () => look(self.pinned));
  chips.forEach((chip, i) => {
    if (cuts && (i === 0 || cuts[i] !== cuts[i - 1])) {
      box.append(h("span", { class: "cut" }, `document ${cuts[i]}`));
    }
    box.append(chip);
    if (tokens[i].text.endsWith("\n")) box.append(h("hr", { "aria-hidden": "true" }));
  });
  const self = { chips, pinned };
  self.go = (i) => {
    chips[current].tabIndex = -1;
    current = i;
    chips[current].tabIndex = 0;
  };
  // scrollIntoView() would scroll the page too
  self.show = (i) => {
    const { offsetTop, offsetHeight } = chips[i];
    const least = offsetTop - box.offsetTop + offsetHeight - box.clientHeight;
    box.scrollTop = clamp(box.scrollTop, least + 8, offsetTop - box.offsetTop - 8);
  };
  box.addEventListener("keydown", (e) => {
    const last = chips.length - 1;
    const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: last }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    const i = clamp(to, 0, last);
    pick(i); // the chip may already have the focus
    chips[i].focus();
  });
  return self;
}

// ------------------------------------------------------------------------------------------ player

const ICONS = {
  "to-start": "M3 3h2v10H3zM13 3v10L6 8z", back: "M12 3v10L4 8z", play: "M4 2.5v11L13.5 8z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z", step: "M4 3v10l8-5z", "to-end": "M11 3h2v10h-2zM3 3v10l7-5z",
};

/** Buttons, keys and a slider of the tile player; draw() shows the state after `done` of n tiles.
 *
 * keys: more key bindings.
 */
function transport(n, rate, draw, keys) {
  const at = (id) => $(`player-${id}`);
  const icon = (name) => h("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" },
    h("path", { d: ICONS[name] }));
  const self = { done: 0, timer: 0, playing: false };
  self.moveTo = (done) => {
    self.done = clamp(done, 0, n);
    draw();
  };
  self.goTo = (done) => {
    self.play(false);
    self.moveTo(done);
  };
  self.play = (on) => {
    clearTimeout(self.timer);
    self.playing = on;
    at("play").replaceChildren(icon(on ? "pause" : "play"));
    at("play").setAttribute("aria-label", on ? "Pause" : "Play");
    $("tile-text").setAttribute("aria-live", on ? "off" : "polite");
    if (!on) return;
    if (self.done === n) self.moveTo(0);
    const next = () => {
      self.timer = setTimeout(() => {
        self.moveTo(self.done + 1);
        if (self.done === n) self.play(false);
        else next();
      }, 1000 / Number(at("speed").value));
    };
    next();
  };
  self.show = (said) => {
    at("scrub").value = self.done;
    at("scrub").setAttribute("aria-valuetext", said);
    at("back").disabled = at("to-start").disabled = self.done === 0;
    at("step").disabled = at("to-end").disabled = self.done === n;
  };
  const all = {
    Home: () => self.goTo(0),
    ArrowLeft: () => self.goTo(self.done - 1),
    " ": () => self.play(!self.playing),
    ArrowRight: () => self.goTo(self.done + 1),
    End: () => self.goTo(n),
    ...keys,
  };
  const buttons = [["to-start", "Home", "Back to the start"],
    ["back", "ArrowLeft", "One tile back"], ["play", " ", "Play"],
    ["step", "ArrowRight", "One tile on"], ["to-end", "End", "On to the end"]];
  const rates = [0.5, 1, 2, 4, 8, 16, 32].map((x) => h("option", { value: x,
    selected: x === rate }, x === 0.5 ? "½" : String(x)));
  const controls = $("player").querySelector(".controls");
  controls.append(h("div", { class: "transport", role: "group", "aria-label": "Playing" },
    buttons.map(([id, key, said]) => h("button", { type: "button", id: `player-${id}`,
      "aria-label": said, class: id, onclick: all[key] }, icon(id)))),
  h("label", {}, "Tiles a second ", h("select", { id: "player-speed" }, rates)));
  controls.after(h("input", { type: "range", id: "player-scrub", max: n, value: 0,
    "aria-label": "Tiles done", oninput: () => self.goTo(Number(at("scrub").value)) }));
  $("player").addEventListener("keydown", (e) => {
    if (e.target.matches("select, input") || e.ctrlKey || e.metaKey || e.altKey) return;
    if (!(e.key in all) || (e.key === " " && e.target.closest("button"))) return; // its own space
    e.preventDefault();
    all[e.key]();
  });
  return self;
}
