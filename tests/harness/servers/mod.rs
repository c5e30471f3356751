//! Servers that belong to one test, which may stop, freeze and restart them.

mod mongo;
mod mongo_set;
mod redis;

use std::{
    env,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use super::{LIMIT, broker::send_signal, port::free_port, until};

pub(crate) use self::{
    mongo::MongoServer,
    mongo_set::MongoSet,
    redis::{RedisServer, redis_url},
};

/// Returns the program that a variable names, or the one on PATH.
fn program(variable: &str, name: &str) -> PathBuf {
    env::var_os(variable).map_or_else(|| PathBuf::from(name), PathBuf::from)
}

fn spawn(command: &mut Command, variable: &str) -> Child {
    command
        .stdin(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            let program = command.get_program().to_string_lossy();
            panic!("{program}: {error}; this test needs that server: run it by tests/run e2e, or set {variable}")
        })
}

/// A process that is killed when dropped.
struct Process(Option<Child>);

impl Process {
    fn signal(&self, name: &str) {
        send_signal(self.0.as_ref().expect("a running server").id(), name);
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
