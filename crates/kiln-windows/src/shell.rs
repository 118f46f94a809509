//! What the desktop opens.

use std::ffi::OsStr;
use std::io;
use std::ptr::{null, null_mut};

use windows_sys::Win32::UI::Shell::ShellExecuteW;
use windows_sys::Win32::UI::WindowsAndMessaging::SW_SHOWNORMAL;

use crate::wide;

/// Opens an address in the user's browser.
pub fn open_url(url: &str) -> io::Result<()> {
    let (open, url) = (wide(OsStr::new("open")), wide(OsStr::new(url)));
    // SAFETY: both texts end with a zero; the others may be null.
    let result =
        unsafe { ShellExecuteW(null_mut(), open.as_ptr(), url.as_ptr(), null(), null(), SW_SHOWNORMAL) };
    // Up to 32 it is the number of an error.
    match result as usize {
        error @ ..=32 => Err(io::Error::from_raw_os_error(error as i32)),
        _ => Ok(()),
    }
}
