//! The names of the files beside the store's.

use std::path::{Path, PathBuf};

/// Returns the path of the file beside the store's whose name has this ending too.
pub(super) fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(ending);
    path.into()
}
