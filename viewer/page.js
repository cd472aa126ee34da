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

opening();
const thumbs = thumbnails();
const strip = tokenStrip($("map-tokens"), (i) => lookAt(i));
listenToMap();

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
