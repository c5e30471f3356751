// Looks at every page of a broker's console in a real Chromium, and does everything that can be done there.
//
// CONSOLE: address of the console. SLUICE: path of the command line tool. SLUICE_SERVER: address of gRPC. CHROMIUM: path of
// the browser. OUT: folder for pictures.
"use strict";
const assert = require("node:assert/strict");
const fs = require("node:fs");
const path = require("node:path");
const { chromium } = require("playwright-core");
const { consumer, fill, sluice } = require("./fill.js");

const { CONSOLE, CHROMIUM = "/usr/bin/chromium", OUT = "target/browser" } = process.env;
const AXE = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const WIDTHS = [400, 900, 1600];
// From loopback, with a debug build and a Chromium that paints without a graphics card. The best of several loads counts.
const FIRST_PAINT_MS = 500;
const LIMIT = 15_000;

const faults = [];
let page;

function watch(page) {
  page.setDefaultTimeout(LIMIT);
  page.on("console", (message) => {
    // Answers that say no, such as a form with a fault, are told on the console of the browser too.
    const isAnswer = message.text().startsWith("Failed to load resource");
    if (["error", "warning"].includes(message.type()) && !isAnswer) faults.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => faults.push(`script: ${error}`));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(CONSOLE) && !url.startsWith("data:")) faults.push(`request to elsewhere: ${url}`);
  });
}

const go = async (address) => {
  const answer = await page.goto(CONSOLE + address);
  assert.ok(answer.status() < 500, `${address}: ${answer.status()}`);
  assert.match(answer.headers()["content-security-policy"], /default-src 'none'/);
};
const text = (selector) => page.locator(selector).first().innerText();
const see = (what, where = "main") => page.locator(where).getByText(what).first().waitFor();
const press = (name, where = "main") => page.locator(where).getByRole("button", { name }).or(page.locator(where).getByRole("link", { name })).first().click();
const noticed = (what) => page.locator("#notice").getByText(what).waitFor();
/** Opens the form of an action in its dialog. */
const open = async (name) => {
  await press(name);
  await page.locator("dialog#dialog[open] form").waitFor();
};
const inDialog = (name) => press(name, "dialog#dialog");
/** Repeats until the page shows it: figures come within a second or two. */
const until = async (what, is) => {
  for (const start = Date.now(); ; await page.waitForTimeout(50)) {
    if (await is()) return;
    assert.ok(Date.now() - start < LIMIT, `${what}: not within ${LIMIT} ms`);
  }
};

const PAGES = {
  queues: "/queues",
  stuck: "/queues?show=paused",
  queue: "/queues/orders",
  item: async () => firstItem("orders"),
  "hostile item": async () => firstItem("hostile"),
  "binary item": async () => firstItem("binary"),
  "dead item": async () => firstItem("mail.dead"),
  settings: "/queues/orders/settings",
  "dead letters": "/dead-letters",
  schedules: "/schedules",
  consumers: "/consumers",
  "no consumers": "/consumers?search=nobody",
  brokers: "/brokers",
  "queue with consumers": "/queues/parcels",
  "edit schedule": "/schedules/nightly/edit",
  "run schedule": "/schedules/nightly/run",
  purge: "/queues/orders/purge",
  delete: "/queues/orders/delete",
  redrive: "/queues/mail.dead/redrive",
  push: "/queues/orders/push",
  "new queue": "/new-queue",
  "new schedule": "/new-schedule",
  templates: "/templates",
  "new template": "/new-template",
  "edit template": "/templates/orders.*/edit",
  missing: "/queues/there.is.none",
};

async function firstItem(queue) {
  await go(`/queues/${queue}`);
  return page.locator("a.row").first().getAttribute("href");
}

