//! Where the system's libraries are, their versions, and the file that this code was loaded from.

use std::ffi::OsString;
use std::io;
use std::os::windows::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use windows_sys::Win32::Storage::FileSystem::{
    GetFileVersionInfoSizeW, GetFileVersionInfoW, VS_FIXEDFILEINFO, VerQueryValueW,
};

use windows_sys::Win32::System::LibraryLoader::{
    GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT, GetModuleFileNameW,
    GetModuleHandleExW,
};
use windows_sys::Win32::System::SystemInformation::GetSystemDirectoryW;

use crate::{check, wide};

/// The folder of the system's libraries, such as `C:\Windows\System32`.
pub fn system_folder() -> io::Result<PathBuf> {
    // SAFETY: the function writes at most the given number of characters.
    text(|buffer| unsafe { GetSystemDirectoryW(buffer.as_mut_ptr(), buffer.len() as u32) })
}

/// The program or library that contains this code: a library in C and Python programs.
pub fn own_file() -> io::Result<PathBuf> {
    let code = own_file as fn() -> io::Result<PathBuf> as *const u16;
    let mut module = null_mut();
    let flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    // SAFETY: with this flag the name is any address inside the module.
    check(unsafe { GetModuleHandleExW(flags, code, &raw mut module) })?;
    // SAFETY: the module stays loaded while its code runs; at most the given number of characters is written.
    text(|buffer| unsafe { GetModuleFileNameW(module, buffer.as_mut_ptr(), buffer.len() as u32) })
}

/// The version of a program or a library, such as 32.0.15.8065.
pub fn file_version(file: &Path) -> io::Result<[u16; 4]> {
    let name = wide(file.as_os_str());
    // SAFETY: the name ends with a zero; the second argument is not used.
    let length = unsafe { GetFileVersionInfoSizeW(name.as_ptr(), null_mut()) };
    let mut data = vec![0u8; length as usize];
    // SAFETY: at most the given number of bytes is written.
    check(unsafe { GetFileVersionInfoW(name.as_ptr(), 0, length, data.as_mut_ptr().cast()) })?;
    let (root, mut value, mut length) = (wide("\\".as_ref()), null_mut(), 0);
    // SAFETY: the data is that of a file's version, and the name ends with a zero.
    check(unsafe { VerQueryValueW(data.as_ptr().cast(), root.as_ptr(), &raw mut value, &raw mut length) })?;
    if (length as usize) < size_of::<VS_FIXEDFILEINFO>() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // SAFETY: the value lies in the data, is that long, and needs no alignment to be read.
    let version = unsafe { value.cast::<VS_FIXEDFILEINFO>().read_unaligned() };
    let halves = |n: u32| [(n >> 16) as u16, n as u16];
    let ([a, b], [c, d]) = (halves(version.dwFileVersionMS), halves(version.dwFileVersionLS));
    Ok([a, b, c, d])
}

/// Calls a function that writes a text into a buffer and returns its length; 0 is failure.
fn text(write: impl Fn(&mut [u16]) -> u32) -> io::Result<PathBuf> {
    // The longest path of Windows.
    let mut buffer = vec![0; 1 << 15];
    let length = write(&mut buffer) as usize;
    if length == 0 || length >= buffer.len() {
        return Err(io::Error::last_os_error());
    }
    Ok(OsString::from_wide(&buffer[..length]).into())
}
