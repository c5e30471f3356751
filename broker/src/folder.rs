//! Files and names that outlive a crash of the machine.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

/// Syncs the folder of a file, and with it the name of the file.
pub(crate) fn sync_name(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Writes a file with what is in it, and syncs it. After a sync that failed, the system may take for written what is not, and a sync
/// alone would not write it.
pub(crate) fn write_again(file: &File) -> io::Result<()> {
    let (mut piece, mut at) = (vec![0; 1 << 20], 0);
    loop {
        let length = file.read_at(&mut piece, at)?;
        if length == 0 {
            return file.sync_all();
        }
        file.write_all_at(&piece[..length], at)?;
        at += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, time::SystemTime};

    use super::*;

    #[test]
    fn a_file_that_is_written_again_is_as_it_was() {
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..3_000_001_u32).map(|at| (at % 251) as u8).collect();
        file.write_all(&content).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        write_again(&file).unwrap();
        let mut found = vec![0; content.len() + 1];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), content.len());
        assert!(found.starts_with(&content));
        assert!(file.metadata().unwrap().modified().unwrap() > SystemTime::UNIX_EPOCH);
    }

    #[test]
    fn a_file_without_a_folder_is_in_the_one_at_hand() {
        sync_name(Path::new("name")).unwrap();
        sync_name(Path::new("/name")).unwrap();
        let missing = sync_name(Path::new("there-is-no-such-folder/name")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
