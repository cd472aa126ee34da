// 2 tiles: the player of the trace. page_board.js draws the picture beside it.

const N = tiles.steps.length; // of the grid; of these the mask leaves VISITED to compute
const VISITED = tiles.steps.filter((s) => !s.skipped).length;
const M = tiles.block_m;
const B = tiles.block_n;

const block = () => (player.done > 0 ? tiles.steps[player.done - 1].i : -1);
const player = Object.assign(transport("player", "tile", N, N > 100 ? 8 : 2, drawPlayer, {
  PageUp: () => goTo(Math.max(block() - 1, 0) * tiles.n_cols + 1),
  PageDown: () => goTo((block() + 1) * tiles.n_cols + 1),
  ArrowUp: () => chooseRow(player.row - 1),
  ArrowDown: () => chooseRow(player.row + 1),
}, (n) => (tiles.steps[n].skipped ? 3 : 1)), { head: null, row: 0 }); // there nothing happens
const { goTo } = player;

/** The last tile at or before n in the same row of tiles that was not skipped; null: none yet. */
function visitedUpTo(n) {
  for (let k = n; k >= 0 && tiles.steps[k].i === tiles.steps[n].i; k--) {
    if (!tiles.steps[k].skipped) return tiles.steps[k];
  }
  return null;
}

/** Everything about row r of a visited tile: before, after, and its scores. */
function rowState(head, n, r) {
  const step = tiles.steps[n];
  const old = n > 0 && tiles.steps[n - 1].i === step.i ? visitedUpTo(n - 1) : null;
  const value = (packed, s) => unpack(packed)[s.at * M + r];
  const state = (s) => (s === null ? { m: -Infinity, l: 0, o: 0 }
    : { m: value(head.m, s), l: value(head.l, s), o: value(head.o_norm, s) });
  if (step.skipped) return { before: state(old), after: state(old), scores: [], rescale: null };
  const first = (step.at * M + r) * B;
  const scores = unpack(head.scores).subarray(first, first + step.cols[1] - step.cols[0]);
  return { before: state(old), after: state(step), scores, rescale: value(head.rescale, step) };
}

function buildPlayer() {
  const layers = [...new Set(tiles.heads.map((t) => t.layer))];
  $("tile-layer").append(...layers.map((l) => h("option", { value: l }, String(l))));
  for (const id of ["tile-layer", "tile-head"]) {
    $(id).addEventListener("change", () => choosePlayed(Number($("tile-layer").value),
      Number($("tile-head").value)));
  }
  $("matrix").addEventListener("click", (e) => {
    const [i, j] = cellAt(e, board);
    if (i !== null && j !== null) goTo(Math.floor(i / M) * tiles.n_cols + Math.floor(j / B) + 1);
  });
}

function choosePlayed(layer, head) {
  const found = tiles.heads.filter((t) => t.layer === layer);
  player.head = found.find((t) => t.head === head) || found[0] || tiles.heads[0];
  $("tile-head").replaceChildren(...found.map((t) => h("option", { value: t.head }, `${t.head}`)));
  $("tile-layer").value = player.head.layer;
  $("tile-head").value = player.head.head;
  player.image = null;
  drawPlayer();
}

function chooseRow(r) {
  if (player.done === 0) return;
  player.row = r; // drawTile() keeps it inside the block
  drawPlayer();
}

const range = ([from, to], one, more) => (to - from === 1 ? `${one} ${from}`
  : `${more} ${from} to ${to - 1}`);

/** What happens at that tile, in words. */
function tileText(step) {
  const queries = range(step.rows, "query", "queries");
  const keys = range(step.cols, "key", "keys");
  if (step.skipped) {
    const why = step.cols[0] >= step.rows[1] ? "later than" : "outside the window of";
    return `Skipped: ${keys}, ${why} ${queries}. Nothing is read, nothing is computed; m, l and O `
      + "stay.";
  }
  const scores = unpack(player.head.scores).subarray(step.at * M * B, (step.at + 1) * M * B);
  return (step.first ? `Q is read for ${queries}. ` : "") + `K and V are read for ${keys}. `
    + (scores.includes(-Infinity) ? "Some entries are masked, one by one."
      : "Every query sees every key.")
    + (step.last ? " This was the row's last tile: O is divided by l and written." : "");
}

