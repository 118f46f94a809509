//! The memory map, the one place with `unsafe` in this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{Mmap, MmapMut};

/// Memory for a tensor that is made here.
pub(crate) enum Made {
    Plain(Vec<u8>),
    Huge(MmapMut),
}

impl Made {
    /// Zeros, large ones in huge pages where the system has them: a product reads a weight in pieces of many rows, each in
    /// a page of its own, and finding small pages takes time.
    pub fn zeros(bytes: usize) -> Made {
        const HUGE: usize = 2 << 20;
        let map = (bytes >= HUGE).then(|| MmapMut::map_anon(bytes).ok()).flatten();
        // A system without such pages gives small ones.
        #[cfg(target_os = "linux")]
        let _ = map.as_ref().map(|map| map.advise(memmap2::Advice::HugePage));
        map.map_or_else(|| Made::Plain(vec![0; bytes]), Made::Huge)
    }
}

impl AsRef<[u8]> for Made {
    fn as_ref(&self) -> &[u8] {
        match self {
            Made::Plain(bytes) => bytes,
            Made::Huge(map) => map,
        }
    }
}

impl AsMut<[u8]> for Made {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Made::Plain(bytes) => bytes,
            Made::Huge(map) => map,
        }
    }
}

/// A mapped file. Pages are read when they are touched and shared with other processes.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: Mmap,
    /// Kept to ask which parts of it are in memory.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux can be asked"))]
    file: File,
}

impl Mapped {
    /// Maps the whole of `file`, which must not be changed while the result lives: see the note on
    /// [`crate::WeightSource::open`].
    pub fn new(file: File) -> io::Result<Arc<Mapped>> {
        // SAFETY: the map is private to this process and only ever read, as plain bytes that are valid whatever
        // their values. What the operating system can't rule out is another program writing to or cutting the file
        // meanwhile; that is the documented condition for using a weight file, as for every program that maps one.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Arc::new(Mapped { map, file }))
    }

    /// Its bytes; the map lives as long as any of them.
    pub fn bytes(self: &Arc<Self>) -> Bytes {
        struct Owner(Arc<Mapped>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0.map
            }
        }
        Bytes::from_owner(Owner(Arc::clone(self)))
    }

    /// Asks the system to read a part of the file soon, without waiting for it.
    pub fn will_need(&self, start: usize, len: usize) {
        // Only advice: where there is no such call, pages are read when they are touched.
        #[cfg(unix)]
        let _ = self.map.advise_range(memmap2::Advice::WillNeed, start, len);
        #[cfg(not(unix))]
        let _ = (start, len);
    }

    /// Lets go of the pages of a part: they stop counting as this process's memory, and are read again when they are
    /// touched again.
    pub fn release(&self, start: usize, len: usize) {
        #[cfg(unix)]
        {
            // SAFETY: the map is never written, so dropping its pages loses nothing: they come back from the file.
            let told =
                unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
            // It is advice; without it the pages stay a little longer.
            let _ = told;
        }
        #[cfg(not(unix))]
        let _ = (start, len);
    }

    /// Whether the byte at `offset` is in memory; where that can't be asked, it is taken to be.
    #[cfg(target_os = "linux")]
    pub fn is_resident(&self, offset: usize) -> bool {
        use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2};
        let mut byte = [0];
        let mut buffers = [IoSliceMut::new(&mut byte)];
        // A read that would have to wait for the disk is refused instead.
        !matches!(
            preadv2(&self.file, &mut buffers, offset as u64, ReadWriteFlags::NOWAIT),
            Err(Errno::AGAIN) | Ok(0)
        )
    }

    #[cfg(not(target_os = "linux"))]
    pub fn is_resident(&self, _: usize) -> bool {
        true
    }
}
