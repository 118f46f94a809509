//! The memory map, the one place with `unsafe` in this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::Mmap;

/// The whole of `file`, mapped. Pages are read when they are touched and shared with other processes.
///
/// The file must not be changed while the result lives: see the note on [`crate::WeightSource::open`].
pub(crate) fn map(file: &File) -> io::Result<Bytes> {
    // SAFETY: the map is private to this process and only ever read, as plain bytes that are valid whatever
    // their values. What the operating system can't rule out is another program writing to or cutting the file
    // meanwhile; that is the documented condition for using a weight file, as for every program that maps one.
    let map = unsafe { Mmap::map(file) }?;
    Ok(Bytes::from_owner(map))
}