function drawTile() {
  const { head, done } = player;
  const [top, body] = [$("tile-rows").tHead, $("tile-rows").tBodies[0]];
  if (done === 0) {
    $("tile-title").textContent = "Before the first tile";
    const skipped = N > VISITED ? ` and ${int(N - VISITED)} skipped` : "";
    $("tile-text").textContent = `A tile is ${M} queries by ${B} keys. Of ${many(N, "tile")} `
      + `${int(VISITED)} will be computed${skipped}. Nothing has been read yet.`;
    [top, body, $("worked")].forEach((e) => e.replaceChildren());
    return;
  }
  const step = tiles.steps[done - 1];
  const which = step.skipped ? "A skipped tile" : `Tile ${step.at + 1} of ${VISITED}`;
  $("tile-title").textContent = `${which}: Q block ${step.i}, K and V block ${step.j}`;
  $("tile-text").textContent = tileText(step);
  const rows = step.rows[1] - step.rows[0];
  player.row = clamp(player.row, 0, rows - 1);
  $("tile-rows").classList.toggle("dense", B > 8); // colours only: numbers would not fit
  const keys = step.skipped ? [] : about.tokens.slice(...step.cols);
  top.replaceChildren(h("tr", {}, th("query"),
    keys.map((token, n) => th(h("b", {}, token.label), { title: `key ${step.cols[0] + n}` })),
    th("rescale"), th(h("var", {}, "m")), th(h("var", {}, "l"))));
  body.replaceChildren(...Array.from({ length: rows }, (_, r) => tileRow(step, r)));
  drawWorked(step);
}

/** Row r of the block: its scores, and m, l and the rescale after the tile. */
function tileRow(step, r) {
  const { before, after, scores, rescale } = rowState(player.head, player.done - 1, r);
  const { low, high } = scorePicture();
  const cells = Array.from(scores, (s) => {
    const seen = Number.isFinite(s);
    const cell = h("td", { class: seen ? "s" : "s mask hatch", title: real(s) }, real(s, 2));
    if (seen) {
      const rgb = shade((s - low) / (high - low || 1));
      cell.style.background = css(rgb);
      cell.style.color = inkOn(rgb);
    }
    return cell;
  });
  const chosen = r === player.row;
  const i = step.rows[0] + r;
  const name = `${i} ${about.tokens[i].label}`;
  const running = (x, more = "") => h("td", { class: `m ${more}` },
    x === null ? "" : num(x, real(x)));
  return h("tr", { class: chosen ? "now" : null },
    rowHead(h("button", { type: "button", tabindex: chosen ? 0 : -1, "aria-pressed": String(chosen),
      "aria-label": `Query ${name}`, onclick: () => chooseRow(r) }, name)),
    cells, running(rescale), running(after.m, after.m > before.m ? "grew" : ""), running(after.l));
}

/** The chosen row's step, with its numbers put into the formulas. */
function drawWorked(step) {
  const { head, done, row } = player;
  const i = step.rows[0] + row;
  const { before, after, scores, rescale } = rowState(head, done - 1, row);
  const box = h("div", { class: "worked" },
    h("h3", {}, `Row of query ${i}, ${quote(about.tokens[i])}, worked`));
  $("worked").replaceChildren(box);
  if (step.skipped) {
    box.append(hint(`Still m = ${real(after.m)}, l = ${real(after.l)}.`));
    return;
  }
  const visible = scores.filter(Number.isFinite);
  const top = visible.reduce((a, b) => Math.max(a, b), -Infinity);
  const added = visible.reduce((sum, s) => sum + Math.exp(s - after.m), 0);
  const result = (x) => h("b", {}, real(x));
  const inBrackets = (x) => (x < 0 ? `(${real(x)})` : real(x));
  const why = (...said) => [" ", h("span", { class: "why" }, ...said)];
  const lines = {
    m: [`max(${real(before.m)}, ${real(top)}) = `, result(after.m),
      ...why(step.first ? "the first tile of the row" : after.m > before.m
        ? "a larger score came" : "as before")],
    rescale: Number.isFinite(after.m)
      ? ["e", h("sup", {}, `${real(before.m)} − ${inBrackets(after.m)}`), " = ", result(rescale)]
      : ["nothing was seen yet"],
    l: [`${real(rescale)} × ${real(before.l)} + ${real(added)} = `, result(after.l),
      ...why(`${real(added)} is the sum of e`, h("sup", {}, "s − m"),
        ` over ${many(visible.length, "visible score")}`)],
    O: [`${real(rescale)} × old O + P̃ V; its length goes from ${real(before.o)} to `,
      result(after.o),
      ...(step.last ? why("divided by l it is the output, of length "
        + real(after.o / (after.l || 1))) : [])],
  };
  box.append(h("dl", {}, Object.entries(lines).flatMap(([name, line]) => [
    h("dt", {}, name), h("dd", {}, line)])));
}

