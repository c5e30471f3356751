// Fills a broker with queues of every kind, by the command line tool.
"use strict";
const { execFile, spawn } = require("node:child_process");
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");

const { SLUICE = "sluice" } = process.env;

/** Runs the command line tool, which finds the broker by SLUICE_SERVER. */
function sluice(...args) {
  return new Promise((done, failed) => {
    execFile(SLUICE, args, (error, out, complaint) => (error ? failed(new Error(`sluice ${args.join(" ")}: ${complaint}`)) : done(out)));
  });
}

/** Runs the tool with lines on its standard input, each of which is an item. */
function pushLines(queue, lines, ...args) {
  return new Promise((done, failed) => {
    const child = spawn(SLUICE, ["push", queue, ...args], { stdio: ["pipe", "ignore", "inherit"] });
    child.on("exit", (code) => (code ? failed(new Error(`push into ${queue}: ${code}`)) : done()));
    child.stdin.end(lines.join("\n") + "\n");
  });
}

/** Starts a consumer that holds each of its items until it is told to end. */
function consumer(queue, name, ...args) {
  const child = spawn(SLUICE, ["consume", queue, "--name", name, "--grace", "1s", ...args, "--exec", "exec sleep 600"], { stdio: "ignore", detached: true });
  // The commands that it runs are in its group of processes.
  return () => new Promise((done) => { child.on("exit", done); process.kill(-child.pid, "SIGTERM"); });
}

const order = (n) => JSON.stringify({ order: 4711 + n, customer: { name: `customer-${n % 17}`, tier: n % 3 ? "standard" : "gold" }, lines: [{ sku: `A-${n}`, count: 1 + (n % 4) }], total: (n * 7.35) % 300 });

async function deadLetters(queue, count, code) {
  await sluice("queue", "create", queue, "--max-attempts", "1");
  await pushLines(queue, Array.from({ length: count }, (_, n) => order(n)));
  await sluice("consume", queue, "--exec", `exit ${code}`, "--count", String(count), "--max-in-flight", "4");
}

async function fill() {
  const binary = path.join(os.tmpdir(), `sluicegate-payload-${process.pid}`);
  fs.writeFileSync(binary, Buffer.from(Array.from({ length: 700 }, (_, n) => (n * 151) % 256)));
  await Promise.all([
    pushLines("orders", Array.from({ length: 300 }, (_, n) => order(n))).then(async () => {
      await sluice("push", "orders", order(1000), "--delay", "1h");
      await sluice("reserve", "orders", "--count", "5", "--lease", "1h", "--name", "packer-3");
    }),
    deadLetters("mail", 8, 7),
    deadLetters("payments", 2, 9),
    sluice("push", "hostile", "</code></pre><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"),
    sluice("push", "binary", "--file", binary),
    sluice("push", "doomed", "to be deleted"),
    sluice("push", "reports", "monthly").then(() => sluice("queue", "pause", "reports")),
    sluice("queue", "create", "history", "--retention", "1h")
      .then(() => pushLines("history", ["a", "b", "c"]))
      .then(() => sluice("consume", "history", "--count", "3")),
    pushLines("keyed", ["first", "second", "third"], "--ordering-key", "customer-1"),
    pushLines("parcels", Array.from({ length: 20 }, (_, n) => order(n))),
    sluice("schedule", "create", "nightly", "reports", "0 3 * * *", "{}"),
    // No queue of these checks comes into being by one of them.
    sluice("template", "set", "orders.*", "--max-attempts", "5", "--retry-initial", "2s", "--label", "team=shop"),
    sluice("template", "set", "*.archive", "--retention", "30d", "--paused"),
  ]);
  const others = Array.from({ length: 45 }, (_, n) => `tenant-${String(n).padStart(2, "0")}.jobs`);
  for (let at = 0; at < others.length; at += 8) await Promise.all(others.slice(at, at + 8).map((queue) => sluice("queue", "create", queue)));
  fs.rmSync(binary);
}

module.exports = { consumer, fill, sluice, pushLines, order };
