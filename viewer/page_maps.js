// Maps of every layer and head, whether the kernel agrees, and the start of the page.

// pinned: the query chosen by a click or key; pointing shows another one.
const map = { layer: about.layer, head: about.head, query: T - 1, key: null, pinned: T - 1 };
const mapView = { cell: 0, left: 0, top: 0 };
const packed = unpack(maps.weights);
const sees = (layer, i, j) => j >= maps.seen[layer][i][0] && j < maps.seen[layer][i][1];

/** The weight of key j for query i. */
const weight = (layer, head, i, j) => (j > i ? 0
  : packed[(layer * H + head) * packedRow(T) + packedRow(i) + j] / maps.levels);

// Most weights are small: the root lets them be seen.
const mapPicture = (layer, head, canvas = h("canvas")) => picture(T, T,
  (i, j) => (sees(layer, i, j) ? Math.sqrt(weight(layer, head, i, j)) : NaN), canvas);

function thumbnails() {
  const box = $("thumbs");
  const label = (what, n) => h("span", {}, L * H > 40 ? String(n) : `${what} ${n}`);
  box.style.gridTemplateColumns = `max-content repeat(${H}, minmax(0, 1fr))`;
  box.append(h("span"), ...Array.from({ length: H }, (_, n) => label("head", n)));
  const buttons = Array.from({ length: L * H }, (_, n) => {
    const [layer, head] = [Math.floor(n / H), n % H];
    const button = h("button", { type: "button", "aria-label": `Layer ${layer}, head ${head}`,
      onclick: () => drawMaps({ layer, head }) },
    mapPicture(layer, head, h("canvas", { "aria-hidden": "true" })));
    if (head === 0) box.append(label("layer", layer));
    box.append(button);
    return button;
  });
  const move = (down, right) => {
    drawMaps({ layer: clamp(map.layer + down, 0, L - 1), head: clamp(map.head + right, 0, H - 1) });
    buttons[map.layer * H + map.head].focus();
  };
  onKeys(box, { ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1),
    ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0) });
  return buttons;
}

/** The tokens as a row of buttons. */
function tokenStrip() {
  const { tokens, segments } = about;
  const box = $("map-tokens");
  const chips = tokens.map((token, i) => h("button", {
    type: "button", tabindex: -1, "aria-label": `Token ${i}, ${token.label}`,
    onclick: () => pin(i), onfocus: () => pin(i),
    onpointerenter: (e) => e.pointerType === "mouse" && lookAt(i),
  }, h("b", {}, token.label), h("small", { "aria-hidden": "true" })));
  box.addEventListener("pointerleave", () => lookAt(map.pinned));
  chips.forEach((chip, i) => {
    if (segments && segments[i] !== segments[i - 1]) {
      box.append(h("span", { class: "cut" }, `document ${segments[i]}`));
    }
    box.append(chip);
    if (tokens[i].text.endsWith("\n")) box.append(h("hr", { "aria-hidden": "true" }));
  });
  const to = (i) => {
    pin(i); // the chip may already have the focus
    chips[map.pinned].focus();
  };
  onKeys(box, { ArrowLeft: () => to(map.pinned - 1), ArrowRight: () => to(map.pinned + 1),
    Home: () => to(0), End: () => to(T - 1) });
  return chips;
}

function drawMap() {
  const canvas = $("map");
  const room = Math.min(canvas.parentElement.parentElement.clientWidth, 620);
  const probe = canvas.getContext("2d");
  probe.font = "12px ui-monospace, monospace";
  const widths = about.tokens.map((t) => probe.measureText(t.label).width);
  const wide = Math.min(Math.ceil(Math.max(...widths)) + 8, 76);
  const letters = room - wide - 2 >= 8 * T; // is there room for every token?
  const left = letters ? wide : wide + 7 * String(T).length; // else some, with their numbers
  const top = Math.max(left, 18);
  const cell = Math.min((room - left - 2) / T, 34);
  const size = cell * T;
  Object.assign(mapView, { cell, left, top });
  const c = fresh(canvas, Math.floor(left + size + 2), Math.floor(top + size + 2));
  c.fillStyle = colour("sunk");
  c.beginPath(); // what causality leaves: a staircase
  c.moveTo(left, top);
  for (let i = 0; i < T; i++) {
    c.lineTo(left + (i + 1) * cell, top + i * cell);
    c.lineTo(left + (i + 1) * cell, top + (i + 1) * cell);
  }
  c.lineTo(left, top + size);
  c.fill();
  for (let i = 0; i < T; i++) { // what the window and other documents hide
    const [from] = maps.seen[map.layer][i];
    if (from > 0) hatch(c, left, top + i * cell, from * cell, cell);
  }
  c.drawImage(mapPicture(map.layer, map.head), left, top, size, size);
  about.segments?.forEach((document, i) => { // the edges of the documents
    if (i === 0 || document === about.segments[i - 1]) return;
    outline(c, left, top + i * cell, size, 0, "strong", 1);
    outline(c, left + i * cell, top, 0, size, "strong", 1);
  });
  outline(c, left - 0.5, top - 0.5, size + 1, size + 1, "strong", 1);
  axes(c, left, top, cell, letters);
  const { query, key } = map;
  outline(c, left, top + query * cell, size, Math.max(cell, 2), "accent", 2.5);
  if (key !== null) {
    const side = Math.max(cell, 4);
    outline(c, left + key * cell, top + query * cell, side, side, "ink", 2);
  }
}

