"use strict";
// Everything works without this script. It keeps pages up to date, shows forms in dialogs, draws charts and listens to keys.

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const one = (selector, root = document) => root.querySelector(selector);

// --- times ---

const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function localTimes(root) {
  for (const time of all("time[datetime]", root)) {
    const instant = new Date(time.dateTime);
    if (!isNaN(instant)) time.textContent = local.format(instant);
  }
}

// --- changing only what differs, so that focus and selection stay ---

function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  changeChildren(old, fresh);
}

function changeChildren(old, fresh) {
  const known = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, at) => {
    const here = old.childNodes[at];
    const same = node.id && known.get(node.id);
    if (same && same !== here) old.insertBefore(same, here ?? null);
    const place = old.childNodes[at];
    if (place) change(place, node);
    else old.append(node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function changeTo(element, html) {
  const fresh = element.cloneNode(false);
  fresh.innerHTML = html;
  localTimes(fresh);
  changeChildren(element, fresh);
}

/** Changes the elements that the fresh ones name by their ids. What is between them stays. */
function changeParts(element, html) {
  const fresh = document.createElement("div");
  fresh.innerHTML = html;
  for (const part of fresh.children) {
    const old = part.id && one(`#${part.id}`, element);
    if (old) changeTo(old, part.innerHTML);
  }
}

// --- live parts ---

let events;
let retry;

function follow() {
  events?.close();
  clearTimeout(retry);
  const live = one("[data-live]");
  if (!live || document.hidden) return; // hidden pages take no connection
  events = new EventSource(live.dataset.live);
  events.onmessage = ({ data }) => {
    live.classList.remove("stale");
    if (live.hasAttribute("data-parts")) changeParts(live, data);
    else changeTo(live, data);
  };
  events.onerror = () => {
    live.classList.add("stale");
    if (events.readyState === EventSource.CLOSED) retry = setTimeout(follow, 5000);
  };
}

document.addEventListener("visibilitychange", follow);
addEventListener("pagehide", () => events?.close());

const reload = one("[data-reload]");
if (reload) setTimeout(() => location.reload(), Number(reload.dataset.reload));

// --- search as one types ---

const search = one("#search");
let typing;

async function find(form) {
  const parameters = new URLSearchParams(new FormData(form));
  const address = `${new URL(form.action).pathname}?${parameters}`;
  const answer = await fetch(address);
  if (!answer.ok || answer.redirected) return location.assign(address);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const [live, fresh] = [one("#live"), one("#live", page)];
  if (String(new URLSearchParams(new FormData(form))) !== String(parameters)) return; // typed on meanwhile
  changeTo(live, fresh.innerHTML);
  live.dataset.live = fresh.dataset.live;
  history.replaceState(null, "", address);
  follow();
}

search?.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => find(search.form), 200);
});

// --- dialogs ---

const dialog = one("#dialog");

async function ask(address) {
  const answer = await fetch(address);
  if (!answer.ok || answer.redirected) return location.assign(address);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const form = one("main form.asks", page);
  if (!form) return location.assign(address);
  const title = one("h1", form);
  if (title) dialog.setAttribute("aria-label", title.textContent);
  dialog.replaceChildren(document.adoptNode(form));
  dialog.showModal();
}

document.addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const link = event.target.closest("a");
  if (link?.matches("[data-dialog]")) {
    event.preventDefault();
    ask(link.href);
  } else if (link?.matches("[data-close]") && dialog.open) {
    event.preventDefault();
    dialog.close();
  }
});
document.addEventListener("submit", (event) => {
  // Once is enough.
  const button = event.submitter;
  if (event.target.method === "post" && button) setTimeout(() => (button.disabled = true));
});

// --- what was done is said once ---

if (location.search.includes("notice=")) {
  const address = new URL(location);
  address.searchParams.delete("notice");
  history.replaceState(null, "", address);
}

// --- dark and light ---

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  document.cookie = `theme=${theme}; path=/; max-age=31536000; samesite=lax`;
  drawCharts();
}

one("#theme").addEventListener("click", switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts());

// --- charts ---

const charts = one(".charts");
let drawn = [];
let series;

const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const full = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const show = (_, value) => (value == null ? "–" : full.format(value));

const COLOURS = {
  ready: ["#1f6feb", "#6cb0ff"],
  delayed: ["#8250df", "#b99cff"],
  reserved: ["#b06a00", "#f0bd5b"],
  blocked: ["#b3261e", "#ff8a80"],
  pushed: ["#1f6feb", "#6cb0ff"],
  left: ["#1a7f37", "#6fd58f"],
};
const LINES = {
  depth: [["ready", "Ready"], ["delayed", "Delayed"], ["reserved", "Reserved"], ["blocked", "Blocked"]],
  rate: [["pushed", "In"], ["left", "Out"]],
};

