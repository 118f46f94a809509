//! Free space on a disk.

use std::path::Path;

/// Returns the bytes that the user may still write to the disk of an existing folder; `None` if the system does not
/// tell.
#[cfg(unix)]
pub fn free_space(path: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(path).ok()?;
    // Some network drives report nothing at all.
    (disk.f_blocks > 0).then(|| disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Returns the bytes that the user may still write to the disk of an existing folder; `None` if the system does not tell.
#[cfg(windows)]
pub fn free_space(path: &Path) -> Option<u64> {
    kiln_windows::free_space(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_of_a_folder_has_some_space() {
        let folder = tempfile::tempdir().unwrap();
        let free = free_space(folder.path()).unwrap();
        assert!(free > 0 && free < 1 << 60, "{free}");
        assert_eq!(free_space(&folder.path().join("none")), None);
    }
}
