"""The measurements of tests/performance, which starts the servers and this: Python's standard library alone.

Each table is a function that runs `sluice bench` and answers Markdown; it replaces what stands between that table's marker
comments in docs/PERFORMANCE.md.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import threading
import time
import urllib.request

import processes

DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "PERFORMANCE.md"
TICKS = os.sysconf("SC_CLK_TCK")
given = argparse.Namespace()


# --- processes ---


def cpu(pid):
    """Returns the processor time of a process in seconds."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss(pid):
    """Returns the resident memory of a process in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) / 1024


class Broker:
    """A broker process on free ports."""

    def __init__(self, name, *flags):
        self.log = pathlib.Path(given.scratch) / f"{name}.log"
        command = [f"{given.bin}/sluicegate", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=given.scratch)
        self.pid = self.process.pid
        self.url, self.http = (f"http://{self.address(scheme)}" for scheme in ("grpc", "http"))

    def address(self, scheme):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(rf"listening on {scheme}://([0-9.:]+)", self.log.read_text())
            if found:
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        sys.exit(f"the broker did not start:\n{self.log.read_text()}")

    def sum(self, metric):
        """Returns the sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.http}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"sluicegate_{metric}[{{ ]", line))

    def stop(self):
        processes.stop(self.process, 20)


# Items settled, however many queues there were: the counters of a queue go with it, and the bench deletes its queues.
SETTLED = r'store_batch_items_sum\{call="settle"\}'

databases = 0


@contextlib.contextmanager
def broker(store, beside=None):
    """Returns a new broker on a new database, or on the database of `beside`."""
    global databases
    if beside is None:
        databases += 1
    name = f"{store}-{databases}{'b' if beside else ''}"
    if store == "mongodb":
        flags = ["--store", given.mongodb, "--database", f"performance_{databases}", "--signals", given.redis]
    else:
        flags = ["--store", f"sqlite:{given.scratch}/{name}.db"]
    running = Broker(name, *flags)
    try:
        yield running
    finally:
        running.stop()


def bench(command, on=None, **options):
    """Runs `sluice bench COMMAND` on a broker and returns the figures."""
    words = [f"{given.bin}/sluice", "--json"]
    if on is not None:
        words += ["--server", on.url]
    words += ["bench", *command.split()]
    for option, value in options.items():
        words += [f"--{option.replace('_', '-')}", value]
    began = time.monotonic()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"sluice bench {command} ended with exit code {done.returncode}")
    figures = json.loads(done.stdout)
    print(f"   {time.monotonic() - began:5.1f} s  {command}: {done.stdout.strip()}", flush=True)
    return figures


# --- Markdown ---


def number(value, digits=0):
    if value is None:
        return "–"
    return f"{value:,.{digits}f}"


def right(figures):
    """Returns whether all items arrived once and nothing failed."""
    once = "yes" if figures["exactly_once"] else f"NO: {figures['missing']} missing, {figures['doubled']} doubled"
    return once if figures["errors"] == 0 else f"{once}, {figures['errors']} errors"


def at_least(value, target, digits=0):
    return f"≥ {number(target, digits)}: {'met' if value >= target else 'missed'}"


def at_most(pairs):
    """(value, target, unit)..."""
    targets = ", ".join(f"{number(target, 1).removesuffix('.0')} {unit}" for _, target, unit in pairs)
    return f"≤ {targets}: {'met' if all(value <= target for value, target, _ in pairs) else 'missed'}"


def code(command):
    return f"`sluice bench {command}`"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


# --- the tables ---

STORES = {"mongodb": "MongoDB", "sqlite": "SQLite"}


