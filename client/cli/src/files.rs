//! Files that take the place of others.

use std::{fs, io, path::Path};

/// Gives a file that is written and synced its name. When this returns, the name outlives a crash of the machine too.
pub(crate) fn put_in_place(new: &Path, path: &Path) -> io::Result<()> {
    fs::rename(new, path)?;
    fs::File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_takes_the_place_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let (path, new) = (folder.path().join("kept"), folder.path().join("new"));
        fs::write(&path, "old").unwrap();
        fs::write(&new, "new").unwrap();
        put_in_place(&new, &path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert!(!new.exists());
        let folders =
            ["kept", "./kept", "there/kept", "/kept"].map(|path| folder_of(path.as_ref()));
        assert_eq!(folders, [".", ".", "there", "/"].map(Path::new));
    }
}
