//! A broker as a process: started, called, killed.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{Api, LIMIT, within};

/// The flags of a broker to be started.
#[derive(Clone)]
pub(crate) struct Launch {
    flags: Vec<String>,
    variables: Vec<(&'static str, PathBuf)>,
    open_files: Option<u32>,
    when_spawned: Option<Arc<dyn Fn(u32) + Send + Sync>>,
}

/// A running broker. Killed when dropped; its log is printed if the test fails.
pub(crate) struct Broker {
    child: Child,
    directory: tempfile::TempDir,
    /// The address of gRPC, as `http://127.0.0.1:PORT`, or `https` with TLS.
    pub(crate) address: String,
    /// The address of HTTP, likewise.
    pub(crate) http_address: String,
}

/// The result of a broker process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) log: String,
}

impl Launch {
    /// Returns the flags of a broker on free ports.
    pub(crate) fn new() -> Self {
        Self { flags: Vec::new(), variables: Vec::new(), open_files: None, when_spawned: None }
            .flag("listen", "127.0.0.1:0")
            .flag("http-listen", "127.0.0.1:0")
    }

    /// Sets `--name value`. A later value replaces an earlier one.
    pub(crate) fn flag(mut self, name: &str, value: &str) -> Self {
        let name = format!("--{name}");
        if let Some(at) = self.flags.iter().position(|flag| *flag == name) {
            value.clone_into(&mut self.flags[at + 1]);
        } else {
            self.flags.extend([name, value.to_owned()]);
        }
        self
    }

    /// Sets a variable of the broker's environment to a path.
    pub(crate) fn variable(mut self, name: &'static str, path: PathBuf) -> Self {
        self.variables.push((name, path));
        self
    }

    /// Tells the id of each process as soon as there is one, which is before it serves.
    pub(crate) fn when_spawned(mut self, tell: impl Fn(u32) + Send + Sync + 'static) -> Self {
        self.when_spawned = Some(Arc::new(tell));
        self
    }

    /// Limits the number of files that the broker may open, including sockets.
    pub(crate) fn open_files(mut self, most: u32) -> Self {
        self.open_files = Some(most);
        self
    }

    /// Sets the address of signals.
    pub(crate) fn signals(self, uri: &str) -> Self {
        self.flag("signals", uri)
    }

    /// Makes the fallback poll so rare that no result of a test depends on it.
    pub(crate) fn without_poll(self) -> Self {
        self.flag("poll-min", "10m").flag("poll-max", "10m")
    }

    /// Starts the broker and waits until it serves.
    pub(crate) async fn start(&self) -> Broker {
        self.try_start().await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts the broker and waits until it serves, or says why it does not.
    pub(crate) async fn try_start(&self) -> Result<Broker, String> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut child = self.spawn(directory.path());
        let log = directory.path().join(LOG);
        let started = Instant::now();
        loop {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let tls = listening(&text, "https").map(|address| ("https", address));
            let grpc = tls.or_else(|| Some(("http", listening(&text, "grpc")?)));
            if let (Some((scheme, grpc)), Some(http)) = (grpc, listening(&text, "http")) {
                return Ok(Broker {
                    child,
                    directory,
                    address: format!("{scheme}://{grpc}"),
                    http_address: format!("http://{http}"),
                });
            }
            if let Some(status) = child.try_wait().expect("a child to wait for") {
                return Err(format!(
                    "the broker ended with {status} instead of serving; its log:\n{text}"
                ));
            }
            if started.elapsed() > LIMIT {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("the broker does not serve after {LIMIT:?}; its log:\n{text}"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Starts the broker and waits until it has ended, for settings that must not serve.
    pub(crate) async fn run_to_end(&self) -> Ended {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut child = self.spawn(directory.path());
        let status = wait(&mut child).await;
        let log = fs::read_to_string(directory.path().join(LOG)).unwrap_or_default();
        Ended { status, log }
    }

    fn spawn(&self, directory: &Path) -> Child {
        let log = File::create(directory.join(LOG)).expect("a log file");
        let binary = binary("sluicegate");
        let mut command = match self.open_files {
            None => Command::new(&binary),
            Some(most) => {
                let mut shell = Command::new("sh");
                let script = format!("ulimit -n {most}; exec \"$0\" \"$@\"");
                shell.args(["-c", &script]).arg(&binary);
                shell
            }
        };
        // Only the test's own settings count: nothing from the environment, no file beside the
        // sources.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SLUICEGATE_") {
                command.env_remove(name);
            }
        }
        let child = command
            .args(&self.flags)
            .envs(self.variables.iter().map(|(name, path)| (name, path)))
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{} does not start: {error}", binary.display()));
        if let Some(tell) = &self.when_spawned {
            tell(child.id());
        }
        child
    }
}

const LOG: &str = "broker.log";

/// Returns the address after `listening on SCHEME://`, once its line is complete.
fn listening<'a>(log: &'a str, scheme: &str) -> Option<&'a str> {
    let (_, rest) = log.split_once(&format!("listening on {scheme}://"))?;
    let (line, _) = rest.split_once('\n')?;
    line.split_whitespace().next()
}

