//! The examples in the help of each command.

use clap::Command;

/// Each command with its examples.
const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "push",
        &[
            "sluice push orders 'two pounds of apples'",
            "sluice push orders --file order.json --header source=shop --delay 10m",
            "seq 1000 | sluice push orders",
        ],
    ),
    (
        "consume",
        &[
            "sluice consume orders",
            "sluice consume orders --exec './handle.sh' --max-in-flight 4",
            "sluice consume orders --count 1 --json",
        ],
    ),
    ("pop", &["sluice pop orders", "sluice pop orders -n 10 --wait 30s"]),
    ("reserve", &["sluice reserve orders --lease 5m", "sluice reserve orders --json --wait 30s"]),
    ("commit", &["sluice commit RECEIPT"]),
    ("rollback", &["sluice rollback RECEIPT --delay 10m --reason 'the bank is closed'"]),
    ("extend", &["sluice extend RECEIPT --lease 10m"]),
    ("move", &["sluice move RECEIPT shipping", "sluice move RECEIPT shipping --payload packed"]),
    ("fork", &["sluice fork RECEIPT --push 'mail=to Ada' --push 'stock=one less'"]),
    (
        "peek",
        &[
            "sluice peek orders",
            "sluice peek orders --state delayed --json",
            "sluice peek orders.dead --reason timeout -n 0",
        ],
    ),
    ("item get", &["sluice item get orders ID"]),
    ("item delete", &["sluice item delete orders ID"]),
    (
        "item delete-all",
        &[
            "sluice item delete-all orders --state delayed --header shop=7 --dry-run",
            "sluice item delete-all orders.dead --reason timeout --until 2026-01-31T12:00:00Z",
        ],
    ),
    ("queues", &["sluice queues", "sluice queues --prefix shop. --label team=a"]),
    ("stats", &["sluice stats", "sluice stats orders mail --json"]),
    ("top", &["sluice top", "sluice top --filter orders"]),
    ("watch", &["sluice watch", "sluice watch orders --json"]),
    (
        "tail",
        &[
            "sluice tail orders",
            "sluice tail orders orders.dead",
            "sluice tail orders --json | jq .payload",
        ],
    ),
    ("brokers", &["sluice brokers"]),
    ("doctor", &["sluice doctor", "sluice --context prod doctor --sample 10s"]),
    ("consumers", &["sluice consumers", "sluice consumers orders"]),
    (
        "queue create",
        &[
            "sluice queue create orders",
            "sluice queue create orders --max-attempts 5 --retention 7d --label team=a",
        ],
    ),
    ("queue get", &["sluice queue get orders"]),
    (
        "queue update",
        &[
            "sluice queue update orders --max-attempts default",
            "sluice queue update orders --retry-initial 10s --retry-max 1h --retention none",
        ],
    ),
    ("queue delete", &["sluice queue delete orders", "sluice queue delete orders --force --yes"]),
    ("template list", &["sluice template list"]),
    ("template get", &["sluice template get 'orders.*'"]),
    (
        "template set",
        &[
            "sluice template set 'orders.*' --max-attempts 5 --label team=a",
            "sluice template set '*' --dead-letter-queue failed",
        ],
    ),
    ("template delete", &["sluice template delete 'orders.*'"]),
    ("queue pause", &["sluice queue pause orders"]),
    ("queue resume", &["sluice queue resume orders"]),
    ("queue purge", &["sluice queue purge orders"]),
    (
        "export",
        &[
            "sluice export > queues.yaml",
            "sluice export --prefix shop.",
            "sluice --context test export | sluice --context prod apply -f - --dry-run",
        ],
    ),
    (
        "apply",
        &[
            "sluice apply -f queues.yaml --dry-run",
            "sluice apply -f queues.yaml",
            "sluice apply -f queues.yaml --prune --prefix shop.",
        ],
    ),
    (
        "backup",
        &["sluice backup orders orders.ndjson", "sluice backup orders - | gzip > orders.ndjson.gz"],
    ),
    ("restore", &["sluice restore orders.ndjson", "sluice restore orders.ndjson --to orders.test"]),
    (
        "redrive",
        &[
            "sluice redrive orders.dead",
            "sluice redrive orders.dead --reason timeout --max 100 --rate 10",
            "sluice redrive orders.dead --rate 10 --background",
        ],
    ),
    (
        "replay",
        &["sluice replay orders --since 2026-01-31T12:00:00Z", "sluice replay orders --all"],
    ),
    ("operation list", &["sluice operation list", "sluice operation list orders.dead"]),
    ("operation get", &["sluice operation get 0123456789abcdef01234567"]),
    ("operation cancel", &["sluice operation cancel 0123456789abcdef01234567"]),
    ("operation wait", &["sluice operation wait 0123456789abcdef01234567"]),
    ("bench", &["sluice bench steady"]),
    (
        "schedule create",
        &[
            "sluice schedule create nightly reports '0 3 * * *' 'make the report' --time-zone Europe/Vienna",
        ],
    ),
    ("schedule get", &["sluice schedule get nightly"]),
    ("schedule list", &["sluice schedule list"]),
    ("schedule update", &["sluice schedule update nightly --cron '0 4 * * *'"]),
    ("schedule run", &["sluice schedule run nightly"]),
    ("schedule delete", &["sluice schedule delete nightly"]),
    ("schedule pause", &["sluice schedule pause nightly"]),
    ("schedule resume", &["sluice schedule resume nightly"]),
    (
        "context add",
        &[
            "sluice context add prod --server https://queue.example:7400 --ca ca.pem --token-file prod.token",
        ],
    ),
    ("context use", &["sluice context use prod"]),
    ("context list", &["sluice context list"]),
    ("context show", &["sluice context show", "sluice context show prod"]),
    ("context remove", &["sluice context remove prod"]),
    ("completion", &["sluice completion bash > ~/.local/share/bash-completion/completions/sluice"]),
    ("man", &["sluice man ~/.local/share/man/man1"]),
];

