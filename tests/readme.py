"""Runs the marked commands of the README: readme.py README.md BIN_DIR SCRATCH_DIR

A fenced block whose info string is `sh serve` is started and left running until the end (a broker);
one marked `sh run` must end with exit code 0. Both run exactly as printed, in order, in an empty
folder, with two stand-ins: `cargo run ... --bin NAME` runs the binary that is already built, and the
default addresses are replaced through the environment so that nothing else on the machine is touched.
Blocks marked plain `sh` are not run.
"""

import os
import pathlib
import re
import socket
import stat
import subprocess
import sys
import time

REQUIRED = ["cargo run --release --bin sluicegate", "tests/run"]
FENCE = re.compile(r"^```sh[ \t]*(\w*)[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CARGO = """#!/bin/sh
# Replaces cargo in README commands: runs the binaries that are built already.
while [ $# -gt 0 ]; do
    case $1 in
        run | --release | -q | --quiet | --locked) shift ;;
        --bin) name=$2; shift 2 ;;
        --) shift; break ;;
        *) echo "README: 'cargo $*' has no stand-in in tests/readme.py" >&2; exit 64 ;;
    esac
done
exec "{bin}/$name" "$@"
"""
SERVE_LIMIT = 30.0
RUN_LIMIT = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    readme, binaries, scratch = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    if not readme.exists():
        sys.exit("readme: there is no README.md\n  next: write it; it must show: " + " and ".join(REQUIRED))
    text = readme.read_text(encoding="utf-8")
    blocks = FENCE.findall(text)
    shown = [line.strip() for _, body in blocks for line in body.splitlines()]
    for command in REQUIRED:
        if not any(line == command or line.startswith(command + " ") for line in shown):
            sys.exit(f"readme: no ```sh block of README.md has a line `{command}`\n  next: put it back")
    if not any(mark == "run" for mark, _ in blocks):
        sys.exit("readme: no block of README.md is marked ```sh run\n  next: mark those of the tour")

    folder = scratch / "readme"
    (folder / "bin").mkdir(parents=True)
    stand_in = folder / "bin" / "cargo"
    stand_in.write_text(CARGO.replace("{bin}", str(binaries.resolve())))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    work = folder / "work"
    work.mkdir()
    grpc, http = free_port(), free_port()
    environment = dict(
        os.environ,
        PATH=os.pathsep.join([str(folder / "bin"), str(binaries.resolve()), os.environ["PATH"]]),
        SLUICEGATE_LISTEN=f"127.0.0.1:{grpc}",
        SLUICEGATE_HTTP_LISTEN=f"127.0.0.1:{http}",
        SLUICE_SERVER=f"http://127.0.0.1:{grpc}",
    )

    running = []
    try:
        for mark, body in blocks:
            if mark == "serve":
                print(f"-- starts: {body.strip()}", flush=True)
                log = folder / "serve.log"
                # exec, so that the process to be stopped is the broker itself.
                process = subprocess.Popen(
                    ["bash", "-ec", "exec " + body.strip()], cwd=work, env=environment,
                    stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT,
                )
                running.append(process)
                started = time.monotonic()
                while not answers(grpc):
                    if process.poll() is not None or time.monotonic() - started > SERVE_LIMIT:
                        sys.exit(f"readme: this does not serve on port {grpc}:\n{body}\n{log.read_text()}")
                    time.sleep(0.05)
            elif mark == "run":
                for line in body.strip().splitlines():
                    print(f"-- runs: {line}", flush=True)
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", body], cwd=work, env=environment,
                    stdin=subprocess.DEVNULL, timeout=RUN_LIMIT,
                )
                if done.returncode != 0:
                    sys.exit(f"readme: exit code {done.returncode} of:\n{body}\n  next: mend the command or the README")
            elif mark:
                sys.exit(f"readme: unknown mark ```sh {mark}\n  next: use `serve`, `run` or none")
    finally:
        for process in running:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


main()
