"""Loads deploy/monitoring into a real Prometheus, runs brokers into each alert, and asks for what each panel shows.

tests/monitoring.py BIN SCRATCH MONGODB_URI REDIS_SERVER: Python's standard library alone. `prometheus` and `promtool` are on
PATH. Everything listens on free ports of loopback, and is ended by process id.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import processes

BIN, SCRATCH, MONGODB, REDIS_SERVER = sys.argv[1:]
HERE = pathlib.Path(__file__).parent.parent
FILES = HERE / "deploy" / "monitoring"
SCRATCH = pathlib.Path(SCRATCH) / "monitoring"
# What is long in production is short here.
SHORT = [(r"for: \w+", "for: 0s"), (r"\b5m\b", "10s"), (r"\b1h\b", "10s"), (r"> 300\b", "> 1"), (r"> 400e6\b", "> 1")]
LIMIT = 60


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(what, check, limit=LIMIT):
    """Waits for an event, and fails after the limit."""
    deadline = time.monotonic() + limit
    while not (seen := check()):
        if time.monotonic() > deadline:
            sys.exit(f"monitoring: not within {limit} s: {what() if callable(what) else what}")
        time.sleep(0.05)
    return seen


@contextlib.contextmanager
def process(name, command):
    log = SCRATCH / f"{name}.log"
    with log.open("w") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=SCRATCH)
    try:
        yield running, log
    finally:
        processes.stop(running, 20)


def broker(name, *flags):
    listen = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    return process(name, [f"{BIN}/sluicegate", *listen, *flags])


def address(log, scheme):
    found = until(
        lambda: f"the broker's address:\n{log.read_text()}", lambda: re.search(rf"listening on {scheme}://([0-9.:]+)", log.read_text())
    )
    return found[1]


def sluice(log, *words, ok=(0,), **options):
    command = [f"{BIN}/sluice", "--server", f"http://{address(log, 'grpc')}", *words]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    if done.returncode not in ok:
        sys.exit(f"monitoring: sluice {' '.join(words)}: {done.returncode}: {done.stderr}")
    return done.stdout


# --- Prometheus ---


class Prometheus:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, expression):
        """Returns the samples of an expression that are numbers."""
        samples = self.get("/api/v1/query", query=expression)["result"]
        return [sample for sample in samples if sample["value"][1] != "NaN"]

    def firing(self):
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}


def short_rules():
    text = (FILES / "alerts.yaml").read_text()
    for pattern, replacement in SHORT:
        text, n = re.subn(pattern, replacement, text)
        assert n, f"{pattern} is nowhere in alerts.yaml"
    (SCRATCH / "alerts.yaml").write_text(text)
    return set(re.findall(r"alert: (\w+)", text))


def configure(targets):
    # JSON is YAML.
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [
            {
                "job_name": "sluicegate",
                "static_configs": [{"targets": targets}],
                "authorization": {"credentials": "a-token-of-the-monitoring"},
            }
        ],
    }
    (SCRATCH / "prometheus.yml").write_text(json.dumps(configuration))
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=SCRATCH, check=True, stdout=subprocess.DEVNULL)


# --- what is in the files ---


def panels():
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions():
    """Yields the expressions of the dashboard, with its variables as Grafana fills them in."""
    for panel in panels():
        assert panel["targets"], f"{panel['title']} shows nothing"
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "10s").replace("$queue", ".*").replace("$job", "sluicegate")
            assert "$" not in text, text
            yield panel["title"], text


def check_names():
    """Every metric that the files name is documented, so that `or vector(0)` does not hide one that is not there."""
    page = (HERE / "docs" / "METRICS.md").read_text()
    documented = set(re.findall(r"^\| `(sluicegate_\w+)`", page, re.MULTILINE))
    histograms = set(re.findall(r"^\| `(sluicegate_\w+)` \| histogram", page, re.MULTILINE))
    documented |= {f"{name}_{suffix}" for name in histograms for suffix in ("bucket", "count", "sum")}
    text = " ".join(expression for _, expression in expressions()) + (FILES / "alerts.yaml").read_text()
    named = set(re.findall(r"\bsluicegate_\w+", text))
    assert named and documented, "nothing is named"
    if unknown := named - documented:
        sys.exit(f"monitoring: not in docs/METRICS.md: {', '.join(sorted(unknown))}")


# --- the faults ---


def traffic(logs, stop):
    """Pushes and consumes all the time, so that each rate has a value."""
    while not stop.is_set():
        for log in logs:
            token = ("--token", "a-token-of-the-monitoring")
            sluice(log, *token, "push", "work", "item", ok=(0, 1, 5))
            sluice(log, *token, "consume", "work", "--count", "1", "--idle-exit", "1s", ok=(0, 1, 3, 5))


def run_into_alerts(on_sqlite, file):
    """Does what five of the alerts are about."""
    for queue, discards in (("failing", "false"), ("discarding", "true")):
        sluice(on_sqlite, "queue", "create", queue, "--max-attempts", "1", "--discard-failed", discards)
        sluice(on_sqlite, "push", queue, "bad")
        sluice(on_sqlite, "consume", queue, "--count", "1", "--idle-exit", "5s", "--exec", "exit 1", ok=(0, 1, 3))
    sluice(on_sqlite, "push", "left", "nobody wants it")
    sluice(on_sqlite, "push", "damaged", "to be damaged")
    with contextlib.closing(sqlite3.connect(file, timeout=10)) as database, database:
        database.execute("UPDATE items SET payload = x'00' WHERE queue = 'damaged'")
    sluice(on_sqlite, "reserve", "damaged", ok=(0, 3))


@contextlib.contextmanager
def held(file):
    """Keeps the broker on this file from writing."""
    with contextlib.closing(sqlite3.connect(file, timeout=10, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def main():
    # So that what was started is stopped then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    check_names()
    subprocess.run(["promtool", "check", "rules", FILES / "alerts.yaml"], check=True, stdout=subprocess.DEVNULL)
    SCRATCH.mkdir()
    wanted = short_rules()
    tokens = SCRATCH / "tokens.toml"
    tokens.write_text('[[token]]\nname = "monitoring"\ntoken = "a-token-of-the-monitoring"\nallow = ["admin@*"]\n')
    file, signals, port = SCRATCH / "monitoring.db", free_port(), free_port()
    redis_command = [REDIS_SERVER, "--bind", "127.0.0.1", "--port", str(signals), "--save", "", "--appendonly", "no"]
    with contextlib.ExitStack() as running:
        redis, redis_log = running.enter_context(process("redis", redis_command))
        until("Redis", lambda: "Ready to accept" in redis_log.read_text())
        _, on_sqlite = running.enter_context(broker("sqlite", "--store", f"sqlite:{file}"))
        store = ["--store", MONGODB, "--database", f"monitoring_{os.getpid()}", "--signals", f"redis://127.0.0.1:{signals}"]
        mongodb, on_mongodb = running.enter_context(broker("mongodb", *store, "--tokens-file", str(tokens)))
        logs = [on_sqlite, on_mongodb]
        configure([address(log, "http") for log in logs])
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=prometheus", f"--web.listen-address=127.0.0.1:{port}"]
        running.enter_context(process("prometheus", command))
        prometheus = Prometheus(port)
        until("Prometheus", lambda: reachable(prometheus))
        until("both brokers are scraped", lambda: len(prometheus.value('up{job="sluicegate"} == 1')) == 2)
        stop = threading.Event()
        passing = threading.Thread(target=traffic, args=(logs, stop))
        passing.start()
        running.callback(passing.join)
        running.callback(stop.set)

        for title, expression in expressions():
            # What no broker has done yet has no value before `run_into_alerts`.
            if "dead_lettered" not in expression:
                until(f"a value of {title}: {expression}", lambda: prometheus.value(expression))
        seen = set()

        def fires(*names, meanwhile=lambda: None):
            """Waits for alerts. An alert that fired meanwhile and ended counts."""

            def look():
                meanwhile()
                seen.update(prometheus.firing())
                return set(names) <= seen

            until(lambda: f"alerts: {set(names) - seen}", look)

        run_into_alerts(on_sqlite, file)
        redis.terminate()
        fires("SluicegateItemsWait", "SluicegateNobodyConsumes", "SluicegateItemsDamaged")
        fires("SluicegateItemsDeadLettered", "SluicegateItemsDiscarded", "SluicegateSignalsFail")
        for title, expression in expressions():
            if "dead_lettered" in expression:
                until(f"a value of {title}: {expression}", lambda: prometheus.value(expression))
        fires("SluicegateCallsRefused", meanwhile=lambda: sluice(on_mongodb, "stats", ok=(1,)))
        with held(file):
            sluice(on_sqlite, "push", "left", "while nothing can be written", ok=(0, 1, 5))
        fires("SluicegateStoreFails", "SluicegateStoreSlow")
        mongodb.terminate()
        fires(*wanted)
    print(f"{len(wanted)} alerts fired, {len(list(expressions()))} expressions of {len(panels())} panels have data")


def reachable(prometheus):
    try:
        return prometheus.get("/api/v1/status/runtimeinfo")
    except OSError:
        return None


main()
