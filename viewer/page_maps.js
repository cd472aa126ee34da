// Maps of every layer and head, and whether the kernel agrees.

const map = { layer: about.layer, head: about.head, query: T - 1, key: null };
const DECIMALS = maps.levels > 255 ? 4 : 2; // more would be rounding
const packed = unpack(maps.weights);
const packedRow = (i) => (i * (i + 1)) / 2;
const sees = (layer, i, j) => j >= maps.seen[layer][i][0] && j < maps.seen[layer][i][1];

/** The weight of key j for query i. */
const weight = (layer, head, i, j) => (j > i ? 0
  : packed[(layer * H + head) * packedRow(T) + packedRow(i) + j] / maps.levels);

const mapPicture = (layer, head, canvas) => picture(T, T,
  (i, j) => (sees(layer, i, j) ? Math.sqrt(weight(layer, head, i, j)) : NaN), canvas);

function thumbnails() {
  const box = $("thumbs");
  const label = (what, n) => h("span", {}, L * H > 40 ? String(n) : `${what} ${n}`);
  box.style.gridTemplateColumns = `max-content repeat(${H}, minmax(0, 1fr))`;
  box.append(h("span"), ...Array.from({ length: H }, (_, n) => label("head", n)));
  const buttons = Array.from({ length: L * H }, (_, n) => {
    const [layer, head] = [Math.floor(n / H), n % H];
    const button = h("button", { type: "button", "aria-label": `Layer ${layer}, head ${head}`,
      onclick: () => chooseHead(layer, head) },
    mapPicture(layer, head, h("canvas", { "aria-hidden": "true" })));
    if (head === 0) box.append(label("layer", layer));
    box.append(button);
    return button;
  });
  box.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(e.key in by)) return;
    e.preventDefault();
    const [down, right] = by[e.key];
    chooseHead(clamp(map.layer + down, 0, L - 1), clamp(map.head + right, 0, H - 1));
    buttons[map.layer * H + map.head].focus();
  });
  return buttons;
}

function chooseHead(layer, head) {
  Object.assign(map, { layer, head });
  drawMaps();
}

const mapView = { cell: 0, left: 0, top: 0 };

function drawMap() {
  const canvas = $("map");
  const room = canvas.parentElement.parentElement.clientWidth;
  const probe = canvas.getContext("2d");
  probe.font = "12px ui-monospace, monospace";
  const widths = about.tokens.map((t) => probe.measureText(t.label).width);
  const wide = Math.min(Math.ceil(Math.max(...widths)) + 8, 76);
  const letters = Math.min(room, 620) - wide - 2 >= 8 * T; // is there room for every token?
  const left = letters ? wide : wide + 7 * String(T).length; // else some, with their numbers
  const [right, top] = [2, Math.max(left, 18)];
  const cell = Math.min((Math.min(room, 620) - left - right) / T, 34);
  const size = cell * T;
  Object.assign(mapView, { cell, left, top });
  const c = fresh(canvas, Math.floor(left + size + right), Math.floor(top + size + 2));
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
  c.strokeStyle = colour("strong");
  c.lineWidth = 1;
  about.segments?.forEach((document, i) => { // the edges of the documents
    if (i === 0 || document === about.segments[i - 1]) return;
    c.strokeRect(left, top + i * cell, size, 0);
    c.strokeRect(left + i * cell, top, 0, size);
  });
  c.strokeRect(left - 0.5, top - 0.5, size + 1, size + 1);
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
  for (let i = 0; i < T; i += every) {
    const label = [...about.tokens[i].label];
    const short = label.length > 9 ? `${label.slice(0, 8).join("")}…` : label.join("");
    const name = letters ? short : `${i} ${short}`;
    c.font = `${i === map.query ? "bold " : ""}${size}px ui-monospace, monospace`;
    c.fillStyle = colour(i === map.query ? "accent" : "muted");
    c.textAlign = "right";
    c.fillText(name, left - 6, top + (i + 0.5) * cell);
    c.font = `${i === map.key ? "bold " : ""}${size}px ui-monospace, monospace`;
    c.fillStyle = colour(i === map.key ? "ink" : "muted");
    c.save();
    c.translate(left + (i + 0.5) * cell, top - 6);
    const turned = [...name].length > 1;
    if (turned) c.rotate(-Math.PI / 2);
    else c.translate(0, -5);
    c.textAlign = turned ? "left" : "center";
    c.fillText(name, 0, 0);
    c.restore();
  }
}

