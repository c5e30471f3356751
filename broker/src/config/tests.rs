use std::fs;

use super::{address::mask_credentials, keys::KEYS, *};

/// What is certified does not matter to who reads the settings.
const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
const TOKENS: &str = "[[token]]\nname = 'ann'\ntoken = '0123456789abcdef'\nallow = ['admin@*']\n";

/// A file that does not exist.
const NONE: &str = "/nonexistent/sluicegate.toml";

fn load_with(file: &Path, env: &[(&str, &str)], args: &[&str]) -> Result<Settings, ConfigError> {
    let args = std::iter::once("sluicegate").chain(args.iter().copied()).map(OsString::from);
    let env = env.iter().map(|(name, value)| (name.into(), value.into()));
    Settings::load(args, env, file)
}

fn load(env: &[(&str, &str)], args: &[&str]) -> Result<Settings, ConfigError> {
    load_with(Path::new(NONE), env, args)
}

fn flags(args: &[&str]) -> Settings {
    load(&[], args).unwrap()
}

fn wrong(args: &[&str]) -> String {
    load(&[], args).unwrap_err().to_string()
}

/// A file of settings that lives as long as the directory.
fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sluicegate.toml");
    fs::write(&path, text).unwrap();
    (dir, path)
}

fn from_file(text: &str) -> Result<Settings, ConfigError> {
    let (_dir, path) = file(text);
    load_with(&path, &[], &[])
}

#[test]
fn the_defaults_serve_this_machine_from_one_file() {
    let settings = flags(&[]);
    assert_eq!(settings.listen, "127.0.0.1:7400".parse().unwrap());
    assert_eq!(settings.http_listen, "127.0.0.1:7401".parse().unwrap());
    assert_eq!(settings.store, StoreUri::Sqlite { path: "sluicegate.db".into() });
    assert_eq!(settings.signals, SignalsUri::Local);
    assert_eq!(settings.database, "sluicegate");
    assert!(settings.auto_create_queues);
    assert_eq!(settings.max_payload_bytes, 3 << 20);
    assert_eq!(settings.default_lease, Duration::from_secs(30));
    assert_eq!(settings.failure_defaults, FailureDefaults::default());
    assert_eq!(settings.max_lease, Duration::from_hours(12));
    assert_eq!(settings.shutdown_grace, Duration::from_secs(10));
    assert_eq!(settings.poll_min, Duration::from_secs(1));
    assert_eq!(settings.poll_max, Duration::from_secs(15));
    assert_eq!(settings.worker_threads, 0);
    assert_eq!((settings.log_format, settings.log_level.as_str()), (LogFormat::Text, "info"));
    assert_eq!(settings.max_connection_age, Duration::from_mins(30));
    assert_eq!((settings.tls.as_ref(), settings.tokens.as_ref()), (None, None));
    assert!(!settings.insecure);
    assert_eq!(settings.max_refusals, 20);
    assert_eq!(settings.bounds, Bounds::default());
    assert_eq!(settings.otlp, None);
    assert!(settings.warnings().is_empty());
}

#[test]
fn flags_override_the_environment_and_that_overrides_the_file() {
    let (_dir, path) = file("database = 'file'\npoll_min = '2s'\npoll_max = '3s'\n");
    let env = [("SLUICEGATE_DATABASE", "env"), ("SLUICEGATE_POLL_MIN", "1500ms")];
    let settings = load_with(&path, &env, &["--database", "flag"]).unwrap();
    assert_eq!(settings.database, "flag");
    assert_eq!(settings.poll_min, Duration::from_millis(1500));
    assert_eq!(settings.poll_max, Duration::from_secs(3));
    assert_eq!(load_with(&path, &env, &[]).unwrap().database, "env");
}