function axes(c, left, top, cell, letters) {
  c.textBaseline = "middle";
  const every = letters ? 1 : [2, 5, 10, 20, 25, 50].find((n) => n * cell >= 14) || 100;
  const size = letters ? clamp(cell, 8, 12) : 12;
  const style = (chosen, name, align) => {
    c.font = `${chosen ? "bold " : ""}${size}px ui-monospace, monospace`;
    c.fillStyle = colour(chosen ? name : "muted");
    c.textAlign = align;
  };
  for (let i = 0; i < T; i += every) {
    const label = [...about.tokens[i].label];
    const short = label.length > 9 ? `${label.slice(0, 8).join("")}…` : label.join("");
    const name = letters ? short : `${i} ${short}`;
    const middle = (i + 0.5) * cell;
    style(i === map.query, "accent", "right");
    c.fillText(name, left - 6, top + middle);
    const turned = [...name].length > 1;
    style(i === map.key, "ink", turned ? "left" : "center");
    c.save();
    c.translate(left + middle, top - (turned ? 6 : 11));
    if (turned) c.rotate(-Math.PI / 2);
    c.fillText(name, 0, 0);
    c.restore();
  }
}

function drawQuery() {
  const { layer, head, query } = map;
  $("query-title").textContent = `Where token ${query}, ${quote(about.tokens[query])}, looks`;
  chips.forEach((chip, j) => {
    chip.tabIndex = j === query ? 0 : -1;
    const [cell, under] = chip.children;
    const seen = sees(layer, query, j);
    const hidden = j <= query && !seen;
    chip.className = j > query ? "later" : hidden ? "hidden" : j === query ? "query" : "";
    cell.classList.toggle("hatch", hidden);
    const w = weight(layer, head, query, j);
    const rgb = colours()[place(Math.sqrt(w))];
    cell.style.background = seen ? css(rgb) : "";
    cell.style.color = seen ? inkOn(rgb) : "";
    const percent = w >= 0.005 ? String(Math.round(100 * w)) : "·";
    under.replaceChildren(seen ? num(100 * w, percent) : "");
  });
  const { offsetTop, offsetHeight, parentElement: box } = chips[query];
  const top = offsetTop - box.offsetTop; // scroll the strip, not the page
  box.scrollTop = clamp(box.scrollTop, top + offsetHeight - box.clientHeight + 8, top - 8);
}

function drawMaps(chosen = {}) {
  const { layer, head, query, key } = Object.assign(map, chosen);
  thumbs.forEach((button, n) => {
    const pressed = n === layer * H + head;
    button.setAttribute("aria-pressed", String(pressed));
    button.tabIndex = pressed ? 0 : -1;
  });
  $("map-title").textContent = `Layer ${layer}, head ${head}`;
  const nats = maps.entropy[layer][head];
  $("entropy").textContent = `Mean entropy ${nats.toFixed(2)} nats: a query's weights are spread as `
    + `evenly over ${Math.exp(nats).toFixed(1)} tokens.`;
  const hidden = maps.seen[layer].some(([from]) => from > 0);
  const why = [about.windows[layer] !== null && "outside the window",
    about.segments && "in another document"].filter(Boolean).join(" or ");
  const bar = picture(1, 256, (_, n) => n / 255, h("canvas", { class: "ramp", "aria-hidden": "true" }));
  $("map-legend").replaceChildren(
    entry("weight 0", bar, "1, by its square root"),
    hidden ? entry(h("i", { class: "hatch" }), `hidden: ${why}`) : "",
    entry(h("i"), "later: never seen"));
  const a = maps.layers[layer];
  $("agreement").className = `verdict ${a.agrees ? "good" : "bad"}`;
  $("agreement").replaceChildren(
    h("b", {}, `${about.backend} ${a.agrees ? "agrees" : "does not agree"} in layer ${layer}.`),
    " The weights above are recomputed outside the kernel that ran, from the same q and k. Its "
    + "output differs from the formula in float64 by at most ", num(a.error, sci(a.error)),
    "; allowed are ", num(a.allowed, sci(a.allowed)), `. In head ${head} it is ${sci(a.heads[head])}.`);
  lookAt(query, key);
}