def steady():
    rates, parts = [], []
    raw_command = "raw-mongo --churn 200000 --duration 8s"
    raw = bench(raw_command, mongodb=given.mongodb)
    limit = raw["commit_per_s"]
    head = ["store", "in and out /s", "of raw-mongo", "target", "p50 ms", "p99 ms", "each item once", "command"]
    row = lambda what, figures, share, target, command: [
        what, number(figures["deliver_per_s"]), share, target, number(figures["p50_ms"], 1), number(figures["p99_ms"], 1),
        right(figures), code(command),
    ]
    rates.append(row("MongoDB with no broker", raw, "1", "", raw_command))
    for store, churn, target in [("mongodb", 200_000, 15_000), ("sqlite", 500_000, 60_000)]:
        command = f"steady --churn {churn} --duration 8s"
        with broker(store) as running:
            before = [cpu(running.pid), cpu(given.mongod_pid), children_cpu(), time.monotonic()]
            figures = bench(command, running)
            after = [cpu(running.pid), cpu(given.mongod_pid), children_cpu(), time.monotonic()]
            items = running.sum(SETTLED)
        share = figures["deliver_per_s"] / limit
        goal = at_least(figures["deliver_per_s"], target)
        if store == "mongodb":
            goal += f"; share {at_least(share, 0.7, 1)}"
        rates.append(row(STORES[store], figures, number(share, 2), goal, command))
        spent = [(late - early) * 1e6 / items for early, late in zip(before, after)]
        database = number(spent[1], 1) if store == "mongodb" else "in the broker"
        parts.append([STORES[store], number(items), number(spent[0], 1), database, number(spent[2], 1), number(spent[3], 1)])
    head_parts = ["store", "items", "broker µs", "mongod µs", "sluice µs", "wall µs"]
    return (
        table(head, rates)
        + "\nWhere an item's time goes: processor time of each process in the runs above, churn and warm-up included, divided by"
        + " the items committed in them; and the time that passed.\n\n"
        + table(head_parts, parts)
    )


def children_cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def callers_table(key, what, cases, command_for):
    rows = []
    for store, targets in cases.items():
        with broker(store) as running:
            for callers, target in targets:
                command = command_for(callers)
                figures = bench(command, running)
                goal = at_least(figures[key], target) if target else ""
                rows.append([STORES[store], callers, number(figures[key]), goal, right(figures), code(command)])
    return table(["store", "callers", what, "target", "each item once", "command"], rows)


def producers():
    cases = {"mongodb": [(50, 12_000), (200, 20_000)], "sqlite": [(50, None), (200, None)]}
    command = "push --push unary --batch 1 --producers {} --churn 50000 --duration 5s"
    return callers_table("push_per_s", "pushes /s", cases, command.format)


def callers():
    cases = {"mongodb": [(20, 3_500), (100, 8_000)], "sqlite": [(20, None), (100, None)]}
    command = "drain --take unary --batch 1 --consumers {} --churn 50000 --items 30000"
    return callers_table("commit_per_s", "items /s", cases, command.format)


def latency():
    rows = []

    def measure(what, command, target, running, **options):
        figures = bench(command, running, **options)
        values = [figures[f"{key}_ms"] for key in ("p50", "p95", "p99", "max")]
        goal = at_most([(values[0], target[0], "ms p50"), (values[2], target[1], "ms p99")])
        also = " --consume-server URL" if options else ""
        rows.append([what, *(number(v, 2) for v in values), goal, right(figures), code(command + also)])

    often, seldom = (f"latency --churn 100000 {more}" for more in ("--duration 10s", "--rate 5 --duration 30s"))
    with broker("mongodb") as first, broker("mongodb", beside=first) as second:
        measure("MongoDB, two brokers, 100/s", often, (4, 15), first, consume_server=second.url)
        measure("MongoDB, two brokers, lone pushes", seldom, (4, 15), first, consume_server=second.url)
        measure("MongoDB, one broker, 100/s", often, (4, 15), first)
    with broker("sqlite") as running:
        measure("SQLite, 100/s", often, (1, 4), running)
        measure("SQLite, lone pushes", seldom, (1, 4), running)
    return table(["where", "p50 ms", "p95 ms", "p99 ms", "max ms", "target", "each item once", "command"], rows)


