// 3 caches: one decode step, cell by cell.

const KINDS = {
  dynamic: "Buffers that double when they are full. Only stored tokens are read.",
  static: "Allocated once for the longest text. Empty places are read too, and masked.",
  paged: "Pages in any order, and a table of the page of each token. Page 0 is for padding.",
};

function buildCaches() {
  const { token, position, prompt } = caches;
  const tokens = [...prompt, token];
  const which = caches.predicted ? "the token that the model found likeliest"
    : "the last one of the prompt";
  $("cache-step").textContent = `${many(prompt.length, "token")} were read. Then ${quote(token)} `
    + `is decoded at position ${position}, ${which}. A token's keys and values take `
    + `${int(caches.bytes_per_token)} bytes in all layers. Point at a token to find it in each `
    + "cache.";
  const cells = [];
  for (const step of caches.steps) {
    const [box, mine] = cacheCells(step, tokens);
    cells.push(...mine);
    const windowed = step.kind === "dynamic" && about.window !== null
      ? " With a window, only the tokens that a later one can see are kept." : "";
    $("caches").append(h("article", { "aria-label": `${step.kind} cache` }, h("h3", {}, step.kind),
      h("p", {}, KINDS[step.kind] + windowed), step.refused.map(refusal), box));
  }
  const facts = {
    "places read": (s) => count(s.read.length),
    "of these seen": (s) => count(s.seen.length),
    "places written": (s) => count(s.written.length),
    "bytes allocated, all layers": (s) => count(s.bytes_allocated),
    "bytes that hold tokens": (s) => count(s.bytes_used),
    "share that is used": (s) => `${Math.round((100 * s.bytes_used) / s.bytes_allocated)}%`,
    "run by": (s) => [s.backend, ...s.kernels].join(", "),
    "off the logits without a cache": (s) => small(s.error),
  };
  $("cache-facts").append(
    h("thead", {}, h("tr", {}, td(), caches.steps.map((s) => th(s.kind)))),
    h("tbody", {}, Object.entries(facts).map(([name, fact]) => h("tr", {}, rowHead(name),
      caches.steps.map((s) => td(fact(s)))))));
  const cacheStrip = tokenStrip($("cache-tokens"), tokens, "Tokens in the cache", (i) => {
    cells.forEach(([element, held]) => element.classList.toggle("spot", held.includes(i)));
    cacheStrip.chips.forEach((chip, n) => chip.classList.toggle("query", n === i));
  }, null);
  cacheStrip.go(tokens.length - 1);
  const sample = (name) => h("i", { class: `cell ${name}` });
  $("cache-legend").append(
    entry(sample("seen read kept"), "read and seen by the query"),
    entry(sample("read"), "read, but masked"),
    entry(sample("kept"), "holds a token, not read"),
    entry(sample(""), "empty"),
    entry(sample("written"), "written in this step"));
  $("cache-verdict").className = judged(caches.agree);
  const error = Math.max(...caches.steps.map((s) => s.error));
  $("cache-verdict").append("The logits of this step differ from those without a cache by at most ",
    small(error), "; allowed are ", small(caches.allowed), ".");
}

/** The places of one cache -> its element, and [element, positions] of what a token lights up. */
function cacheCells(step, tokens) {
  const [read, seen, written] = [step.read, step.seen, step.written].map((list) => new Set(list));
  const lit = [];
  // A letter fits into a place; a longer token is shown by its position.
  const letters = tokens.every((t) => [...t.label].length === 1);
  const cell = (n) => {
    const at = step.holds[n];
    const kinds = { kept: at >= 0, read: read.has(n), seen: seen.has(n), written: written.has(n) };
    const on = Object.keys(kinds).filter((kind) => kinds[kind]);
    const holds = at < 0 ? "empty" : `token ${at} ${tokens[at].label}`;
    const title = `place ${n}: ${[holds, ...on].join(", ")}`;
    const e = h("i", { class: ["cell", ...on].join(" "), title },
      at < 0 ? "" : letters ? tokens[at].label : String(at));
    if (at >= 0) lit.push([e, [at]]);
    return e;
  };
  const all = Array.from({ length: step.cells }, (_, n) => n);
  const crowded = step.cells > 320 ? " many" : letters ? "" : " numbered";
  const attributes = (kind) => ({ class: `cells ${kind}${crowded}`, role: "img",
    "aria-label": `${step.cells} places: ${step.seen.length} read and seen, `
      + `${step.read.length - step.seen.length} read and masked, ${step.written.length} written` });
  if (step.page_size === null) return [h("div", attributes(""), all.map(cell)), lit];
  const size = step.page_size;
  const pages = h("div", attributes("paged"));
  pages.style.setProperty("--across", Math.min(size, 8));
  for (let p = 0; p * size < step.cells; p++) {
    const at = step.page_table.indexOf(p);
    const said = p === 0 ? "page 0, padding" : at >= 0 ? `page ${p}` : `page ${p}, free`;
    pages.append(h("div", { class: at >= 0 ? "page held" : "page" }, h("span", {}, said),
      h("div", {}, all.slice(p * size, (p + 1) * size).map(cell))));
  }
  const entries = step.page_table.map((page, n) => {
    const positions = Array.from({ length: size }, (_, s) => n * size + s);
    const e = h("li", {}, `tokens ${n * size}–${(n + 1) * size - 1} → page ${page}`);
    lit.push([e, positions]);
    return e;
  });
  const table_ = h("ol", { class: "table", "aria-label": "Page table" }, entries);
  return [h("div", {}, table_, pages), lit];
}
