"use strict";
// Shared by all parts. Every number comes from the document; text is set as text, never as HTML.

const { about, maps, tiles } = JSON.parse(document.getElementById("document").textContent);
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

/** Call moves[key] for the keys that it has. */
function onKeys(element, moves) {
  element.addEventListener("keydown", (e) => {
    if (!(e.key in moves)) return;
    e.preventDefault();
    moves[e.key]();
  });
}

/** The numbers of a Packed. */
function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
  const kinds = { uint8: Uint8Array, uint16: Uint16Array, float32: Float32Array };
  return new kinds[packed.dtype](bytes.buffer); // little endian
}

const many = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

/** 1.2e-7 as 1.2 × 10⁻⁷. */
function sci(x) {
  if (!x) return "0";
  const [digits, power] = x.toExponential(1).split("e");
  if (Math.abs(power) <= 3) return String(Number(x.toPrecision(2)));
  const raised = power.replace("+", "").replace(/\d/g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).replace("-", "⁻");
  return `${digits}\u00a0×\u00a010${raised}`;
}

/** A number with its exact value as an attribute. */
const num = (value, shown) => h("data", { value: String(value) }, shown);
const entry = (...children) => h("span", {}, ...children); // of a legend
const quote = (token) => `“${token.label}”`;
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const packedRow = (i) => (i * (i + 1)) / 2; // where row i of a lower triangle begins

// ----------------------------------------------------------------------------------------- colours

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const css = (rgb) => `rgb(${rgb.join(" ")})`;

/** 256 colours [r, g, b], by OKLCH: lightness alone gives the order, for any colour vision. */
function ramp(isDark) {
  const c = h("canvas", { width: 256, height: 1 }).getContext("2d");
  for (let n = 0; n < 256; n++) {
    const t = n / 255;
    const [light, hue] = isDark ? [0.245 + 0.675 * t, 295 - 190 * t] : [0.965 - 0.645 * t, 105 + 190 * t];
    c.fillStyle = `oklch(${light} ${0.02 + 0.09 * t + 0.05 * Math.sin(Math.PI * t)} ${hue})`;
    c.fillRect(n, 0, 1, 1);
  }
  const { data } = c.getImageData(0, 0, 256, 1);
  return Array.from({ length: 256 }, (_, n) => [...data.slice(4 * n, 4 * n + 3)]);
}

const ramps = { light: ramp(false), dark: ramp(true) };
const colours = () => ramps[dark.matches ? "dark" : "light"];
const place = (t) => Math.round(255 * clamp(t, 0, 1)); // in a ramp

/** Black or white on that colour (relative luminance of WCAG 2.2). */
function inkOn(rgb) {
  const [r, g, b] = rgb.map((v) => (v <= 10 ? v / 3295 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

/** An image of rows x cols pixels; level(r, c): 0 to 1, or NaN for transparent. */
function picture(rows, cols, level, canvas) {
  Object.assign(canvas, { width: cols, height: rows });
  const image = new ImageData(cols, rows);
  const pixels = new Uint32Array(image.data.buffer); // a large page has ten million of them
  const packed = Uint32Array.from(colours(), ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
  for (let n = 0; n < rows * cols; n++) {
    const found = level(Math.floor(n / cols), n % cols);
    if (!Number.isNaN(found)) pixels[n] = packed[place(found)];
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** The context of a canvas, cleared and resized (CSS pixels). */
function fresh(canvas, width, height) {
  const sharp = devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * sharp), height: Math.round(height * sharp) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const c = canvas.getContext("2d");
  c.scale(sharp, sharp);
  c.imageSmoothingEnabled = false;
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