function lookAt(query, key = null) {
  Object.assign(map, { query, key });
  if ($("map-panel").hidden) drawTiles();
  else drawMap();
  drawQuery();
  const { layer, head } = map;
  const token = (n) => `${quote(about.tokens[n])} (${n})`;
  $("map").setAttribute("aria-label",
    `Attention map of layer ${layer}, head ${head}. Token ${token(query)} looks.`);
  let given = key > query ? "a later token, masked" : "masked";
  const decimals = maps.levels > 255 ? 4 : 2; // more would be rounding
  if (sees(layer, query, key)) given = weight(layer, head, query, key).toFixed(decimals);
  $("map-cell").textContent = key === null ? ""
    : `${token(query)} looks at ${token(key)}: ${given}`;
}

function pin(query, key = null) {
  map.pinned = clamp(query, 0, T - 1);
  lookAt(map.pinned, key);
}

function listenToMap() {
  const canvas = $("map");
  /** Call show() with the cell of an event, if there is one. */
  const point = (e, show) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.floor((e.clientY - box.top - mapView.top) / mapView.cell);
    const j = Math.floor((e.clientX - box.left - mapView.left) / mapView.cell);
    if (i < 0 || i >= T || (show === lookAt && i === map.query && j === map.key)) return;
    show(i, j >= 0 && j < T ? j : null);
  };
  canvas.addEventListener("pointermove", (e) => point(e, lookAt));
  canvas.addEventListener("pointerdown", (e) => point(e, pin));
  canvas.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && lookAt(map.pinned));
  const go = (i, j) => pin(i, j === null ? null : clamp(j, 0, T - 1));
  onKeys(canvas, {
    ArrowUp: () => go(map.query - 1, map.key), ArrowDown: () => go(map.query + 1, map.key),
    Home: () => go(0, map.key), End: () => go(T - 1, map.key),
    ArrowLeft: () => go(map.query, (map.key ?? map.query) - 1),
    ArrowRight: () => go(map.query, (map.key ?? -1) + 1),
  });
}

/** The words at the top, and how the page chose its first head, if it did. */
function opening() {
  $("prompt").textContent = about.prompt;
  const shared = about.n_kv_head < H
    ? `, which share ${many(about.n_kv_head, "key/value head")}` : "";
  const parameters = about.n_params.toLocaleString("en",
    { notation: "compact", maximumSignificantDigits: 3 });
  $("lede").append(`${about.source}: a GPT of ${many(L, "layer")}, ${many(H, "head")} of `
    + `${about.head_dim} a layer${shared}, and ${parameters} parameters in ${about.dtype} on `
    + `${about.device}, with ${many(T, "token")}. ${about.announced}.`);
  const agreeing = maps.layers.filter((a) => a.agrees).length;
  $("check").className = agreeing === L ? "good" : "bad";
  $("check").textContent = `${about.backend} agrees with the formula in ${agreeing} of ${L} layers`;
  const refused = about.refused.map((r) => `${r.name} was refused: ${r.why.join("; ")}.`);
  $("notes").append(...[...about.notes, ...refused].map((note) => h("p", { class: "note" }, note)));
  const entropies = maps.entropy.flat();
  if (L * H > 1 && entropies[about.layer * H + about.head] === Math.min(...entropies)) {
    $("begin").textContent = `The page begins with layer ${about.layer}, head ${about.head}: of all `
      + "heads it spreads its weights over the fewest tokens (lowest mean entropy).";
  }
}

opening();
const thumbs = thumbnails();
const chips = tokenStrip();
listenToMap();
listenToTiles();
drawMaps();

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) drawMaps(); // on a phone the height changes as the address bar hides
  width = innerWidth;
});
dark.addEventListener("change", () => {
  thumbs.forEach((button, n) => mapPicture(Math.floor(n / H), n % H, button.firstChild));
  drawMaps();
});
