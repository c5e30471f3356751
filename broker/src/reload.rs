//! Files that are read again when they change: tokens, certificates, keys.
//!
//! The contents are compared, not the times of change: a file may be exchanged by a rename, by a symbolic link that points
//! elsewhere, or within the granularity of its file system's clock.

use std::{fs, io, path::PathBuf, sync::Arc, time::Duration};

use sha2::{Digest, Sha256};
use tokio::{
    sync::Notify,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// Files that are used together.
pub(crate) struct Files {
    /// What they are, for the log.
    subject: &'static str,
    paths: Vec<PathBuf>,
    /// Reads the files and puts what is in them in force. On an error, what was in force stays.
    load: Box<dyn Fn() -> Result<(), String> + Send>,
    seen: Contents,
}

/// A digest of each file, or why it cannot be read.
type Contents = Vec<Result<[u8; 32], io::ErrorKind>>;

impl Files {
    /// Returns files that are in force as they are now.
    pub(crate) fn new(
        subject: &'static str,
        paths: Vec<PathBuf>,
        load: impl Fn() -> Result<(), String> + Send + 'static,
    ) -> Self {
        let seen = contents(&paths);
        Self { subject, paths, load: Box::new(load), seen }
    }

    /// Loads the files if they have changed since they were last loaded, or in any case.
    fn look(&mut self, in_any_case: bool) {
        let now = contents(&self.paths);
        if now == self.seen && !in_any_case {
            return;
        }
        // Noted before they are read: what changes in between is a change for the next look.
        self.seen = now;
        match (self.load)() {
            Ok(()) => tracing::info!(subject = self.subject, "read again: in force from now on"),
            Err(error) => {
                tracing::error!(
                    subject = self.subject,
                    error,
                    "cannot be used: what was in force stays"
                );
            }
        }
    }
}

fn contents(paths: &[PathBuf]) -> Contents {
    let digest = |path| match fs::read(path) {
        Ok(content) => Ok(Sha256::digest(content).into()),
        Err(error) => Err(error.kind()),
    };
    paths.iter().map(digest).collect()
}

/// Looks at the files again and again, and whenever `now` is notified, until `stop` is cancelled.
pub(crate) async fn run(mut files: Vec<Files>, now: Arc<Notify>, stop: CancellationToken) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let in_any_case = tokio::select! {
            () = stop.cancelled() => return,
            () = now.notified() => true,
            _ = ticks.tick() => false,
        };
        // A file may be on a slow file system: not on a thread that serves calls.
        let looked = tokio::task::spawn_blocking(move || {
            for files in &mut files {
                files.look(in_any_case);
            }
            files
        });
        match looked.await {
            Ok(same) => files = same,
            Err(died) => {
                tracing::error!(error = %died, "files are no longer read again");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn files_are_read_when_they_change_and_a_bad_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "one").unwrap();
        let in_force = Arc::new(Mutex::new(Vec::new()));
        let (read, noted) = (path.clone(), Arc::clone(&in_force));
        let mut files = Files::new("a file", vec![path.clone()], move || {
            let text = fs::read_to_string(&read).map_err(|error| error.to_string())?;
            if text == "bad" {
                return Err("it is bad".to_owned());
            }
            noted.lock().push(text);
            Ok(())
        });
        files.look(false);
        assert!(in_force.lock().is_empty(), "nothing has changed");
        for text in ["two", "bad", "two", "tri"] {
            // By a rename, of the same length and perhaps at the same time.
            fs::write(directory.path().join("new"), text).unwrap();
            fs::rename(directory.path().join("new"), &path).unwrap();
            files.look(false);
            files.look(false);
        }
        assert_eq!(*in_force.lock(), ["two", "two", "tri"]);
        fs::remove_file(&path).unwrap();
        files.look(false);
        assert_eq!(in_force.lock().len(), 3, "a file that is gone changes nothing");
        fs::write(&path, "tri").unwrap();
        files.look(false);
        files.look(true);
        assert_eq!(in_force.lock().len(), 5, "also in any case, if that is asked for");
    }
}