/// Adds the examples to the help of all commands below `command`.
pub(crate) fn with_examples(command: Command) -> Command {
    add(command, "")
}

fn add(command: Command, path: &str) -> Command {
    command.mut_subcommands(|command| {
        let path = format!("{path} {}", command.get_name()).trim_start().to_owned();
        let examples = EXAMPLES.iter().find(|(of, _)| *of == path).map(|(_, examples)| *examples);
        let command = add(command, &path);
        let Some(examples) = examples else { return command };
        let title = if examples.len() == 1 { "Example" } else { "Examples" };
        let text = format!("{title}:\n  {}", examples.join("\n  "));
        let help = match command.get_after_help() {
            Some(before) => format!("{before}\n\n{text}"),
            None => text,
        };
        command.after_help(help)
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    /// Returns the paths of all commands that have none below them.
    fn paths(command: &Command, path: &str) -> Vec<String> {
        let below = command.get_subcommands();
        let below: Vec<String> =
            below.flat_map(|below| paths(below, &format!("{path} {}", below.get_name()))).collect();
        if below.is_empty() { vec![path.trim().to_owned()] } else { below }
    }

    /// Returns the words of each `sluice` in a line of a shell.
    fn command_lines(line: &str) -> Vec<Vec<String>> {
        let mut lines: Vec<Vec<String>> = Vec::new();
        let mut is_sluice = false;
        // Within quotation marks a blank is part of its word.
        let parts = line.split('\'').enumerate();
        for (at, part) in parts {
            let words: Vec<&str> =
                if at % 2 == 1 { vec![part] } else { part.split_whitespace().collect() };
            for word in words {
                match word {
                    "sluice" => {
                        is_sluice = true;
                        lines.push(Vec::new());
                    }
                    "|" | ">" => is_sluice = false,
                    _ => {}
                }
                if is_sluice && let Some(line) = lines.last_mut() {
                    line.push(word.to_owned());
                }
            }
        }
        lines
    }

    #[test]
    fn every_command_has_examples_and_every_example_is_a_command_line() {
        let mut commands = paths(&Cli::command(), "");
        commands.sort();
        let mut named: Vec<&str> = EXAMPLES.iter().map(|(path, _)| *path).collect();
        named.sort_unstable();
        assert_eq!(named, commands);
        for (path, examples) in EXAMPLES {
            for example in *examples {
                let lines = command_lines(example);
                assert!(!lines.is_empty(), "{example}");
                for words in lines {
                    let parsed = Cli::command().try_get_matches_from(&words);
                    let matches = parsed.unwrap_or_else(|error| panic!("{example}: {error}"));
                    let command = matches.subcommand_name().unwrap_or_default();
                    assert!(
                        path.starts_with(command) || words.contains(&"apply".to_owned()),
                        "{example}"
                    );
                }
            }
        }
    }

    #[test]
    fn examples_come_after_what_the_help_says() {
        let mut command = with_examples(Cli::command());
        let top = command.find_subcommand_mut("top").unwrap();
        let help = top.render_long_help().to_string();
        let (keys, examples) = (help.find("Keys:").unwrap(), help.find("Examples:").unwrap());
        assert!(keys < examples, "{help}");
    }
}
