"use strict";
// Everything from kubefan is inserted as text: names and user agents are chosen by others. Rows and
// cells are changed in place, so that focus, scrolling and a selection stay.

const PAUSE_MILLIS = 5000, ANSWER_MILLIS = 8000, HISTORIES_EVERY_ROUNDS = 6, TOP_ROWS = 10;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
let rounds = 0, before = null, lastAnswer = null;
const histories = new Map();

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function number(value) {
  return Math.round(value).toLocaleString("en-US");
}

function rate(value) {
  return value === null ? "–" : value < 10 ? value.toFixed(1) : number(value);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return (unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)) + " " + units[unit];
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return "<1s";
  if (seconds < 120) return Math.floor(seconds) + "s";
  if (seconds < 7200) return Math.floor(seconds / 60) + "m";
  if (seconds < 172800) return Math.floor(seconds / 3600) + "h";
  return Math.floor(seconds / 86400) + "d";
}

// Makes the rows of a table those of `items`. A cell is { text, kind, chart, title, columns }.
function fill(table, items, keyOf, cellsOf, none) {
  const body = table.tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const columns = table.tHead.rows[0].cells.length;
  const wanted = items.map((item) => [keyOf(item), cellsOf(item)]);
  if (wanted.length === 0) wanted.push(["", [{ text: none, kind: "empty", columns }]]);
  wanted.forEach(([key, cells], at) => {
    let row = known.get(key);
    known.delete(key);
    if (!row) {
      row = document.createElement("tr");
      row.dataset.key = key;
      cells.forEach((cell, column) => {
        const node = document.createElement(column === 0 && !cell.columns ? "th" : "td");
        if (node.tagName === "TH") node.scope = "row";
        if (cell.columns) node.colSpan = cell.columns;
        row.append(node);
      });
    }
    cells.forEach((cell, column) => {
      const node = row.cells[column];
      if (node.className !== (cell.kind || "")) node.className = cell.kind || "";
      if (cell.chart) draw(node, cell.chart);
      else setText(node, cell.text);
      if (cell.title && node.title !== cell.title) node.title = cell.title;
    });
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] || null);
  });
  known.forEach((row) => row.remove());
}

// A chart of the last hour: the newest sample is at the right edge.
function draw(node, { values, what, unit, samples }) {
  const most = Math.max(0, ...values), last = values.length ? values[values.length - 1] : 0;
  const label = values.length
    ? what + " over the last " + span(values.length * samples.seconds) + ": now " + unit(last) + ", at most " + unit(most)
    : what + ": no samples yet";
  let svg = node.querySelector("svg");
  if (!svg) {
    svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("viewBox", "0 0 360 40");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.append(document.createElementNS(SVG, "polygon"), document.createElementNS(SVG, "polyline"));
    const scale = document.createElement("small");
    // The label of the chart says the same.
    scale.setAttribute("aria-hidden", "true");
    node.append(svg, scale);
  }
  setText(node.querySelector("small"), values.length ? "at most " + unit(most) : "no samples yet");
  if (svg.getAttribute("aria-label") !== label) svg.setAttribute("aria-label", label);
  const from = 360 - values.length + 1;
  const height = (value) => (most > 0 ? 38 - (36 * value) / most : 38).toFixed(1);
  const points = values.map((value, at) => (from + at - 1) + "," + height(value)).join(" ");
  svg.lastElementChild.setAttribute("points", points);
  svg.firstElementChild.setAttribute("points", points && from - 1 + ",40 " + points + " 359,40");
}

