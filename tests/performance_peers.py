"""The table `peers` of tests/performance: Sluicegate beside RabbitMQ, NATS JetStream and Redis Streams, in turn, in one run.

The load is made by tests/performance_peers for all of them. Each system is started anew for its turn, on free ports of
loopback, and stopped by process id after it.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time

import performance
import processes
from performance import bench, broker, given, number, table

SMALL = "churn,push,drain,steady,latency,singles,workers"
ALL = f"{SMALL},large"
# What only Sluicegate is measured with.
OURS = f"{ALL},pollers"


# --- servers ---


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def server(name, command, ready, env=None):
    """Runs a server until the caller is done with it. It is ready when its log says `ready`."""
    log = pathlib.Path(given.scratch) / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=given.scratch, env={**os.environ, **(env or {})}
        )
    try:
        deadline = time.monotonic() + 60
        while ready not in log.read_text(errors="replace"):
            if time.monotonic() > deadline or process.poll() is not None:
                sys.exit(f"{name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        processes.stop(process, 30)


@contextlib.contextmanager
def directory(name):
    path = pathlib.Path(given.scratch) / name
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def rabbitmq():
    with directory("rabbitmq") as home:
        port, node_port, mapper_port = free_port(), free_port(), free_port()
        (home / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
        (home / "plugins").write_text("[].\n")
        env = {
            "HOME": str(home),
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # Replaces the shell of the start script by the server, so that its process id is the server's.
            "RUNNING_UNDER_SYSTEMD": "yes",
            "RABBITMQ_NODENAME": f"peers-{os.getpid()}@localhost",
            "RABBITMQ_DIST_PORT": str(node_port),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
        }
        # The name server, which would otherwise stay when the broker ends.
        with server("epmd", ["epmd", "-d", "-port", str(mapper_port), "-address", "127.0.0.1"], "epmd running", env):
            with server("rabbitmq", ["/usr/lib/rabbitmq/bin/rabbitmq-server"], "Server startup complete", env) as pid:
                yield "rabbitmq", f"amqp://guest:guest@127.0.0.1:{port}/%2f", [pid]


@contextlib.contextmanager
def nats(sync_always):
    with directory("nats") as home:
        port = free_port()
        sync = "sync_interval: always" if sync_always else ""
        (home / "nats.conf").write_text(f'listen: 127.0.0.1:{port}\njetstream {{ store_dir: "{home}", {sync} }}\n')
        with server("nats", [given.nats_server, "-c", str(home / "nats.conf")], "Server is ready") as pid:
            yield "nats", f"nats://127.0.0.1:{port}", [pid]


@contextlib.contextmanager
def redis():
    with directory("redis-aof") as home:
        port = free_port()
        command = [given.redis_server, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(home), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always"]
        with server("redis-aof", command, "Ready to accept connections") as pid:
            yield "redis", f"redis://127.0.0.1:{port}", [pid]


@contextlib.contextmanager
def sluicegate(store):
    with broker(store) as running:
        database = [given.mongod_pid] if store == "mongodb" else []
        yield "sluicegate", running.url, [running.pid, *database]


@contextlib.contextmanager
def driver():
    yield "mongodb", given.mongodb, [given.mongod_pid]


@contextlib.contextmanager
def two_brokers():
    with broker("mongodb") as first, broker("mongodb", beside=first) as second:
        pids = [first.pid, second.pid, given.mongod_pid]
        yield "sluicegate", first.url, pids, "--consume-address", second.url


# --- the run ---

# Key, name, what starts it, what is measured.
SYSTEMS = [
    ("driver", "the MongoDB driver alone", driver, "confirm"),
    ("mongodb", "Sluicegate on MongoDB", lambda: sluicegate("mongodb"), OURS),
    ("two", "Sluicegate on MongoDB, two brokers", two_brokers, "churn,latency"),
    ("rabbitmq", "RabbitMQ, quorum queue", rabbitmq, ALL),
    ("sqlite", "Sluicegate on SQLite", lambda: sluicegate("sqlite"), OURS),
    ("nats", "NATS JetStream, sync by default: every 2 minutes", lambda: nats(False), ALL),
    ("nats_sync", "NATS JetStream, sync always", lambda: nats(True), ALL),
    ("redis", "Redis Streams, AOF always", redis, ALL),
]


def turn(name, start, measurements):
    """Starts a system, measures it, and returns the figures of each measurement by its name."""
    print(f"-- {name}", flush=True)
    with start() as (kind, address, pids, *options):
        command = [f"{given.bin}/peers", kind, address, *options, "--measure", measurements]
        command += ["--seconds", str(given.seconds), "--churn", str(given.churn)]
        command += [word for pid in pids for word in ("--server-pid", str(pid))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        sys.exit(f"{name}: the load ended with exit code {done.returncode}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for figures in lines:
        if figures.get("missing") or figures.get("doubled"):
            sys.exit(f"{name}, {figures['measurement']}: {figures['missing']} items missing, {figures['doubled']} doubled")
    return {figures["measurement"]: figures for figures in lines}


def queues(n):
    """Returns the rate of a thousand producers and consumers on `n` queues of a broker on MongoDB."""
    with broker("mongodb") as running:
        command = f"steady --queues {n} --producers 1000 --consumers 1000 --push unary --batch 20 --in-flight 100"
        figures = bench(f"{command} --churn 20000 --duration {given.seconds}s", running)
    if figures["errors"] or not figures["exactly_once"]:
        sys.exit(f"{n} queues: {figures}")
    return figures["deliver_per_s"]


def run():
    """Returns the medians over all rounds: by system, measurement and figure; and the rates of one and of 1,000 queues."""
    rounds, of_queues = [], {1: [], 1_000: []}
    for n in range(given.rounds):
        print(f"== round {n + 1} of {given.rounds}", flush=True)
        rounds.append({key: turn(name, start, measurements) for key, name, start, measurements in SYSTEMS})
        for count, rates in of_queues.items():
            rates.append(queues(count))
    median = lambda key, measurement, figure: statistics.median(r[key][measurement][figure] for r in rounds)
    return median, {count: statistics.median(rates) for count, rates in of_queues.items()}


# --- Markdown ---


def systems_table(median):
    head = ["system", "push /s", "drain /s", "steady /s", "server CPU s per 100,000", "of the load"]
    head += ["50 single pushers /s", "50 workers one at a time /s", "with two calls per item /s", "64 KiB, MiB/s", "p50 ms", "p99 ms", "CPU ms per item at 200/s"]
    rows = []
    for key, name, _, measurements in SYSTEMS:
        at_200 = "confirm" if key == "driver" else "latency"
        figure = lambda measurement, what, digits=0, scale=1: (
            number(median(key, measurement, what) * scale, digits) if measurement in measurements.split(",") else ""
        )
        rows.append([
            name, figure("push", "stored_per_s"), figure("drain", "arrived_per_s"), figure("steady", "arrived_per_s"),
            figure("steady", "server_cpu_s_per_100k", 2), figure("steady", "generator_cpu_s_per_100k", 2),
            figure("singles", "stored_per_s"), figure("workers", "arrived_per_s"), figure("pollers", "arrived_per_s"), figure("large", "arrived_per_s", 0, 1 / 16),
            figure(at_200, "p50_ms", 2), figure(at_200, "p99_ms", 2), figure(at_200, "server_cpu_s_per_100k", 2, 0.01),
        ])
    return table(head, rows)


def targets_table(median, of_queues):
    rows = []

    def ratio(what, value, of, reference, at_least=None, at_most=None, digits=0):
        found = value / reference
        met = found >= at_least if at_least else found <= at_most
        target = f"≥ {at_least}" if at_least else f"≤ {at_most}"
        rows.append([what, number(value, digits), of, number(reference, digits), number(found, 2), target, "met" if met else "missed"])

    steady, drain = ("steady", "arrived_per_s"), ("drain", "arrived_per_s")
    rabbitmq = lambda *figure: median("rabbitmq", *figure)
    quorum = "RabbitMQ"
    ratio("MongoDB: steady /s", median("mongodb", *steady), quorum, rabbitmq(*steady), at_least=2)
    cpu = ("steady", "server_cpu_s_per_100k")
    ratio("MongoDB: server CPU s per 100,000", median("mongodb", *cpu), quorum, rabbitmq(*cpu), at_most=0.7, digits=2)
    ratio("MongoDB: drain /s", median("mongodb", *drain), quorum, rabbitmq(*drain), at_least=1)
    p50 = median("mongodb", "latency", "p50_ms")
    insert = median("driver", "confirm", "p50_ms")
    ratio("MongoDB at 200/s: p50 ms", p50, "one insert by the driver", insert, at_most=1.6, digits=2)
    ratio("MongoDB at 200/s: p99 ms", median("mongodb", "latency", "p99_ms"), "its p50", p50, at_most=5, digits=2)
    cpu = ("latency", "server_cpu_s_per_100k")
    ratio("MongoDB at 200/s: CPU ms per item", median("mongodb", *cpu) / 100, quorum, rabbitmq(*cpu) / 100, at_most=3.4, digits=2)
    ratio("two brokers at 200/s: p50 ms", median("two", "latency", "p50_ms"), "one insert by the driver", insert, at_most=2.5, digits=2)
    single = ("singles", "stored_per_s")
    ratio("MongoDB: 50 single pushers /s", median("mongodb", *single), quorum, rabbitmq(*single), at_least=0.62)
    ratio("SQLite: 50 single pushers /s", median("sqlite", *single), quorum, rabbitmq(*single), at_least=0.88)
    worked = ("workers", "arrived_per_s")
    ratio("MongoDB: 50 workers one at a time /s", median("mongodb", *worked), quorum, rabbitmq(*worked), at_least=0.84)
    ratio("SQLite: steady /s", median("sqlite", *steady), "NATS, default sync", median("nats", *steady), at_least=1)
    ratio("SQLite: drain /s", median("sqlite", *drain), quorum, rabbitmq(*drain), at_least=1)
    own = median("sqlite", "latency", "p50_ms")
    rows.append(["SQLite at 200/s: p50 ms", number(own, 2), "", "", "", "≤ 0.8 ms", "met" if own <= 0.8 else "missed"])
    for key, name in (("mongodb", "MongoDB"), ("sqlite", "SQLite")):
        large = ("large", "arrived_per_s")
        ratio(f"{name}: 64 KiB payloads, MiB/s", median(key, *large) / 16, quorum, rabbitmq(*large) / 16, at_least=0.7)
    ratio("MongoDB: 1,000 queues at once /s", of_queues[1_000], "one queue", of_queues[1], at_least=0.7)
    return table(["what", "Sluicegate", "against", "that", "ratio", "target", ""], rows)


def versions():
    said = lambda *command: subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()
    rabbitmq_version = said("dpkg-query", "-W", "-f", "${source:Upstream-Version}", "rabbitmq-server")
    nats_version = said(given.nats_server, "--version").rpartition("v")[2]
    return f"RabbitMQ {rabbitmq_version}, NATS {nats_version}; medians of {given.rounds} rounds of {given.seconds:g} s."


def main():
    # So that servers are stopped then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = performance.arguments()
    parser.add_argument("--nats-server", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--churn", type=int, default=100_000)
    parser.parse_args(namespace=given)
    given.bin, given.scratch = os.path.abspath(given.bin), os.path.abspath(given.scratch)
    median, of_queues = run()
    text = f"{systems_table(median)}\n{targets_table(median, of_queues)}\n{versions()}\n"
    print(text)
    performance.write("peers", text)


if __name__ == "__main__":
    main()