#[test]
fn every_key_works_in_all_three_places() {
    let dir = tempfile::tempdir().unwrap();
    let written = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let pem = written("some.pem", "");
    let authority = written("authority.pem", CERTIFICATE);
    let tokens = written("tokens.toml", TOKENS);
    let store = written("store", "sqlite::memory:\n");
    let signals = written("signals", "redis://127.0.0.1:1/\n");
    for key in KEYS {
        let value = match key.name {
            "listen" | "http_listen" => "127.0.0.1:1",
            "store" => "sqlite::memory:",
            "signals" => "redis://127.0.0.1:1/",
            "database" => "other",
            "auto_create_queues" => "false",
            "max_payload_bytes" => "1KiB",
            "default_lease" | "shutdown_grace" => "1s",
            "default_max_attempts" | "default_max_deliveries" => "7",
            "default_retry_initial_delay" | "default_retry_max_delay" => "2s",
            "default_retry_multiplier" => "1.5",
            "default_retry_jitter" => "0.5",
            "max_lease" => "1d",
            "max_connection_age" => "1h",
            "poll_min" => "1500ms",
            "poll_max" => "1m",
            "log_format" => "json",
            "log_level" => "debug",
            "tls_cert" | "tls_key" | "tls_client_ca" => &pem,
            "tls_client_auth" => "optional",
            "store_file" => &store,
            "signals_file" => &signals,
            "insecure" => "true",
            "max_refusals" | "worker_threads" => "3",
            bytes if bytes.starts_with("max_") && bytes.ends_with("_bytes") => "1MiB",
            count if count.starts_with("max_") => "7",
            "unused_queue_ttl" => "1d",
            "unread_timeout" | "handshake_timeout" | "ping_interval" | "ping_timeout" => "1s",
            "tokens_file" => &tokens,
            "otlp_endpoint" => "http://127.0.0.1:4317",
            "otlp_protocol" => "http",
            "otlp_metrics_interval" => "0s",
            "otlp_ca" => &authority,
            other => panic!("no test value for {other}"),
        };
        // TLS files come together; the ones that are not under test are flags.
        let mut others: Vec<String> = Vec::new();
        if key.name.starts_with("tls_") {
            for other in ["tls_cert", "tls_key"].into_iter().filter(|o| *o != key.name) {
                others.extend([format!("--{}", other.replace('_', "-")), pem.clone()]);
            }
        }
        if key.name == "tls_client_auth" {
            others.extend(["--tls-client-ca", &pem, "--tokens-file", &tokens].map(str::to_owned));
        }
        if ["otlp_protocol", "otlp_metrics_interval"].contains(&key.name) {
            others.extend(["--otlp-endpoint", "http://127.0.0.1:4317"].map(str::to_owned));
        }
        if key.name == "otlp_ca" {
            others.extend(["--otlp-endpoint", "https://127.0.0.1:4317"].map(str::to_owned));
        }
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        let flag = format!("--{}", key.flag());
        let by_flag = load(&[], &[&others[..], &[&flag, value]].concat()).unwrap();
        let by_env = load(&[(&key.variable(), value)], &others).unwrap();
        let (_dir, path) = file(&format!("{} = {value:?}\n", key.name));
        let by_file = load_with(&path, &[], &others).unwrap();
        assert_ne!(by_flag, load(&[], &[]).unwrap(), "{flag} has an effect");
        assert_eq!(by_flag, by_env, "{}", key.name);
        assert_eq!(by_flag, by_file, "{}", key.name);
    }
}

#[test]
fn the_file_may_use_its_own_types() {
    let settings = from_file(
        "max_payload_bytes = 1024\nauto_create_queues = false\n\
         insecure = true\n",
    )
    .unwrap();
    assert_eq!(settings.max_payload_bytes, 1024);
    assert!(!settings.auto_create_queues);
    assert!(settings.insecure);
}

#[test]
fn a_named_file_must_exist() {
    let (_dir, path) = file("database = 'named'");
    let path = path.to_str().unwrap();
    assert_eq!(flags(&["--config", path]).database, "named");
    assert_eq!(load(&[("SLUICEGATE_CONFIG", path)], &[]).unwrap().database, "named");
    let both = load(&[("SLUICEGATE_CONFIG", NONE)], &["--config", path]).unwrap();
    assert_eq!(both.database, "named", "the flag wins");
    assert!(wrong(&["--config", NONE]).starts_with(NONE));
}

#[test]
fn an_unknown_key_is_named_with_its_place() {
    let error = from_file("listn = '127.0.0.1:1'").unwrap_err().to_string();
    assert!(error.starts_with("unknown key `listn` in /"), "{error}");
    assert!(error.contains("sluicegate.toml; there are: listen, http_listen"), "{error}");

    let error = load(&[("SLUICEGATE_LISTN", "x")], &[]).unwrap_err().to_string();
    assert!(error.starts_with("unknown key `SLUICEGATE_LISTN` in the environment"), "{error}");
    assert!(error.contains("SLUICEGATE_LISTEN,"), "{error}");

    assert!(wrong(&["--listn", "x"]).contains("--listn"));
    assert!(from_file("[tls]\ncert = 'x'").unwrap_err().to_string().contains("`tls`"));
}

