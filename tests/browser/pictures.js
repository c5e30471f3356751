// Makes pictures of the console of a busy broker. Variables as for check.js.
"use strict";
const path = require("node:path");
const { spawn } = require("node:child_process");
const { chromium } = require("playwright-core");
const { fill, order, pushLines, sluice } = require("./fill.js");

const { CONSOLE, SLUICE, CHROMIUM = "/usr/bin/chromium", OUT } = process.env;
const BUSY_MS = 90_000;

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function main() {
  await fill();
  const consumers = ["orders", "invoices", "thumbnails"].map((queue) =>
    spawn(SLUICE, ["consume", queue, "--name", "worker-1", "--max-in-flight", "3", "--exec", "sleep 0.1"], { stdio: "ignore" }));
  const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--in-process-gpu", "--no-zygote", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"] });
  const page = await browser.newPage({ viewport: { width: 1200, height: 760 }, colorScheme: "light" });
  await page.goto(`${CONSOLE}/queues`);
  for (const start = Date.now(); Date.now() - start < BUSY_MS; await pause(1_500)) {
    const wave = 1 + Math.sin((Date.now() - start) / 9_000);
    await Promise.all([["orders", 30], ["invoices", 18], ["thumbnails", 40]].map(([queue, most]) =>
      pushLines(queue, Array.from({ length: Math.ceil(most * wave) }, (_, n) => order(n)))));
  }
  await page.goto(`${CONSOLE}/queues`);
  await page.waitForTimeout(2_000);
  await page.screenshot({ path: path.join(OUT, "queues.png") });
  await page.emulateMedia({ colorScheme: "dark" });
  await page.goto(`${CONSOLE}/queues/orders`);
  await page.locator(".uplot canvas").nth(1).waitFor();
  await page.locator(".spans").getByText("5 min", { exact: true }).click();
  await page.waitForTimeout(6_000);
  await page.screenshot({ path: path.join(OUT, "queue.png") });
  for (const consumer of consumers) consumer.kill();
  await browser.close();
}

main();