function chartOptions(kind, element) {
  const shade = isDark() ? 1 : 0;
  const [quiet, line] = isDark() ? ["#97a3b1", "#2b3440"] : ["#56606c", "#e4e8ed"];
  const axis = { stroke: quiet, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
  const lines = LINES[kind].map(([name, label]) => ({
    label, stroke: COLOURS[name][shade], width: 1.5, value: show, points: { show: false },
    fill: kind === "depth" && name === "ready" ? COLOURS[name][shade] + "22" : undefined,
  }));
  const until = Math.floor(Date.now() / 1000);
  return {
    width: element.clientWidth, height: 180, cursor: { y: false },
    scales: {
      x: { time: true, range: () => [until - chosenSpan(), until] },
      y: { range: (_, __, most) => [0, Math.max(most ?? 0, kind === "rate" ? 1 : 4) * 1.1] },
    },
    axes: [{ ...axis, space: 70 }, { ...axis, size: 48, values: (_, values) => values.map((value) => compact.format(value)) }],
    series: [{ label: "", value: (_, at) => (at == null ? "–" : local.format(new Date(at * 1000))) }, ...lines],
  };
}

const chosenSpan = () => Number(one("input[name=span]:checked", charts).value);

function drawCharts() {
  if (!charts || !series || !window.uPlot) return;
  for (const chart of drawn) chart.destroy();
  drawn = all("[data-chart]", charts).map((element) => {
    const kind = element.dataset.chart;
    const data = [series.time, ...LINES[kind].map(([name]) => series[name])];
    return new uPlot(chartOptions(kind, element), data, element);
  });
  one(".empty", charts).hidden = series.time.length > 1;
}

async function readSeries() {
  if (document.hidden) return;
  const answer = await fetch(`${charts.dataset.series}?seconds=${chosenSpan()}`).catch(() => null);
  if (!answer?.ok) return;
  series = await answer.json();
  drawCharts();
}

function load(name, attributes) {
  return new Promise((done) => {
    const element = Object.assign(document.createElement(name), attributes);
    element.onload = done;
    document.head.append(element);
  });
}

async function startCharts() {
  const style = load("link", { rel: "stylesheet", href: charts.dataset.style });
  await Promise.all([style, load("script", { src: charts.dataset.script })]);
  await readSeries();
  setInterval(readSeries, 5000);
  for (const input of all("input[name=span]", charts)) input.addEventListener("change", readSeries);
  let width = charts.clientWidth;
  new ResizeObserver(() => {
    if (charts.clientWidth !== width) drawCharts();
    width = charts.clientWidth;
  }).observe(charts);
}

if (charts) startCharts();

// --- keys ---

const help = one("#help");
one("#keys").addEventListener("click", () => help.showModal());
let before = "";

function moveTo(step) {
  const rows = all("a.row");
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + step, 0), rows.length - 1);
  rows[next]?.focus();
}

const KEYS = {
  "/": () => (search ? (search.focus(), search.select()) : location.assign("/queues")),
  j: () => moveTo(1),
  k: () => moveTo(-1),
  ArrowDown: () => moveTo(1),
  ArrowUp: () => moveTo(-1),
  u: () => one("[data-up]")?.click(),
  t: switchTheme,
  "?": () => help.showModal(),
  "g q": () => location.assign("/queues"),
  "g d": () => location.assign("/dead-letters"),
  "g s": () => location.assign("/schedules"),
  "g t": () => location.assign("/templates"),
  "g c": () => location.assign("/consumers"),
  "g b": () => location.assign("/brokers"),
};

document.addEventListener("keydown", (event) => {
  const target = event.target;
  if (event.key === "Escape" && target === search) return search.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || one("dialog[open]")) return;
  const isField = target.closest("input, textarea, select, pre");
  if (target === search && event.key === "ArrowDown") return event.preventDefault(), moveTo(1);
  if (isField) return;
  const isArrow = event.key.startsWith("Arrow");
  if (isArrow && !target.matches("a.row") && all("a.row").length === 0) return;
  const key = before === "g" ? `g ${event.key}` : event.key;
  before = event.key === "g" ? "g" : "";
  const act = KEYS[key];
  if (!act) return;
  event.preventDefault();
  act();
});

localTimes(document);
follow();