function show(status) {
  // By kubefan's own clock. A process that was started again counts from zero.
  const now = status.uptimeSeconds;
  if (before && now < before.at) { before = null; histories.clear(); }
  const elapsed = before ? now - before.at : 0;
  const perSecond = (total, key) => {
    const earlier = before && before.totals.get(key);
    return earlier === undefined || earlier === null || elapsed <= 0 || total < earlier ? null : (total - earlier) / elapsed;
  };
  const totals = new Map();
  const rated = (total, key) => { totals.set(key, total); return perSecond(total, key); };
  setText(byId("version"), status.version);
  showTotals(status, rated);
  showChecks(status);
  showHealth(status);
  const samples = { seconds: status.sampleSeconds };
  fill(byId("caches"), status.caches, keyOfCache, (cache) => {
    const key = keyOfCache(cache);
    if (cache.eventsHistory.length) histories.set(key, cache);
    const drawn = histories.get(key) || cache;
    const good = cache.state === "synced";
    const kind = good ? "ok" : cache.state === "stale" || cache.state === "syncing" ? "warn" : "bad";
    const name = cache.resource + (cache.namespace ? " in " + cache.namespace : "") +
      (cache.encoding === "json" ? "" : " (" + cache.encoding + ")");
    return [
      { text: name, kind: "long", title: name },
      { text: (good ? "● " : kind === "warn" ? "▲ " : "✕ ") + cache.state + (cache.message ? ": " + cache.message : ""),
        kind: kind + (cache.message ? " message" : "") },
      { text: number(cache.objects), kind: "n" },
      { text: bytes(cache.memoryBytes), kind: "n" },
      { text: cache.ageSeconds === null ? "never" : span(cache.ageSeconds) + " ago", kind: "n" },
      { text: cache.resourceVersion || "–", kind: "n" },
      { text: rate(rated(cache.eventsTotal, "events " + key)), kind: "n" },
      { chart: { values: drawn.eventsHistory, what: "Events per second", unit: rate, samples } },
      { text: number(cache.subscribers), kind: "n" },
      { chart: { values: drawn.subscribersHistory, what: "Subscribers", unit: number, samples } },
    ];
  }, "No resource is cached.");
  fill(byId("recent"), grouped(status.recent), (one) => one.key, (one) => [
    { text: span(one.latest), kind: "n" },
    { text: one.what, kind: "" },
    { text: one.resource || "–", kind: "long", title: one.resource },
    { text: one.reason, kind: "" },
    { text: number(one.count), kind: "n" },
    { text: span(one.first), kind: "n" },
  ], "Nothing in the last samples.");
  fill(byId("upstream"), status.upstream.requests, (one) => one.verb + " " + one.code, (one) => [
    { text: one.verb },
    { text: one.code, kind: one.code.startsWith("2") ? "" : "warn" },
    { text: number(one.total), kind: "n" },
    { text: rate(rated(one.total, "upstream " + one.verb + " " + one.code)), kind: "n" },
  ], "No request yet.");
  before = { at: now, totals };
}

// One row for repeated occurrences, the latest first.
function grouped(recent) {
  const groups = new Map();
  for (const { secondsAgo, what, resource, reason, count } of recent) {
    const key = [what, resource, reason].join("\n");
    const group = groups.get(key) || { key, what, resource, reason, count: 0, latest: secondsAgo };
    group.count += count;
    group.first = secondsAgo;
    groups.set(key, group);
  }
  return [...groups.values()];
}

function keyOfCache(cache) {
  return [cache.resource, cache.namespace, cache.encoding].join("\n");
}

function showTotals(status, rated) {
  const budget = status.process.memoryBudgetBytes;
  const cpu = rated(status.process.cpuSeconds, "cpu");
  const sum = (name) => status.caches.reduce((sum, cache) => sum + cache[name], 0);
  const list = [
    ["Subscribers", number(status.subscribers)],
    ["Connections", number(status.connections)],
    ["Events/s", rate(rated(sum("eventsTotal"), "events"))],
    ["Deliveries/s", rate(rated(sum("deliveriesTotal"), "deliveries"))],
    ["Sent/s", ((value) => value === null ? "–" : bytes(value))(rated(sum("sentBytesTotal"), "sent"))],
    ["Memory", bytes(status.process.residentBytes) + (budget ? " of " + bytes(budget) : "")],
    ["CPU", cpu === null ? "–" : cpu.toFixed(2) + " cores"],
    ["Up for", span(status.uptimeSeconds)],
  ];
  const node = byId("totals");
  list.forEach(([name, text], at) => {
    let item = node.children[at];
    if (!item) {
      item = document.createElement("div");
      item.append(document.createElement("dt"), document.createElement("dd"));
      node.append(item);
    }
    setText(item.firstElementChild, name);
    setText(item.lastElementChild, text);
  });
}

function showChecks(status) {
  const failed = status.checks.filter((check) => !check.ok);
  const section = byId("checks"), list = section.lastElementChild;
  section.hidden = failed.length === 0;
  while (list.children.length > failed.length) list.lastElementChild.remove();
  failed.forEach((check, at) => {
    if (!list.children[at]) list.append(document.createElement("li"));
    setText(list.children[at], check.text);
  });
}

