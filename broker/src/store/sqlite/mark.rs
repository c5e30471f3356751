//! A mark beside the file that says how much was on disk, so that a file or log that has lost its end is noticed.
//!
//! SQLite reads its log up to the first frame that is not whole, and takes that for the end, as after a crash. It
//! cannot tell a log that ended there from a log that was cut or damaged later, and what came behind is lost silently.
//! The mark tells them apart: the file counts the commits that have to be on disk before their calls are answered, and the
//! mark repeats the count after each sync.
//!
//! The mark is written after the commit is on disk, and never before, so it never claims too much. It is not synced
//! with each commit but now and then. A killed broker leaves it exact for what it has answered. After a power cut it may
//! be older than the file, which is no fault, but hides the loss of later writes.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::beside::beside;

/// What the mark says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Noted {
    /// The tag of the ids of the store that the mark belongs to.
    pub(super) tag: u32,
    /// Number of commits that were on disk.
    pub(super) commits: i64,
}

impl Noted {
    fn text(self) -> String {
        let said =
            format!("sluicegate mark 1: store {:08x} commits {:020}", self.tag, self.commits);
        format!("{said} check {:08x}\n", crc32fast::hash(said.as_bytes()))
    }

    /// Parses a mark. `None` unless it is whole.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().skip(4);
        let tag = u32::from_str_radix(words.next()?, 16).ok()?;
        let noted = Self { tag, commits: words.nth(1)?.parse().ok()? };
        (noted.text() == text).then_some(noted)
    }
}

/// Returns the path of the mark of a file.
pub(super) fn path_of(file: &Path) -> PathBuf {
    beside(file, "-mark")
}

/// Reads the mark of a file. `None` if there is none, or if it is not whole and therefore proves nothing.
pub(super) fn read(file: &Path) -> io::Result<Option<Noted>> {
    match fs::read(path_of(file)) {
        Ok(bytes) => Ok(std::str::from_utf8(&bytes).ok().and_then(Noted::parse)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The mark of a file in use.
#[derive(Debug)]
pub(super) struct Mark {
    file: File,
    tag: u32,
    synced: bool,
    failing: bool,
}

impl Mark {
    /// Opens the mark for writing.
    pub(super) fn open(file: &Path, tag: u32) -> io::Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path_of(file))?;
        Ok(Self { file, tag, synced: true, failing: false })
    }

    /// Writes that this many commits are on disk.
    pub(super) fn note(&mut self, commits: i64) {
        let text = Noted { tag: self.tag, commits }.text();
        let written = self.file.write_all_at(text.as_bytes(), 0);
        self.tell(written);
        self.synced = false;
    }

    /// Syncs the mark, so that it survives a power cut.
    pub(super) fn sync(&mut self) {
        if !self.synced {
            let synced = self.file.sync_data();
            self.tell(synced);
            self.synced = true;
        }
    }

    /// Logs the first of several errors. A mark that cannot be written protects less, which is no reason to stop.
    fn tell(&mut self, done: io::Result<()>) {
        match done {
            Err(error) if !self.failing => {
                tracing::warn!(%error, "could not write the mark beside the store's file");
                self.failing = true;
            }
            Err(_) => {}
            Ok(()) => self.failing = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_says_what_was_written_last_and_nothing_once_it_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store.db");
        assert_eq!(read(&store).unwrap(), None);
        let mut mark = Mark::open(&store, 7).unwrap();
        mark.note(99);
        mark.note(100);
        mark.sync();
        assert_eq!(read(&store).unwrap(), Some(Noted { tag: 7, commits: 100 }));

        let mut bytes = fs::read(path_of(&store)).unwrap();
        let last_digit = bytes.len() - " check 01234567\n".len() - 1;
        bytes[last_digit] ^= 1;
        fs::write(path_of(&store), bytes).unwrap();
        assert_eq!(read(&store).unwrap(), None);
    }
}
