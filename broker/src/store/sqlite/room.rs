//! Room on the disk. When it gets scarce, pushes are refused. Consumers can still reserve and settle items, which makes
//! room again.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

use super::beside::beside;

/// Bytes kept in a file of their own for settles, in case other programs take the rest of the disk.
const RESERVE: u64 = 16 << 20;
/// Default of [`Room::scarce`], in bytes.
const SCARCE: u64 = 8 << 20;
/// Pause between checks whether there is room again.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Watches the free room on the disk of a store's file.
#[derive(Debug)]
pub(super) struct Room {
    reserve: File,
    folder: PathBuf,
    /// Bytes of free room below which pushes are refused.
    scarce: u64,
    /// True while the reserve takes its room.
    held: bool,
    /// While pushes are refused, when to check again.
    scarce_until: Option<Instant>,
}

impl Room {
    /// Sets room aside beside the file. If there is none, pushes are refused from the start.
    pub(super) fn beside(file: &Path) -> io::Result<Self> {
        let reserve = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(beside(file, "-reserve"))?;
        let folder = file.parent().unwrap_or(Path::new(".")).to_owned();
        let mut room = Self { reserve, folder, scarce: SCARCE, held: false, scarce_until: None };
        if !room.take() {
            room.refuse("there is no room to set aside on the disk of the store's file");
        }
        Ok(room)
    }

    /// Returns true if nothing may be stored that needs more room. The store's file may get longer by `unwritten`, the
    /// bytes of the log that are not in it yet.
    pub(super) fn is_scarce(&mut self, unwritten: u64) -> bool {
        match self.scarce_until {
            Some(until) if Instant::now() < until => true,
            Some(_) => {
                if self.take() && self.available(unwritten) > self.scarce.saturating_mul(2) {
                    tracing::info!("there is room on the disk again: pushes are taken");
                    self.scarce_until = None;
                    false
                } else {
                    self.scarce_until = Some(Instant::now() + LOOK_AGAIN);
                    true
                }
            }
            None => {
                if self.available(unwritten) < self.scarce {
                    self.refuse("the disk of the store's file is nearly full");
                }
                self.scarce_until.is_some()
            }
        }
    }

    /// Returns true while pushes are refused, as of the last check.
    pub(super) fn was_scarce(&self) -> bool {
        self.scarce_until.is_some()
    }

    /// Releases the room that was set aside. Must be called when a write found no room.
    pub(super) fn ran_out(&mut self) {
        match self.reserve.set_len(0) {
            Ok(()) => self.held = false,
            Err(error) => tracing::error!(%error, "could not release the room that was set aside"),
        }
        self.refuse("the disk of the store's file is full");
    }

    fn refuse(&mut self, why: &str) {
        if self.scarce_until.is_none() {
            tracing::error!("{why}: pushes are refused, items can be taken and settled");
        }
        self.scarce_until = Some(Instant::now() + LOOK_AGAIN);
    }

    /// Returns the free bytes for this process once `unwritten` bytes more are in the store's file, or the maximum if
    /// that cannot be determined.
    fn available(&self, unwritten: u64) -> u64 {
        let left = statvfs(&self.folder)
            .map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        left.saturating_sub(unwritten)
    }

    /// Sets room aside. False if there is none.
    fn take(&mut self) -> bool {
        if !self.held {
            let taken = match fallocate(&self.reserve, FallocateFlags::empty(), 0, RESERVE) {
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => self.fill(),
                taken => taken.map_err(io::Error::from),
            };
            self.held = taken.is_ok();
            if !self.held {
                let _ = self.reserve.set_len(0); // part of the room may have been taken
            }
        }
        self.held
    }

    /// Sets room aside on a file system without `fallocate`.
    fn fill(&self) -> io::Result<()> {
        let zeros = vec![0; 1 << 20];
        for offset in (0..RESERVE).step_by(zeros.len()) {
            self.reserve.write_all_at(&zeros, offset)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn room() -> (tempfile::TempDir, Room) {
        let folder = tempfile::tempdir().unwrap();
        let room = Room::beside(&folder.path().join("store.db")).unwrap();
        (folder, room)
    }

    #[test]
    fn room_is_set_aside_released_and_taken_again() {
        let (_folder, mut room) = room();
        let bytes = |room: &Room| room.reserve.metadata().unwrap().blocks() * 512;
        assert!(bytes(&room) >= RESERVE);
        assert!(!room.is_scarce(0));
        room.ran_out();
        assert_eq!(bytes(&room), 0);
        assert!(room.is_scarce(0), "not checked again yet");
        room.scarce_until = Some(Instant::now());
        assert!(!room.is_scarce(0));
        assert!(bytes(&room) >= RESERVE);
    }

    #[test]
    fn room_is_scarce_before_the_disk_is_full() {
        let (_folder, mut room) = room();
        room.scarce = u64::MAX;
        assert!(room.is_scarce(0));
        room.scarce_until = Some(Instant::now());
        assert!(room.is_scarce(0));
        room.scarce = 1;
        room.scarce_until = Some(Instant::now());
        assert!(!room.is_scarce(0));
    }

    #[test]
    fn what_is_only_in_the_log_counts_as_used_room() {
        let (_folder, mut room) = room();
        assert!(room.is_scarce(u64::MAX));
        room.scarce_until = Some(Instant::now());
        assert!(!room.is_scarce(0));
    }
}
