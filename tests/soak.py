"""The load, the samples, the verdict and the plots of tests/soak, which starts the servers and this."""

import argparse
import concurrent.futures
import csv
import datetime
import json
import os
import pathlib
import random
import re
import sqlite3
import statistics
import subprocess
import sys
import threading
import time

import grpc
import matplotlib
import pymongo
import stubs  # noqa: F401  makes sluicegate.v1 importable
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from sluicegate.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    item_pb2,
    queue_pb2,
    queue_service_pb2,
    queue_service_pb2_grpc,
)

import performance
from performance import Broker, bench, given, rss

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  after the choice of what draws

WINDOW = 20  # seconds for which one set of producers, consumers and queues stays
PAUSE = 2  # seconds between two samples
VISITORS = 4  # clients that come and go, each with a queue
DEADLINE = 30

# What may grow between the second and the last quarter: the share of it, and as much in any case.
BOUNDS = {
    "memory_mib": (0.10, 16),
    "descriptors": (0.10, 10),
    "threads": (0.10, 16),  # the runtime's threads for blocking work come as they are needed
    "database_mib": (0.25, 32),
    "index_mib": (0.25, 8),
    "p50_ms": (1.0, 5),
    "p99_ms": (1.0, 40),
}


def mib(count):
    return count / 2**20


