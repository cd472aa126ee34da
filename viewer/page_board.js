// 2 tiles: the picture of the player, a T x T board with Q, K, V and O around it.

/** The scores of all visited tiles as one T x T picture, and their range. */
function scorePicture() {
  if (player.image) return player.image;
  const scores = unpack(player.head.scores);
  const finite = scores.filter(Number.isFinite);
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  const level = (i, j) => {
    const step = tiles.steps[Math.floor(i / M) * tiles.n_cols + Math.floor(j / B)];
    if (step.skipped) return NaN;
    const s = scores[(step.at * M + (i % M)) * B + (j % B)];
    return Number.isFinite(s) ? (s - low) / (high - low || 1) : NaN;
  };
  player.image = { canvas: picture(T, T, level), low, high };
  return player.image;
}

const board = { cell: 0, left: 0, top: 0 };

function drawBoard() {
  const canvas = $("matrix");
  const room = Math.min(canvas.parentElement.clientWidth, 560);
  const [left, right, top] = [46, 34, 46];
  const cell = Math.min((room - left - right) / T, 26);
  const size = cell * T;
  Object.assign(board, { cell, left, top });
  const c = fresh(canvas, Math.floor(left + size + right), Math.floor(top + size + 22));
  const { done } = player;
  const busy = done > 0 ? tiles.steps[done - 1] : null;
  const width = ([from, to]) => to - from;
  const box = (s) => [left + s.cols[0] * cell, top + s.rows[0] * cell,
    width(s.cols) * cell, width(s.rows) * cell];
  const image = scorePicture().canvas;
  tiles.steps.forEach((s, n) => {
    const [x, y, w, hgt] = box(s);
    if (s.skipped) {
      c.globalAlpha = n < done ? 1 : 0.45;
      hatch(c, x, y, w, hgt);
    } else {
      c.fillStyle = colour(n < done ? "paper" : "sunk");
      c.fillRect(x, y, w, hgt);
      c.globalAlpha = n === done - 1 ? 1 : 0.38;
      if (n < done) {
        c.drawImage(image, s.cols[0], s.rows[0], width(s.cols), width(s.rows), x, y, w, hgt);
      }
    }
    c.globalAlpha = 1;
    c.strokeStyle = colour("line");
    c.strokeRect(Math.round(x) + 0.5, Math.round(y) + 0.5, Math.round(w), Math.round(hgt));
  });
  // Around it the tensors in main memory, in their blocks: Q on the left, K and V on top, O on the
  // right. What is on the chip now is filled.
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.font = "11px system-ui, sans-serif";
  const put = (x, y, w, hgt, kind, name) => {
    c.fillStyle = colour(kind);
    c.fillRect(x, y, w, hgt);
    c.strokeStyle = colour("strong");
    c.strokeRect(Math.round(x) + 0.5, Math.round(y) + 0.5, Math.round(w) - 1, Math.round(hgt) - 1);
    if (Math.min(w, hgt) >= 11) {
      c.fillStyle = colour(kind === "sunk" ? "muted" : "paper");
      c.fillText(name, x + w / 2, y + hgt / 2 + 0.5);
    }
  };
  const [on, off] = ["accent", "sunk"];
  const reads = busy && !busy.skipped;
  for (let i = 0; i < tiles.n_rows; i++) {
    const y = top + i * M * cell;
    const hgt = Math.min(M, T - i * M) * cell;
    put(left - 22, y, 18, hgt, busy && busy.i === i && visitedUpTo(done - 1) ? on : off, `${i}`);
    const written = tiles.steps.some((s, n) => n < done && s.i === i && s.last);
    put(left + size + 5, y, 18, hgt, written ? "tiled" : off, `${i}`);
  }
  for (let j = 0; j < tiles.n_cols; j++) {
    const x = left + j * B * cell;
    const w = Math.min(B, T - j * B) * cell;
    put(x, top - 22, w, 18, reads && busy.j === j ? on : off, w >= 16 ? `${j}` : "");
  }
  c.font = "italic 15px Georgia, serif";
  c.fillStyle = colour("ink");
  c.fillText("Q", left - 13, top - 12);
  c.fillText("K, V", left + size / 2, top - 34);
  c.fillText("O", left + size + 14, top - 12);
  c.fillText("S = Q Kᵀ / √D, a tile at a time", left + size / 2, top + size + 12);
  if (busy) {
    const [x, y, w, hgt] = box(busy);
    outline(c, x, y, w, hgt, "paper", 6);
    outline(c, x, y, w, hgt, "accent", 3);
  }
  canvas.setAttribute("aria-label",
    `${tiles.n_rows} by ${tiles.n_cols} tiles, ${VISITED} of them computed. `
    + $("tile-text").textContent);
}

function boardLegend() {
  const { low, high } = scorePicture();
  const past = rampBar();
  past.style.opacity = 0.38;
  $("matrix-legend").replaceChildren(
    entry(`score ${real(low, 1)}`, rampBar(), real(high, 1)),
    entry(h("i", { class: "chip" }), "on the chip now"),
    entry(past, "done, its scores thrown away"),
    entry(h("i", { class: "hatch" }), "skipped"),
    entry(h("i", { class: "output" }), "O written"));
}
