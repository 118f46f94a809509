//! Free space on a disk.

use std::io;
use std::path::Path;
use std::ptr::null_mut;

use windows_sys::Win32::Storage::FileSystem::GetDiskFreeSpaceExW;

use crate::{check, wide};

/// The bytes that the user may still write to the disk of a folder.
pub fn free_space(folder: &Path) -> io::Result<u64> {
    let (folder, mut free) = (wide(folder.as_os_str()), 0);
    // SAFETY: the path ends with a zero; the number outlives the call; the other two results are not asked for.
    check(unsafe { GetDiskFreeSpaceExW(folder.as_ptr(), &raw mut free, null_mut(), null_mut()) })?;
    Ok(free)
}