def backlog():
    rows = []
    for store in STORES:
        command = "backlog --churn 100000 --duration 8s"
        with broker(store) as running:
            figures = bench(command, running)
        rows.append(
            [STORES[store], number(figures["deliver_per_s"]), number(figures["almost_empty_deliver_per_s"])]
            + [number(figures["ratio"], 2), at_least(figures["ratio"], 0.9, 1), right(figures), code(command)]
        )
    return table(["store", "deep: items /s", "almost empty: items /s", "ratio", "target", "each item once", "command"], rows)


def crowd():
    idle, settle, watched, streams = 30, 6, 20, 1_000
    command = f"crowd --idle {idle}s --duration 10s"
    rows = []
    for store in STORES:
        with broker(store) as running:
            seen = {}

            def watch():
                deadline = time.monotonic() + idle
                while running.sum("streams_open") < streams:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.2)
                time.sleep(settle)
                look = lambda: (cpu(running.pid), running.sum("store_call_duration_seconds_count"), time.monotonic())
                before = look()
                time.sleep(watched)
                after = look()
                seconds = after[2] - before[2]
                seen["core"] = 100 * (after[0] - before[0]) / seconds
                seen["calls"] = (after[1] - before[1]) / 100 / seconds * 2
                seen["rss"] = rss(running.pid)

            watcher = threading.Thread(target=watch)
            watcher.start()
            figures = bench(command, running)
            watcher.join()
            if not seen:
                sys.exit(f"the broker never had {streams} streams open")
            goal = at_most([(seen["rss"], 150, "MiB"), (seen["core"], 2, "%"), (seen["calls"], 1, "calls")])
            rows.append(
                [STORES[store], number(seen["rss"]), number(seen["core"], 2), number(seen["calls"], 2), goal]
                + [number(figures["p50_ms"], 1), number(figures["p99_ms"], 1), right(figures), code(command)]
            )
    head = ["store", "idle: memory MiB", "idle: % of a core", "idle: store calls per queue and 2 s", "target"]
    return table(head + ["200 items/s: p50 ms", "p99 ms", "each item once", "command"], rows)


def simulator():
    rows = []
    for store in STORES:
        with broker(store) as running:
            figures = bench("simulator", running)
        for act, key in (("publish", "p99"), ("fetch", "p95")):
            ms = figures[f"{act}_ms"]
            mean, tail = {"publish": (32, 188), "fetch": (48, 10.7)}[act]
            rows.append(
                [STORES[store], act, *(number(ms[k], 2) for k in ("mean", "standard_deviation", "p75", "p95", "p99", "min", "max"))]
                + [at_most([(ms["mean"], mean, "ms mean"), (ms[key], tail, f"ms {key}")]), right(figures)]
            )
    head = ["store", "act", "mean ms", "standard deviation", "p75", "p95", "p99", "min", "max", "target", "each item once"]
    return table(head, rows) + "\nCommand: `sluice bench simulator`.\n"


def growth():
    rows = []
    with broker("mongodb") as running:

        def measure(what, value, command):
            mongod, own, committed = cpu(given.mongod_pid), cpu(running.pid), running.sum(SETTLED)
            figures = bench(command, running)
            items = running.sum(SETTLED) - committed
            spent = [(late - early) * 1e6 / items for early, late in ((own, cpu(running.pid)), (mongod, cpu(given.mongod_pid)))]
            rate = number(figures["deliver_per_s"])
            rows.append([what, value, rate, *(number(s, 1) for s in spent), right(figures), code(command)])
            return figures

        for queues in (1, 10, 100):
            measure("queues", queues, f"steady --queues {queues} --duration 4s")
        for consumers in (2, 20, 200):
            measure("consumers", consumers, f"steady --consumers {consumers} --in-flight 100 --duration 4s")
        for depth in (10_000, 100_000):
            measure("ready and as many delayed", number(depth), f"backlog --items {depth} --duration 4s")
        for size in (256, 1_024, 4_096, 16_384):
            measure("bytes per item", number(size), f"steady --size {size} --batch 200 --duration 4s")
    return table(["what grows", "to", "items /s", "broker µs/item", "mongod µs/item", "each item once", "command"], rows)


