"use strict";
// Shared by all parts. Every number comes from the document; text is set as text, never as HTML.

const doc = JSON.parse(document.getElementById("document").textContent);
const { about, maps, tiles } = doc;
const T = about.tokens.length;
const L = about.n_layer;
const H = about.n_head;

// ------------------------------------------------------------------------------- elements, numbers

const $ = (id) => document.getElementById(id);

/** An element with attributes ("on..." are listeners) and children; strings become text. */
function h(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else e.setAttribute(name, value);
  }
  e.append(...children);
  return e;
}

/** The numbers of a Packed. */
function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
  if (packed.dtype === "uint8") return bytes;
  return new (packed.dtype === "uint16" ? Uint16Array : Float32Array)(bytes.buffer); // little endian
}

const many = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** 1.2e-7 as 1.2 × 10⁻⁷. */
function sci(x) {
  if (!x) return "0";
  const [digits, power] = x.toExponential(1).split("e");
  if (power >= -3 && power <= 3) return String(Number(x.toPrecision(2)));
  const raised = [...power.replace("+", "")].map((c) => (c === "-" ? "⁻" : SUPERSCRIPT[c]));
  return `${digits}\u00a0×\u00a010${raised.join("")}`;
}

/** A number with its exact value as an attribute. */
const num = (value, shown) => h("data", { value: String(value) }, shown);
const small = (x) => num(x, sci(x));

const entry = (...children) => h("span", {}, ...children); // of a legend
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

/** Tokens as a row of buttons. look(i) shows the token pointed at, else the chosen one, `pinned`. */
function tokenStrip(box, look) {
  const { tokens, segments } = about;
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
  box.addEventListener("pointerleave", () => look(self.pinned));
  chips.forEach((chip, i) => {
    if (segments && (i === 0 || segments[i] !== segments[i - 1])) {
      box.append(h("span", { class: "cut" }, `document ${segments[i]}`));
    }
    box.append(chip);
    if (tokens[i].text.endsWith("\n")) box.append(h("hr", { "aria-hidden": "true" }));
  });
  const self = { chips, pinned: T - 1 };
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
