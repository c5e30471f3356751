//! Names of files that outlive a crash of the machine.

use std::{fs::File, io, path::Path};

/// Syncs the folder of a file, and with it the name of the file.
pub(crate) fn sync_name(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_a_folder_is_in_the_one_at_hand() {
        sync_name(Path::new("name")).unwrap();
        sync_name(Path::new("/name")).unwrap();
        let missing = sync_name(Path::new("there-is-no-such-folder/name")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