// Whether the apiserver is reachable, as far as the caches know.
function showHealth(status) {
  const known = status.caches.filter((cache) => cache.ageSeconds !== null);
  const oldest = known.reduce((oldest, cache) => oldest && oldest.ageSeconds >= cache.ageSeconds ? oldest : cache, null);
  const broken = status.caches.filter((cache) => cache.state !== "synced");
  const { lists, listsWaiting } = status.upstream;
  const watches = "Watches open: " + number(status.upstream.watches) + ". Lists now: " + number(lists) +
    (listsWaiting ? ", and " + number(listsWaiting) + " waiting." : ".");
  const node = byId("health");
  node.className = broken.length ? "warn" : "ok";
  if (broken.length) {
    setText(node, "▲ " + number(broken.length) + " of " + number(status.caches.length) + " caches are not in sync with the apiserver. " + watches);
  } else if (oldest) {
    setText(node, "● Every cache is in sync with the apiserver; the oldest proof is " + span(oldest.ageSeconds) + " old (" + oldest.resource + "). " + watches);
  } else {
    node.className = "quiet";
    setText(node, "No cache asks the apiserver. " + watches);
  }
}

const COLUMNS = ["Id", "Behind", "Sent", "Identity", "Resource", "Selector", "Age", "User agent", "Address", "Encoding", "Started"];
const NUMBERS = ["Sent", "Age"];
// A lag below this is normal.
const BEHIND_SECONDS = 5;

function showSubscribers(id, listed) {
  const table = byId(id);
  if (!table.tHead.rows.length) {
    const row = table.tHead.insertRow();
    COLUMNS.forEach((name) => {
      const head = document.createElement("th");
      head.scope = "col";
      if (NUMBERS.includes(name)) head.className = "n";
      setText(head, name);
      row.append(head);
    });
  }
  fill(table, listed.subscribers, (one) => one.id, (one) => {
    const selector = [one.labelSelector, one.fieldSelector].filter(Boolean).join(",") || "–";
    const resource = one.resource + (one.namespace ? " in " + one.namespace : "");
    const behind = number(one.lagEvents) + (one.isExpired ? "+" : "") + (one.lagEvents === 1 ? " event" : " events") +
      (one.lagSeconds === null ? "" : ", " + span(one.lagSeconds)) + (one.inBacklog ? ", catching up" : "");
    return [
      { text: one.id },
      { text: behind, kind: one.isExpired ? "bad" : one.lagSeconds >= BEHIND_SECONDS ? "warn" : "" },
      { text: bytes(one.bytesSent), kind: "n" },
      { text: one.identity || "any", kind: "long", title: one.identity },
      { text: resource, kind: "long", title: resource },
      { text: selector, kind: "long", title: selector },
      { text: span(one.ageSeconds), kind: "n" },
      { text: one.userAgent || "–", kind: "long", title: one.userAgent },
      { text: one.address },
      { text: one.protocol + "/" + one.encoding },
      { text: one.started },
    ];
  }, "No subscriber is connected.");
}

class Refused extends Error {}

async function get(path) {
  const stop = new AbortController(), timer = setTimeout(() => stop.abort(), ANSWER_MILLIS);
  try {
    const answer = await fetch(path, { signal: stop.signal, cache: "no-store" });
    if (!answer.ok) throw new Refused(answer.status + ": " + (await answer.text()).slice(0, 500));
    return await answer.json();
  } finally {
    clearTimeout(timer);
  }
}

function connection(text, kind) {
  const node = byId("connection");
  // Seen in the tab, too.
  document.title = (kind === "ok" ? "" : text.slice(0, 2)) + "kubefan";
  setText(node, text);
  node.className = kind;
}

async function round() {
  try {
    const status = await get("/status" + (rounds % HISTORIES_EVERY_ROUNDS === 0 ? "?histories=true" : ""));
    rounds += 1;
    show(status);
    lastAnswer = new Date();
    connection(status.isReady ? "● Ready" : "▲ Not ready", status.isReady ? "ok" : "warn");
    setText(byId("updated"), "updated " + lastAnswer.toLocaleTimeString());
    try {
      for (const [id, sort] of [["lag", "lag"], ["bytes", "bytes"]]) {
        showSubscribers(id, await get("/subscribers?sort=" + sort + "&limit=" + TOP_ROWS));
      }
      byId("lag-note").hidden = true;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      byId("lag-note").hidden = false;
      setText(byId("lag-note"), "The subscribers are not shown: " + error.message);
    }
  } catch (error) {
    rounds = 0;
    before = null;
    const since = lastAnswer ? " since " + lastAnswer.toLocaleTimeString() + ": what is below is old" : "";
    if (error instanceof Refused) connection("✕ kubefan refuses: " + error.message, "bad");
    else connection("✕ kubefan does not answer" + since + "; trying again", "bad");
  }
  setTimeout(round, PAUSE_MILLIS);
}

round();
