"""Checks the documents as a book, and writes what is generated: book.py BIN_DIR [--write]

* Every page of docs/ is in docs/SUMMARY.md, once, and every entry there is a page.
* Every relative link in a Markdown file of the repository leads to a file, and every anchor to a heading.
* The pages of docs/reference are what --help of the broker and of sluice and the proto say; --write makes them so.
* Blocks of Rust in docs/ stand in the client's code, which the compiler has seen.

This stands in for `mdbook build`, which takes the same SUMMARY.md.
"""

import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
RUST = re.compile(r"^```rust\n(.*?)^```", re.MULTILINE | re.DOTALL)
faults = []


def anchors(page):
    """Returns the anchors of a page's headings, as forges and mdBook make them."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = sum(1 for other in found if re.fullmatch(re.escape(anchor) + r"(-\d+)?", other))
        found.add(f"{anchor}-{count}" if count else anchor)
    return found


def check_links(pages):
    for page in pages:
        for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = urllib.parse.unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                faults.append(f"{page.relative_to(REPOSITORY)}: there is no {link}")
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                faults.append(f"{page.relative_to(REPOSITORY)}: no heading for {link}")


def check_summary():
    summary = DOCS / "SUMMARY.md"
    entries = LINK.findall(summary.read_text(encoding="utf-8"))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {summary.name}
    faults.extend(f"docs/SUMMARY.md: {page} is not in it" for page in sorted(pages - set(entries)))
    faults.extend(f"docs/SUMMARY.md: {entry} is in it twice" for entry in sorted(set(entries)) if entries.count(entry) > 1)


def check_rust():
    compiled = "".join(re.sub(r"^//!", "", (REPOSITORY / "client" / "src" / "lib.rs").read_text(), flags=re.MULTILINE).split())
    for page in DOCS.rglob("*.md"):
        for block in RUST.findall(page.read_text(encoding="utf-8")):
            if "".join(block.split()) not in compiled:
                faults.append(f"{page.relative_to(REPOSITORY)}: this does not stand in client/src/lib.rs:\n{block}")


# --- what is generated ---


def table(header, rows):
    lines = [header, "|" + "---|" * (header.count("|") - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def settings(binaries):
    """Returns rows of name, value, default and meaning, from the broker's --help."""
    said = subprocess.run([binaries / "sluicegate", "--help"], capture_output=True, text=True, check=True).stdout
    rows = []
    for name, value, text in re.findall(r"^      --([\w-]+) (<\S+>)\n((?:^ {10}.*\n)+)", said, re.MULTILINE):
        text = " ".join(text.split())
        if name == "config":
            continue
        text = re.sub(r" ?\[env: [^\]]*\]", "", text)
        default = re.search(r" ?\[default: ([^\]]*)\]", text)
        text = text.replace(default[0], "") if default else text
        rows.append((f"`{name.replace('-', '_')}`", value.strip("<>").lower(), default[1] if default else "", text))
    return table("| setting | value | default | meaning |", rows)


def errors(_binaries):
    """Returns rows of reason, code and meaning, from the comments of the proto."""
    text = (REPOSITORY / "proto" / "sluicegate" / "v1" / "error.proto").read_text(encoding="utf-8")
    rows = []
    for comment, name in re.findall(r"((?:^  // .*\n)+)^  ERROR_REASON_(\w+) = \d+;", text, re.MULTILINE):
        meaning = " ".join(line.strip().removeprefix("// ") for line in comment.splitlines())
        if name == "UNSPECIFIED":
            continue
        code = re.search(r" Code ([A-Z_]+)\.", meaning)
        meaning = meaning.replace(code[0], "") if code else meaning
        rows.append((f"`{name}`", f"`{code[1]}`" if code else "", meaning))
    return table("| reason | code | meaning |", rows)


def commands(binaries):
    """Returns a section for each command of sluice, with what its --help says; options of all commands are in the first one alone."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS" and not name.startswith("SLUICE_")}
    sections = []

    def add(names):
        line = [binaries / "sluice", *names, "--help"]
        said = subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout.rstrip()
        said = "\n".join(text.rstrip() for text in said.split("\n"))
        subcommands = re.search(r"^Commands:\n((?:^  .*\n?)+)", said, re.MULTILINE)
        if names:
            said = re.sub(r"^Options of all commands:\n(?:(?:  .*)?\n)*(?:  .*)?", "", said, flags=re.MULTILINE).rstrip()
        sections.append(f"## {' '.join(['sluice', *names])}\n\n```text\n{said}\n```\n")
        for name in re.findall(r"^  ([a-z-]+) ", subcommands[1] if subcommands else "", re.MULTILINE):
            if name != "help":
                add([*names, name])

    add([])
    return "\n".join(sections)


GENERATED = {"settings": settings, "errors": errors, "cli": commands}


def check_reference(binaries, write):
    for name, generate in GENERATED.items():
        page = DOCS / "reference" / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        begin, end = text.index("<!-- begin: generated"), text.index("<!-- end: generated -->")
        begin = text.index("\n", begin) + 1
        wanted = text[:begin] + generate(binaries) + text[end:]
        if write:
            page.write_text(wanted, encoding="utf-8")
        elif wanted != text:
            faults.append(f"docs/reference/{name}.md is not what the code says: python3 tests/book.py {binaries} --write")


def main():
    check_reference(pathlib.Path(sys.argv[1]), "--write" in sys.argv[2:])
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=REPOSITORY, capture_output=True, text=True)
    pages = [REPOSITORY / name for name in listed.stdout.split("\n") if name and (REPOSITORY / name).exists()]
    check_links(pages)
    check_summary()
    check_rust()
    if faults or not pages:
        sys.exit("book: " + "\n      ".join(faults or ["git lists no pages"]))
    print(f"-- {len(pages)} pages, and their links", flush=True)


main()