const checks = {
  async "live figures come without a reload"() {
    await go("/queues?search=live");
    await sluice("push", "live", "1");
    await see("live", "tbody");
    await sluice("push", "live", "2");
    await until("the second item", async () => (await text("#queue-live td:nth-child(3)")) === "2");
  },

  async "queues are searched, sorted, filtered and paged"() {
    await go("/queues");
    assert.equal(await page.locator("tbody tr").count(), 50);
    await press("Next");
    await see("Page 2 of 2");
    await go("/queues");
    await page.locator("#search").fill("RDER");
    await until("one row", async () => (await page.locator("tbody tr").count()) === 1);
    assert.match(page.url(), /search=RDER/);
    await go("/queues");
    await page.locator("thead").getByText("Ready").click();
    await page.waitForURL(/sort=ready/);
    assert.match(await text("tbody a.row"), /orders/);
    assert.equal(await page.locator("th[aria-sort]").getAttribute("aria-sort"), "descending");
    await page.locator(".filters").getByText("Paused").click();
    await see("reports");
    assert.equal(await page.locator("tbody tr").count(), 1);
    await go("/queues?search=there-is-none");
    await see("No queue is called like");
  },

  async "a queue is created, filled, paused, resumed, purged and deleted"() {
    await go("/queues");
    await open("New queue");
    await page.fill("#name", "made here");
    await inDialog("Create");
    await page.locator(".problem").waitFor(); // a fault, told beside the field
    await page.fill("#name", "made-here");
    await press("Create");
    await noticed("created");
    await open("Push an item");
    await page.fill("#payload", '{"a": [1, {"b": "<b>"}]}');
    await page.fill("#delay", "soon");
    await inDialog("Push 1 item");
    await see("no length of time");
    await page.fill("#delay", "");
    await press("Push 1 item");
    await noticed("1 item pushed");
    assert.doesNotMatch(page.url(), /notice/, "said once");
    await open("Pause");
    await inDialog("Pause");
    await noticed("paused");
    await see("paused", "#badges");
    await open("Resume");
    await inDialog("Resume");
    await noticed("goes on");
    await open("Purge");
    await see("1 item", "dialog#dialog");
    await inDialog("Cancel");
    assert.equal(await page.locator("dialog[open]").count(), 0);
    await open("Purge");
    await inDialog("Delete 1 item");
    await noticed("1 item deleted");
    await open("Delete");
    await inDialog("Delete the queue and 0 items");
    await see("is not the name");
    await page.fill("#confirm", "made-here");
    await press("Delete the queue and 0 items");
    await noticed("The queue is deleted");
    await go("/queues?search=made-here");
    await see("No queue is called like");
  },

  async "settings are explained and changed"() {
    await go("/queues/orders/settings");
    await page.fill("#lease", "never");
    await press("Save");
    await see("no length of time", ".wrong");
    await page.fill("#lease", "1m 30s");
    await page.fill("#jitter", "7");
    await press("Save");
    await page.locator(".problem").waitFor();
    await page.fill("#jitter", "0.5");
    await page.fill("#labels", "team=shop");
    await press("Save");
    await noticed("saved");
    await go("/queues/orders/settings");
    assert.equal(await page.inputValue("#lease"), "1m 30s");
    assert.equal(await page.inputValue("#labels"), "team=shop");
  },

  async "items are listed by state and told whole"() {
    await go("/queues/orders");
    await page.locator(".filters").getByText("Reserved").click();
    await page.waitForURL(/state=reserved/);
    assert.equal(await page.locator(".items tbody tr").count(), 5); // legends of charts are tables, too
    await page.locator("a.row").first().click();
    await see("Held by");
    await see("customer");
    await page.locator("details[name=payload] > summary", { hasText: "Hex" }).click();
    await see("00000000");
    const [download] = await Promise.all([page.waitForEvent("download"), press("Download")]);
    assert.match(fs.readFileSync(await download.path(), "utf8"), /customer/);
    await go("/queues/orders?state=delayed");
    await see("ready in");
    await go("/queues/keyed?state=blocked");
    await page.locator("a.row").first().click();
    await see("Waits for an earlier item");
    await go("/queues/orders");
    await press("Next");
    await until("the next page", async () => /after=/.test(page.url()));
  },

  async "payloads never become a part of the page"() {
    await page.goto(CONSOLE + (await firstItem("hostile")));
    await see("<script>");
    assert.equal(await page.evaluate("window.hacked"), undefined);
    assert.equal(await page.locator("main img, main script").count(), 0);
    await page.goto(CONSOLE + (await firstItem("binary")));
    assert.match(await text("details[open] pre"), /^00000000 /);
  },

  async "an item is deleted"() {
    await page.goto(CONSOLE + (await firstItem("doomed")));
    await open("Delete");
    await inDialog("Delete 1 item");
    await noticed("The item is deleted");
  },

  async "history is replayed"() {
    await go("/queues/history");
    await open("Replay");
    await inDialog("Replay up to 3 items");
    await noticed("3 items ready again");
  },

  async "dead letters are grouped, explained and redriven"() {
    await go("/dead-letters");
    await see("exit status: 7");
    assert.equal(await page.locator("tbody tr").count(), 2);
    await page.locator("tbody tr", { hasText: "exit status: 7" }).getByRole("link", { name: "exit" }).click();
    await see("Given up after");
    await go("/dead-letters");
    await page.locator("tbody tr", { hasText: "exit status: 9" }).getByRole("link", { name: "Redrive" }).click();
    await see("2 items", "dialog#dialog");
    await inDialog("Redrive 2 items");
    await noticed("2 items moved back");
    assert.equal(await page.locator("tbody tr").count(), 1);
  },

  async "a redrive has a rate, shows its progress and can be stopped"() {
    await go("/queues/mail.dead");
    await open("Redrive");
    await page.fill("#rate", "1");
    await inDialog("Redrive up to 8 items");
    await page.waitForURL(/operations/);
    await see("so far");
    await press("Stop");
    await noticed("moved back");
    assert.match(page.url(), /mail\.dead/);
  },

  async "schedules are created, paused, resumed and deleted"() {
    await go("/schedules");
    await see("nightly");
    await open("New schedule");
    await page.fill("#name", "hourly");
    await page.fill("#queue", "reports");
    await page.fill("#cron", "often");
    await inDialog("Create");
    await page.locator(".problem").waitFor();
    await page.fill("#cron", "0 * * * *");
    await press("Create");
    await noticed("created");
    const row = page.locator("tbody tr", { hasText: "hourly" });
    for (const [action, said] of [["Pause", "paused"], ["Resume", "goes on"], ["Delete", "deleted"]]) {
      await row.getByRole("link", { name: action }).click();
      await page.locator("dialog#dialog[open] form").waitFor();
      await inDialog(action);
      await noticed(said);
    }
    assert.equal(await row.count(), 0);
  },

  async "templates are created, edited and deleted, and queues that are new have their settings"() {
    await go("/templates");
    const row = page.locator("tbody tr", { hasText: "tenants.*" });
    assert.equal(await row.count(), 0);
    await page.getByRole("link", { name: "New template" }).click();
    await page.fill("#pattern", "ten ants");
    await page.fill("#max_attempts", "7");
    await page.getByRole("button", { name: "Create" }).click();
    await page.locator(".problem").waitFor();
    await page.fill("#pattern", "tenants.*");
    await page.getByRole("button", { name: "Create" }).click();
    await noticed("created");
    assert.match(await row.innerText(), /most attempts: 7/);
    await sluice("push", "tenants.a", "1");
    assert.equal(JSON.parse(await sluice("queue", "get", "tenants.a", "--json")).max_attempts, 7);
    await row.getByRole("link", { name: "Edit" }).click();
    assert.equal(await page.inputValue("#max_attempts"), "7");
    await page.fill("#max_attempts", "");
    await page.fill("#lease", "soon");
    await page.getByRole("button", { name: "Save" }).click();
    await page.locator(".problem").waitFor();
    await page.fill("#lease", "90s");
    await page.getByRole("button", { name: "Save" }).click();
    await noticed("saved");
    assert.match(await row.innerText(), /lease: 1m 30s/);
    assert.doesNotMatch(await row.innerText(), /most attempts/);
    await row.getByRole("link", { name: "Delete" }).click();
    await page.locator("dialog#dialog[open] form").waitFor();
    await inDialog("Delete");
    await noticed("deleted");
    assert.equal(await row.count(), 0);
  },

  async "a schedule says its times in words, is run now and edited"() {
    await go("/schedules");
    const row = page.locator("tbody tr", { hasText: "nightly" });
    assert.match(await row.innerText(), /Every day at 03:00/);
    assert.equal(await row.locator("td:nth-child(3) time").count(), 3, "the next three ticks");
    const action = async (name) => {
      await row.getByRole("link", { name }).click();
      await page.locator("dialog#dialog[open] form").waitFor();
    };
    const ready = async () => JSON.parse(await sluice("stats", "reports", "--json")).ready;
    const before = await ready();
    await action("Run now");
    await see("one more item now", "dialog#dialog");
    await inDialog("Push 1 item");
    await noticed("1 item is pushed");
    assert.equal((await ready()) - before, 1);
    await action("Edit");
    assert.equal(await page.inputValue("#payload"), "{}");
    await page.fill("#cron", "61 * * * *");
    await inDialog("Save");
    await page.locator(".problem").waitFor();
    await page.fill("#cron", "*/15 * * * *");
    await page.fill("#time_zone", "Europe/Vienna");
    await page.fill("#payload", '{"kind": "quarterly"}');
    await press("Save");
    await noticed("saved");
    assert.match(await row.innerText(), /Every 15 minutes[^]*Europe\/Vienna[^]*quarterly/);
  },

  async "a schedule whose tick is refused says why"() {
    await sluice("queue", "create", "full", "--max-depth", "1");
    await sluice("push", "full", "the only one");
    await sluice("schedule", "create", "refused", "full", "* * * * * *", "{}");
    const row = page.locator("tbody tr", { hasText: "refused" });
    await until("the reason", async () => {
      await go("/schedules");
      return /not pushed[^]*tried again/.test(await row.innerText());
    });
    await sluice("schedule", "delete", "refused", "--yes");
  },

  async "consumers come, hold items and leave without a reload"() {
    await go("/consumers?search=parc");
    await page.locator("tbody tr", { hasText: "sorter-1" }).waitFor();
    const row = page.locator("tbody tr", { hasText: "sorter-2" });
    assert.equal(await row.count(), 0);
    const leave = consumer("parcels", "sorter-2", "--max-in-flight", "3");
    await until("what it holds", async () => (await row.count()) && /3 of 3/.test(await row.innerText()));
    assert.match(await row.innerText(), /127\.0\.0\.1:\d+[^]*parcels/);
    await until("how long, and the lease", async () => /\ds\s|\d s[^]*in \d+ s/.test(await row.innerText()));
    await until("a rate", async () => /\d$/.test((await row.locator("td").nth(5).innerText()).trim()));
    await row.getByRole("link", { name: "parcels" }).click();
    await page.waitForURL(/queues\/parcels/);
    await page.locator("#consumers tbody tr", { hasText: "sorter-2" }).waitFor();
    assert.equal(await text("#figures dl > div:last-child dd"), "2");
    await page.locator(".uplot canvas").nth(1).waitFor();
    await leave();
    await until("one consumer is left", async () => (await page.locator("#consumers tbody tr").count()) === 1);
    assert.equal(await text("#figures dl > div:last-child dd"), "1");
    assert.equal(await page.locator(".uplot canvas").count(), 2, "the charts stay");
  },

  async "consumers are found by the beginning of their queue"() {
    await go("/consumers");
    await page.locator("tbody tr", { hasText: "sorter-1" }).waitFor();
    await page.locator("#search").fill("nobody");
    await see("No such consumer");
    assert.match(page.url(), /search=nobody/);
    await page.locator("#search").fill("parcels");
    await page.locator("tbody tr", { hasText: "sorter-1" }).waitFor();
    await go("/consumers?queue=parcels");
    await see("Of all queues");
    await go("/consumers?queue=orders");
    await see("No such consumer");
  },

  async "the broker says how it is and leads to its consumers"() {
    await go("/brokers");
    await see("this one", "tbody");
    assert.match(await text("tbody tr"), /127\.0\.0\.1:\d+[^]*well[^]*well/);
    await see("up to 3.0 MiB");
    await page.keyboard.press("j");
    await page.keyboard.press("Enter");
    await page.waitForURL(/consumers\?broker=/);
    await page.locator("tbody tr", { hasText: "sorter-1" }).waitFor();
  },

  async "charts are drawn and have spans"() {
    await go("/queues/orders");
    await page.locator(".uplot canvas").nth(1).waitFor();
    await page.locator(".spans").getByText("24 h").click();
    await page.waitForResponse((answer) => answer.url().includes("seconds=86400"));
    const coloured = () => page.evaluate(() => {
      const canvas = document.querySelector(".uplot canvas");
      return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0);
    });
    await until("something is drawn", coloured);
  },

  async "everything is reached by keyboard"() {
    await go("/queues");
    await page.keyboard.press("/");
    await page.keyboard.type("orders");
    await until("the row", async () => (await page.locator("tbody tr").count()) === 1);
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("Enter");
    await page.waitForURL(/queues\/orders/);
    await page.keyboard.press("j");
    await page.keyboard.press("j");
    await page.keyboard.press("k");
    await page.keyboard.press("Enter");
    await page.waitForURL(/items/);
    await page.keyboard.press("u");
    await page.waitForURL(/queues\/orders$/);
    await page.keyboard.press("u");
    await page.waitForURL(/queues$/);
    await page.keyboard.press("?");
    await see("Keyboard", "#help");
    await page.keyboard.press("Escape");
    for (const [keys, target] of [["gd", /dead-letters/], ["gs", /schedules/], ["gt", /templates/], ["gc", /consumers/], ["gb", /brokers/], ["gq", /queues/]]) {
      for (const key of keys) await page.keyboard.press(key);
      await page.waitForURL(target);
    }
    // A row keeps the focus while figures change.
    await page.keyboard.press("j");
    const focused = await page.evaluate("document.activeElement.textContent");
    await sluice("push", "live", "3");
    await page.waitForTimeout(1_500);
    assert.equal(await page.evaluate("document.activeElement.textContent"), focused);
  },

  async "the theme is chosen and stays"() {
    await go("/queues");
    await page.keyboard.press("t");
    assert.equal(await page.locator("html").getAttribute("data-theme"), "dark");
    await go("/dead-letters");
    assert.equal(await page.locator("html").getAttribute("data-theme"), "dark");
    await page.locator("#theme").click();
    assert.equal(await page.locator("html").getAttribute("data-theme"), "light");
    await page.context().clearCookies();
  },

  async "first paint is fast"() {
    const first_paint = async (path) => {
      await page.goto(CONSOLE + path);
      const paint = () => page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime");
      await until("paint", paint);
      return Math.round(await paint());
    };
    // A page of one word in turn with it tells what the machine gives at the moment.
    const [paints, bare] = [[], []];
    for (let load = 0; load < 5; load++) {
      bare.push(await first_paint("/healthz"));
      paints.push(await first_paint("/queues"));
    }
    console.log(`   first paint after ${paints.join(", ")} ms, of one word after ${bare.join(", ")} ms`);
    assert.ok(Math.min(...paints) < Math.max(FIRST_PAINT_MS, 4 * Math.min(...bare)), `${paints} ms, one word ${bare} ms`);
  },
};