def parts():
    """Returns Divan's tree as a table."""
    command = ["cargo", "bench", "--package", "sluicegate-broker", "--all-features"]
    command += [word for name in ("domain", "codec", "stores") for word in ("--bench", name)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=DOCUMENT.parent.parent,
        env={**os.environ, "SLUICEGATE_TEST_MONGODB_URI": given.mongodb},
    )
    if done.returncode != 0:
        sys.exit(f"cargo bench ended with exit code {done.returncode}")
    rows, group, bench_name = [], "", ""
    for line in done.stdout.splitlines():
        if headed := re.match(r"(\w+) +fastest", line):
            bench_name = headed[1]
        elif branch := re.match(r"([│ ]*)[├╰]─ (.+?) {2,}(.*)", line):
            indent, name, rest = branch.groups()
            cells = [cell.strip() for cell in rest.split("│")]
            if not indent:
                group = name
            if cells[0]:
                median = time_of(cells[2])
                each = median / 500 if "_500" in group else median
                rows.append([bench_name, f"`{group}`", name if indent else "", cells[2], number(each / 1e3, 3)])
    return table(["bench", "what", "of", "median", "µs per item"], rows)


def time_of(text):
    """Nanoseconds."""
    value, unit = text.split()
    return float(value) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]


TABLES = [steady, producers, callers, latency, backlog, crowd, simulator, growth, parts]


# --- the document ---


def surroundings():
    """Returns the machine and the versions in one line."""
    said = lambda *command: subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    model = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())
    memory = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) / 1024**2
    commit = said("git", "-C", str(DOCUMENT.parent), "rev-parse", "--short", "HEAD").strip()
    mongod = re.search(r"v([\d.]+)", said(given.mongod, "--version"))[1]
    redis = re.search(r"v=([\d.]+)", said(given.redis_server, "--version"))[1]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return (
        f"{today}, {model[1] if model else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB,"
        f" Linux {platform.release()}; {said(f'{given.bin}/sluicegate', '--version').strip()} ({commit or 'no commit'}),"
        f" MongoDB {mongod}, Redis {redis}."
    )


def write(name, text):
    document = DOCUMENT.read_text()
    begin, end = f"<!-- tests/performance {name} -->", f"<!-- end of {name} -->"
    if begin not in document or end not in document:
        sys.exit(f"{DOCUMENT.name} has no markers for {name}")
    before, rest = document.split(begin, 1)
    after = rest.split(end, 1)[1]
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{surroundings()}\n{end}{after}")


def arguments():
    """Returns a parser of what tests/performance passes on."""
    parser = argparse.ArgumentParser(prog="tests/performance")
    for flag in ("bin", "scratch", "mongod", "mongodb", "redis-server", "redis"):
        parser.add_argument(f"--{flag}", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--mongod-pid", required=True, type=int, help=argparse.SUPPRESS)
    return parser


def main():
    parser = arguments()
    names = [measure.__name__ for measure in TABLES]
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(names)}; all if none is named")
    parser.parse_args(namespace=given)
    given.bin, given.scratch = os.path.abspath(given.bin), os.path.abspath(given.scratch)
    if unknown := set(given.tables) - set(names):
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    began = time.monotonic()
    for measure in TABLES:
        if not given.tables or measure.__name__ in given.tables:
            print(f"== {measure.__name__} (at {time.monotonic() - began:.0f} s)", flush=True)
            write(measure.__name__, measure())


if __name__ == "__main__":
    main()
