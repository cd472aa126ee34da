// The head of the page. page.py puts the other files before this one.

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
}

/** How the page chose its first head, if it did. */
function beginning() {
  const heads = maps.entropy.flat();
  const least = heads[about.layer * H + about.head];
  if (heads.length > 1 && least === Math.min(...heads)) {
    $("begin").textContent = `The page begins with layer ${about.layer}, head ${about.head}: of all `
      + "heads it spreads its weights over the fewest tokens (lowest mean entropy).";
  }
}

opening();
beginning();
const thumbs = thumbnails();
const strip = tokenStrip($("map-tokens"), (i) => lookAt(i));
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
