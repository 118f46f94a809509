//! Memory maps; the only `unsafe` code in this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{Mmap, MmapMut};

/// Memory for a tensor that is computed at run time.
pub(crate) enum TensorBuffer {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl TensorBuffer {
    /// Zeros; large buffers in huge pages where the system has them. A matmul reads tiles of many
    /// rows, each on another page, so small pages cause many TLB misses.
    pub fn zeros(bytes: usize) -> TensorBuffer {
        const HUGE: usize = 2 << 20;
        let map = (bytes >= HUGE).then(|| MmapMut::map_anon(bytes).ok()).flatten();
        // Only advice: a system without huge pages uses small ones.
        #[cfg(target_os = "linux")]
        let _ = map.as_ref().map(|map| map.advise(memmap2::Advice::HugePage));
        map.map_or_else(|| TensorBuffer::Heap(vec![0; bytes]), TensorBuffer::Mapped)
    }
}

impl AsRef<[u8]> for TensorBuffer {
    fn as_ref(&self) -> &[u8] {
        match self {
            TensorBuffer::Heap(bytes) => bytes,
            TensorBuffer::Mapped(map) => map,
        }
    }
}

impl AsMut<[u8]> for TensorBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            TensorBuffer::Heap(bytes) => bytes,
            TensorBuffer::Mapped(map) => map,
        }
    }
}

/// A mapped file. Pages are read when they are touched and shared with other processes.
#[derive(Debug)]
pub(crate) struct MappedFile {
    map: Mmap,
    file: File,
}

impl MappedFile {
    /// Maps all of `file`, which must not be changed while the result exists; see [`crate::WeightSource::open`].
    pub fn new(file: File) -> io::Result<Arc<MappedFile>> {
        // SAFETY: the map is only read, as bytes, for which every value is valid. The operating system can't prevent another
        // program from writing to or truncating the file meanwhile; that it does not happen is the documented condition for
        // using a weight file, as for every program that maps one.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Arc::new(MappedFile { map, file }))
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its bytes, which keep the map alive.
    pub fn bytes(self: &Arc<Self>) -> Bytes {
        struct Owner(Arc<MappedFile>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0.map
            }
        }
        Bytes::from_owner(Owner(Arc::clone(self)))
    }

    /// Asks the system to read a range of the file soon, without waiting for it.
    pub fn will_need(&self, start: usize, len: usize) {
        // Only advice: without it, pages are read when they are touched.
        #[cfg(unix)]
        let _ = self.map.advise_range(memmap2::Advice::WillNeed, start, len);
        #[cfg(not(unix))]
        let _ = (start, len);
    }

    /// Releases the pages of a range: they no longer count as this process's memory, and are read again when touched.
    pub fn release(&self, start: usize, len: usize) {
        #[cfg(unix)]
        {
            // Only advice: without it, the pages stay a little longer.
            // SAFETY: the map is never written, so dropping its pages loses nothing: they are read from the file again.
            let _ =
                unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
        }
        #[cfg(not(unix))]
        let _ = (start, len);
    }

    /// Whether the byte at `offset` is in memory; true if the system can't tell.
    #[cfg(target_os = "linux")]
    pub fn is_resident(&self, offset: usize) -> bool {
        use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2};
        let mut byte = [0];
        let mut buffers = [IoSliceMut::new(&mut byte)];
        // NOWAIT: a read that would have to wait for the disk fails instead.
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
