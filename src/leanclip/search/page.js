"use strict";
const $ = (id) => document.getElementById(id);
const COUNT = 30;
const TABS = ["search", "classes", "duplicates", "suspects"];
const state = { info: null, shown: "search", load: null, offset: 0, hits: [], sorted: null, turn: 0 };

// Every text of the data enters by textContent: a caption is never read as HTML.
function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function say(text, error) {
  $("status").textContent = text;
  $("status").classList.toggle("error", Boolean(error));
}

async function ask(address, options) {
  let answer, content;
  try {
    answer = await fetch(address, options);
    content = await answer.json();
  } catch {
    throw new Error(answer ? "the server gave no readable answer" : "the server does not answer; is it still running?");
  }
  if (!answer.ok) throw new Error(content.error);
  return content;
}

const post = (address, content) => ask(address, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content),
});

// ---- cards

const imageOf = (hit, options = "") => `/image/${hit.id}?token=${state.info.token}${options}`;

function card(hit, detail) {
  const image = element("img", { src: imageOf(hit), alt: hit.caption || hit.key, loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => missing(image, hit));
  image.addEventListener("click", () => enlarge(hit));
  const node = element("article", { className: "card", tabIndex: -1 }, image,
    element("div", { className: "text" },
      element("div", { className: "score" }, detail ?? hit.score.toFixed(3)),
      element("p", { className: "caption", title: hit.caption }, hit.caption),
      element("p", { className: "key", title: hit.shard }, hit.key)),
    element("div", { className: "row" },
      element("button", { type: "button", tabIndex: -1, title: "More like this", onclick: () => similar(hit) }, "Similar"),
      element("button", { type: "button", tabIndex: -1, onclick: () => copy([hit.key]) }, "Copy key")));
  node.dataset.id = hit.id;
  node.dataset.key = hit.key;
  node.setAttribute("aria-label", `${hit.caption || hit.key}, ${detail ?? hit.score.toFixed(3)}`);
  node.addEventListener("keydown", (event) => cardKey(event, node, hit));
  return node;
}

async function missing(image, hit) {
  const note = element("div", { className: "none" }, "cannot be read");
  image.replaceWith(note);
  try {
    const answer = await fetch(imageOf(hit));
    if (!answer.ok) note.textContent = (await answer.json()).error;
  } catch { /* the note says enough */ }
}

function cardKey(event, node, hit) {
  if (event.target !== node || event.ctrlKey || event.metaKey || event.altKey) return;
  const cards = [...document.querySelectorAll("#results .card")];
  const place = cards.indexOf(node);
  const columns = cards.filter((other) => other.offsetTop === cards[0].offsetTop).length;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  if (event.key in steps) {
    const next = place + steps[event.key];
    if (next < 0) $("text").focus();
    else focusCard(cards[Math.min(next, cards.length - 1)]);
  } else if (event.key === "Enter") similar(hit);
  else if (event.key === " ") enlarge(hit);
  else if (event.key === "c") copy([hit.key]);
  else return;
  event.preventDefault();
}

function focusCard(node) {
  if (!node) return;
  for (const other of document.querySelectorAll('#results .card[tabindex="0"]')) other.tabIndex = -1;
  node.tabIndex = 0;
  node.focus();
}

function enlarge(hit) {
  $("large-image").src = imageOf(hit, "&large=1");
  $("large-image").alt = hit.caption || hit.key;
  $("large-caption").textContent = hit.caption;
  $("large-key").textContent = `${hit.key} in ${hit.shard}`;
  $("large").showModal();
}

async function copy(keys) {
  const text = keys.join("\n");
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page of another machine has no clipboard
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say(`copied ${keys.length === 1 ? keys[0] : `${keys.length} keys`}`);
}

// ---- lists: `load(offset)` gives {nodes, hits, more, text}

async function show(load, kind) {
  const turn = ++state.turn;
  Object.assign(state, { load, offset: 0, hits: [], kind });
  $("results").className = kind || "";
  say("…");
  try {
    const part = await load(0);
    if (turn !== state.turn) return; // a later request was faster
    $("results").replaceChildren();
    add(part);
  } catch (error) {
    if (turn === state.turn) clear(), say(error.message, true);
  }
}

function add(part) {
  $("results").append(...part.nodes);
  state.hits.push(...part.hits);
  state.offset += part.count ?? part.hits.length;
  $("more").hidden = !part.more;
  $("copy").hidden = !state.hits.length;
  const first = $("results").querySelector(".card");
  if (first && !$("results").querySelector('.card[tabindex="0"]')) first.tabIndex = 0;
  say(part.text);
}

function clear() {
  $("results").replaceChildren();
  $("more").hidden = $("copy").hidden = true;
  state.hits = [];
  state.load = null;
}

$("more").addEventListener("click", async () => {
  const turn = state.turn;
  try {
    const part = await state.load(state.offset);
    if (turn === state.turn) add(part);
  } catch (error) { say(error.message, true); }
});
$("copy").addEventListener("click", () => copy(state.hits.map((hit) => hit.key)));

function hitList(answer, text, count) {
  return { hits: answer.hits, nodes: answer.hits.map((hit) => card(hit)), more: answer.hits.length === count, text };
}

// ---- search

const shard = () => ($("shard").value === "" ? null : Number($("shard").value));
const approximately = () => (state.info.approximate && shard() === null ? " (approximate)" : "");

function searchText(text) {
  return show(async (offset) => hitList(
    await post("/api/search", { text, shard: shard(), count: COUNT, offset }), `nearest to “${text}”${approximately()}`, COUNT));
}

function similar(hit) {
  select("search");
  $("text").value = "";
  return show(async (offset) => hitList(
    await post("/api/search", { id: hit.id, shard: shard(), count: COUNT, offset }), `more like ${hit.key}${approximately()}`, COUNT));
}

function searchFile(file) {
  select("search");
  $("text").value = "";
  const limit = state.info.upload_bytes;
  if (file.size > limit) {
    clear();
    return say(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${limit / 2 ** 20} MiB are read`, true);
  }
  return show(async (offset) => {
    const query = new URLSearchParams({ count: COUNT, offset, shard: shard() ?? "" });
    const headers = { "Content-Type": file.type || "application/octet-stream" };
    const answer = await ask(`/api/search-image?${query}`, { method: "POST", headers, body: file });
    return hitList(answer, `nearest to ${file.name || "the image"}${approximately()}`, COUNT);
  });
}

$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  searchText($("text").value);
});
$("shard").addEventListener("change", () => { if (state.load) show(state.load); });
$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  if (file) searchFile(file);
  $("file").value = "";
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") focusCard(document.querySelector("#results .card")), event.preventDefault();
});

let depth = 0;
const withFile = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
addEventListener("dragenter", (event) => { if (withFile(event)) depth++, $("drop").hidden = false, event.preventDefault(); });
addEventListener("dragover", (event) => { if (withFile(event)) event.preventDefault(); });
addEventListener("dragleave", () => { if (depth && !--depth) $("drop").hidden = true; });
addEventListener("drop", (event) => {
  if (!withFile(event)) return;
  event.preventDefault();
  depth = 0;
  $("drop").hidden = true;
  if (event.dataTransfer.files.length) searchFile(event.dataTransfer.files[0]);
});
addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])].find((entry) => entry.type.startsWith("image/"));
  if (file) searchFile(file), event.preventDefault();
});
addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input, textarea, select");
  if (event.key === "/" && !typing) select("search"), $("text").focus(), event.preventDefault();
});

// ---- classes

$("sort").addEventListener("submit", async (event) => {
  event.preventDefault();
  clear();
  $("counts").replaceChildren();
  $("csv").hidden = true;
  say("sorting…");
  try {
    const classes = $("classes").value.split("\n");
    state.sorted = await post("/api/sort", { classes, templates: $("templates").value });
  } catch (error) { return say(error.message, true); }
  $("csv").href = `/api/sorted/${state.sorted.sorted}.csv`;
  $("csv").hidden = false;
  $("counts").append(...state.sorted.classes.map((entry, number) =>
    element("button", { type: "button", onclick: () => showClass(number) }, `${entry.name}: ${entry.count.toLocaleString("en")}`)));
  showClass(0);
});

function showClass(number) {
  const { name, count } = state.sorted.classes[number];
  [...$("counts").children].forEach((button, other) => button.setAttribute("aria-pressed", other === number));
  return show(async (offset) => {
    const { hits } = await ask(`/api/sorted/${state.sorted.sorted}?class=${number}&offset=${offset}`);
    const nodes = hits.map((hit) => card(hit, `${(100 * hit.score).toFixed(0)}%, else ${hit.second}`));
    return { hits, nodes, more: offset + hits.length < count, text: `${count.toLocaleString("en")} in ${name}, the doubtful ones first` };
  });
}

// ---- near-duplicates

$("pairs").addEventListener("submit", (event) => {
  event.preventDefault();
  const threshold = $("threshold").value;
  clear();
  show(async (offset) => {
    const turn = state.turn;
    for (;;) {
      const answer = await ask(`/api/duplicates?threshold=${encodeURIComponent(threshold)}&offset=${offset}`);
      $("progress").hidden = answer.finished;
      if (answer.finished || turn !== state.turn) {
        const nodes = answer.pairs.map((pair) => element("div", { className: "pair" }, ...pair.map((hit) => card(hit))));
        const { total } = answer;
        const text = total ? `${total.toLocaleString("en")} pair${total === 1 ? "" : "s"} with a score of at least ${threshold}` : "no such pairs";
        return { hits: answer.pairs.flat(), nodes, count: answer.pairs.length, more: offset + answer.pairs.length < total, text };
      }
      $("progress").value = answer.done;
      say(`comparing: ${(100 * answer.done).toFixed(0)}%, ${answer.total.toLocaleString("en")} pairs so far`);
      await new Promise((resume) => setTimeout(resume, 400));
    }
  }, "pairs").finally(() => { $("progress").hidden = true; });
});

// ---- suspects

function showSuspects() {
  return show(async (offset) => {
    const { rows, total } = await ask(`/api/suspects?offset=${offset}`);
    const hits = rows.map((row) => ({ id: row.id ?? -1, key: row.key, shard: row.shard, caption: row.caption ?? "" }));
    const detail = (row) => ["probability", "score", "rank"].filter((name) => row[name] !== null)
      .map((name) => `${name} ${Number.isFinite(Number(row[name])) ? Number(Number(row[name]).toPrecision(3)) : row[name]}`).join(", ");
    const nodes = hits.map((hit, number) => card(hit, detail(rows[number])));
    return { hits, nodes, more: offset + rows.length < total, text: `${total.toLocaleString("en")} suspects` };
  });
}

// ---- tabs

function select(name) {
  if (state.shown === name) return;
  state.shown = name;
  state.turn++;
  for (const tab of TABS) {
    const shown = tab === name;
    $(`view-${tab}`).hidden = !shown;
    $(`tab-${tab}`).setAttribute("aria-selected", shown);
    $(`tab-${tab}`).tabIndex = shown ? 0 : -1;
  }
  clear();
  say("");
  if (name === "suspects") showSuspects();
  if (name === "classes" && state.sorted) showClass(0);
}

for (const name of TABS) {
  $(`tab-${name}`).addEventListener("click", () => select(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = TABS.filter((tab) => !$(`tab-${tab}`).hidden);
    const next = tabs[(tabs.indexOf(name) + step + tabs.length) % tabs.length];
    select(next);
    $(`tab-${next}`).focus();
    event.preventDefault();
  });
}

// ---- start

(async () => {
  try {
    state.info = await ask("/api/info");
  } catch (error) { return say(error.message, true); }
  const { info } = state;
  $("about").textContent = `${info.images.toLocaleString("en")} images of ${info.data} · ${info.model}`;
  document.title = `${info.images.toLocaleString("en")} images · leanclip search`;
  info.shards.forEach((entry, number) => $("shard").append(new Option(`${entry.name} (${entry.samples.toLocaleString("en")})`, number)));
  $("shard").hidden = info.shards.length < 2;
  $("templates").append(...info.templates.map((name) => new Option(name, name)));
  $("tab-suspects").hidden = info.suspects === null;
  $("text").focus();
  const text = new URLSearchParams(location.hash.slice(1)).get("text"); // a link of the report
  if (text) $("text").value = text, searchText(text);
})();