#[test]
fn variables_of_tests_and_of_kubernetes_are_ignored() {
    let env = [
        ("SLUICEGATE_TEST_MONGODB_URI", "mongodb://x"),
        ("SLUICEGATE_SERVICE_HOST", "10.0.0.1"),
        ("SLUICEGATE_SERVICE_PORT", "7400"),
        ("SLUICEGATE_SERVICE_PORT_GRPC", "7400"),
        ("SLUICEGATE_PORT", "tcp://10.0.0.1:7400"),
        ("SLUICEGATE_PORT_7400_TCP", "tcp://10.0.0.1:7400"),
        ("SLUICEGATE_PORT_7400_TCP_ADDR", "10.0.0.1"),
        ("SLUICEGATE_HTTP_PORT_7401_TCP_PROTO", "tcp"),
        ("SLUICEGATE_SIGNALS", ""),
        ("PATH", "/bin"),
    ];
    assert_eq!(load(&env, &[]).unwrap(), flags(&[]));
    for unknown in ["SLUICEGATE_PORTS", "SLUICEGATE_PORT_X", "SLUICEGATE_", "SLUICEGATE_TESTS"] {
        assert!(load(&[(unknown, "1")], &[]).is_err(), "{unknown}");
    }
}

#[test]
fn a_bad_value_is_reported_with_its_key_its_place_and_valid_values() {
    for (args, expected) in [
        (["--listen", "7400"], "`listen` in flag --listen: \"7400\" is not an address and a port"),
        (["--listen", "example.org:1"], "write for example 127.0.0.1:7400"),
        (["--poll-min", "5"], "`poll_min` in flag --poll-min: \"5\" is not a duration"),
        (["--poll-min", "0s"], "0s is not within 10ms and 3600s"),
        (["--poll-max", "500ms"], "`poll_max` in flag --poll-max: 500ms is not within 1s"),
        (["--default-lease", "13h"], "`default_lease`"),
        (
            ["--max-lease", "31d"],
            "`max_lease` in flag --max-lease: 31d is not within 100ms and 2592000s",
        ),
        (["--default-max-attempts", "many"], "is not a whole number from 0"),
        (["--default-retry-multiplier", "0.5"], "is not a number of 1 to 1000"),
        (["--default-retry-jitter", "nan"], "is not a number of 0 to 1"),
        (["--max-payload-bytes", "16MiB"], "16MiB is not within 1 byte and 15MiB"),
        (["--max-payload-bytes", "0"], "`max_payload_bytes`"),
        (["--max-payload-bytes", "4 flags"], "is not a size; write for example"),
        (
            ["--worker-threads", "1025"],
            "`worker_threads` in flag --worker-threads: 1025 is more than 1024",
        ),
        (["--auto-create-queues", "yes"], "\"yes\" is neither true nor false"),
        (["--log-format", "xml"], "\"xml\" is neither text nor json"),
        (["--log-level", "a=b=c"], "`log_level`"),
        (["--database", "a.b"], "\"a.b\" is not 1 to 63 letters"),
        (["--store", "sqlite:"], "names no file"),
        (["--store", "sqlite://x.db"], "write sqlite:PATH"),
        (["--store", "postgres://x"], "is not sqlite:PATH, sqlite::memory:, mongodb://"),
        (["--store", "mongodb://"], "`store` in flag --store"),
        (["--signals", "nats://x"], "is not local:, redis://HOST:PORT"),
        (["--signals", "redis://host:port"], "`signals` in flag --signals"),
        (["--signals", "mongodb:"], "through the store, which is sqlite:sluicegate.db"),
        (["--tls-cert", "/nonexistent"], "\"/nonexistent\" cannot be read"),
        (["--tokens", "0123456789abcdef"], "tokens are in a TOML file that tokens_file names"),
        (["--listen", "0.0.0.0:1"], "`listen` in flag --listen: without tokens everyone"),
        (
            ["--http-listen", "[::]:1"],
            "`http_listen` in flag --http-listen: without tokens everyone",
        ),
        (["--tokens-file", "/nonexistent"], "`tokens_file`"),
    ] {
        let error = wrong(&args);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    let error = load(&[("SLUICEGATE_POLL_MIN", "soon")], &[]).unwrap_err().to_string();
    assert!(error.contains("`poll_min` in environment variable SLUICEGATE_POLL_MIN"), "{error}");
    let error = from_file("poll_min = ['1s']").unwrap_err().to_string();
    assert!(error.contains("sluicegate.toml: one plain value is expected"), "{error}");
    let error = from_file("poll_min = ").unwrap_err().to_string();
    assert!(error.contains("this is not TOML"), "{error}");
}

#[test]
fn signals_follow_the_store_unless_given() {
    let mongo = "mongodb://u:secret@h:27017/?replicaSet=rs0";
    let settings = flags(&["--store", mongo]);
    assert_eq!(settings.signals, SignalsUri::Mongo { uri: mongo.to_owned() });
    assert!(settings.warnings().is_empty());

    let redis = "redis://:secret@h:6379/";
    let settings = flags(&["--store", mongo, "--signals", redis]);
    assert_eq!(settings.signals, SignalsUri::Redis { uri: redis.to_owned() });
    assert!(!format!("{settings:?}").contains("secret"));

    let settings = flags(&["--store", mongo, "--signals", "local:"]);
    assert_eq!(settings.signals, SignalsUri::Local);
    assert_eq!(settings.warnings().len(), 1);
}

#[test]
fn no_message_contains_a_secret() {
    let (_dir, tokens) = file(TOKENS);
    let settings = flags(&["--listen", "0.0.0.0:1", "--tokens-file", tokens.to_str().unwrap()]);
    assert_eq!(settings.warnings().len(), 1, "tokens without TLS");
    assert!(!format!("{settings:?}").contains("0123456789abcdef"));
    for args in [
        ["--store", "mongodb://u:hunter2/@h:port/"],
        ["--store", "mongodb://u:hunter2@h:port/"],
        ["--store", "mongo://u:hunter2@h/"],
        ["--signals", "redis://u:hunter2@h:port/"],
        ["--signals", "http://u:hunter2@h/"],
        ["--tokens", "ann:hunter2:admin"],
        ["--tokens", "hunter2"],
        ["--tokens", "ann:hunter2hunter2:consume+x"],
    ] {
        let error = wrong(&args);
        assert!(!error.contains("hunter2"), "{args:?}: {error}");
    }
}

#[test]
fn addresses_with_passwords_can_be_in_files_of_their_own() {
    let (_dir, path) = file("mongodb://u:hunter2@h/?replicaSet=rs0\n");
    let path = path.to_str().unwrap();
    let settings = flags(&["--store-file", path]);
    let uri = "mongodb://u:hunter2@h/?replicaSet=rs0".to_owned();
    assert_eq!(settings.store, StoreUri::Mongo { uri });
    let both = wrong(&["--store-file", path, "--store", "sqlite:x"]);
    assert!(both.contains("give either store or store_file"), "{both}");
    let (_dir, bad) = file("mongo://u:hunter2@h/");
    let error = wrong(&["--store-file", bad.to_str().unwrap()]);
    assert!(error.contains("`store` in /") && !error.contains("hunter2"), "{error}");
    assert!(wrong(&["--signals-file", NONE]).contains("cannot be read"));
}

#[test]
fn a_tokens_file_without_tokens_lets_nobody_in() {
    let (_dir, path) = file("# nothing but this\n");
    let empty = wrong(&["--tokens-file", path.to_str().unwrap()]);
    assert!(empty.contains("there is no [[token]]"), "{empty}");
}

/// The error has what to write instead.
#[test]
fn tokens_of_earlier_versions_are_refused_wherever_they_are() {
    let old = "ann:hunter2hunter2hunter2:produce+consume";
    let listed = format!("tokens = ['{old}', 'bob:hunter2hunter2hunter3:admin']");
    let (_dir, path) = file(old);
    let errors = [
        wrong(&["--tokens", old]),
        load(&[("SLUICEGATE_TOKENS", old)], &[]).unwrap_err().to_string(),
        from_file(&listed).unwrap_err().to_string(),
        wrong(&["--tokens-file", path.to_str().unwrap()]),
    ];
    for error in errors {
        let expected = "allow = [\"produce@*\", \"create@*\", \"consume@*\"]";
        assert!(error.contains("name = \"ann\"") && error.contains(expected), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn other_machines_are_served_with_tokens_or_if_insecurity_is_meant() {
    let (_dir, tokens) = file(TOKENS);
    let tokens = tokens.to_str().unwrap();
    let open = ["--listen", "0.0.0.0:1", "--http-listen", "0.0.0.0:2"];
    assert!(wrong(&open).contains("`sluicegate token new"), "it says how to make a token");
    flags(&[&open[..], &["--tokens-file", tokens]].concat());
    let insecure = flags(&[&open[..], &["--insecure", "true"]].concat());
    assert_eq!(insecure.warnings().len(), 1);
    flags(&["--listen", "127.0.0.2:1", "--http-listen", "[::1]:2"]);
}

#[test]
fn tls_needs_certificate_and_key() {
    let (_dir, pem) = file("");
    let pem = pem.to_str().unwrap();
    assert!(
        wrong(&["--tls-cert", pem]).contains("`tls_cert` in flag --tls-cert: it needs tls_key")
    );
    assert!(wrong(&["--tls-key", pem]).contains("it needs tls_cert beside it"));
    assert!(wrong(&["--tls-client-ca", pem]).contains("it needs tls_cert and tls_key"));
    let tls = flags(&["--tls-cert", pem, "--tls-key", pem]).tls.unwrap();
    assert_eq!((tls.cert, tls.client_ca), (pem.into(), None));
}

#[test]
fn certificates_of_clients_are_optional_only_beside_tokens() {
    let (_dir, pem) = file("");
    let (_tokens_dir, tokens) = file(TOKENS);
    let (pem, tokens) = (pem.to_str().unwrap(), tokens.to_str().unwrap());
    let tls = ["--tls-cert", pem, "--tls-key", pem];
    let with_ca = [&tls[..], &["--tls-client-ca", pem]].concat();
    assert!(flags(&with_ca).tls.unwrap().certificate_required);
    let optional = ["--tls-client-auth", "optional"];
    let problem = wrong(&[&tls[..], &optional].concat());
    assert!(problem.contains("it needs tls_client_ca"), "{problem}");
    let problem = wrong(&[&with_ca[..], &optional].concat());
    assert!(problem.contains("set tokens_file"), "{problem}");
    let problem = wrong(&[&with_ca[..], &["--tls-client-auth", "no"]].concat());
    assert!(problem.contains("neither required nor optional"), "{problem}");
    let settings = flags(&[&with_ca[..], &optional, &["--tokens-file", tokens]].concat());
    assert!(!settings.tls.unwrap().certificate_required);
}

#[test]
fn durations_and_sizes_read_as_people_write_them() {
    for (text, millis) in [
        ("0s", 0),
        ("500ms", 500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("12h", 43_200_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        (" 1m 5s ", 65_000),
        ("1.5s", 1_500),
        ("2w", 1_209_600_000),
        ("0", 0),
    ] {
        assert_eq!(values::duration(text), Ok(Duration::from_millis(millis)), "{text}");
    }
    let huge = "99999999999999999999s";
    for bad in ["", " ", "5", "s", "-1s", "1x", "1s1", "s1", huge, "18446744073709551615d"] {
        assert!(values::duration(bad).is_err(), "{bad:?}");
    }
    for (text, bytes) in
        [("1", 1), ("512KiB", 1 << 19), ("4 MiB", 4 << 20), ("10B", 10), ("1.5KiB", 1_536)]
    {
        assert_eq!(values::bytes(text), Ok(bytes), "{text}");
    }
    for bad in ["", "MiB", "-1", "4x", "1e3"] {
        assert!(values::bytes(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn credentials_are_masked() {
    for (uri, shown) in [
        ("mongodb://h:27017/db", "mongodb://h:27017/db"),
        ("mongodb://u:p@h1,h2/db", "mongodb://***@h1,h2/db"),
        ("mongodb+srv://u:p%40q@h/?authSource=a", "mongodb+srv://***@h/?***"),
        ("redis://:p@h:6379/0", "redis://***@h:6379/0"),
        ("redis://u:p@ss@h", "redis://***@h"),
        ("redis://u:p?x@h", "redis://***@h"),
        ("local:", "local:"),
    ] {
        assert_eq!(mask_credentials(uri), shown);
    }
}

#[test]
fn help_explains_every_key_with_its_default() {
    let Err(ConfigError::Usage(help)) = load(&[], &["--help"]) else { panic!("no help") };
    assert_eq!(help.exit_code(), 0);
    let help = help.to_string();
    let unwrapped = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for key in KEYS {
        assert!(unwrapped.contains(&format!("--{} <", key.flag())), "{}", key.name);
        assert!(unwrapped.contains(&format!("[env: {}]", key.variable())), "{}", key.name);
        if !key.default.is_empty() {
            assert!(unwrapped.contains(&format!("[default: {}]", key.default)), "{}", key.name);
        }
    }
    let Err(ConfigError::Usage(version)) = load(&[], &["--version"]) else { panic!("no version") };
    assert!(version.to_string().contains(env!("CARGO_PKG_VERSION")));
}

#[cfg(feature = "otlp")]
#[test]
fn a_collector_has_an_address_and_a_protocol() {
    let collector = |args: &[&str]| {
        let Otlp { endpoint, protocol, .. } = flags(args).otlp.unwrap();
        (endpoint, protocol)
    };
    let (http, https) = ("http://127.0.0.1:4317", "https://collector.example");
    assert_eq!(collector(&["--otlp-endpoint", http]), (http.to_owned(), OtlpProtocol::Grpc));
    assert_eq!(collector(&["--otlp-endpoint", https]), (https.to_owned(), OtlpProtocol::Grpc));
    let over_http = ["--otlp-endpoint", http, "--otlp-protocol", "http"];
    assert_eq!(collector(&over_http), (http.to_owned(), OtlpProtocol::Http));
    for bad in ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "http", "/v1/traces"] {
        let why = wrong(&["--otlp-endpoint", bad]);
        assert!(why.contains("write for example http://127.0.0.1:4317"), "{bad}: {why}");
    }
    let why = wrong(&["--otlp-endpoint", https, "--otlp-protocol", "http"]);
    assert!(why.contains("https needs otlp_protocol = grpc"), "{why}");
    assert!(wrong(&["--otlp-protocol", "json"]).contains("neither grpc nor http"));
    let interval = |given: &str| {
        let args = ["--otlp-endpoint", http, "--otlp-metrics-interval", given];
        flags(&args).otlp.unwrap().metrics_interval
    };
    assert_eq!(
        flags(&["--otlp-endpoint", http]).otlp.unwrap().metrics_interval,
        Some(Duration::from_mins(1))
    );
    assert_eq!((interval("1s"), interval("0s")), (Some(Duration::from_secs(1)), None));
    for bad in ["10ms", "2h", "often"] {
        wrong(&["--otlp-metrics-interval", bad]);
    }
}

#[cfg(feature = "otlp")]
#[test]
fn the_authorities_of_a_collector_are_read_and_used_for_https_alone() {
    let directory = tempfile::tempdir().unwrap();
    let written = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, empty) = (written("good.pem", CERTIFICATE), written("empty.pem", "# none yet\n"));
    let broken = written("broken.pem", &CERTIFICATE.replace("-----END", "-----"));
    let with = |endpoint: &'static str, file: &'static str| {
        ["--otlp-endpoint", endpoint, "--otlp-ca", file]
    };
    let [good, empty, broken] = [good, empty, broken].map(|path| &*path.leak());
    let (https, http) = ("https://collector.example", "http://127.0.0.1:4317");
    let authorities = flags(&with(https, good)).otlp.unwrap().authorities;
    assert_eq!(authorities.as_deref(), Some(CERTIFICATE));
    assert_eq!(flags(&["--otlp-endpoint", https]).otlp.unwrap().authorities, None);
    for (args, problem) in [
        (with(https, empty), "has no certificate in it"),
        (with(https, broken), "is not usable"),
        (with(https, "/nowhere.pem"), "cannot be read"),
        (with(http, good), "it needs an otlp_endpoint of https"),
    ] {
        let why = wrong(&args);
        assert!(why.contains("otlp_ca") && why.contains(problem), "{args:?}: {why}");
    }
    assert!(wrong(&["--otlp-ca", good]).contains("it needs an otlp_endpoint of https"));
}