class Samples:
    """What was read of a broker and its database, in the order of time."""

    def __init__(self, broker):
        self.broker, self.begun, self.rows = broker, time.monotonic(), []
        self.uri = given.mongodb
        self.mongo = pymongo.MongoClient(self.uri) if self.uri else None

    def read(self):
        process = pathlib.Path(f"/proc/{self.broker.pid}")
        threads = int(re.search(r"Threads:\s+(\d+)", (process / "status").read_text())[1])
        database, indexes = self.sizes()
        self.rows.append({
            "seconds": round(time.monotonic() - self.begun, 1),
            "memory_mib": round(rss(self.broker.pid), 1),
            "descriptors": len(os.listdir(process / "fd")),
            "threads": threads,
            "streams": self.broker.sum("streams_open"),
            "database_mib": round(database, 2),
            "index_mib": round(indexes, 2),
        })

    def sizes(self):
        """Returns the sizes of the database and of its indexes. On SQLite the pages in use stand for the latter."""
        if self.mongo is not None:
            stats = self.mongo["soak"].command("dbStats")
            return mib(stats["storageSize"]), mib(stats["indexSize"])
        path = pathlib.Path(given.scratch) / "soak.db"
        files = sum(file.stat().st_size for file in path.parent.glob("soak.db*"))
        reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        page, count, free = (reader.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count"))
        reader.close()
        return mib(files), mib(page * (count - free))

    def read_until(self, stop):
        while not stop.wait(PAUSE):
            self.read()


# --- those who come and go ---


def visit(address, number, choices):
    """Comes with a new connection, makes or changes a queue, pushes, consumes for a while, and sometimes deletes the queue."""
    name = f"visited-{number}-{choices.randrange(5)}"
    with grpc.insecure_channel(address) as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        queues = queue_service_pb2_grpc.QueueServiceStub(channel)
        lease = Duration(seconds=choices.randrange(1, 60))
        settings = queue_pb2.Queue(name=name, lease=lease, labels={"visit": str(choices.randrange(100))})
        items = [item_pb2.NewItem(payload=os.urandom(200)) for _ in range(20)]
        queues.Push(queue_service_pb2.PushRequest(queue=name, items=items), timeout=DEADLINE)
        update = admin_service_pb2.UpdateQueueRequest(queue=settings, update_mask=FieldMask(paths=["lease", "labels"]))
        admin.UpdateQueue(update, timeout=DEADLINE)
        stream = queues.Consume(queue_service_pb2.ConsumeRequest(queue=name, max_in_flight=10), timeout=DEADLINE)
        leave = time.monotonic() + choices.uniform(0.3, 3)
        # The stream ends with its client, which leaves some items unsettled.
        threading.Timer(leave - time.monotonic(), stream.cancel).start()
        try:
            for answer in stream:
                receipts = [delivery.receipt for delivery in answer.deliveries]
                queues.Commit(queue_service_pb2.CommitRequest(receipts=receipts), timeout=DEADLINE)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                raise
        if choices.random() < 0.3:
            admin.PauseQueue(admin_service_pb2.PauseQueueRequest(name=name), timeout=DEADLINE)
            admin.ResumeQueue(admin_service_pb2.ResumeQueueRequest(name=name), timeout=DEADLINE)
        if choices.random() < 0.5:
            admin.DeleteQueue(admin_service_pb2.DeleteQueueRequest(name=name, force=True), timeout=DEADLINE)


def visit_until(stop, address, number):
    """Returns how many visits there were."""
    choices, count = random.Random(number), 0
    while not stop.is_set():
        visit(address, number, choices)
        count += 1
    return count


# --- the verdict ---


def half_of_load(broker):
    figures = bench("steady --duration 8s --queues 5", broker)
    return max(10, figures["deliver_per_s"] / 2)


def grown(rows, key):
    """Returns what the medians of the second and of the last quarter are, and whether the latter is too large."""
    values = [row[key] for row in rows]
    quarter = len(values) // 4
    early, late = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
    share, least = BOUNDS[key]
    return early, late, late - early > max(least, share * early)


def verdict(samples, windows):
    """Prints a line for each figure, and returns what is wrong."""
    wrong = [f"{window['errors']} errors at {window['seconds']} s" for window in windows if window["errors"]]
    wrong += [f"items missing or doubled at {window['seconds']} s" for window in windows if not window["exactly_once"]]
    for key in BOUNDS:
        early, late, is_wrong = grown(windows if key.endswith("_ms") else samples, key)
        print(f"   {key:14} second quarter {early:10.2f}   last quarter {late:10.2f}   {'GROWN' if is_wrong else 'flat'}")
        wrong += [f"{key} has grown from {early:.2f} to {late:.2f}"] if is_wrong else []
    return wrong


def keep(name, rows):
    with (pathlib.Path(given.out) / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def plot(name, title, samples, windows):
    keys = ["memory_mib", "descriptors", "threads", "streams", "database_mib", "index_mib", "p50_ms", "p99_ms"]
    figure, axes = pyplot.subplots(len(keys) // 2, 2, figsize=(12, 10), sharex=True)
    for key, axis in zip(keys, axes.flat):
        rows = windows if key.endswith("_ms") else samples
        axis.plot([row["seconds"] / 60 for row in rows], [row[key] for row in rows], linewidth=1)
        axis.set_title(key)
        axis.set_ylim(0, 1.1 * max(row[key] for row in rows) or 1)
    for axis in axes[-1]:
        axis.set_xlabel("minutes")
    figure.suptitle(title)
    figure.tight_layout()
    path = pathlib.Path(given.out) / f"{name}.png"
    figure.savefig(path, dpi=80)
    return path


def load(broker, rate, minutes):
    """Runs the load, and returns the samples, one row for each window, and how many visits there were."""
    samples, windows, stop = Samples(broker), [], threading.Event()
    address = broker.url.removeprefix("http://")
    command = f"steady --rate {rate:.0f} --queues 5 --duration {WINDOW - 2}s --warm-up 1s"
    with concurrent.futures.ThreadPoolExecutor(VISITORS + 1) as pool:
        sampling = pool.submit(samples.read_until, stop)
        visitors = [pool.submit(visit_until, stop, address, number) for number in range(VISITORS)]
        try:
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                figures = bench(command, broker)
                seconds = round(time.monotonic() - samples.begun, 1)
                row = {key: figures[key] for key in ("p50_ms", "p99_ms", "deliver_per_s", "errors", "exactly_once")}
                windows.append({"seconds": seconds, **row})
                print(f"   {seconds:6.0f} s  {json.dumps(samples.rows[-1])}", flush=True)
                for running in (sampling, *visitors):
                    if running.done():
                        running.result()  # raises what ended it
        finally:
            stop.set()
    return samples.rows, windows, sum(visitor.result() for visitor in visitors)


def main():
    parser = argparse.ArgumentParser(prog="tests/soak")
    for flag in ("bin", "scratch", "out"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--mongodb")
    parser.add_argument("--redis")
    parser.parse_args(namespace=given)
    given.bin, given.scratch = os.path.abspath(given.bin), os.path.abspath(given.scratch)
    if given.minutes < 3:
        parser.error("in less than three minutes there are too few windows to compare")
    store = "mongodb" if given.mongodb else "sqlite"
    flags = ["--store", f"sqlite:{given.scratch}/soak.db"]
    if given.mongodb:
        flags = ["--store", given.mongodb, "--database", "soak", "--signals", given.redis]
    broker = Broker("soak", *flags)
    try:
        rate = given.rate or half_of_load(broker)
        print(f"== {given.minutes:g} minutes on {store} at {rate:.0f} items per second", flush=True)
        samples, windows, visits = load(broker, rate, given.minutes)
        ended = broker.process.poll()
    finally:
        broker.stop()
    now = datetime.datetime.now(datetime.timezone.utc)
    name = f"{store}-{now:%Y%m%d-%H%M}"
    keep(f"{name}-samples", samples)
    keep(f"{name}-windows", windows)
    title = f"{store}, {given.minutes:g} min, {rate:.0f} items/s, {now:%Y-%m-%d}"
    print(f"== {len(samples)} samples, {len(windows)} windows, {visits} visits; plots in {plot(name, title, samples, windows)}")
    wrong = verdict(samples, windows)
    if ended is not None:
        wrong.append(f"the broker ended with {ended}")
    log = broker.log.read_text()
    wrong += [f"the broker panicked: {line}" for line in log.splitlines() if "panicked at" in line][:3]
    for line in wrong:
        print(f"WRONG: {line}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
