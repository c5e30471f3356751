//! The files in `deploy`: a broker starts with the settings that they give it, and lets in whoever has the token that they
//! make. Addresses, and the store, are those of the test.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::process::Command;
use yaml_rust2::{Yaml, YamlLoader};

use crate::harness::{Broker, Launch, binary, within};

fn read(name: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "..", "deploy", name].iter().collect();
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(name: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&read(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

/// Runs `script` with the binaries of this workspace.
async fn run(script: &str, directory: &Path) {
    let binaries = binary("sluicegate").parent().expect("a folder").to_owned();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("bash");
    command.args(["-euc", script]).current_dir(directory);
    command.env("PATH", format!("{}:{path}", binaries.display()));
    let output = within("a script", command.output()).await.expect("bash");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Pushes an item, and returns the error if the broker refuses it.
async fn push(broker: &Broker, options: &[&str]) -> Result<(), String> {
    let run = Command::new(binary("sluice"))
        .args(["--server", &broker.address])
        .args(options)
        .args(["push", "q", "text"])
        .env_remove("SLUICE_SERVER")
        .output();
    let output = within("sluice", run).await.expect("sluice to start");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(error) }
}

/// Returns the settings in the environment that the image sets.
fn image() -> Vec<(String, String)> {
    let text = read("Dockerfile").replace("\\\n", " ");
    let words =
        text.lines().filter_map(|line| line.strip_prefix("ENV ")).flat_map(str::split_whitespace);
    words
        .filter(|word| word.starts_with("SLUICEGATE_"))
        .filter_map(|word| word.split_once('='))
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_brokers_of_compose_start_and_take_the_token_that_is_made_for_them() {
    let compose = yaml("compose.yaml").remove(0);
    let services = &compose["services"];
    let directory = tempfile::tempdir().expect("a directory");
    let here = directory.path().to_str().expect("a path");
    let script = text(&services["tokens"]["command"][0]).replace("/run/sluicegate", here);
    // Only root may do this.
    let script: Vec<&str> = script.lines().filter(|line| !line.starts_with("chown")).collect();
    run(&script.join("\n"), directory.path()).await;
    let made = fs::read_to_string(directory.path().join("admin-token")).expect("a token");
    run(&script.join("\n"), directory.path()).await;
    let kept = fs::read_to_string(directory.path().join("admin-token")).expect("a token");
    assert_eq!(made, kept, "a second start changes nothing");
    for name in ["broker-1", "broker-2"] {
        let service = &services[name];
        for port in service["ports"].as_vec().expect("ports") {
            assert!(text(port).starts_with("127.0.0.1:"), "{port:?} is open to other machines");
        }
        let mut settings = image();
        let environment = service["<<"]["environment"].as_hash().expect("an environment");
        settings.extend(environment.iter().map(|(a, b)| (text(a).to_owned(), text(b).to_owned())));
        let mut launch = Launch::new();
        for (variable, value) in settings {
            let setting = variable.strip_prefix("SLUICEGATE_").expect("a setting of the broker");
            let value = match setting {
                "LISTEN" | "HTTP_LISTEN" => {
                    let port = if setting == "LISTEN" { ":7400" } else { ":7401" };
                    assert!(value.ends_with(port), "{variable}={value} is not what is published");
                    "127.0.0.1:0".to_owned()
                }
                "STORE" => "sqlite::memory:".to_owned(),
                "SIGNALS" => "local:".to_owned(),
                _ => value.replace("/run/sluicegate", here),
            };
            launch = launch.flag(&setting.to_lowercase().replace('_', "-"), &value);
        }
        let broker = launch.start().await;
        let token = format!("{here}/admin-token");
        push(&broker, &["--token-file", &token]).await.expect("the token is known");
        let refused = push(&broker, &[]).await.expect_err("nobody else is let in");
        assert!(refused.contains("a token is needed"), "{refused}");
        broker.stop().await;
    }
}

fn of_kind<'a>(files: &'a [Yaml], kind: &str) -> &'a Yaml {
    let found = files.iter().find(|file| file["kind"].as_str() == Some(kind));
    found.unwrap_or_else(|| panic!("no {kind}"))
}

/// Writes a certificate for this machine, its key, and its authority.
fn certificate(directory: &Path) {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let authority = CertifiedIssuer::self_signed(params, key).expect("an authority");
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, &authority).expect("a certificate");
    fs::create_dir(directory.join("tls")).expect("a folder");
    fs::write(directory.join("tls/tls.crt"), certificate.pem()).expect("a file");
    fs::write(directory.join("tls/tls.key"), key.serialize_pem()).expect("a file");
    fs::write(directory.join("ca.crt"), authority.pem()).expect("a file");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_starts_with_the_settings_for_kubernetes() {
    let files = yaml("kubernetes/sluicegate.yaml");
    let settings = text(&of_kind(&files, "ConfigMap")["data"]["sluicegate.toml"]);
    let pod = &of_kind(&files, "Deployment")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    // Every file that a setting names is in a mounted folder, and every mounted folder has a volume.
    let mounts = container["volumeMounts"].as_vec().expect("mounts");
    let volumes = pod["volumes"].as_vec().expect("volumes");
    for mount in mounts {
        assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "{mount:?}");
    }
    for line in settings.lines().filter(|line| line.contains("/etc/sluicegate")) {
        let (_, path) = line.split_once('"').expect("a path");
        let mounted = mounts.iter().any(|mount| path.starts_with(text(&mount["mountPath"])));
        assert!(mounted, "{line}: no volume is mounted there");
    }
    for (listen, name) in [("listen", "grpc"), ("http_listen", "http")] {
        let ports = container["ports"].as_vec().expect("ports");
        let port = ports.iter().find(|port| port["name"].as_str() == Some(name)).expect(name);
        let port = port["containerPort"].as_i64().expect("a port");
        let line = format!("{listen} = \"0.0.0.0:{port}\"");
        assert!(settings.lines().any(|setting| setting == line), "no {line}");
    }
    assert!(pod["terminationGracePeriodSeconds"].as_i64() > Some(10), "more than shutdown_grace");
    assert_eq!(pod["enableServiceLinks"].as_bool(), Some(false));
    assert_eq!(
        of_kind(&files, "NetworkPolicy")["spec"]["policyTypes"][0].as_str(),
        Some("Ingress")
    );

    let directory = tempfile::tempdir().expect("a directory");
    let here = directory.path().to_str().expect("a path");
    certificate(directory.path());
    fs::create_dir(directory.path().join("addresses")).expect("a folder");
    fs::create_dir(directory.path().join("tokens")).expect("a folder");
    fs::write(directory.path().join("addresses/store"), "sqlite::memory:\n").expect("a file");
    fs::write(directory.path().join("addresses/signals"), "local:\n").expect("a file");
    // The command stands at the head of the file.
    let head = read("kubernetes/sluicegate.yaml");
    let command = head.lines().find_map(|line| line.strip_prefix("#   sluicegate token new"));
    let command = command.expect("the command for the first token");
    run(&format!("cd tokens; sluicegate token new{command}"), directory.path()).await;
    let config = directory.path().join("sluicegate.toml");
    fs::write(&config, settings.replace("/etc/sluicegate", here)).expect("a file");
    // Flags come before the file: the addresses are those of the test.
    let broker = Launch::new().flag("config", config.to_str().expect("a path")).start().await;
    let (ca, token) = (format!("{here}/ca.crt"), format!("{here}/tokens/admin-token"));
    push(&broker, &["--ca", &ca, "--token-file", &token]).await.expect("the token is known");
    let refused = push(&broker, &["--ca", &ca]).await.expect_err("nobody else is let in");
    assert!(refused.contains("a token is needed"), "{refused}");
    broker.stop().await;
}
