//! Reading ahead: the pages of weights that are needed next.
//!
//! A model larger than the memory is read from disk again in every step. Left alone, the system reads a page when it is
//! touched and guesses a little ahead; told which block comes next, it reads all of that while this one computes.

use std::fmt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, LazyLock};

use crate::map::Mapped;

/// How far apart the looks are that tell whether a part of a file is in memory. The system drops and reads pages in
/// long runs, so a few looks show it.
const LOOK: usize = 8 << 20;
/// Systems cut one piece of advice to as much as they read ahead at a time; this is the least that is common.
const PIECE: usize = 128 << 10;
/// Gaps up to this size are read, too.
const GAP: usize = 64 << 10;

/// Where some tensors lie in their mapped files.
#[derive(Clone, Default)]
pub struct Pages {
    spans: Arc<[Span]>,
}

#[derive(Clone)]
pub(crate) struct Span {
    pub file: Arc<Mapped>,
    pub start: usize,
    pub end: usize,
}

impl Pages {
    /// The spans, joined where they touch.
    pub(crate) fn new(mut spans: Vec<Span>) -> Pages {
        spans.sort_by_key(|span| (Arc::as_ptr(&span.file) as usize, span.start));
        let mut joined: Vec<Span> = Vec::new();
        for span in spans {
            match joined.last_mut() {
                Some(last) if Arc::ptr_eq(&last.file, &span.file) && span.start <= last.end + GAP => {
                    last.end = last.end.max(span.end);
                }
                _ => joined.push(span),
            }
        }
        Pages { spans: joined.into() }
    }

    /// Bytes in all; 0 for weights that are in no mapped file.
    pub fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| (span.end - span.start) as u64).sum()
    }

    /// Asks the system to have these pages in memory soon. Returns at once: a thread of its own first looks whether
    /// anything is missing, so that a model which is in memory anyway costs no more than a message.
    pub fn will_need(&self) {
        static READER: LazyLock<Option<SyncSender<Pages>>> = LazyLock::new(|| {
            let (sender, receiver) = sync_channel::<Pages>(2);
            let work = move || receiver.iter().for_each(|pages| pages.fetch());
            std::thread::Builder::new().name("kiln-read-ahead".into()).spawn(work).ok()?;
            Some(sender)
        });
        if !self.spans.is_empty()
            && let Some(reader) = &*READER
        {
            // When the disk is behind, more advice wouldn't make it faster.
            let _ = reader.try_send(self.clone());
        }
    }

    /// Asks for the spans that are not in memory.
    fn fetch(&self) {
        for span in self.spans.iter().filter(|span| !span.is_resident()) {
            for start in (span.start..span.end).step_by(PIECE) {
                span.file.will_need(start, PIECE.min(span.end - start));
            }
        }
    }

    /// Whether all looks find their page in memory.
    pub fn is_resident(&self) -> bool {
        self.spans.iter().all(Span::is_resident)
    }
}

impl Span {
    fn is_resident(&self) -> bool {
        let mut looks = (self.start..self.end).step_by(LOOK).chain(self.end.checked_sub(1));
        looks.all(|offset| self.file.is_resident(offset))
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({} spans, {} bytes)", self.spans.len(), self.bytes())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::time::{Duration, Instant};

    fn pages(file: &File, spans: &[(usize, usize)]) -> Pages {
        let mapped = Mapped::new(file.try_clone().unwrap()).unwrap();
        let span = |&(start, end): &(usize, usize)| Span { file: Arc::clone(&mapped), start, end };
        Pages::new(spans.iter().map(span).collect())
    }

    #[test]
    fn spans_that_touch_are_one() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let pages = pages(&file, &[(5000, 6000), (0, 100), (90, 4000), (500_000, 600_000)]);
        let spans: Vec<_> = pages.spans.iter().map(|s| (s.start, s.end)).collect();
        assert_eq!(spans, [(0, 6000), (500_000, 600_000)]);
        assert_eq!(pages.bytes(), 106_000);
    }

    #[test]
    fn pages_that_were_dropped_come_back() {
        // Beside the build's own files: a folder for temporary ones may live in memory, where nothing is dropped.
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = tempfile::tempfile_in(folder).or_else(|_| tempfile::tempfile()).unwrap();
        let size = 12 << 20;
        std::io::Write::write_all(&mut &file, &vec![7; size]).unwrap();
        file.sync_all().unwrap();
        let pages = pages(&file, &[(1000, size - 1000)]);
        assert!(pages.is_resident());
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if pages.is_resident() {
            eprintln!("this file system drops nothing: there is nothing to read ahead");
            return;
        }
        pages.will_need();
        let start = Instant::now();
        while !pages.is_resident() {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing was read");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
