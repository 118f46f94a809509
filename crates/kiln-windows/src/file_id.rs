//! What identifies a file, whatever its name.

use std::fs::File;
use std::io;
use std::os::windows::io::AsRawHandle;

use windows_sys::Win32::Storage::FileSystem::{
    FILE_BASIC_INFO, FILE_ID_INFO, FILE_INFO_BY_HANDLE_CLASS, FileBasicInfo, FileIdInfo,
    GetFileInformationByHandleEx,
};

use crate::check;

/// Which file it is, and when it was last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// The volume's serial number.
    pub volume: u64,
    /// The number of the file on its volume.
    pub file: u128,
    /// When its data or properties last changed, in steps of 100 ns since 1601. No program can set it by accident.
    pub changed: i64,
}

impl FileId {
    /// Asks for the identity of an open file.
    pub fn of(file: &File) -> io::Result<FileId> {
        let (mut id, mut basic) = (FILE_ID_INFO::default(), FILE_BASIC_INFO::default());
        // SAFETY: each class of information is asked for with its own structure.
        unsafe {
            query(file, FileIdInfo, &raw mut id)?;
            query(file, FileBasicInfo, &raw mut basic)?;
        }
        let FILE_ID_INFO { VolumeSerialNumber: volume, FileId: file } = id;
        Ok(FileId { volume, file: u128::from_le_bytes(file.Identifier), changed: basic.ChangeTime })
    }
}

/// # Safety
///
/// `T` must be the structure of `class`.
unsafe fn query<T>(file: &File, class: FILE_INFO_BY_HANDLE_CLASS, out: *mut T) -> io::Result<()> {
    // SAFETY: the handle is open; `out` has the size that is given, and the caller promises the type.
    check(unsafe {
        GetFileInformationByHandleEx(file.as_raw_handle(), class, out.cast(), size_of::<T>() as u32)
    })
}