/// Returns the path of a binary of this workspace, built beside the running program; `examples/NAME` for an example.
pub(crate) fn binary(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("the path of the running program");
    let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    // A test is target/PROFILE/deps/suite-HASH, a program target/PROFILE/NAME.
    let folders = program.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join(&name)).find(|path| path.exists()).unwrap_or_else(|| {
        panic!(
            "{name} is not beside {}: build it with `cargo build --workspace --all-targets`, or run the tests by \
             tests/run e2e",
            program.display()
        )
    })
}

impl Broker {
    /// Returns a new connection to the broker.
    pub(crate) async fn api(&self) -> Api {
        Api::connect(&self.address).await
    }

    /// Kills the broker as in a crash: SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("a broker to kill");
        self.child.wait().expect("its end");
    }

    /// Tells the broker to stop: SIGTERM. It runs until [`Broker::ended`].
    pub(crate) fn terminate(&self) {
        send_signal(self.child.id(), "TERM");
    }

    /// Sends the broker a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        send_signal(self.child.id(), name);
    }

    /// Returns the processor time that the broker has used so far.
    pub(crate) fn processor_time(&self) -> Duration {
        let path = format!("/proc/{}/stat", self.child.id());
        let text = fs::read_to_string(path).expect("the figures of a process");
        let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let ticks: u64 =
            fields[11..13].iter().map(|field| field.parse::<u64>().expect("ticks")).sum();
        Duration::from_millis(ticks * 10) // a hundred a second, on every Linux
    }

    /// Returns the id of the process.
    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Returns how the broker has ended, if it has.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child to wait for")
    }

    /// Waits until the broker has ended.
    pub(crate) async fn ended(mut self) -> Ended {
        let status = wait(&mut self.child).await;
        Ended { status, log: self.log() }
    }

    /// Stops the broker gracefully and expects success.
    pub(crate) async fn stop(self) {
        self.terminate();
        let ended = self.ended().await;
        assert!(ended.status.success(), "{} instead of success; log:\n{}", ended.status, ended.log);
    }

    /// Returns the peak memory of the broker so far, in bytes.
    pub(crate) fn peak_memory(&self) -> usize {
        self.memory_figure("VmHWM:")
    }

    /// Returns the memory that the broker has now, in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.memory_figure("VmRSS:")
    }

    fn memory_figure(&self, name: &str) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("the state of a running process");
        let figure = status.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes =
            figure.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
        kilobytes.expect("a figure in kilobytes") << 10
    }

    /// Returns what the broker has logged so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join(LOG)).unwrap_or_default()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- log of the broker at {} ---\n{}", self.address, self.log());
        }
    }
}

async fn wait(child: &mut Child) -> ExitStatus {
    within("a process that ends", async {
        loop {
            if let Some(status) = child.try_wait().expect("a child to wait for") {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Sends a signal by name, as the shell's `kill` does, because the standard library only supports
/// SIGKILL. After STOP the threads of a process stop one by one, and those that still run answer: returns when all have.
pub(super) fn send_signal(process: u32, signal: &str) {
    let sent = Command::new("sh").arg("-c").arg(format!("kill -{signal} {process}")).status();
    assert!(sent.is_ok_and(|status| status.success()), "SIG{signal} to process {process}");
    let since = Instant::now();
    while signal == "STOP" && !is_frozen(process) {
        assert!(since.elapsed() < LIMIT, "process {process} still runs");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns true if no thread of the process runs, or if the system does not tell.
fn is_frozen(process: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return true };
    threads.flatten().all(|thread| {
        let text = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state follows the name, which may contain anything but ends with the last parenthesis.
        text.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    })
}
