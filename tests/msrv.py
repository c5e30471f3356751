"""Checks the minimum supported Rust version of the client library: msrv.py METADATA

METADATA is the output of `cargo metadata --all-features`. No dependency of the library, of whatever
feature or platform, may declare a higher `rust-version` than the library does; dependencies of its
tests do not count. That the library's own code builds with that version is checked by clippy
(`incompatible_msrv`) and, with the real toolchain, by continuous integration.
"""

import json
import pathlib
import sys

LIBRARY = "sluicegate-client"


def version(text):
    """Returns a `rust-version` as numbers. No declared version is lower than every version."""
    parts = [int(part) for part in (text or "0").split(".")]
    return tuple(parts + [0] * (3 - len(parts)))


def main():
    metadata = json.loads(pathlib.Path(sys.argv[1]).read_text())
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    library = next(package for package in metadata["packages"] if package["name"] == LIBRARY)
    reached, todo = set(), [library["id"]]
    while todo:
        package = todo.pop()
        if package not in reached:
            reached.add(package)
            for dependency in nodes[package]["deps"]:
                if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"]):
                    todo.append(dependency["pkg"])
    given = version(library["rust_version"])
    dependencies = [packages[package] for package in reached if package != library["id"]]
    too_new = [package for package in dependencies if version(package["rust_version"]) > given]
    for package in sorted(too_new, key=lambda package: package["name"]):
        print(f"{package['name']} {package['version']} needs Rust {package['rust_version']}")
    if too_new:
        sys.exit(f"msrv: {LIBRARY} declares Rust {library['rust_version']}\n  next: cargo update -p NAME, or raise `rust-version`")
    foreign = [package for package in dependencies if package["source"]]
    highest = max(foreign, key=lambda package: version(package["rust_version"]))
    if version(highest["rust_version"]) < given:
        sys.exit(f"msrv: Rust {highest['rust_version']} would do\n  next: lower `rust-version` of {LIBRARY} to it")
    print(f"{LIBRARY} and its {len(dependencies)} dependencies build with Rust {library['rust_version']}")


main()
