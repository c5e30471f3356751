//! Redis: one for all tests, and servers that belong to one.

use std::{
    env,
    net::TcpStream,
    process::{Command, Stdio},
};

use super::{Process, free_port, program, spawn, until};

/// Returns the address of the Redis that the environment names, shared by all tests.
pub(crate) fn redis_url() -> String {
    env::var("SLUICEGATE_TEST_REDIS_URL").unwrap_or_else(|_| {
        panic!(
            "this test needs a Redis server: run it by tests/run e2e, or set \
             SLUICEGATE_TEST_REDIS_URL, for example to redis://127.0.0.1:6379"
        )
    })
}

/// A Redis server.
pub(crate) struct RedisServer {
    port: u16,
    process: Process,
}

impl RedisServer {
    pub(crate) async fn start() -> Self {
        let mut server = Self { port: free_port(), process: Process(None) };
        server.restart().await;
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Stops the server, which loses all its data.
    pub(crate) fn stop(&mut self) {
        self.process.kill();
    }

    /// Freezes the server: connections stay open, and nothing is answered.
    pub(crate) fn freeze(&self) {
        self.process.signal("STOP");
    }

    /// Resumes the server.
    pub(crate) fn thaw(&self) {
        self.process.signal("CONT");
    }

    /// Restarts the server on the same port.
    pub(crate) async fn restart(&mut self) {
        let variable = "SLUICEGATE_TEST_REDIS_SERVER";
        let mut command = Command::new(program(variable, "redis-server"));
        command.args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.process = Process(Some(spawn(command.arg(self.port.to_string()), variable)));
        let port = self.port;
        until(
            "redis-server answers",
            || async move { TcpStream::connect(("127.0.0.1", port)).ok() },
        )
        .await;
    }
}
