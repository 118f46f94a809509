//! Prefetching the pages of weights that are needed next.
//!
//! A model larger than memory is read from disk again in every step. By itself, the system reads a page when it is touched
//! and guesses a little ahead; told which block comes next, it reads all of that while the current one is computed.
//! A few probes find out whether anything is missing, so weights that are in memory cost nothing.

use std::fmt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, LazyLock};

use crate::map::MappedFile;

/// The distance between probes of whether a range is in memory. The system drops and reads pages in long runs, so a few
/// probes show it.
const PROBE_STEP: usize = 8 << 20;
/// Systems cut each request to the size of their read-ahead; this is the smallest common one.
const REQUEST: usize = 128 << 10;
/// Gaps up to this size between tensors are read, too.
const MAX_GAP: usize = 64 << 10;

/// The ranges of mapped files that some tensors occupy.
#[derive(Clone, Default)]
pub struct PageRanges {
    spans: Arc<[Span]>,
}

#[derive(Clone)]
pub(crate) struct Span {
    pub file: Arc<MappedFile>,
    pub start: usize,
    pub end: usize,
}

impl PageRanges {
    /// Sorts the spans and joins neighbours.
    pub(crate) fn new(mut spans: Vec<Span>) -> PageRanges {
        spans.sort_by_key(|span| (Arc::as_ptr(&span.file) as usize, span.start));
        let mut joined: Vec<Span> = Vec::new();
        for span in spans {
            match joined.last_mut() {
                Some(last) if Arc::ptr_eq(&last.file, &span.file) && span.start <= last.end + MAX_GAP => {
                    last.end = last.end.max(span.end);
                }
                _ => joined.push(span),
            }
        }
        PageRanges { spans: joined.into() }
    }

    /// Their size in bytes; 0 for weights that are in no mapped file.
    pub fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| (span.end - span.start) as u64).sum()
    }

    /// Asks the system to have these pages in memory soon. Returns at once: a background thread first checks whether anything
    /// is missing, so that a model which is in memory costs no more than a message.
    pub fn prefetch(&self) {
        static READER: LazyLock<Option<SyncSender<PageRanges>>> = LazyLock::new(|| {
            let (sender, receiver) = sync_channel::<PageRanges>(2);
            let fetch = move || receiver.iter().for_each(|pages| pages.fetch());
            std::thread::Builder::new().name("kiln-read-ahead".into()).spawn(fetch).ok()?;
            Some(sender)
        });
        if !self.spans.is_empty()
            && let Some(reader) = &*READER
        {
            // If the queue is full, the disk is behind, and another request wouldn't make it faster.
            let _ = reader.try_send(self.clone());
        }
    }

    /// Requests the spans that are not in memory.
    fn fetch(&self) {
        for span in self.spans.iter().filter(|span| !span.is_resident()) {
            for start in (span.start..span.end).step_by(REQUEST) {
                span.file.will_need(start, REQUEST.min(span.end - start));
            }
        }
    }

    /// Whether all probed pages are in memory.
    pub fn is_resident(&self) -> bool {
        self.spans.iter().all(Span::is_resident)
    }
}

impl Span {
    fn is_resident(&self) -> bool {
        let mut probes = (self.start..self.end).step_by(PROBE_STEP).chain(self.end.checked_sub(1));
        probes.all(|offset| self.file.is_resident(offset))
    }
}

impl fmt::Debug for PageRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRanges({} spans, {} bytes)", self.spans.len(), self.bytes())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::time::{Duration, Instant};

    fn pages(file: &File, spans: &[(usize, usize)]) -> PageRanges {
        let mapped = MappedFile::new(file.try_clone().unwrap()).unwrap();
        let span = |&(start, end): &(usize, usize)| Span { file: Arc::clone(&mapped), start, end };
        PageRanges::new(spans.iter().map(span).collect())
    }

    #[test]
    fn adjacent_spans_are_joined() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let pages = pages(&file, &[(5000, 6000), (0, 100), (90, 4000), (500_000, 600_000)]);
        let spans: Vec<_> = pages.spans.iter().map(|s| (s.start, s.end)).collect();
        assert_eq!(spans, [(0, 6000), (500_000, 600_000)]);
        assert_eq!(pages.bytes(), 106_000);
    }

    #[test]
    fn dropped_pages_are_prefetched() {
        // Not in the folder for temporary files, which may be in memory, where nothing is dropped.
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = tempfile::tempfile_in(folder).or_else(|_| tempfile::tempfile()).unwrap();
        let size = 12 << 20;
        std::io::Write::write_all(&mut &file, &vec![7; size]).unwrap();
        file.sync_all().unwrap();
        let pages = pages(&file, &[(1000, size - 1000)]);
        assert!(pages.is_resident());
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if pages.is_resident() {
            eprintln!("this file system drops no pages: nothing to prefetch");
            return;
        }
        pages.prefetch();
        let start = Instant::now();
        while !pages.is_resident() {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing was read");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