async function shown(name, theme, width, picture) {
  const wide = await page.evaluate("document.documentElement.scrollWidth");
  if (wide > width) faults.push(`${name} at ${width}: ${wide} pixels wide`);
  await page.evaluate(AXE);
  const { violations } = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })");
  for (const { id, nodes } of violations) {
    faults.push(`${name}, ${theme}, ${width}: ${id}: ${nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join("\n      ")}`);
  }
  await page.screenshot({ path: picture, fullPage: true });
}

/** Every page, each width in one theme: accessible, no wider than the window. */
async function everyPage(browser) {
  const views = [["light", 400], ["dark", 900], ["light", 1600]];
  for (const [theme, width] of views) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: theme });
    page = await context.newPage();
    watch(page);
    for (const [name, address] of Object.entries(PAGES)) {
      await go(typeof address === "string" ? address : await address());
      if (await page.locator(".charts").count()) await page.locator(".uplot canvas").nth(1).waitFor();
      await shown(name, theme, width, path.join(OUT, `${name.replaceAll(" ", "-")}-${theme}-${width}.png`));
    }
    await context.close();
  }
}

async function main() {
  fs.mkdirSync(OUT, { recursive: true });
  await fill();
  const leave = consumer("parcels", "sorter-1");
  const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--in-process-gpu", "--no-zygote", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"] });
  const only = process.argv[2];
  const run = async (name, check) => {
    if (only && !name.includes(only)) return;
    const start = Date.now();
    const known = faults.length;
    try {
      await check();
    } catch (error) {
      faults.push(`${name}: ${error.stack}\n   at ${page.url()}`);
      await page.screenshot({ path: path.join(OUT, "fault.png") }).catch(() => {});
    }
    console.log(`${faults.length > known ? "FAULT" : "ok   "} ${name} (${Date.now() - start} ms)`);
  };
  await run("every page is accessible and fits, in both themes", () => everyPage(browser));
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, acceptDownloads: true });
  page = await context.newPage();
  watch(page);
  for (const [name, check] of Object.entries(checks)) await run(name, check);
  await browser.close();
  await leave();
  for (const fault of faults) console.error(`\n${fault}`);
  process.exitCode = faults.length ? 1 : 0;
}

main();