/** Manual's bytes at the same progress: it makes three passes, each a third of the way. */
function manualAt(progress) {
  const passes = tiles.manual;
  const k = Math.min(Math.floor(progress * passes.length), passes.length - 1);
  const pass = passes[k];
  const missing = k + 1 - progress * passes.length; // of this pass
  return {
    text: `pass ${k + 1} of ${passes.length}: ${pass.name.replace("^T", "ᵀ")}, reads `
      + `${pass.reads}, writes ${pass.writes}`,
    read: Math.round(pass.read_so_far - missing * pass.read),
    written: Math.round(pass.written_so_far - missing * pass.written),
  };
}

/** Which of the two moves more in the end, in a sentence. */
function inTheEnd(tiled, manual) {
  const times = (a, b) => `${(a / b).toFixed(1)} times as much`;
  if (tiled < manual) return `At the end manual has moved ${times(manual, tiled)}.`;
  return `On ${many(T, "token")} with tiles this small tiled moves ${times(tiled, manual)}: K and `
    + "V are read for each block of queries, and T × T is still a small square.";
}

function drawCounters() {
  const { done } = player;
  const total = (s) => s.read_so_far + s.written_so_far;
  const end = { tiled: total(tiles.steps[N - 1]), manual: total(tiles.manual.at(-1)) };
  const bar = (x) => {
    const i = h("i");
    i.style.width = `${(100 * x) / Math.max(end.tiled, end.manual)}%`;
    return i;
  };
  const meter = (kind, read, written, text) => h("div", { class: `meter ${kind}` },
    h("b", {}, kind), h("div", { class: "bar", "aria-hidden": "true" }, bar(read), bar(written)),
    h("p", {}, count(read), " bytes read, ", count(written), " written", h("br"),
      done === 0 ? "nothing yet" : text));
  const step = done > 0 ? tiles.steps[done - 1]
    : { read: 0, written: 0, read_so_far: 0, written_so_far: 0 };
  const manual = manualAt(done / N);
  const long = costs.rows.find((r) => r.T === 4096);
  const ratio = long.manual.bytes / long.tiled.bytes;
  $("counters").replaceChildren(
    h("h3", {}, "To and from main memory"),
    hint(`All ${H} heads of one layer, numbers of ${tiles.size} bytes; the fuller colour is what `
      + `is read. A tile and what goes with it need ${int(tiles.fast_memory)} bytes of fast memory `
      + "on the chip."),
    meter("tiled", step.read_so_far, step.written_so_far,
      `by this tile ${int(step.read)} read, ${int(step.written)} written`),
    meter("manual", manual.read, manual.written, manual.text),
    hint(`Manual makes ${tiles.manual.length} passes over main memory, here spread evenly over the `
      + `same progress. ${inTheEnd(end.tiled, end.manual)} At ${int(long.T)} tokens, in `
      + `${costs.dtype} with tiles of ${costs.block_m} × ${costs.block_n}, manual moves `
      + `${ratio.toFixed(ratio < 10 ? 1 : 0)} times as much as tiled.`));
}

function drawOutputs() {
  const { head, done } = player;
  const D = head.out.shape[1];
  const [out, manual] = [unpack(head.out), unpack(head.manual)];
  const most = largest(manual);
  const finished = new Set(tiles.steps.slice(0, done).filter((s) => s.last).map((s) => s.i));
  const shape = `${T} tokens × ${D} numbers`;
  const paint = (algorithm, values, shows, said) => {
    const label = `Output of ${algorithm}, ${shape}`;
    const canvas = outputPicture(T, D, values, most, label, 0, shows);
    canvas.style.height = `${clamp(T * 6, 60, 220)}px`;
    return h("figure", {}, h("figcaption", {}, named(algorithm), `: ${said}`), canvas);
  };
  const written = done === N ? shape : `${finished.size} of ${many(tiles.n_rows, "block")} written`;
  $("outputs").replaceChildren(
    h("h3", {}, `The output of layer ${head.layer}, head ${head.head}`),
    h("div", { class: "pair" },
      paint("tiled", out, (i) => finished.has(Math.floor(i / M)), written),
      paint("manual", manual, () => true, shape)),
    h("div", { class: "legend" }, entry(real(-most, 2), rampBar(signed), real(most, 2))),
    done < N ? hint("They are compared when the last tile is done.")
      : compared("difference", "The largest difference between the two is ", "tiled", head));
}

function drawPlayer() {
  const { done } = player;
  player.show(`${int(VISITED)} tiles to compute, step ${done} of ${N}`);
  drawTile();
  drawBoard();
  boardLegend();
  drawCounters();
  drawOutputs();
}