function drawQuery() {
  const { layer, head, query } = map;
  const token = about.tokens[query];
  $("query-title").textContent = `Where token ${query}, ${quote(token)}, looks`;
  strip.chips.forEach((chip, j) => {
    const [cell, under] = chip.children;
    const hidden = j <= query && !sees(layer, query, j);
    chip.className = [j > query && "later", hidden && "hidden hatched", j === query && "query"]
      .filter(Boolean).join(" ");
    cell.classList.toggle("hatch", hidden);
    const w = weight(layer, head, query, j);
    const rgb = sees(layer, query, j) ? weightShade(w) : null;
    cell.style.background = rgb ? css(rgb) : "";
    cell.style.color = rgb ? inkOn(rgb) : "";
    const percent = w >= 0.005 ? String(Math.round(100 * w)) : "·";
    under.replaceChildren(sees(layer, query, j) ? num(100 * w, percent) : "");
  });
  strip.go(query);
  strip.show(query);
}

function drawMaps() {
  const { layer, head, query, key } = map;
  thumbs.forEach((button, n) => {
    const chosen = n === layer * H + head;
    button.setAttribute("aria-pressed", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  });
  $("map-title").textContent = `Layer ${layer}, head ${head}`;
  const nats = maps.entropy[layer][head];
  $("entropy").textContent = `Mean entropy ${nats.toFixed(2)} nats: a query's weights are spread as `
    + `evenly over ${Math.exp(nats).toFixed(1)} tokens.`;
  mapLegend();
  drawAgreement();
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
  if (sees(layer, query, key)) given = weight(layer, head, query, key).toFixed(DECIMALS);
  $("map-cell").textContent = key === null ? ""
    : `${token(query)} looks at ${token(key)}: ${given}`;
}

function listenToMap() {
  const canvas = $("map");
  canvas.addEventListener("pointermove", (e) => {
    const [i, j] = cellAt(e, mapView);
    if (i !== null && (i !== map.query || j !== map.key)) lookAt(i, j);
  });
  canvas.addEventListener("pointerdown", (e) => {
    const [i, j] = cellAt(e, mapView);
    if (i === null) return;
    strip.pinned = i;
    lookAt(i, j);
  });
  canvas.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && lookAt(strip.pinned));
  canvas.addEventListener("keydown", (e) => {
    const { query: i, key: j } = map;
    const to = { ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], Home: [0, j], End: [T - 1, j],
      ArrowLeft: [i, (j ?? i) - 1], ArrowRight: [i, (j ?? -1) + 1] }[e.key];
    if (!to) return;
    e.preventDefault();
    strip.pinned = clamp(to[0], 0, T - 1);
    lookAt(strip.pinned, to[1] === null ? null : clamp(to[1], 0, T - 1));
  });
}

function mapLegend() {
  const hidden = maps.seen[map.layer].some(([from]) => from > 0);
  const why = [about.windows[map.layer] !== null && "outside the window",
    about.segments && "in another document"].filter(Boolean).join(" or ");
  $("map-legend").replaceChildren(
    entry("weight 0", rampBar(), "1, by its square root"),
    hidden ? entry(h("i", { class: "hatch" }), `hidden: ${why}`) : "",
    entry(h("i"), "later: never seen"));
}

function drawAgreement() {
  const a = maps.layers[map.layer];
  $("agreement").className = `verdict ${a.agrees ? "good" : "bad"}`;
  $("agreement").replaceChildren(
    h("b", {}, `${about.backend} ${a.agrees ? "agrees" : "does not agree"} in layer ${map.layer}.`),
    " The weights above are recomputed outside the kernel that ran, from the same q and k. Its "
    + "output differs from the formula in float64 by at most ", small(a.error), "; allowed are ",
    small(a.allowed), `. In head ${map.head} it is ${sci(a.heads[map.head])}.`);
}
