# What one does all day; `just` lists it. Each recipe is one command that can be typed by hand as well.

_default:
    @just --list --unsorted

# Everything that continuous integration checks, or some sections of it: just test unit e2e
test *SECTIONS:
    tests/run {{ SECTIONS }}

# Format, lints, documentation: what to run before each commit
check:
    cargo fmt --all
    cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

# Tests of the broker whose names contain FILTER; needs SLUICEGATE_TEST_MONGODB_URI for those of MongoDB
unit FILTER="":
    cargo test -p sluicegate-broker --lib {{ FILTER }}

# End-to-end tests whose names contain FILTER
e2e FILTER="":
    cargo build -p sluicegate-broker --bin sluicegate
    cargo test -p sluicegate-tests --test suite {{ FILTER }}

# Small changes of the domain (with `sqlite` or `mongodb`: of that store) that none of its tests notices; needs cargo-mutants
mutants *OPTIONS:
    tests/mutants {{ OPTIONS }}

# A broker on a SQLite file in target/, with its log in the terminal
serve *FLAGS:
    cargo run --bin sluicegate -- --store sqlite:target/sluicegate.db {{ FLAGS }}

# The tables of docs/PERFORMANCE.md: just performance steady latency
performance *TABLES:
    tests/performance {{ TABLES }}

# Documentation of the code, private items included
doc:
    cargo doc --workspace --no-deps --document-private-items --open
