"""Runs the commands in the documents, as a reader would: documents.py BIN_DIR SCRATCH_DIR PAGE...

Each page is read from its top to its end, in an empty folder of its own:

* ```sh serve    is started and left running until the page ends (a broker). A page with commands and no such block gets a broker in memory.
* ```sh run      must end with exit code 0. A block of ```text that follows must be what it prints. Ids, times and durations may
                 differ, and a line `...` stands for any lines.
* ```LANGUAGE file=NAME    is written to that file, for the commands that follow.
* ```sh          by itself is not run, and allowed in README.md alone.

Everything runs exactly as printed, with these stand-ins: `cargo run ... --bin NAME` runs the binary that is already built, the
default addresses are replaced through the environment so that nothing else on the machine is touched, `python3` is the one that
runs this program, and `proto` in the folder is that of the repository.
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import processes

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
README = "README.md"
README_SHOWS = ["cargo run --release --bin sluicegate", "tests/run"]
FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[^\n]*\n", re.MULTILINE | re.DOTALL)
SERVE = "sluicegate --store sqlite::memory:"
CARGO = """#!/bin/sh
# Replaces cargo in the documents: runs the binaries that are built already.
while [ $# -gt 0 ]; do
    case $1 in
        run | --release | -q | --quiet | --locked) shift ;;
        --bin) name=$2; shift 2 ;;
        --) shift; break ;;
        *) echo "'cargo $*' has no stand-in in tests/documents.py" >&2; exit 64 ;;
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


def pattern(shown: str) -> re.Pattern:
    """Returns what output has to match that is shown like this."""
    lines = []
    for line in shown.strip("\n").splitlines():
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        line = re.sub(r"[0-9a-f]{24,}", "\0ID\0", line)
        line = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "\0TIME\0", line)
        line = re.sub(r"(?<![\w-])(?:\d+(?:\.\d+)?(?:ms|s|m|h))+(?![\w-])", "\0DURATION\0", line)
        words = [re.escape(word) for word in line.split()]
        line = r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n"
        for mark, known in [("ID", "[0-9a-f]{24,}"), ("TIME", r"\d{4}-\d\d-\d\dT[\d:.]+Z"), ("DURATION", r"[\d.hms]+")]:
            line = line.replace(re.escape(f"\0{mark}\0"), known)
        lines.append(line)
    return re.compile("".join(lines))


class Page:
    def __init__(self, path: pathlib.Path, binaries: pathlib.Path, scratch: pathlib.Path):
        self.name = path.name if path.parent == REPOSITORY else str(path.relative_to(REPOSITORY))
        self.text = path.read_text(encoding="utf-8")
        self.folder = scratch / self.name.replace("/", "-").removesuffix(".md")
        self.work = self.folder / "work"
        (self.folder / "bin").mkdir(parents=True)
        self.work.mkdir()
        (self.work / "proto").symlink_to(REPOSITORY / "proto")
        stand_in = self.folder / "bin" / "cargo"
        stand_in.write_text(CARGO.replace("{bin}", str(binaries)))
        stand_in.chmod(0o755)
        python = self.folder / "bin" / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self.grpc, http = free_port(), free_port()
        self.environment = dict(
            os.environ,
            PATH=os.pathsep.join([str(self.folder / "bin"), str(binaries), os.environ["PATH"]]),
            SLUICEGATE_LISTEN=f"127.0.0.1:{self.grpc}",
            SLUICEGATE_HTTP_LISTEN=f"127.0.0.1:{http}",
            SLUICE_SERVER=f"http://127.0.0.1:{self.grpc}",
        )
        self.running = []

    def fail(self, what: str) -> None:
        sys.exit(f"documents: {self.name}: {what}\n  next: mend the command or the page")

    def serve(self, command: str) -> None:
        log = self.folder / "serve.log"
        # exec, so that the process to be stopped is the broker itself.
        process = subprocess.Popen(
            ["bash", "-ec", "exec " + command], cwd=self.work, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT,
        )
        self.running.append(process)
        started = time.monotonic()
        while not answers(self.grpc):
            if process.poll() is not None or time.monotonic() - started > SERVE_LIMIT:
                self.fail(f"this does not serve on port {self.grpc}:\n{command}\n{log.read_text()}")
            time.sleep(0.05)

    def command(self, body: str, shown: str | None) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", body], cwd=self.work, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=RUN_LIMIT,
        )
        if done.returncode != 0:
            self.fail(f"exit code {done.returncode} of:\n{body}\n{done.stdout}{done.stderr}")
        if shown is not None and not pattern(shown).fullmatch(done.stdout.rstrip("\n") + "\n"):
            self.fail(f"this prints something else than is shown:\n{body}\nprints:\n{done.stdout}")

    def run(self) -> int:
        """Runs the blocks of the page, and returns how many commands there were."""
        blocks = list(FENCE.finditer(self.text))
        marks = [mark for language, mark, _ in (block.groups() for block in blocks) if language == "sh"]
        if self.name == README:
            self.check_readme(marks)
        elif "" in marks:
            self.fail("a block ```sh is not marked; use `run`, `serve`, or ```console for what is not run")
        if "run" in marks and "serve" not in marks:
            self.serve(SERVE)
        for block, following in zip(blocks, blocks[1:] + [None]):
            language, mark, body = block.groups()
            if mark.startswith("file="):
                (self.work / mark.removeprefix("file=")).write_text(body)
            elif language == "sh" and mark == "serve":
                self.serve(body.strip())
            elif language == "sh" and mark == "run":
                prints = following is not None and following[1] == "text" and not self.text[block.end():following.start()].strip()
                self.command(body, following[3] if prints else None)
            elif language == "sh" and mark:
                self.fail(f"unknown mark ```sh {mark}; use `run` or `serve`")
        return marks.count("run")

    def check_readme(self, marks: list[str]) -> None:
        shown = [line.strip() for language, _, body in FENCE.findall(self.text) if language == "sh" for line in body.splitlines()]
        for command in README_SHOWS:
            if not any(line == command or line.startswith(command + " ") for line in shown):
                self.fail(f"no block ```sh has a line `{command}`")
        if "run" not in marks:
            self.fail("no block is marked ```sh run")

    def stop(self) -> None:
        for process in self.running:
            processes.stop(process, 30)


def main() -> None:
    binaries, scratch = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    for path in sys.argv[3:]:
        page = Page(pathlib.Path(path).resolve(), binaries, scratch)
        try:
            count = page.run()
        finally:
            page.stop()
        if count:
            print(f"-- {page.name}: {count} blocks of commands", flush=True)


main()
